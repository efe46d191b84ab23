"""Bytes counted by the tracker, on tensors of known sizes."""

from __future__ import annotations

import torch
from torch import nn

from roomier.planner.memory.kinds import MODEL_STATES, Kind
from roomier.planner.memory.tracker import MemoryTracker

CPU = torch.device("cpu")
KIB = 1024


def kibibytes(count: int) -> torch.Tensor:
    return torch.zeros(count * KIB // 4)


def make_tracker() -> MemoryTracker:
    return MemoryTracker(nn.Module(), [], CPU)


def test_storage_counts_one_time_for_all_views() -> None:
    with make_tracker() as tracker:
        base = kibibytes(4)
        views = [base[:10], base.view(2, -1), base.detach()]
    assert tracker.now().total() == 4 * KIB
    assert len(views) == 3


def test_freed_storage_is_subtracted_and_the_peak_is_kept() -> None:
    with make_tracker() as tracker:
        first = kibibytes(4)
        second = kibibytes(2)
        del first
        third = kibibytes(1)
    assert tracker.peak().total() == 6 * KIB
    assert tracker.now().total() == 3 * KIB
    assert second.numel() > third.numel()


def test_resized_storage_counts_with_its_new_size() -> None:
    tensor = kibibytes(4)
    with make_tracker() as tracker:
        tensor.add_(1)
        tensor.untyped_storage().resize_(8 * KIB)
        tensor.add_(1)
        tensor.untyped_storage().resize_(1 * KIB)
        tensor[:4].add_(1)
    assert tracker.peak().total() == 8 * KIB
    assert tracker.now().total() == 1 * KIB


def test_existing_storage_counts_from_the_start() -> None:
    before = kibibytes(4)
    with make_tracker() as tracker:
        freed = kibibytes(2)
        del freed
        after = before[:4] + 1
    assert tracker.peak().total() == 6 * KIB  # although the memory was first used at the end
    assert after.numel() == 4


def test_restart_discards_the_past_and_keeps_existing_storages() -> None:
    with make_tracker() as tracker:
        large = kibibytes(64)
        del large
        kept = kibibytes(2)
        tracker.restart()
        more = kept + 1
    assert tracker.peak().total() == 4 * KIB
    assert more.numel() == kept.numel()


def test_tensors_saved_for_backward_are_activations() -> None:
    weight = nn.Parameter(torch.ones(KIB // 4))
    with make_tracker() as tracker:
        tracker.enter("forward")
        hidden = (weight * 2).exp()  # exp saves its result; the product is freed
        loss = hidden.sum()
        tracker.enter("backward")
        loss.backward()
    peak = tracker.peak([Kind.ACTIVATION])
    assert KIB <= peak.num_bytes[Kind.ACTIVATION] - weight.nbytes < 1.1 * KIB


def test_parameters_gradients_and_states_of_a_model() -> None:
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
    assert peak.num_bytes[Kind.OPTIMIZER_STATE] == 2 * num_bytes + 2 * 4  # plus two counters
    assert peak.num_bytes[Kind.GATHERED] == 0


def test_operations_outside_are_not_counted() -> None:
    tracker = make_tracker()
    with tracker:
        kept = kibibytes(1)
    outside = kibibytes(4)
    del kept
    assert tracker.now().total() == KIB
    assert outside.numel()
