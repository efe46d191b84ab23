"""Malformed records with valid checksums: loading succeeds, or raises an error that names the file and the field.

A program that can write a checkpoint can compute its checksums. Loading such a checkpoint may fail, but only with a
CheckpointError. The error must be raised before the state of the run changes, without waiting, and without reading
beyond the end of the checkpoint.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
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
from roomier.checkpoint import TensorSpec
from roomier.checkpoint.reading import Piece, check_pieces
from roomier.core.errors import CheckpointError, RoomierError

pytestmark = pytest.mark.more

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
    """Run of 6 steps in ``root``, within its second epoch, with the checkpoints of steps 5 (``good``) and 6."""

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
    """Yield the paths of all values. For long lists, only the first three values are included."""
    if place:
        yield place
    keys = list(node) if isinstance(node, dict) else range(min(3, len(node))) if isinstance(node, list) else ()
    for key in keys:
        yield from places(node[key], (*place, key))


def mutations(content: Json) -> list[Mutation]:
    """Return mutations that delete a value, replace it by each of ``VALUES``, or insert an item, in random order."""
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


def is_well_formed(content: Json, mutation: Mutation) -> bool:
    """Return True if the mutated record is valid, because only the user could detect the change.

    A torchmetrics state may have another shape, which is valid for some metrics. A reference to another tensor of the
    same dtype and shape is valid for every state.
    """
    place, _, value = mutation
    if value != TENSOR:
        return False
    current = content
    for key in place:
        current = current[key]
    is_same_form = isinstance(current, dict) and current.get("~tensor", [""])[1:] == TENSOR["~tensor"][1:]
    return is_same_form or place[1:2] == ("metrics",)


def malformed(content: Json) -> list[Mutation]:
    return [each for each in mutations(content) if not is_well_formed(content, each)]


def resume_from(desk: Desk, path: Path) -> RoomierError | None:
    """Resume and run a step. Return the error, after which the model must be unchanged."""
    torch.manual_seed(1)
    net = Net()
    weights, drawn = {name: value.clone() for name, value in net.state_dict().items()}, torch.get_rng_state()
    error = None
    try:
        trainer, _ = desk.fit(7, path, net)
    except RoomierError as raised:
        error = raised
    if error is None:
        assert trainer.global_step >= 7 or trainer.current_epoch > 1
        return None
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items()), error
    assert torch.equal(torch.get_rng_state(), drawn), error
    assert net.mean_loss.update_count == 0, error
    return error


def check_outcome(desk: Desk, mutation: Mutation, content: Json) -> bool:
    """Resume from the newest checkpoint after ``mutation``. Return True if the checkpoint was rejected."""
    write_content(desk.newest, mutated(content, mutation))
    error = resume_from(desk, desk.newest)
    if error is not None:
        entry = next((key for key in mutation[0] if key != "tree"), "tree")
        assert any(
            name in str(error)
            for name in ("run.json", str(desk.newest), "optimizer", "lr_scheduler", "train_dataloaders")
        ), error
        # An error about a weight contains the name of the weight. If the entry of all weights is mutated, the error
        # names the model.
        weights = (mutation[0][2:3] or ("model",)) if entry == "module" else ()
        # A record without any entry cannot be distinguished from a record of weights.
        empty = ("weights only",) if mutation[0] == ("tree",) else ()
        names = (entry, str(entry).replace("_", " "), *weights, *empty)
        assert any(str(each).rstrip("s") in str(error) for each in names), (mutation, error)
    return error is not None


@pytest.mark.timeout(120)
def test_a_mutated_field_is_rejected_with_its_name_or_loaded(desk: Desk) -> None:
    content = content_of(desk.newest)
    outcomes = []
    for mutation in malformed(content)[:NUM_QUICK]:
        outcomes.append(check_outcome(desk, mutation, content))
        shutil.rmtree(desk.folder / "epoch=1-step=7", ignore_errors=True)
    assert sum(outcomes) > NUM_QUICK / 2
    write_content(desk.newest, content)
    assert resume_from(desk, desk.newest) is None


@pytest.mark.parametrize(
    "mutation",
    [
        (("tree", "schedulers", 0, "state", "_schedulers"), "delete", None),
        (("tree", "schedulers", 0, "state", "_milestones"), "insert", None),
        (("tree", "callbacks", "Timer", "time_elapsed", "train"), "replace", 2**53 + 1),
    ],
    ids=["parts of a scheduler", "milestones of a scheduler", "elapsed time"],
)
def test_a_state_that_torch_or_python_cannot_use_is_rejected(desk: Desk, mutation: Mutation) -> None:
    assert check_outcome(desk, mutation, content_of(desk.newest))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_mutated_field_is_rejected_with_its_name_or_loaded(desk: Desk) -> None:
    content = content_of(desk.newest)
    for mutation in malformed(content):
        check_outcome(desk, mutation, content)
        shutil.rmtree(desk.folder / "epoch=1-step=7", ignore_errors=True)


@pytest.mark.timeout(60)
def test_a_mutated_newest_checkpoint_does_not_break_last(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    content = content_of(desk.newest)
    # A checkpoint without a weight belongs to another model, which is an error for "last", too.
    chosen = [each for each in malformed(content)[NUM_QUICK:] if each[0][1:2] != ("module",)][:12]
    for mutation in chosen:
        write_content(desk.newest, mutated(content, mutation))
        is_skipped = resume_from(desk, desk.newest) is not None
        shutil.rmtree(desk.folder / "epoch=1-step=7", ignore_errors=True)
        capsys.readouterr()
        trainer, _ = desk.fit(7, "last")
        assert trainer.global_step == 7 or trainer.current_epoch > 1, mutation
        assert (f"skipped the checkpoint {desk.newest}" in capsys.readouterr().err) == is_skipped, mutation
        shutil.rmtree(desk.folder / "epoch=1-step=7", ignore_errors=True)


def test_a_scheduler_state_cannot_replace_a_method(desk: Desk) -> None:
    content = content_of(desk.newest)
    content["tree"]["schedulers"][0]["state"]["_schedulers"][1]["get_lr"] = 5
    write_content(desk.newest, content)
    error = resume_from(desk, desk.newest)
    assert error is not None
    assert "a key of schedulers[0].state._schedulers[1] is 'get_lr'" in str(error)


# Invalid files -------------------------------------------------------------------------------------------------------


def save_two(folder: Path) -> tuple[Path, Path]:
    for step in (1, 2):
        state = {
            "module": {"w": torch.full((6, 4), float(step)), "b": torch.ones(3)},
            "progress": {"global_step": step},
        }
        checkpoint.save(folder / f"step={step}", state)
    return folder / "step=1", folder / "step=2"


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], str]:
    """Replace the file that matches ``name``."""

    def change(path: Path) -> str:
        file = next(path.glob(name))
        file.unlink()
        make(file)
        return file.name

    return change


def with_content(data: bytes) -> Callable[[Path], str]:
    """Replace the content of the record with ``data``, and write a valid checksum."""

    def change(path: Path) -> str:
        (path / "run.json").write_bytes(b'{"crc32": "%08x", "content": ' % zlib.crc32(data) + data + b"}\n")
        return "run.json"

    return change


def sparse(path: Path) -> None:
    path.write_bytes(b'{"crc32": "00000000", "content": ')
    os.truncate(path, 2**40)


FILES: dict[str, Callable[[Path], str]] = {
    "a pipe": replaced("run.json", os.mkfifo),
    "a device": replaced("run.json", lambda path: path.symlink_to("/dev/zero")),
    "a folder": replaced("run.json", lambda path: path.mkdir()),
    "a link to itself": replaced("run.json", lambda path: path.symlink_to(path)),
    "an empty TiB": replaced("run.json", sparse),
    "tensors in a pipe": replaced("*.safetensors", os.mkfifo),
    "tensors on a device": replaced("*.safetensors", lambda path: path.symlink_to("/dev/zero")),
    "deep lists": with_content(b"[" * 10**6 + b"]" * 10**6),
    "deep mappings": with_content(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "a list": with_content(b"[]"),
    "null": with_content(b"null"),
    "not UTF-8": with_content(b'{"format_version":3,"\xff":1}'),
    "a number of 10000 digits": with_content(b'{"format_version":3,"saved_at_ns":' + b"9" * 10_000 + b"}"),
    "not a number": with_content(b'{"format_version":NaN}'),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in FILES.items()])
def test_a_file_of_another_type_is_rejected(
    change: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = save_two(tmp_path)
    name = change(newer)
    into = {"module": {"w": torch.zeros(6, 4), "b": torch.zeros(3)}}
    attempts: list[Callable[[], object]] = [
        lambda: checkpoint.load(newer, into=into),
        lambda: checkpoint.verify(newer),
        lambda: checkpoint.peek(newer, check_files=True),
    ]
    for attempt in attempts:
        with pytest.raises(CheckpointError, match=name) as caught:
            attempt()
        assert caught.value.action == f"Use {str(older)!r}, the newest valid checkpoint next to it"
    assert not any(each.any() for each in into["module"].values())
    assert checkpoint.find_last(tmp_path) == older
    assert f"skipped the checkpoint {newer}" in capsys.readouterr().err
    assert checkpoint.list_complete(tmp_path) == [older]
    third = tmp_path / "step=3"
    checkpoint.save(third, checkpoint.load(older))
    assert checkpoint.find_last(tmp_path) == third


def header_of(data: bytes) -> Json:
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def write_header(path: Path, file: Path, header: Json, length: int | None = None) -> None:
    """Replace the header of a tensor file, and update its size and checksum in the record."""
    data = file.read_bytes()
    text = json.dumps(header).encode()
    start = struct.pack("<Q", len(text) if length is None else length)
    data = start + text + data[8 + struct.unpack("<Q", data[:8])[0] :]
    file.write_bytes(data)
    content = content_of(path)
    [entry] = [each for each in content["files"] if each["name"] == file.name]
    entry["size_bytes"], entry["crc32"] = len(data), zlib.crc32(data)
    write_content(path, content)


@pytest.mark.timeout(60)
def test_a_mutated_header_is_rejected_with_its_file_or_loaded(tmp_path: Path) -> None:
    _, path = save_two(tmp_path)
    expected = checkpoint.load(path)["module"]
    [file] = path.glob("*.safetensors")
    data, record = file.read_bytes(), content_of(path)
    header = header_of(data)
    offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    changed = [mutated(header, each) for each in mutations(header)]
    for each in mutations(offsets):
        sharding = {"DCP_SHARDING_INFO": json.dumps(mutated(offsets, each))}
        changed.append({**header, "__metadata__": {**header["__metadata__"], **sharding}})
    lengths = [(header, length) for length in (0, 1, 2**20, 2**62, 2**64 - 1)]
    num_rejected = 0
    for each, length in [*((each, None) for each in changed), *lengths]:
        write_header(path, file, each, length)
        into = {"module": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
        error = None
        try:
            checkpoint.load(path, into=into)
        except CheckpointError as raised:
            error = raised
        if error is not None:
            num_rejected += 1
            assert file.name in str(error) or "differ in 'module." in str(error), error
        for name, tensor in into["module"].items():
            assert torch.equal(tensor, expected[name] if error is None else torch.zeros_like(tensor)), each
        file.write_bytes(data)
        write_content(path, record)
    assert num_rejected > len(changed) / 2


def test_pieces_that_leave_gaps_or_overlap_are_rejected(tmp_path: Path) -> None:
    def check(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        pieces = [Piece("x", 0, torch.float32, shape, offsets) for offsets, shape in boxes]
        check_pieces(tmp_path, {"w": pieces}, "w", TensorSpec((4, 6), torch.float32))

    check(((0, 0), (4, 6)))
    check(((0, 0), (3, 6)), ((3, 0), (1, 6)))
    check(((0, 0), (3, 2)), ((3, 0), (1, 2)), ((0, 2), (3, 4)), ((3, 2), (1, 4)))
    for boxes in (
        (),
        (((0, 0), (3, 6)),),
        (((1, 0), (4, 6)),),
        (((0, 0), (2, 6)), ((3, 0), (1, 6))),
        (((0, 0), (3, 6)), ((2, 0), (2, 6))),
        (((0, 0), (4, 6)), ((0, 0), (4, 6))),
        (((0, 0), (2, 6)), ((2, 0), (2, 3)), ((2, 3), (2, 3))),
        (((0,), (24,)),),
    ):
        with pytest.raises(CheckpointError, match="differ in 'w'"):
            check(*boxes)
