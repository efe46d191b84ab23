"""Exact counts of the library code that runs in a fit. The counts do not depend on the speed of the machine."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import roomier
from benchmarks import toy
from benchmarks.calls import folder_of
from benchmarks.timing import muted
from roomier.trainer import Trainer

PACKAGE = folder_of(roomier)
FIRST, LAST = 50, 150
"""A multiple of the default log_every_n_steps, so that log steps are counted at their share."""


@contextmanager
def counted(count: Callable[[FrameType, str], None], *, opcodes: bool = False) -> Iterator[None]:
    """Call ``count`` with each event in a frame of roomier."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = opcodes, False
        count(frame, event)
        return trace if opcodes else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Toy(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = toy.toy_network()

    def training_step(self, batch: toy.Batch, batch_idx: int) -> torch.Tensor:
        inputs, classes = batch
        return torch.nn.functional.cross_entropy(self.network(inputs), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return toy.toy_optimizer(self.network)


def functions_of_bare_fit() -> Counter[CodeType]:
    """Return how many times each function of roomier is entered by a fit without files, callbacks and bars."""
    found = Counter[CodeType]()

    def count(frame: FrameType, event: str) -> None:
        if event == "call" and not frame.f_code.co_name.startswith("<"):  # comprehensions have no frame in Python 3.12
            found[frame.f_code] += 1

    batches = toy.toy_batches(4)
    with muted(), counted(count):
        trainer = Trainer(
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
        )
        trainer.fit(Toy(), batches)
    return found


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the number of bytecodes depends on the version of Python")
def test_step_runs_few_bytecodes_of_the_library() -> None:
    counts: list[int] = [0]

    def probe(index: int) -> None:
        if index == FIRST:
            counts[0] = 0
        if index == LAST:
            counts.append(counts[0])

    def count(_: FrameType, event: str) -> None:
        counts[0] += event == "opcode"

    with counted(count, opcodes=True):
        toy.run_trainer(toy.toy_batches(LAST + 1), probe)
    per_step = counts[1] / (LAST - FIRST)
    assert per_step <= 1011 * 1.02


def test_bare_fit_enters_few_functions_of_the_library() -> None:
    functions = functions_of_bare_fit()
    assert len(functions) <= 475  # each rule of a Plan is a function


def test_native_module_does_not_run_the_compatibility_code() -> None:
    visits = {
        code.co_name: number
        for code, number in functions_of_bare_fit().items()
        if code.co_filename == f"{PACKAGE}api/lightning_module.py"
    }
    assert not visits
