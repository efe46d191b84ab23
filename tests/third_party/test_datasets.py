"""Datasets from the datasets package are rejected as loaders. A DataLoader can read such a dataset and resume
exactly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import roomier
from roomier.core.errors import DataError
from roomier.data import LengthGroupedBatchSampler, PackedCollate
from tests.third_party.side_by_side import SEPARATE

datasets = pytest.importorskip("datasets", reason=SEPARATE.format(name="datasets"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NUM_SAMPLES = 22


def rows() -> Any:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(NUM_SAMPLES, 3, generator=generator)
    ids = [torch.randint(2, 9, (1 + number % 7,), generator=generator).tolist() for number in range(NUM_SAMPLES)]
    return datasets.Dataset.from_dict(
        {"x": values.tolist(), "number": list(range(NUM_SAMPLES)), "input_ids": ids, "length": [*map(len, ids)]}
    )


class Net(roomier.Module):
    """Module that records the number of each sample that it reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.read: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read.append(batch["number"].tolist())
        return self.layer(batch["x"]).square().mean()


class Packed(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Embedding(9, 9)
        self.read: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read.append(batch["input_ids"][0].tolist())
        return nn.functional.cross_entropy(self.layer(batch["input_ids"][0, :-1]), batch["labels"][0, 1:])


def formatted() -> Any:
    table = rows().select_columns(["x", "number"])
    table.set_format("torch")
    return table


def grouped() -> DataLoader[Any]:
    table = rows()
    sampler = LengthGroupedBatchSampler(table["length"], max_tokens=14)
    return DataLoader(table, batch_sampler=sampler, collate_fn=PackedCollate())


LOADERS: dict[str, tuple[type[Any], Callable[[], Any]]] = {
    "in order": (Net, lambda: DataLoader(formatted(), batch_size=4)),
    "shuffled": (Net, lambda: DataLoader(formatted(), batch_size=4, shuffle=True)),
    "workers": (Net, lambda: DataLoader(formatted(), batch_size=4, shuffle=True, num_workers=2)),
    "with_format": (Net, lambda: DataLoader(rows().with_format("torch", columns=["x", "number"]), batch_size=4)),
    "selected": (Net, lambda: DataLoader(formatted().select(range(1, 20)).shuffle(seed=3), batch_size=4, shuffle=True)),
    "stream": (Net, lambda: DataLoader(formatted().to_iterable_dataset(num_shards=2), batch_size=4)),
    "shuffled stream": (
        Net,
        lambda: DataLoader(formatted().to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=5), batch_size=4),
    ),
    "packed": (Packed, grouped),
}


def trained(make: Callable[[], Any], kind: type[Any], folder: Path, stops_at: int | None = None) -> Any:
    """Train three epochs. With ``stops_at``, train in two runs, the second of which resumes the first."""
    quiet: dict[str, Any] = {
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
        "default_root_dir": folder,
        "accelerator": "cpu",
        "optimizer": {"name": "adamw", "lr": 0.05},
    }
    roomier.seed_everything(5)
    module = kind()
    if stops_at is not None:
        first = roomier.Trainer(max_steps=stops_at, **quiet)
        first.fit(module, make())
        first.save_checkpoint(folder / "c")
        read, module = module.read, kind()
        module.read += read
    path = None if stops_at is None else folder / "c"
    roomier.Trainer(max_epochs=3, **quiet).fit(module, make(), ckpt_path=path)
    return module


@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_run_equals_a_run_without_interruption(name: str, tmp_path: Path) -> None:
    kind, make = LOADERS[name]
    straight = trained(make, kind, tmp_path / "straight")
    num_steps = len(straight.read) // 3
    for stops_at in (2, num_steps, num_steps + 2):
        resumed = trained(make, kind, tmp_path / str(stops_at), stops_at)
        assert resumed.read == straight.read
        for ours, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    if kind is Net:
        epoch = sorted(number for batch in straight.read[:num_steps] for number in batch)
        assert epoch == sorted(set(epoch))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (rows, ""),
        (lambda: rows().to_iterable_dataset(), ""),
        (lambda: datasets.DatasetDict({"train": rows()}), r"\['train'\]"),
    ],
)
def test_a_dataset_is_answered_with_a_loader_that_trains(make: Callable[[], Any], name: str, tmp_path: Path) -> None:
    trainer = roomier.Trainer(max_steps=1, optimizer="sgd", logger=False, enable_checkpointing=False)
    action = r"yields samples instead of batches\. Pass DataLoader\(dataset\.with_format\('torch'\), batch_size=8\)"
    with pytest.raises(DataError, match=rf"(?s)train_dataloaders{name}=.* {action}"):
        trainer.fit(Net(), make())
    dataset = rows().select_columns(["x", "number"])
    module = Net()
    trainer.fit(module, DataLoader(dataset.with_format("torch"), batch_size=8))
    assert module.read == [list(range(8))]
