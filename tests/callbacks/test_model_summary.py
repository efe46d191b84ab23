"""ModelSummary: hand-computed sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roomier.callbacks import ModelSummary
from roomier.callbacks.model_summary import SummaryRow, optimizer_table, summarize
from roomier.core.errors import RoomierError
from roomier.techniques.optim.by_name import make_optimizer
from roomier.trainer import Trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.body[2].weight  # tied
        self.frozen = nn.Linear(2, 1, dtype=torch.bfloat16).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))


def test_rows_and_totals() -> None:
    summary = summarize(Net())
    assert summary.rows == (
        SummaryRow("body", "Sequential", 16 + 16, 32, 128),
        SummaryRow("head", "Linear", 16, 16, 64),
        SummaryRow("frozen", "Linear", 3, 0, 6),
    )
    # the 16 tied parameters count once: 16 + 16 + 3 + 1
    assert summary.total == SummaryRow("total", "Net", 36, 33, 138)
    assert summary.num_frozen == 3


def test_depth() -> None:
    assert [row.name for row in summarize(Net(), 0).rows] == []
    assert [row.name for row in summarize(Net(), -1).rows] == ["body", "body.0", "body.1", "body.2", "head", "frozen"]
    assert summarize(Net(), 2) == summarize(Net(), -1)


def test_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Linear(1000, 1000)
    assert summarize(model).total == SummaryRow("total", "Linear", 1_001_000, 1_001_000, 4_004_000)


def test_summary_is_printed_when_a_fit_starts(
    make_trainer: Callable[..., Trainer], scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(max_steps=1, enable_model_summary=True, logger=False, enable_checkpointing=False)
    trainer.fit(scripted(), batches)
    out, err = capsys.readouterr()
    assert out == "", "standard output contains only data"
    lines = [line.split() for line in err.splitlines()]
    assert ["layer", "Linear", "3", "12", "B", "all"] in lines
    assert ["total", "Scripted", "3", "12", "B", "all"] in lines
    assert ["SGD", "1", "0.01", "0", "2", "3"] in lines


@pytest.mark.parametrize("depth", [-2, 1.5, True])
def test_invalid_depth_is_rejected(depth: Any) -> None:
    with pytest.raises(RoomierError, match="max_depth="):
        ModelSummary(max_depth=depth)


def test_optimizer_without_learning_rate() -> None:
    class Signless(torch.optim.Optimizer):
        def __init__(self, params: list[nn.Parameter]) -> None:
            super().__init__(params, {})

    table = optimizer_table([Signless([nn.Parameter(torch.zeros(3))])])
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["Signless", "1", "-", "-", "1", "3"]


def test_groups_of_a_named_optimizer_list_their_contents() -> None:
    net = nn.Sequential(nn.Embedding(50, 96), nn.Linear(96, 128), nn.LayerNorm(128))
    plain = optimizer_table([make_optimizer("adamw", net, lr=0.1, weight_decay=0.2)])
    assert [column.header for column in plain.columns] == [
        "optimizer", "group", "lr", "weight decay", "tensors", "params"
    ]  # fmt: skip
    cells = list(zip(*(column.cells for column in plain.columns), strict=True))
    assert cells == [
        ("AdamW", "weights", "0.1", "0.2", "2", "17.1 K"),
        ("AdamW", "biases, norms", "0.1", "0", "3", "384"),
    ]
    low = optimizer_table([make_optimizer("adamw8bit", net, lr=0.1, weight_decay=0.2)])
    cells = list(zip(*(column.cells for column in low.columns), strict=True))
    assert [(holds, decay, bits, tensors) for _, holds, _, decay, bits, tensors, _ in cells] == [
        ("large matrices", "0.2", "8", "1"),
        ("embeddings, small weights", "0.2", "32", "1"),
        ("biases, norms", "0", "32", "3"),
    ]
