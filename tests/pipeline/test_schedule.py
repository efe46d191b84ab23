"""Orders of forward and backward passes."""

from __future__ import annotations

import itertools

import pytest

from roomier.techniques.pipeline.schedule import SCHEDULES, Action

CASES = [
    (name, num_ranks, stages_per_rank, num_micro_batches)
    for name, num_ranks, num_micro_batches in itertools.product(SCHEDULES, (1, 2, 3, 4), (1, 2, 3, 4, 5, 8, 9))
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


def messages_of(actions: list[Action], num_ranks: int, stages_per_rank: int) -> list[tuple[str, Action]]:
    """Return the sends and receives of a rank, and the moments at which it waits until a send was received."""
    num_stages, waiting = num_ranks * stages_per_rank, list[Action]()
    calls = list[tuple[str, Action]]()
    for action in actions:
        stage, index, is_forward = action.stage, action.index, action.is_forward
        sender, receiver = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
        if 0 <= sender < num_stages:
            calls.append(("receive", Action(is_forward, sender, index)))
            if not is_forward:
                calls.append(("wait", Action(True, stage, index)))
        if 0 <= receiver < num_stages:
            calls.append(("send", action))
            if not is_forward:
                waiting.append(action)
                calls += [("wait", waiting.pop(0)) for _ in waiting[num_stages:]]
    return calls + [("wait", each) for each in waiting]


@pytest.mark.parametrize(("name", "num_ranks", "stages_per_rank", "num_micro_batches"), CASES)
def test_ranks_receive_messages_in_their_order(
    name: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> None:
    ranks = [SCHEDULES[name](rank, num_ranks, stages_per_rank, num_micro_batches) for rank in range(num_ranks)]
    calls = [messages_of(each, num_ranks, stages_per_rank) for each in ranks]
    channels: dict[tuple[str, int, int, int], list[Action]] = {}
    for rank, own in enumerate(calls):
        for call, action in own:
            peer = (action.stage + (1 if action.is_forward else -1) if call == "send" else action.stage) % num_ranks
            number = (2 * action.stage + action.is_forward) % (2 if stages_per_rank == 1 else 4)  # [Note: channels]
            channels.setdefault((call, rank, peer, number), []).append(action)
    for (call, rank, peer, number), messages in channels.items():
        if call == "send" and num_ranks > 1:
            assert messages == channels["receive", peer, rank, number]
            assert ("receive", rank, peer, number) not in channels  # each channel has one direction
    sent, received, places = set[Action](), set[Action](), [0] * num_ranks
    while any(place < len(own) for place, own in zip(places, calls, strict=True)):
        before = list(places)
        for rank, own in enumerate(calls):
            while places[rank] < len(own):
                call, action = own[places[rank]]
                if (call == "receive" and action not in sent) or (call == "wait" and action not in received):
                    break
                {"send": sent, "receive": received}.get(call, set()).add(action)
                places[rank] += 1
        assert places != before, "the ranks wait for each other"


def in_flight(actions: list[Action]) -> int:
    """Return the largest number of micro-batches whose activations exist at the same time."""
    return max(itertools.accumulate(1 if each.is_forward else -1 for each in actions))


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8])
def test_activations_in_flight_follow_the_schedule(num_micro_batches: int) -> None:
    for rank in range(4):
        assert in_flight(SCHEDULES["gpipe"](rank, 4, 1, num_micro_batches)) == (num_micro_batches if rank < 3 else 1)
        assert in_flight(SCHEDULES["1f1b"](rank, 4, 1, num_micro_batches)) == min(4 - rank, num_micro_batches)
