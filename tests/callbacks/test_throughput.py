"""Throughput: hand-computed counts, and rates from a scripted clock."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roomier.api.module import Module
from roomier.callbacks import Throughput
from roomier.callbacks.throughput import CountsFlops, flops_per_token, num_tokens_of
from roomier.core.errors import RoomierError
from roomier.trainer import Trainer

Make = Callable[..., Trainer]


class Clock:
    """Clock that advances only when the test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("roomier.callbacks.throughput.time.monotonic", lambda: self.now_s)


class Tokens(Module):
    """Module whose training batches take 0.5 s and whose validation batches take 10 s on the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)  # lookups do not count
        self.layer = nn.Linear(4, 3, bias=False)  # 12 parameters
        self.clock = clock

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.clock.now_s += 0.5
        return self.layer(self.embedding(batch["input_ids"])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now_s += 10.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rows(trainer: Trainer) -> list[dict[str, float]]:
    lines = (Path(trainer.log_dir) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [
        {name: value for name, value in row.items() if name not in ("time", "epoch")}
        for row in found
        if "samples_per_s" in row
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


TOKENS = [{"input_ids": torch.zeros(2, 5, dtype=torch.long)}] * 8  # each batch has 2 samples and 10 tokens


def test_rates_match_a_hand_computation(make_trainer: Make, clock: Clock) -> None:
    trainer = make_trainer(Throughput(peak_flops_per_s=14400.0), max_steps=8, log_every_n_steps=4)
    trainer.fit(Tokens(clock), TOKENS)
    rate = {"samples_per_s": 4.0, "tokens_per_s": 20.0, "model_flops_per_s": 20.0 * 6 * 12, "mfu": 0.1}
    # the first step only starts the clock; the rows cover steps 2 to 4 and 5 to 8
    assert rows(trainer) == [{"step": 4, **rate}, {"step": 8, **rate}]


def test_validation_stops_the_clock(make_trainer: Make, clock: Clock) -> None:
    trainer = make_trainer(Throughput(), max_steps=8, log_every_n_steps=4, val_check_interval=2)
    trainer.fit(Tokens(clock), TOKENS, TOKENS[:1])
    assert [row["samples_per_s"] for row in rows(trainer)] == [4.0, 4.0]
    assert "mfu" not in rows(trainer)[0], "the peak of a CPU is unknown"


def test_all_accumulated_batches_count(make_trainer: Make, clock: Clock) -> None:
    trainer = make_trainer(Throughput(), max_epochs=1, log_every_n_steps=2, accumulate_grad_batches=2)
    trainer.fit(Tokens(clock), TOKENS)
    # step 2 has 2 batches in 1 s, steps 3 and 4 have 4 batches in 2 s
    assert [(row["step"], row["samples_per_s"]) for row in rows(trainer)] == [(2, 4.0), (4, 4.0)]


def test_num_flops_of_the_module_is_used(make_trainer: Make, clock: Clock) -> None:
    class Counting(Tokens):
        def num_flops(self, batch: Any) -> float:
            return 1000.0

    assert isinstance(Counting(clock), CountsFlops)
    assert not isinstance(Tokens(clock), CountsFlops)
    trainer = make_trainer(Throughput(), max_steps=4, log_every_n_steps=4)
    trainer.fit(Counting(clock), TOKENS)
    assert rows(trainer)[0]["model_flops_per_s"] == 2000.0


def test_only_samples_are_logged_without_tokens(make_trainer: Make, scripted: Any, batches: Any) -> None:
    trainer = make_trainer(Throughput(), max_steps=4, log_every_n_steps=4)
    trainer.fit(scripted(), batches)
    assert list(rows(trainer)[0]) == ["step", "samples_per_s"]


def test_number_of_tokens() -> None:
    ids = torch.zeros(3, 7, dtype=torch.int32)
    assert num_tokens_of(ids) == 21
    assert num_tokens_of((torch.zeros(3, 7), torch.zeros(3, dtype=torch.long), ids)) == 21
    assert num_tokens_of({"mask": torch.ones(3, 9, dtype=torch.bool), "input_ids": ids}) == 21
    assert num_tokens_of({"labels": torch.zeros(2, 2, dtype=torch.long), "input_ids": ids}) == 21
    assert num_tokens_of({"x": torch.zeros(3, 7)}) == 0
    assert num_tokens_of("text") == 0


def test_flops_per_parameter() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(10, 4), "layer": nn.Linear(4, 3), "head": nn.Linear(4, 10, bias=False)}
    )
    assert flops_per_token(model) == 6 * (12 + 3 + 40)
    model["head"].weight = model["embed"].weight  # the weight is tied, so the embedding is used in a matrix product
    assert flops_per_token(model) == 6 * (12 + 3 + 40)
    model["layer"].requires_grad_(False)
    assert flops_per_token(model) == 4 * (12 + 3) + 6 * 40


def test_invalid_peak_is_rejected() -> None:
    with pytest.raises(RoomierError, match="peak_flops_per_s=0"):
        Throughput(peak_flops_per_s=0)


def test_overhead_between_log_steps(make_trainer: Make, clock: Clock) -> None:
    throughput = Throughput()
    trainer = make_trainer(throughput, max_steps=4, log_every_n_steps=10**6)
    module = Tokens(clock)
    trainer.fit(module, TOKENS)
    best_s = float("inf")
    for _ in range(20):
        began_s = time.perf_counter()
        for _ in range(100):
            throughput.on_train_batch_end(trainer, module, None, TOKENS[0], 0)
        best_s = min(best_s, (time.perf_counter() - began_s) / 100)
    assert best_s < 100e-6  # about 3 microseconds on an idle core
