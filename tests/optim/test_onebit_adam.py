"""1-bit Adam equals its formulas, which the tests implement again in one process that simulates all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roomier.core.errors import CheckpointError
from roomier.core.exchange import all_reduce_bytes
from roomier.techniques.optim.onebit_adam import BLOCK, LEAST_VARIANCE, OneBitAdam
from tests.covering import covering, few
from tests.ranks.pool import RankPool

# Sizes that the number of ranks divides or does not divide, sizes below the number of ranks, and sizes above a block.
SHAPES = [(16, 32), (7,), (1,), (130, 3), (2, 2, 300)]
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.99), 1e-8, 0.1


def first_weights(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def gradients(step: int, rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Return gradients with a common part and a part per rank. The sizes in the last tensor differ widely."""
    common, own = torch.Generator().manual_seed(step), torch.Generator().manual_seed(1000 * step + rank + 1)
    drawn = [
        torch.randn(shape, generator=common, dtype=torch.float64)
        + 0.5 * torch.randn(shape, generator=own, dtype=torch.float64)
        for shape in SHAPES
    ]
    drawn[-1] *= torch.logspace(-4, 0, 300, dtype=torch.float64)
    return [each.to(dtype) for each in drawn]


def sign_code(pieces: list[Tensor]) -> list[Tensor]:
    """Return the decoded signs of each piece, with one scale per block."""
    coded = []
    for piece in pieces:
        blocks = [
            torch.copysign(block.abs().mean().float().to(block.dtype), block) if len(block) else block
            for block in piece.split(BLOCK)
        ]
        coded.append(torch.cat(blocks))
    return coded


def reference(num_ranks: int, num_steps: int, freeze_step: int, *, rounds: bool = False) -> list[Tensor]:
    """Compute algorithm 1 of the paper in float64, tensor by tensor, and return the weights."""
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
    """Return the weights after ``num_steps``, and the bytes that this rank sent in each step."""
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


@pytest.mark.parametrize(("num_ranks", "rounds"), few(covering([1, 2, 3, 4], [False, True]), 2))
def test_steps_equal_algorithm_1(on_ranks: RankPool, num_ranks: int, rounds: bool) -> None:
    expected = reference(num_ranks, 25, 8, rounds=rounds)
    for weights, _ in on_ranks(num_ranks, train, 25, freeze_step=8, rounds_variance=rounds):
        for weight, reference_weight in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, reference_weight, rtol=1e-7, atol=1e-9)


@pytest.mark.more
def test_float32_differs_by_rounding_only(on_ranks: RankPool) -> None:
    # Only a few steps run, because rounding can change the sign of an element near zero, and its values then differ for
    # several steps.
    expected = reference(2, 11, 8)
    weights, _ = on_ranks(2, train, 11, torch.float32, freeze_step=8)[0]
    for weight, reference_weight in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.double(), reference_weight, rtol=1e-4, atol=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_steps_before_the_freeze_equal_adamw_on_averaged_gradients(on_ranks: RankPool, num_ranks: int) -> None:
    parameters = [nn.Parameter(each) for each in first_weights(torch.float32)]
    adamw = torch.optim.AdamW(parameters, LR, BETAS, EPS, DECAY)
    for step in range(1, 11):
        by_rank = [gradients(step, rank, torch.float32) for rank in range(num_ranks)]
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.stack([of_rank[index] for of_rank in by_rank]).mean(0)
        adamw.step()
    for weights, _ in on_ranks(num_ranks, train, 10, torch.float32, freeze_step=10):
        for weight, parameter in zip(weights, parameters, strict=True):
            torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)


def bytes_of_steps(num_steps: int, freeze_step: int) -> list[int]:
    parameters = [nn.Parameter(torch.ones(256, 300)), nn.Parameter(torch.ones(300))]
    optimizer = OneBitAdam(parameters, freeze_step=freeze_step)
    sent = []
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        before = optimizer.bytes_sent
        optimizer.step()
        sent.append(optimizer.bytes_sent - before)
    return sent


@pytest.mark.parametrize("num_ranks", few([2, 4]))
def test_bytes_sent_against_ddp(on_ranks: RankPool, num_ranks: int) -> None:
    ddp = all_reduce_bytes(4 * (256 * 300 + 300), num_ranks)
    for sent in on_ranks(num_ranks, bytes_of_steps, 6, 3):
        assert sent[:3] == [pytest.approx(ddp, rel=0.01)] * 3
        assert ddp < sent[3] < 2.1 * ddp  # both moments are gathered one time
        assert sent[4] == sent[5]
        assert ddp / sent[5] > 20
        assert ddp / sent[5] == pytest.approx(32 / 1.25, rel=0.05)


def resumed(num_steps: int, at: int, freeze_step: int, rounds_variance: bool) -> bool:
    """Return True if a new optimizer with the states of step ``at`` continues with the same bits."""
    keywords: dict[str, Any] = {"freeze_step": freeze_step, "rounds_variance": rounds_variance}
    expected, _ = train(num_steps, torch.float32, **keywords)
    parameters = [nn.Parameter(each) for each in first_weights(torch.float32)]
    first = OneBitAdam(parameters, LR, BETAS, EPS, DECAY, **keywords)
    run(first, parameters, range(1, at + 1))
    second = OneBitAdam(parameters, 1.0, **keywords)
    second.load_state_dict(first.state_dict())
    run(second, parameters, range(at + 1, num_steps + 1))
    return all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


@pytest.mark.more
@pytest.mark.parametrize(("num_ranks", "at"), covering([1, 2, 3], [0, 6, 10]))
def test_restored_states_continue_bit_for_bit(on_ranks: RankPool, num_ranks: int, at: int) -> None:
    calls = [(14, at, 6, rounds) for rounds in (False, True)]
    for call, by_rank in zip(calls, on_ranks.each(num_ranks, resumed, calls), strict=True):
        assert all(by_rank), call


def whole_states(at: int, freeze_step: int) -> dict[str, Any]:
    """Return the unsharded states after ``at`` steps."""
    parameters = [nn.Parameter(each) for each in first_weights(torch.float64)]
    optimizer = OneBitAdam(parameters, LR, BETAS, EPS, DECAY, freeze_step=freeze_step)
    run(optimizer, parameters, range(1, at + 1))
    return whole(optimizer.state_dict())


def whole(packed: dict[str, Any]) -> dict[str, Any]:
    states = {
        index: {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in state.items()
        }
        for index, state in packed["state"].items()
    }
    return {"state": states, "param_groups": packed["param_groups"]}


def loaded_and_read_back(states: dict[str, Any]) -> dict[str, Any]:
    parameters = [nn.Parameter(each) for each in first_weights(torch.float64)]
    optimizer = OneBitAdam(parameters, freeze_step=6)
    optimizer.load_state_dict(states)
    result = whole(optimizer.state_dict())["state"]
    run(optimizer, parameters, range(11, 13))
    assert all(parameter.isfinite().all() for parameter in parameters)
    return result


@pytest.mark.more
@pytest.mark.parametrize(("numbers", "at"), covering([(4, 2), (2, 4), (3, 1), (1, 3)], [4, 10]))
def test_states_load_on_another_number_of_ranks(on_ranks: RankPool, numbers: tuple[int, int], at: int) -> None:
    saved_on, loaded_on = numbers
    saved = on_ranks(saved_on, whole_states, at, 6)[0]
    for loaded in on_ranks(loaded_on, loaded_and_read_back, saved):
        for index, before in saved["state"].items():
            after = loaded[index]
            if at == 4:
                assert torch.equal(after["exp_avg"], before["exp_avg"])
                assert torch.equal(after["exp_avg_sq"], before["exp_avg_sq"])
                continue
            assert torch.equal(after["denominator"], before["denominator"])
            # The accumulated error of the average is unchanged.
            torch.testing.assert_close(after["worker_error"].mean(0), before["worker_error"].mean(0))
            # The momentum now has different blocks. Its rounding error is in the error state and is added later.
            torch.testing.assert_close(
                BETAS[0] * after["exp_avg"] + after["server_error"],
                BETAS[0] * before["exp_avg"] + before["server_error"],
            )


def steps_of_odd_parameters() -> list[bool]:
    """Update parameters that are bfloat16, are not contiguous, have no gradient on some ranks, are empty, or are
    frozen."""
    torch.manual_seed(0)
    halved = nn.Parameter(torch.randn(40, 10).bfloat16())
    last = nn.Parameter(torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    sometimes, never = nn.Parameter(torch.randn(30)), nn.Parameter(torch.ones(3))
    parameters = [halved, last, sometimes, never, nn.Parameter(torch.empty(0, 3))]
    before = [each.detach().clone() for each in parameters]
    optimizer = OneBitAdam(parameters, 0.1, weight_decay=0.0, freeze_step=2)
    for _ in range(5):
        optimizer.zero_grad()
        loss = halved.float().square().sum() + last.square().sum()
        if dist.get_rank() == 0:
            loss = loss + sometimes.square().sum()
        loss.backward()
        optimizer.step()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [each.detach() for each in parameters])
    assert all(torch.equal(a, b) for other in gathered for a, b in zip(gathered[0], other, strict=True))
    optimizer.load_state_dict(optimizer.state_dict())
    return [torch.equal(each, was) for each, was in zip(parameters, before, strict=True)]


@pytest.mark.more
def test_parameters_of_all_kinds(on_ranks: RankPool) -> None:
    assert on_ranks(2, steps_of_odd_parameters) == [[False, False, False, True, True]] * 2


def test_states_of_other_parameters_are_rejected() -> None:
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = OneBitAdam([one, two], freeze_step=1)
    one.grad, two.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    states = optimizer.state_dict()
    del states["state"][1]
    with pytest.raises(CheckpointError, match="lacks states of these parameters"):
        optimizer.load_state_dict(states)


def test_the_freeze_and_its_savings_are_reported(on_ranks: RankPool, capfd: pytest.CaptureFixture[str]) -> None:
    on_ranks(2, bytes_of_steps, 3, 2)
    told = [line for line in capfd.readouterr().out.splitlines() if "frozen" in line]
    assert len(told) == 1
    assert "frozen after 2 steps" in told[0]
    assert "25.5 times less than with float32 (301.2 KiB)" in told[0]
