"""A program fails without each synchronization, or a proof shows that no program can fail."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.device.mutant_scenarios import Scenario, defects
from tests.device.mutants import DETECTED, EQUIVALENT, OF_THE_HOST, SCENARIOS, of_roomier
from tests.ranks.pool import RankFailed
from tests.simulator.workers import SimulatedRanks

SCHEDULES = ("LATE", "OTHERS_FIRST")
TIMEOUT_S = 120.0


def test_every_synchronization_of_roomier_has_one_row() -> None:
    """A new synchronization requires a program that fails without it, or a proof that the call is not necessary."""
    found = list(of_roomier())
    rows = [*DETECTED, *EQUIVALENT, *OF_THE_HOST]
    assert sorted(rows) == sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_missing_synchronization_is_detected(on_simulated: SimulatedRanks, num_ranks: int, schedule: str) -> None:
    found: dict[str, list[str]] = {}
    programs = {name: each for name, each in SCENARIOS.items() if each.num_ranks == num_ranks}
    rows = {each: [mutant for mutant, name in DETECTED.items() if name == each] for each in programs}
    found = defects_of(on_simulated, [(programs[name], mutants) for name, mutants in rows.items()], schedule)
    for mutant, kinds in found.items():
        print(f"{mutant}: {', '.join(kinds)} ({schedule})")
    assert [mutant for mutant, kinds in found.items() if not kinds] == []


def defects_of(
    on_simulated: SimulatedRanks, rows: Iterable[tuple[Scenario, list[str]]], schedule: str
) -> dict[str, list[str]]:
    """Return the defects of each mutant on any rank. New ranks continue after a mutant that raises an error."""
    rest = [(scenario, mutant) for scenario, mutants in rows for mutant in mutants]
    found: dict[str, list[str]] = {}
    size = len(rest)
    while rest:
        part = rest[:size]
        call: list[tuple[Scenario, list[str]]] = []
        for scenario, mutant in part:
            if not call or call[-1][0] is not scenario:
                call.append((scenario, []))
            call[-1][1].append(mutant)
        try:
            by_rank = on_simulated(part[0][0].num_ranks, defects, call, schedule=schedule, timeout_s=TIMEOUT_S)
        except RankFailed as error:  # a rank died, or the ranks wait for each other
            if size > 1:
                size //= 2
                continue
            found[part[0][1]] = ["error: RankFailed"]
            print(error)
        else:
            for (_, mutant), of_ranks in zip(part, zip(*by_rank, strict=False), strict=False):
                found[mutant] = sorted({each for of_rank in of_ranks for each in of_rank})
            size = len(rest)
        rest = [(scenario, mutant) for scenario, mutant in rest if mutant not in found]
    return found
