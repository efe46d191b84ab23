"""The record of a forecast and its measurement, in the run folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import roomier
from roomier.callbacks import MemoryForecast
from roomier.planner.measured.record import read_record, record_from
from tests.planner.page_examples import record


class TinyModule(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).square().mean()


def test_a_record_keeps_all_values_and_older_records_can_be_read() -> None:
    own = record(num_ranks=1)
    rank = dataclasses.replace(own.ranks[0], allocator_bytes=3)
    kept = dataclasses.replace(own, ranks=(rank,), num_parameters=7)
    stored = json.loads(json.dumps(kept.as_dict()))
    assert record_from(stored) == kept
    del stored["num_parameters"]
    stored["measured"][0] |= {"reserved_bytes": 4, "beside_bytes": 5}
    before = record_from(stored)
    assert (before.num_parameters, before.ranks) == (None, kept.ranks)


def test_the_run_folder_contains_the_number_of_parameters(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer(
        callbacks=[MemoryForecast()],
        optimizer="adamw",
        learning_rate=1e-3,
        max_steps=2,
        logger=True,
        default_root_dir=tmp_path,
    )
    trainer.fit(TinyModule(), [torch.zeros(4, 3)] * 2)
    assert read_record(Path(trainer.log_dir)).num_parameters == 3 + 1
