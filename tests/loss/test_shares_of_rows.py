"""Ranks with the same rows compute a share of the chunked loss each. The sum of their gradients is exact."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.core.wrapped_forward import install
from roomier.techniques.loss.chunked import LazyForward
from roomier.techniques.loss.cross_entropy import LossOfLinear
from tests.covering import few
from tests.ranks.pool import RankPool

WIDTH, CLASSES = 6, 11
BOUND = 1e-13  # float64; sums of at most 23 terms of size 1


class Tied(nn.Module):
    """A language model whose output layer shares its weight with the embedding."""

    def __init__(self, *, ties: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        if ties:
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor, targets: Tensor, options: dict[str, Any]) -> Tensor:
        logits = self.head(torch.tanh(self.inner(self.embedding(tokens))))
        loss = F.cross_entropy(logits.view(-1, CLASSES), targets, **options)
        if options.get("reduction") == "none":
            loss = (loss * torch.linspace(0.5, 1.5, len(loss), dtype=loss.dtype)).sum()
        return loss


def difference(num_rows: int, ties: bool, options: dict[str, Any]) -> float:
    """Return the largest difference from one process, in the loss and in the gradients summed over the ranks."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(CLASSES, (2, num_rows), generator=generator)
    targets[num_rows // 3 : num_rows // 2] = -100
    alone, shared = Tied(ties=ties), Tied(ties=ties)
    install(shared.head, LazyForward(shared.head, 4, dist.group.WORLD))
    shared = copy.deepcopy(shared)  # as for an average of the weights
    expected, loss = alone(tokens, targets, options), shared(tokens, targets, options)
    expected.backward()
    (loss / dist.get_world_size()).backward()
    found = [abs(loss.item() - expected.item())]
    for ours, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        dist.all_reduce(ours.grad)
        found.append(float((ours.grad - theirs.grad).abs().max()))
    return max(found)


def differences(cases: list[tuple[int, bool, dict[str, Any]]]) -> list[float]:
    return [difference(*case) for case in cases]


@pytest.mark.parametrize("num_ranks", few([2, 4]))
def test_loss_and_gradients_are_those_of_one_process(on_ranks: RankPool, num_ranks: int) -> None:
    kinds = [{"reduction": each, "label_smoothing": s} for each in ("mean", "sum", "none") for s in (0.0, 0.3)]
    weighted = {"weight": torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)}  # computed from all logits on each rank
    cases = list(itertools.product((23, 3), (True, False), [*kinds, weighted]))
    for case, *found in zip(cases, *on_ranks(num_ranks, differences, cases), strict=True):
        assert max(found) < BOUND, case


def rows_and_bytes() -> tuple[list[int], int]:
    """Return the rows of this rank, and the bytes of the saved gradient of the input."""
    hidden, weight = torch.randn(23, WIDTH, requires_grad=True), torch.randn(CLASSES, WIDTH)
    how = LossOfLinear((torch.float32,), group=dist.group.WORLD)
    saved: list[int] = []
    layer = nn.Linear(WIDTH, CLASSES, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    install(layer, LazyForward(layer, None, dist.group.WORLD))

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        F.cross_entropy(layer(hidden), torch.zeros(23, dtype=torch.int64))
    return list(range(23))[how.own_rows(23)], max(saved)


def test_each_rank_computes_and_saves_its_share(on_ranks: RankPool) -> None:
    shares = on_ranks(2, rows_and_bytes)
    assert [row for rows, _ in shares for row in rows] == list(range(23))
    assert [len(rows) for rows, _ in shares] == [11, 12]
    assert [num_bytes for _, num_bytes in shares] == [len(rows) * WIDTH * 4 for rows, _ in shares]
