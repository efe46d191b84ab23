"""A program fails without each synchronization, or a proof shows that no program can fail."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import pytest
import torch

from tests.device import mutants, torch_mutants
from tests.device.mutant_scenario import Scenario, called, defects
from tests.ranks.pool import RankFailed
from tests.simulator.workers import SimulatedRanks

SCHEDULES = ("LATE", "OTHERS_FIRST")
TIMEOUT_S = 120.0
# One synchronization of each kind: for a stream, an event, memory, and a copy that the host reads.
REPRESENTATIVES = [
    "roomier.techniques.activation.copies:StreamCopies._copy | self._stream.wait_event(start)",
    "roomier.techniques.activation.copies:StreamCopies.wait | computing_stream(self.device).wait_event(mark)",
    "roomier.core.device.transfer:BatchMover.__call__ | copied.record_stream(computing)",
    "roomier.checkpoint.background:BackgroundSaver._stage | synchronize(device)",
    "roomier.core.wire:_Encoder.node | value.detach().cpu()",
]

is_described = pytest.mark.skipif(
    not torch.__version__.startswith(torch_mutants.VERSION),
    reason=f"the table describes torch {torch_mutants.VERSION}, whose functions have different names in other versions",
)


@pytest.mark.more
def test_every_synchronization_of_roomier_has_one_row() -> None:
    """A new synchronization requires a program that fails without it, or a proof that the call is not necessary."""
    rows = [*mutants.DETECTED, *mutants.EQUIVALENT, *mutants.OF_THE_HOST]
    assert sorted(rows) == sorted(mutants.of_roomier())


@pytest.mark.more
@is_described
def test_every_synchronization_of_torch_has_one_row() -> None:
    tables = (torch_mutants.DETECTED, torch_mutants.EQUIVALENT, torch_mutants.UNUSED, torch_mutants.OF_THE_HOST)
    assert sorted(row for table in tables for row in table) == sorted(torch_mutants.of_torch())


def test_missing_synchronizations_of_each_kind_are_detected(on_simulated: SimulatedRanks) -> None:
    rows = {each: mutants.PROGRAMS[mutants.DETECTED[each]] for each in REPRESENTATIVES}
    assert all(defects_of(on_simulated, rows, "LATE").values())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("table", "num_ranks"),
    [
        pytest.param(mutants, 1, id="roomier-1"),
        pytest.param(mutants, 2, id="roomier-2"),
        pytest.param(torch_mutants, 2, id="torch-2", marks=is_described),
        pytest.param(torch_mutants, 4, id="torch-4", marks=is_described),
    ],
)
def test_a_missing_synchronization_is_detected(
    on_simulated: SimulatedRanks, table: ModuleType, num_ranks: int, schedule: str
) -> None:
    check(on_simulated, table.DETECTED, table.PROGRAMS, num_ranks, schedule)


@is_described
@pytest.mark.slow
@pytest.mark.parametrize("name", torch_mutants.USES)
def test_unused_synchronizations_of_torch_are_not_called(on_simulated: SimulatedRanks, name: str) -> None:
    scenario = torch_mutants.USES[name]
    by_rank = on_simulated(scenario.num_ranks, called, scenario, list(torch_mutants.of_torch()))
    found = set().union(*by_rank)
    assert found  # the programs call other synchronizations
    assert found & torch_mutants.UNUSED.keys() == set()


def check(
    on_simulated: SimulatedRanks,
    detected: Mapping[str, str],
    programs: Mapping[str, Scenario],
    num_ranks: int,
    schedule: str,
) -> None:
    """Check that each mutant of the programs with ``num_ranks`` ranks is detected, and print how the mutant is
    detected."""
    of_size = {mutant: programs[name] for mutant, name in detected.items() if programs[name].num_ranks == num_ranks}
    found = defects_of(on_simulated, of_size, schedule)
    for mutant, kinds in found.items():
        print(f"{mutant}: {', '.join(kinds)} ({schedule})")
    assert [mutant for mutant, kinds in found.items() if not kinds] == []


def defects_of(on_simulated: SimulatedRanks, rows: Mapping[str, Scenario], schedule: str) -> dict[str, list[str]]:
    """Return the defects of each mutant on any rank. New ranks continue after a mutant that raises an error."""
    found: dict[str, list[str]] = {}
    rest = sorted(rows, key=lambda mutant: list(rows.values()).index(rows[mutant]))
    size = len(rest)
    while rest:
        part = rest[:size]
        num_ranks = rows[part[0]].num_ranks
        calls = [(rows[mutant], mutant) for mutant in part]
        try:
            by_rank = on_simulated(num_ranks, defects, calls, schedule=schedule, timeout_s=TIMEOUT_S)
        except RankFailed as error:  # a rank has died, or the ranks wait for each other
            if "in _expected" in str(error):
                raise  # the complete program fails
            if size > 1:
                size //= 2
                continue
            found[part[0]] = ["error: RankFailed"]
            print(error)
        else:
            for mutant, of_ranks in zip(part, zip(*by_rank, strict=False), strict=False):
                found[mutant] = sorted({each for of_rank in of_ranks for each in of_rank})
            size = len(rest)
        rest = [mutant for mutant in rest if mutant not in found]
    return found
