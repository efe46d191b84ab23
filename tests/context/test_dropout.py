"""Dropout with a context size equals dropout on one device, whose masks are drawn slice by slice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.api.blocks import find_blocks
from roomier.core.device.events import Events
from roomier.core.device.rng import mix_seed
from roomier.techniques.pipeline.units import find_units
from tests.context.fitting import SEED, Case, Fitted, fit_module, is_equal
from tests.context.networks import Batch
from tests.parallel.parity import Trained, bare_optimizer, distance
from tests.ranks.pool import RankPool


class Slices:
    """Dropout on one device whose masks consist of the masks of all slices of the sequence.

    Args:
        size: number of slices. A block draws the mask of each slice from a separate generator. Other units draw masks
            of full sequences.
    """

    def __init__(self, size: int, length: int) -> None:
        self._size, self._length = size, length
        self._generators: list[torch.Generator] = []

    @contextmanager
    def installed(self, network: nn.Module) -> Iterator[None]:
        before, F.dropout, F.scaled_dot_product_attention = (
            (F.dropout, F.scaled_dot_product_attention),
            self._dropout,
            self._attention,
        )
        self._of_torch = before[0]
        blocks = find_blocks(network)
        handles = []
        for unit in find_units(network, blocks).values():
            enter = partial(self._enter, self._size if unit in blocks else 1)
            handles += [unit.register_forward_pre_hook(enter), unit.register_forward_hook(self._leave)]
        try:
            yield
        finally:
            F.dropout, F.scaled_dot_product_attention = before
            for each in handles:
                each.remove()

    def _enter(self, num_slices: int, *_: Any) -> None:
        drawn = int(torch.randint(2**62, ()))
        self._generators = [torch.Generator().manual_seed(mix_seed(drawn, rank)) for rank in range(num_slices)]

    def _leave(self, *_: Any) -> None:
        self._generators = []

    def _noise(self, tensor: Tensor, dim: int, p: float) -> Tensor:
        """Return the scaled mask of dropout, drawn by slices along ``dim``."""
        parts = tensor.tensor_split(len(self._generators), dim)
        drawn = [  # in the order of the memory, as torch draws masks
            torch.empty_like(part).bernoulli_(1 - p, generator=generator)
            for part, generator in zip(parts, self._generators, strict=True)
        ]
        return torch.cat(drawn, dim) / (1 - p)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not self._generators or not training:
            return self._of_torch(input, p, training, inplace)
        return input * self._noise(input, list(input.shape).index(self._length), p)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        elif attn_mask is not None:
            is_bool = attn_mask.dtype is torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if is_bool else scores + attn_mask
        weights = scores.softmax(-1)
        return (weights * self._noise(weights, 1, dropout_p) if dropout_p else weights) @ value


def fit_seeded(case: Case) -> tuple[Trained, list[Batch]]:
    """Fit, and return the micro-batches of this rank too."""
    trained, module = fit_module(case)
    return trained, module.read


def train_in_slices(case: Case, read: list[list[Batch]]) -> Trained:
    """Train in one process. ``read`` contains the micro-batches of each data rank."""
    bare = Fitted(case).double()
    optimizer, trained = bare_optimizer("adamw", bare), Trained([], [], {})
    with Slices(case.size, case.length).installed(bare):
        for step in range(case.num_steps):
            window = [(rank, index) for index in range(case.accumulate) for rank in range(len(read))]
            batches = {(rank, index): read[rank][step * case.accumulate + index] for rank, index in window}
            num_terms = sum(map(bare.terms, batches.values()))
            optimizer.zero_grad()
            trained.losses.append(0.0)
            for (rank, index), batch in batches.items():
                torch.manual_seed(mix_seed(SEED, step, rank, index))
                loss = bare.loss(batch) * bare.terms(batch) / num_terms
                loss.backward()
                trained.losses[-1] += loss.item()
            trained.norms.append(nn.utils.clip_grad_norm_(bare.parameters(), 0.05).item())
            optimizer.step()
    trained.weights = {name: each.detach() for name, each in bare.named_parameters()}
    return trained


def check(on_ranks: RankPool, case: Case) -> None:
    results = on_ranks(case.num_ranks, fit_seeded, case)
    apart = distance(results[0][0], train_in_slices(case, [read for _, read in results[:: case.size]]))
    assert is_equal(case, apart), (case, apart)


def test_dropout_of_slices(on_ranks: RankPool) -> None:
    check(on_ranks, Case("gpt dropout", "zero2", num_steps=3))


@pytest.mark.more
@pytest.mark.parametrize(
    "case",
    [
        Case("encoder dropout", "ddp", 4, 2, num_steps=3),
        Case("gpt dropout", "zero3", 4, 4, num_steps=3, levers={"activation_checkpointing": "full"}),
        Case("recomputed dropout", "zero1", num_steps=3),
        Case("gpt2 dropout", "zero2", num_steps=3),
    ],
    ids=lambda case: case.network,
)
def test_dropout_of_slices_in_other_models(on_ranks: RankPool, case: Case) -> None:
    check(on_ranks, case)


def fit_with_equal_seeds(case: Case) -> tuple[Trained, list[Batch]]:
    Events.seed_of_event = lambda self, **_: mix_seed(int(torch.randint(2**62, ())), 0)  # type: ignore
    return fit_seeded(case)


@pytest.mark.more
def test_equal_seeds_inside_blocks_are_detected(on_ranks: RankPool) -> None:
    case = Case("gpt dropout", num_steps=1)
    trained, read = on_ranks(2, fit_with_equal_seeds, case)[0]
    assert distance(trained, train_in_slices(case, [read])).weights > 1e-5
