"""1-bit Adam against its formulas, written down once more for one process that plays all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from roomier.core.exchange import all_reduce_bytes
from roomier.optim.onebit_adam import LEAST_VARIANCE, OneBitAdam
from roomier.optim.sign_code import BLOCK, SignCode
from tests.ranks.pool import RankPool

# Sizes that divide evenly and that do not, less than a rank each, and more than a block.
SHAPES = [(16, 32), (7,), (1,), (130, 3), (2, 2, 300)]
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.99), 1e-8, 0.1


def first_weights(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def gradients(step: int, rank: int, dtype: torch.dtype) -> list[Tensor]:
    """A common part, and one of each rank; those of the last tensor are of very different sizes."""
    common, own = torch.Generator().manual_seed(step), torch.Generator().manual_seed(1000 * step + rank + 1)
    drawn = [
        torch.randn(shape, generator=common, dtype=torch.float64)
        + 0.5 * torch.randn(shape, generator=own, dtype=torch.float64)
        for shape in SHAPES
    ]
    drawn[-1] *= torch.logspace(-4, 0, 300, dtype=torch.float64)
    return [each.to(dtype) for each in drawn]


def sign_code(pieces: list[Tensor]) -> list[Tensor]:
    """What the signs of each piece stand for: one scale a block."""
    coded = []
    for piece in pieces:
        blocks = [
            torch.copysign(block.abs().mean().float().to(block.dtype), block) if len(block) else block
            for block in piece.split(BLOCK)
        ]
        coded.append(torch.cat(blocks))
    return coded


def reference(num_ranks: int, num_steps: int, freeze_step: int, *, rounds: bool = False) -> list[Tensor]:
    """Algorithm 1 of the paper, in float64, one tensor after the other; returns the weights."""
    (beta1, beta2), f64 = BETAS, torch.float64
    results = []
    for index, weight in enumerate(first_weights(f64)):
        x = weight.flatten()
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        worker_errors, server_error = [torch.zeros_like(x) for _ in range(num_ranks)], torch.zeros_like(x)
        size = math.ceil(len(x) / num_ranks)
        for t in range(1, num_steps + 1):
            g = [gradients(t, rank, f64)[index].flatten() for rank in range(num_ranks)]
            if t <= freeze_step:
                mean = sum(g) / num_ranks
                m, v = beta1 * m + (1 - beta1) * mean, beta2 * v + (1 - beta2) * mean**2
                denominator = (v / (1 - beta2**t)).sqrt() + EPS
                if t == freeze_step:
                    kept = v.clamp(min=LEAST_VARIANCE * v.mean())
                    frozen = (kept / (1 - beta2**t)).sqrt() + EPS
                    frozen = frozen.bfloat16().to(f64) if rounds else frozen
            else:
                sent = []
                for rank in range(num_ranks):
                    compensated = beta1 * m + (1 - beta1) * g[rank] + worker_errors[rank]
                    sent.append(torch.cat(sign_code(list(compensated.split(size)))))
                    worker_errors[rank] = compensated - sent[rank]
                average = sum(sent) / num_ranks + server_error
                m = torch.cat(sign_code(list(average.split(size))))
                server_error = average - m
                denominator = frozen
            x = x * (1 - LR * DECAY) - LR / (1 - beta1**t) * m / denominator
        results.append(x.view_as(weight))
    return results


def train(num_steps: int, dtype: torch.dtype = torch.float64, **keywords: Any) -> tuple[list[Tensor], list[int]]:
    """The weights after ``num_steps``, and the bytes this rank sent in each."""
    parameters = [nn.Parameter(each) for each in first_weights(dtype)]
    optimizer = OneBitAdam(parameters, LR, BETAS, EPS, DECAY, **keywords)
    sent = run(optimizer, parameters, range(1, num_steps + 1))
    return [each.detach() for each in parameters], sent


def run(optimizer: OneBitAdam, parameters: list[nn.Parameter], steps: range) -> list[int]:
    sent = []
    for step in steps:
        rank = dist.get_rank() if dist.is_initialized() else 0
        for parameter, gradient in zip(parameters, gradients(step, rank, parameters[0].dtype), strict=True):
            parameter.grad = gradient
        before = optimizer.bytes_sent
        optimizer.step()
        sent.append(optimizer.bytes_sent - before)
    return sent


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [False, True])
def test_it_is_algorithm_1(on_ranks: RankPool, num_ranks: int, rounds: bool) -> None:
    expected = reference(num_ranks, 25, 8, rounds=rounds)
    for weights, _ in on_ranks(num_ranks, train, 25, freeze_step=8, rounds_variance=rounds):
        for weight, reference_weight in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, reference_weight, rtol=1e-7, atol=1e-9)
