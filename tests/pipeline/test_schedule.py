"""Orders of forward and backward passes."""

from __future__ import annotations

import itertools

import pytest

from roomier.techniques.pipeline.schedule import SCHEDULES, Action

CASES = [
    (name, num_ranks, stages_per_rank, num_micro_batches)
    for name, num_ranks, num_micro_batches in itertools.product(SCHEDULES, (1, 2, 3, 4), (1, 2, 3, 4, 6, 8))
    for stages_per_rank in ((1,) if name != "interleaved_1f1b" else (1, 2, 3))
]


def slots_of(actions: list[list[Action]], num_stages: int) -> int:
    """Return the number of time slots in which all ranks finish their actions, in order.

    An action starts when the neighbour stage has finished the same micro-batch. A forward or backward pass takes one
    slot.
    """
    done: dict[Action, int] = {}
    free = [0] * len(actions)
    places = [0] * len(actions)
    while any(place < len(own) for place, own in zip(places, actions, strict=True)):
        progress = False
        for rank, own in enumerate(actions):
            if places[rank] == len(own):
                continue
            action = own[places[rank]]
            needed = _needed(action, num_stages)
            if all(each in done for each in needed):
                free[rank] = max([free[rank], *(done[each] for each in needed)]) + 1
                done[action] = free[rank]
                places[rank] += 1
                progress = True
        assert progress, "the ranks wait for each other"
    return max(done.values())


def _needed(action: Action, num_stages: int) -> list[Action]:
    if action.is_forward:
        return [Action(True, action.stage - 1, action.index)] * (action.stage > 0)
    own = [Action(True, action.stage, action.index)]
    return own + [Action(False, action.stage + 1, action.index)] * (action.stage + 1 < num_stages)


@pytest.mark.parametrize(("name", "num_ranks", "stages_per_rank", "num_micro_batches"), CASES)
def test_each_schedule_runs_each_pass_once_without_a_deadlock(
    name: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> None:
    schedule, num_stages = SCHEDULES[name], num_ranks * stages_per_rank
    actions = [schedule(rank, num_ranks, stages_per_rank, num_micro_batches) for rank in range(num_ranks)]
    assert sorted(str(each) for own in actions for each in own) == sorted(
        str(Action(is_forward, stage, index))
        for is_forward in (False, True)
        for stage in range(num_stages)
        for index in range(num_micro_batches)
    )
    num_slots = slots_of(actions, num_stages)
    if stages_per_rank == 1:
        assert num_slots == 2 * (num_micro_batches + num_ranks - 1)
    elif num_micro_batches % num_ranks == 0:  # a smaller bubble, measured in slots of a stage
        assert num_slots == 2 * (num_micro_batches * stages_per_rank + num_ranks - 1)


def in_flight(actions: list[Action]) -> int:
    """Return the largest number of micro-batches whose activations exist at the same time."""
    return max(itertools.accumulate(1 if each.is_forward else -1 for each in actions))


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8])
def test_activations_in_flight_follow_the_schedule(num_micro_batches: int) -> None:
    for rank in range(4):
        assert in_flight(SCHEDULES["gpipe"](rank, 4, 1, num_micro_batches)) == (num_micro_batches if rank < 3 else 1)
        assert in_flight(SCHEDULES["1f1b"](rank, 4, 1, num_micro_batches)) == min(4 - rank, num_micro_batches)
