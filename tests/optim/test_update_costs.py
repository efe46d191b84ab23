"""The costs of an update in the table of optimizers, which price the steps of a plan, equal the operations of torch."""

import inspect

import pytest
import torch
from torch import nn

from roomier.plan.choices import OPTIMIZERS
from roomier.planner.dry_runs.work import Work, WorkCounter

WIDTH = 256
UNFUSED = sorted(
    name
    for name, choice in OPTIMIZERS.items()
    if choice.num_operations and name not in ("adamw8bit", "adamw4bit", "muon", "onebit_adam", "lion")
)
"""Optimizers whose update is a sequence of operations of torch. The update of the others is fused or compiled, or
differs between steps, so its cost was measured."""


@pytest.mark.parametrize("name", UNFUSED)
def test_bytes_and_operations_of_an_update_are_those_of_the_table(name: str) -> None:
    choice = OPTIMIZERS[name]
    kind = choice.load()
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    options = {"foreach": False} if "foreach" in inspect.signature(kind).parameters else {}
    optimizer = kind([weight], **options)
    counter = WorkCounter()
    for step in range(8):  # the first steps of RAdam and NAdam run other operations
        weight.grad = torch.randn(WIDTH, WIDTH)
        if step == 7:
            with counter.counting(lambda: ("", "")):
                optimizer.step()
        else:
            optimizer.step()
    work = sum(counter.by_part.values(), start=Work())
    num_bytes = (work.other_bytes + work.product_bytes) / WIDTH**2
    assert num_bytes == pytest.approx(choice.cuda_bytes, rel=0.01)
    if name != "adafactor":  # its matrices run 22 operations and its vectors fewer; the table has a value in between
        assert work.num_operations == choice.num_operations
