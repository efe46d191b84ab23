"""Runs whose folder is in remote storage: what the storage contains, and how a run resumes on an empty disk."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from roomier import Callback, Trainer
from roomier.callbacks import ModelCheckpoint
from roomier.checkpoint import find, find_last, list_complete, peek, verify
from roomier.cli.main import main
from roomier.storage import sending

ROOT = "memory://bucket/runs"


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty storage, and a cache for mirrors."""
    monkeypatch.setenv("ROOMIER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sending, "WAITS_S", [0.01])
    system = fsspec.filesystem("memory", use_listings_cache=False)
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def _fit(max_steps: int, root: str = ROOT, ckpt_path: str | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,))), batch_size=4)
    saving = ModelCheckpoint(**{"every_n_train_steps": 2, "save_top_k": 2, "monitor": "step", "mode": "max"} | options)
    trainer = Trainer(
        max_steps=max_steps,
        learning_rate=0.1,
        optimizer="adamw",
        default_root_dir=root,
        callbacks=[saving],
        enable_progress_bar=False,
        accelerator="cpu",
    )
    trainer.fit(_Classifier(), data, ckpt_path=ckpt_path)
    return trainer


class _Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(x), y)


def _names(system: Any) -> list[str]:
    return sorted(path.removeprefix("/bucket/runs/version_0/") for path in system.store)


def test_a_run_resumes_on_an_empty_disk(storage: Any, tmp_path: Path) -> None:
    """The storage contains the kept checkpoints and the other files, and a container without files continues the run
    with the same bits."""
    trainer = _fit(6)
    folder = f"{ROOT}/version_0/checkpoints"
    assert trainer.checkpoint_callback.best_model_path == f"{folder}/epoch=0-step=6"
    found = [Path(path).name for path in list_complete(folder)]
    assert found == ["epoch=0-step=4", "epoch=0-step=6"]
    assert {"plan.yaml", "metrics.csv", "metrics.jsonl"} <= set(_names(storage))
    assert not [name for name in _names(storage) if "step=2" in name or "probe" in name]
    verify(f"{folder}/epoch=0-step=6")

    shutil.rmtree(tmp_path / "cache")
    find._largest_in_storage.cache_clear()
    resumed = _fit(8, ckpt_path="last")
    assert resumed.global_step == 8
    assert [Path(path).name for path in list_complete(folder)] == ["epoch=0-step=6", "epoch=0-step=8"]
    expected = _fit(8, root=str(tmp_path / "local"))
    for key, value in expected.fitted.module.state_dict().items():
        assert torch.equal(value, resumed.fitted.module.state_dict()[key])


def test_a_remote_checkpoint_equals_its_local_copy(storage: Any, tmp_path: Path) -> None:
    """Each file of the newest checkpoint has the bytes of the committed checkpoint, and nothing else."""
    _fit(2)
    folder = tmp_path / "cache/remote/memory/bucket/runs/version_0/checkpoints/epoch=0-step=2"
    local = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "run.json" in local
    remote = {path.rpartition("/")[2]: storage.cat_file(path) for path in storage.store if folder.name in path}
    assert remote == local


def test_a_run_keeps_the_checkpoints_of_other_runs(storage: Any, tmp_path: Path, capsys: Any) -> None:
    """A run neither replaces nor removes a checkpoint that another run wrote to the same folder while it trained."""
    other: dict[str, bytes] = {}

    class Interfering(ModelCheckpoint):
        def on_train_start(self, *hook: Any) -> None:
            super().on_train_start(*hook)
            for name in ("run.json", "shard-00001-model-00001-of-00001.safetensors"):
                path = f"/saves/epoch=0-step=2/{name}"
                other[path] = f"{name} of another run".encode()
                storage.pipe_file(path, other[path])

    saving = Interfering("memory://saves", every_n_train_steps=2, save_top_k=1)
    data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,))), batch_size=4)
    trainer = Trainer(
        max_steps=4, optimizer="adamw", default_root_dir=tmp_path, callbacks=[saving], enable_progress_bar=False
    )
    trainer.fit(_Classifier(), data)
    assert {path: storage.cat_file(path) for path in other} == other
    assert [path.name for path in map(Path, list_complete("memory://saves"))] == ["epoch=0-step=4"]
    assert "is the checkpoint of another run" in capsys.readouterr().err


def test_best_and_last_are_read_from_the_storage(storage: Any, tmp_path: Path) -> None:
    """On an empty disk, "best" is the checkpoint with the best value, and "last" the newest one, also of an earlier
    run."""
    trainer = _fit(6, monitor="step", mode="min", save_top_k=1, save_last=True)
    shutil.rmtree(tmp_path / "cache")
    find._largest_in_storage.cache_clear()
    data = DataLoader(TensorDataset(torch.randn(4, 4), torch.randint(0, 3, (4,))))
    for name, step in (("best", 2), ("last", 6)):
        trainer.validate(_Classifier(), data, ckpt_path=name)
        assert peek(trainer.read_path)["progress"]["global_step"] == step
        assert trainer.read_path.startswith(f"{ROOT}/version_0/checkpoints/")


def test_a_run_that_fails_before_it_writes_leaves_nothing(storage: Any) -> None:
    """The name ``version_0`` is free again."""

    class Failing(Callback):
        def setup(self, *_: Any) -> None:
            raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        Trainer(default_root_dir=ROOT, callbacks=[Failing()], max_steps=1, optimizer="adamw").fit(
            _Classifier(), DataLoader(TensorDataset(torch.randn(4, 4)))
        )
    assert not _names(storage)


def test_the_command_line_reads_and_writes_addresses(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``fit`` saves to an address. On an empty disk, it continues from an address, and ``plan`` accepts it."""
    monkeypatch.chdir(Path(__file__).parents[1] / "cli" / "project")
    words = ["--model", "cli_toy.ToyModule", "--data", "cli_toy.ToyData", "--trainer.default_root_dir", ROOT]
    quiet = ["--trainer.enable_progress_bar", "false"]
    assert main(["fit", *words, *quiet, "--trainer.max_steps", "2"]) == 0
    shutil.rmtree(tmp_path / "cache")
    saved = str(find_last(ROOT))
    assert saved.startswith(f"{ROOT}/version_0/checkpoints/")
    assert main(["plan", *words, "--ckpt_path", saved]) == 0
    assert main(["fit", *words, *quiet, "--trainer.max_steps", "3", "--ckpt_path", saved]) == 0
    assert peek(str(find_last(ROOT)))["progress"]["global_step"] == 3
    assert "config-step=2.yaml" in _names(storage)
