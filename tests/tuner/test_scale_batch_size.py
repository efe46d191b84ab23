"""The largest micro-batch: search, limits, and rejected arguments."""

from typing import Any

import pytest
import torch

from roomier.core.errors import RoomierError
from roomier.trainer.tuner.trial import run_trial
from roomier.trainer.tuner.tuner import largest_that_fits
from roomier.tuner import Tuner, scale_batch_size
from tests.tuner.conftest import Net, shuffled


@pytest.mark.parametrize("limit", [0, 1, 3, 7, 8, 24, 48, 100])
@pytest.mark.parametrize("first", [1, 2, 16, 48])
def test_largest_size_is_found_from_any_start(limit: int, first: int) -> None:
    sizes = [size for size in range(1, 49) if 48 % size == 0]
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    expected = max((size for size in sizes if size <= limit), default=None)
    assert largest_that_fits(sizes, fits, first=first) == expected
    assert len(asked) == len(set(asked)) <= 7


def test_doubling_stops_before_the_first_size_that_does_not_fit() -> None:
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert largest_that_fits(sizes, lambda size: size <= 6, first=1, refines=False) == 4
    assert largest_that_fits(sizes, lambda size: size <= 6, first=1) == 6
    assert largest_that_fits(sizes, lambda size: True, first=1, max_trials=3) == 4


class Full(Net):
    """Module that raises an out-of-memory error for more than 12 samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)


def test_out_of_memory_errors_are_caught_and_the_global_batch_is_kept(make_trainer, capsys) -> None:
    trainer, net = make_trainer(max_steps=2, accumulate_grad_batches=2), Full()
    size = Tuner(trainer).scale_batch_size(net, shuffled(24), memory_budget="1GiB", mode="binsearch", init_val=12)
    assert size == 12
    trainer.fit(net, shuffled(24))
    assert (trainer.accumulate_grad_batches, trainer.num_training_batches) == (4, 22)
    assert (
        "a step uses 4 micro-batches of 12 samples on each rank, with the same total number of samples"
        in capsys.readouterr().err
    )
    assert Tuner(trainer).scale_batch_size(Full(), shuffled(24), memory_budget="1GiB", margin=0.5, init_val=12) == 6


def test_budget_limits_the_measured_memory_of_a_step(make_trainer, capsys) -> None:
    trainer = make_trainer(max_steps=2)
    largest = scale_batch_size(trainer, Net(width=512), shuffled(64), memory_budget="1GiB", init_val=32)
    output = [line for line in capsys.readouterr().err.splitlines() if "at the peak of a step" in line]
    assert (largest, len(output)) == (64, 2)
    smaller = scale_batch_size(trainer, Net(width=512), shuffled(64), memory_budget=200_000, init_val=32)
    assert 1 <= smaller < 64
    with pytest.raises(RoomierError, match=r"a micro-batch of 1 samples does not fit into 4\.9 KiB"):
        scale_batch_size(trainer, Net(width=512), shuffled(64), memory_budget=5_000, init_val=1)
    assert trainer.micro_batch == smaller, "the result of the earlier search"


@pytest.mark.slow
def test_resumed_run_keeps_the_found_size(make_trainer, capsys) -> None:
    keywords = {"auto_scale_batch_size": True, "memory_budget": "1MiB", "enable_checkpointing": True}
    first = make_trainer(max_steps=2, **keywords)
    first.fit(Net(width=512), shuffled(128))
    assert first.accumulate_grad_batches > 1
    resumed = make_trainer(max_steps=3, **{**keywords, "memory_budget": None})
    resumed.fit(Net(width=512), shuffled(128), ckpt_path="last")
    assert resumed.accumulate_grad_batches == first.accumulate_grad_batches
    assert "the plan differs from the plan of the checkpoint" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trainer", "arguments", "words"),
    [
        ({}, {}, "a CPU process is killed without an error.*memory_budget='8GiB'"),
        ({"strategy": "auto"}, {}, "strategy='auto', which chooses the micro-batch"),
        ({"limit_train_batches": 3}, {"memory_budget": "1GiB"}, "limit_train_batches counts micro-batches"),
        ({}, {"mode": "halve"}, "mode='halve'"),
        ({}, {"margin": 1.0}, "margin=1.0"),
        ({}, {"steps_per_trial": 0}, "steps_per_trial=0"),
        ({}, {"train_dataloaders": [[torch.ones(2, 8)] * 2], "memory_budget": "1GiB"}, "creates its batches itself"),
    ],
)
def test_invalid_arguments_are_rejected(make_trainer, trainer: dict, arguments: dict[str, Any], words: str) -> None:
    given = {"train_dataloaders": shuffled(), **arguments}
    with pytest.raises(RoomierError, match=words):
        scale_batch_size(make_trainer(**trainer), Net(), **given)


def test_evaluation_is_not_tuned(make_trainer) -> None:
    with pytest.raises(RoomierError, match="method='validate'"):
        Tuner(make_trainer()).scale_batch_size(Net(), method="validate", dataloaders=shuffled())


def test_other_errors_are_raised(make_trainer) -> None:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError("own")

    with pytest.raises(ZeroDivisionError, match="own"):
        scale_batch_size(make_trainer(), Breaks(), shuffled(), memory_budget="1GiB")
    assert callable(run_trial)
