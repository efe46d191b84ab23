"""Histograms of weights and gradients. The counts equal the counts of one process for every strategy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.callbacks import HistogramMonitor
from roomier.core.errors import RoomierError
from tests.house.test_step_size import counted


class Dyadic(roomier.Module):
    """Module whose weights and gradients are multiples of 1/64, so that no sum is rounded, in any order."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randint(-2, 3, each.shape, generator=generator))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().sum(-1).mean() * self.scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125, momentum=0.5)


def samples() -> Tensor:
    return torch.randint(-3, 4, (16, 6), generator=torch.Generator().manual_seed(1)).float()


def fit(folder: Path, batch_size: int = 8, scale: float = 1.0, **keywords: Any) -> list[dict]:
    """Return the histograms that two steps logged."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = roomier.Trainer(
        accelerator="cpu",
        max_steps=2,
        default_root_dir=folder,
        callbacks=[HistogramMonitor(1, bins=8)],
        **{**quiet, **keywords},
    )
    data = torch.utils.data.TensorDataset(samples())
    trainer.fit(Dyadic(scale), torch.utils.data.DataLoader(data, batch_size=batch_size))
    rows = (Path(trainer.log_dir) / "histograms.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(row).items() if name != "time"} for row in rows]


def expected_rows(scale: float = 1.0) -> list[dict]:
    """Return the rows from ``numpy.histogram``, with gradients of a bare loop."""
    model, rows = Dyadic(scale), []
    optimizer = model.configure_optimizers()
    for step in (1, 2):
        optimizer.zero_grad()
        model.training_step([samples()[8 * step - 8 : 8 * step]], 0).backward()
        gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        optimizer.step()
        weights = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
        for kind, tensors in (("gradients", gradients), ("weights", weights)):
            for name, tensor in tensors.items():
                counts, edges = np.histogram(tensor.numpy(), bins=8)
                row = {"counts": counts.tolist(), "edges": pytest.approx(edges.tolist(), rel=1e-6, abs=1e-6)}
                rows.append({"step": step, "name": f"{kind}/{name}", **row})
    return rows


OFFLOADED = {"parameters": "cpu", "optimizer_states": "cpu"}
CASES = [
    pytest.param(2, {"strategy": "zero3"}, id="zero3"),
    pytest.param(1, {}, id="single", marks=pytest.mark.more),
    pytest.param(4, {"strategy": "zero3"}, id="zero3-4", marks=pytest.mark.more),
    pytest.param(4, {"strategy": {"name": "hsdp", "shard_size": 2}}, id="hsdp", marks=pytest.mark.more),
    *(pytest.param(2, {"strategy": each}, id=each, marks=pytest.mark.more) for each in ("ddp", "zero1", "zero2")),
    pytest.param(1, {"offload": OFFLOADED}, id="offload", marks=pytest.mark.more),
    pytest.param(2, {"offload": OFFLOADED, "strategy": "zero3"}, id="offload-zero3", marks=pytest.mark.more),
    pytest.param(2, {"offload": "cpu", "strategy": "zero2"}, id="offload-zero2", marks=pytest.mark.more),
    pytest.param(1, {"precision": "16-mixed", "scale": 2.0**-8}, id="scaled", marks=pytest.mark.more),
    pytest.param(
        2,
        {"strategy": "zero3", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        id="accumulated",
        marks=pytest.mark.more,
    ),
]


@pytest.mark.parametrize(("num_ranks", "keywords"), CASES)
def test_counts_equal_one_process(on_ranks, tmp_path: Path, num_ranks: int, keywords: dict[str, Any]) -> None:
    size = 8 // num_ranks // keywords.get("accumulate_grad_batches", 1)
    if num_ranks == 1:
        rows = fit(tmp_path, size, **keywords)
    else:
        rows = on_ranks(num_ranks, fit, tmp_path, size, devices=num_ranks, **keywords)[0]
    expected = expected_rows(keywords.get("scale", 1.0))
    if {"gradient_clip_val", "precision"} & keywords.keys():  # the later weights differ
        rows, expected = rows[:6], expected[:6]
    assert rows == expected


@pytest.mark.more
def test_other_steps_add_few_calls(make_trainer) -> None:
    def num_calls(num_steps: int, *callbacks: HistogramMonitor) -> int:
        found = [0]
        trainer = make_trainer(*callbacks, max_steps=num_steps)
        with counted(lambda frame, event: found.__setitem__(0, found[0] + (event == "call"))):
            trainer.fit(Dyadic(scale=0.0), [[samples()[:4]]] * num_steps)
        return found[0]

    def num_added(num_steps: int) -> int:
        return num_calls(num_steps, HistogramMonitor(100)) - num_calls(num_steps)

    num_added(2)  # the first fit of a process calls more
    assert num_added(20) - num_added(10) <= 10 * 10  # five calls in each of the two hooks


@pytest.mark.more
@pytest.mark.parametrize(
    ("monitor", "keywords", "message"),
    [
        ({}, {"logger": False}, "callbacks='HistogramMonitor': requires a logger"),
        ({"include": "x.*"}, {}, r"HistogramMonitor\(include\).*matches no trained parameter"),
        (
            {},
            {"step_in_backward": True},
            r"step_in_backward=.*is freed during backward. Use HistogramMonitor\(gradients=False\), or remove",
        ),
        ({"weights": False, "gradients": False}, {}, "logs neither weights nor gradients"),
        ({"bins": [1.0, 0.0]}, {}, "must be a number of bins or ascending edges"),
        ({"every_n_steps": 0}, {}, "must be an integer of at least 1"),
    ],
)
def test_bad_input(make_trainer, monitor: dict[str, Any], keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(RoomierError, match=message):
        make_trainer(HistogramMonitor(**monitor), max_steps=1, **keywords).fit(Dyadic(), [[samples()]])


@pytest.mark.more
def test_weights_only_with_updates_in_backward(make_trainer) -> None:
    monitor = HistogramMonitor(1, gradients=False, include=["head.*"], bins=[-10.0, 0.0, 10.0])
    trainer = make_trainer(monitor, max_steps=1, step_in_backward=True)
    trainer.fit(Dyadic(), [[samples()]])
    rows = [json.loads(row) for row in (Path(trainer.log_dir) / "histograms.jsonl").read_text().splitlines()]
    assert [(row["name"], sum(row["counts"]), row["edges"]) for row in rows] == [
        ("weights/head.weight", 18, [-10.0, 0.0, 10.0]),
        ("weights/head.bias", 3, [-10.0, 0.0, 10.0]),
    ]
