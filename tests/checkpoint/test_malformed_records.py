"""Records that are malformed although their checksums are valid: an error that names file and field, or a correct load.

Whoever can write a checkpoint can compute its checksums. Loading one may fail, but only with a CheckpointError, before
anything of the run changed, without waiting and without reading more than the checkpoint has.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier import checkpoint
from roomier.callbacks import EarlyStopping, ModelCheckpoint, SpikeGuard, Timer
from roomier.core.errors import RoomierError

torchmetrics = pytest.importorskip("torchmetrics")

Json = Any
Mutation = tuple[tuple[str | int, ...], str, Json]

NUM_QUICK = 40
DELETE, INSERT = "delete", "insert"
TENSOR = {"~tensor": ["module.body.bias", "float32", [8]]}
VALUES: list[Json] = [None, -1, 0, 2**53 + 1, 2**70, "x", [], {}, True, 1.5, {"~float": "nan"}, {"~unknown": 1}, TENSOR]


class Net(roomier.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body, self.head = nn.Linear(4, width), nn.Linear(width, 2)
        self.mean_loss = torchmetrics.MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
        self.mean_loss.update(loss.detach())
        self.log("loss_of_step", loss, on_epoch=True)
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        parts = [LinearLR(optimizer, total_iters=2), StepLR(optimizer, 1)]
        return [optimizer], [{"scheduler": SequentialLR(optimizer, parts, [2]), "interval": "step"}]


class Desk:
    """A run of 6 steps in ``root``, within its second epoch, with the checkpoints of steps 5 (``good``) and 6."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "version_0" / "checkpoints"
        self.good, self.newest = (self.folder / f"epoch=1-step={step}" for step in (5, 6))

    def fit(self, max_steps: int, ckpt_path: Any = None, net: Net | None = None) -> tuple[roomier.Trainer, Net]:
        net = Net() if net is None else net
        generator = torch.Generator().manual_seed(0)
        samples = TensorDataset(torch.randn(16, 4, generator=generator), torch.zeros(16, dtype=torch.int64))
        callbacks = [
            EarlyStopping("val", patience=99),
            ModelCheckpoint(save_top_k=-1, every_n_train_steps=1),
            Timer("01:00:00:00"),
            SpikeGuard(),
        ]
        trainer = roomier.Trainer(
            max_steps=max_steps,
            default_root_dir=self.root,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            callbacks=callbacks,
        )
        trainer.fit(net, DataLoader(samples, 4, shuffle=True), DataLoader(samples, 4), ckpt_path=ckpt_path)
        return trainer, net


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished")
    torch.manual_seed(0)
    desk = Desk(root)
    desk.fit(6)
    for path in desk.folder.iterdir():
        if path not in (desk.good, desk.newest):
            checkpoint.remove(path)
    return root


@pytest.fixture
def desk(finished: Path, tmp_path: Path) -> Desk:
    return Desk(Path(shutil.copytree(finished, tmp_path / "runs", symlinks=True)))


def content_of(path: Path) -> Json:
    return json.loads((path / "run.json").read_bytes())["content"]


def write_content(path: Path, content: Json) -> None:
    """Write a record with a valid checksum."""
    data = json.dumps(content, separators=(",", ":")).encode()
    (path / "run.json").write_bytes(b'{"crc32": "%08x", "content": ' % zlib.crc32(data) + data + b"}\n")


def places(node: Json, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all values, of long lists the first three."""
    if place:
        yield place
    for key in (
        list(node)[:50] if isinstance(node, dict) else range(min(3, len(node))) if isinstance(node, list) else ()
    ):
        yield from places(node[key], (*place, key))


def mutations(content: Json) -> list[Mutation]:
    """Every value deleted, replaced by each of ``VALUES``, or with another item inserted; in random order."""
    kinds = [(DELETE, None), (INSERT, None), *(("replace", value) for value in VALUES)]
    found = [(place, how, value) for place in places(content) for how, value in kinds]
    random.Random(0).shuffle(found)
    return found


def mutated(content: Json, mutation: Mutation) -> Json:
    place, how, value = mutation
    content = copy.deepcopy(content)
    node = content
    for key in place[:-1]:
        node = node[key]
    if how == DELETE:
        del node[place[-1]]
    elif how == "replace":
        node[place[-1]] = value
    elif isinstance(node[place[-1]], dict):
        node[place[-1]]["get_lr"] = 5
    elif isinstance(node[place[-1]], list):
        node[place[-1]].append(5)
    else:
        node[place[-1]] = [node[place[-1]]]
    return content


def is_value_of_metric(mutation: Mutation) -> bool:
    """Whether the shape of a state of torchmetrics changed, which is valid for some metrics."""
    return mutation[0][1:2] == ("metrics",) and mutation[2] == TENSOR


def resume_from(desk: Desk, path: Path) -> RoomierError | None:
    """Resume and take a step. Returns the error, after which nothing may have changed."""
    torch.manual_seed(1)
    net = Net()
    weights, drawn = {name: value.clone() for name, value in net.state_dict().items()}, torch.get_rng_state()
    try:
        trainer, _ = desk.fit(7, path, net)
    except RoomierError as error:
        assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items()), error
        assert torch.equal(torch.get_rng_state(), drawn), error
        assert net.mean_loss.update_count == 0, error
        return error
    assert trainer.global_step >= 7 or trainer.current_epoch > 1
    return None


def check_outcome(desk: Desk, mutation: Mutation, content: Json) -> bool:
    """Resume from the newest checkpoint after ``mutation``. Returns whether that was rejected."""
    write_content(desk.newest, mutated(content, mutation))
    error = resume_from(desk, desk.newest)
    if error is not None:
        entry = next((key for key in mutation[0] if key != "tree"), "tree")
        assert any(name in str(error) for name in ("run.json", str(desk.newest), "optimizer", "lr_scheduler")), error
        assert str(entry).rstrip("s") in str(error), (mutation, error)
    return error is not None


@pytest.mark.timeout(120)
def test_a_mutated_field_is_rejected_with_its_name_or_loaded(desk: Desk) -> None:
    content = content_of(desk.newest)
    outcomes = []
    for mutation in [each for each in mutations(content) if not is_value_of_metric(each)][:NUM_QUICK]:
        outcomes.append(check_outcome(desk, mutation, content))
        shutil.rmtree(desk.folder / "epoch=1-step=7", ignore_errors=True)
    assert sum(outcomes) > NUM_QUICK / 2
    write_content(desk.newest, content)
    assert resume_from(desk, desk.newest) is None


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_mutated_field_is_rejected_with_its_name_or_loaded(desk: Desk) -> None:
    content = content_of(desk.newest)
    for mutation in mutations(content):
        if not is_value_of_metric(mutation):
            check_outcome(desk, mutation, content)
            shutil.rmtree(desk.folder / "epoch=1-step=7", ignore_errors=True)


@pytest.mark.timeout(60)
def test_a_mutated_newest_checkpoint_does_not_break_last(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    content = content_of(desk.newest)
    chosen = [each for each in mutations(content) if not is_value_of_metric(each)][NUM_QUICK : NUM_QUICK + 12]
    for mutation in chosen:
        write_content(desk.newest, mutated(content, mutation))
        is_skipped = resume_from(desk, desk.newest) is not None
        shutil.rmtree(desk.folder / "epoch=1-step=7", ignore_errors=True)
        capsys.readouterr()
        trainer, _ = desk.fit(7, "last")
        assert trainer.global_step == 7 or trainer.current_epoch > 1, mutation
        assert (f"skipped the checkpoint {desk.newest}" in capsys.readouterr().err) == is_skipped, mutation
        shutil.rmtree(desk.folder / "epoch=1-step=7", ignore_errors=True)
