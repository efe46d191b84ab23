"""What the tracker counts, on tensors whose sizes are known."""

from __future__ import annotations

import torch
from torch import nn

from roomier.memory.kinds import MODEL_STATES, Kind
from roomier.memory.tracker import MemoryTracker

CPU = torch.device("cpu")
KIB = 1024


def kibibytes(count: int) -> torch.Tensor:
    return torch.zeros(count * KIB // 4)


def make_tracker() -> MemoryTracker:
    return MemoryTracker(nn.Module(), [], CPU)


def test_a_storage_counts_once_however_many_look_into_it() -> None:
    with make_tracker() as tracker:
        whole = kibibytes(4)
        views = [whole[:10], whole.view(2, -1), whole.detach()]
    assert tracker.now().total() == 4 * KIB
    assert len(views) == 3


def test_what_is_freed_counts_no_more_and_the_peak_stays() -> None:
    with make_tracker() as tracker:
        first = kibibytes(4)
        second = kibibytes(2)
        del first
        third = kibibytes(1)
    assert tracker.peak().total() == 6 * KIB
    assert tracker.now().total() == 3 * KIB
    assert second.numel() > third.numel()


def test_a_storage_that_is_resized_counts_at_its_new_size() -> None:
    tensor = kibibytes(4)
    with make_tracker() as tracker:
        tensor.add_(1)
        tensor.untyped_storage().resize_(8 * KIB)
        tensor.add_(1)
        tensor.untyped_storage().resize_(1 * KIB)
        tensor[:4].add_(1)
    assert tracker.peak().total() == 8 * KIB
    assert tracker.now().total() == 1 * KIB


def test_what_was_there_before_counts_from_the_start() -> None:
    before = kibibytes(4)
    with make_tracker() as tracker:
        freed = kibibytes(2)
        del freed
        after = before[:4] + 1
    assert tracker.peak().total() == 6 * KIB  # though it was seen last
    assert after.numel() == 4


def test_a_restart_forgets_the_past_and_keeps_what_is_there() -> None:
    with make_tracker() as tracker:
        large = kibibytes(64)
        del large
        kept = kibibytes(2)
        tracker.restart()
        more = kept + 1
    assert tracker.peak().total() == 4 * KIB
    assert more.numel() == kept.numel()


def test_what_the_forward_keeps_is_activation_and_what_it_drops_is_not() -> None:
    weight = nn.Parameter(torch.ones(KIB // 4))
    with make_tracker() as tracker:
        tracker.enter("forward")
        hidden = (weight * 2).exp()  # keeps its result; the product is dropped
        loss = hidden.sum()
        tracker.enter("backward")
        loss.backward()
    peak = tracker.peak([Kind.ACTIVATION])
    assert KIB <= peak.num_bytes[Kind.ACTIVATION] - weight.nbytes < 1.1 * KIB


def test_parameters_gradients_and_states_of_a_plain_model() -> None:
    module = nn.Linear(64, 64)
    num_bytes = sum(each.nbytes for each in module.parameters())
    optimizer = torch.optim.AdamW(module.parameters())
    batch = torch.ones(2, 64)

    def step(tracker: MemoryTracker) -> None:
        tracker.enter("forward")
        optimizer.zero_grad()
        loss = module(batch).sum()
        tracker.enter("backward")
        loss.backward()
        tracker.enter("update")
        optimizer.step()

    with MemoryTracker(module, [optimizer], CPU) as tracker:
        step(tracker)
        tracker.restart()
        step(tracker)
    peak = tracker.peak(MODEL_STATES)
    assert peak.num_bytes[Kind.PARAMETER] == num_bytes
    assert peak.num_bytes[Kind.GRADIENT] == num_bytes
    assert peak.num_bytes[Kind.OPTIMIZER_STATE] == 2 * num_bytes + 2 * 4  # and two counters
    assert peak.num_bytes[Kind.GATHERED] == 0


def test_nothing_is_counted_outside() -> None:
    tracker = make_tracker()
    with tracker:
        kept = kibibytes(1)
    outside = kibibytes(4)
    del kept
    assert tracker.now().total() == KIB
    assert outside.numel()
