"""AdamW with 32-bit, 8-bit and 4-bit states equals torch bit for bit, or its formulas in float64."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier import PlanError
from roomier.core import torch_private
from roomier.techniques.optim import adamw
from roomier.techniques.optim.adamw import BlockwiseAdamW, blockwise_adamw_bytes, compiled_update
from roomier.techniques.optim.block_codes import block_size, decode, regions

BITS = pytest.mark.parametrize("bits", [8, 4])
SHAPES = [(33, 150), (7, 1009), (12, 3, 9, 13), (1, 5000), (90,), (20, 20), ()]
CODED = SHAPES[:4]


def parameters_of(shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(step: int, *models: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(step)
    for same in zip(*models, strict=True):
        gradient = torch.randn(same[0].shape, generator=generator)
        # The sizes span a factor of 30, as between columns of real gradients.
        gradient *= 10 ** (-1.5 * torch.rand(same[0].shape[-1:], generator=torch.Generator().manual_seed(5)))
        for each in same:
            each.grad = gradient.to(each.dtype)


def state_of(optimizer: BlockwiseAdamW) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


# ---- 32 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_32_bit_states_equal_torch_bit_for_bit(weight_decay: float) -> None:
    ours, theirs = parameters_of(), parameters_of()
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    one, other = BlockwiseAdamW(ours, **options, state_bits=32), torch.optim.AdamW(theirs, **options, foreach=False)
    for step in range(10):
        for optimizer in (one, other):
            optimizer.param_groups[0]["lr"] = 3e-3 / (step + 1)
        give_gradients(step, ours, theirs)
        one.step()
        other.step()
        assert all(map(torch.equal, ours, theirs))
    for parameter, twin in zip(ours, theirs, strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(one.state[parameter][name], other.state[twin][name])


def test_split_bfloat16_weights_equal_float32_masters_bit_for_bit() -> None:
    ours = parameters_of(dtype=torch.bfloat16)
    masters = [nn.Parameter(each.detach().float()) for each in ours]
    one, other = BlockwiseAdamW(ours, state_bits=32), torch.optim.AdamW(masters, foreach=False)
    for step in range(10):
        give_gradients(step, ours)
        for each, master in zip(ours, masters, strict=True):
            assert each.grad is not None
            master.grad = each.grad.float()
        one.step()
        other.step()
    for each, master in zip(ours, masters, strict=True):
        kept = each.detach().float().view(torch.int32) + one.state[each]["low_bits"]
        assert torch.equal(kept.view(torch.float32), master.detach())


# ---- codes -----------------------------------------------------------------------------------------------------------


def held(state: dict[str, Tensor], parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return roots and ratios in float64, with the shape of ``parameter``."""
    bits = 8 if "root_codes" in state else 4
    codes = [state[name].flatten(1) for name in ("root_codes", "ratio_codes", "codes") if name in state]
    parts = [
        decode(
            [region.cut(each) for each in codes],
            [state[name].double()[:, region.scales, None] for name in ("root_scales", "ratio_scales")],
        )
        for region in regions(codes[0].shape[1], bits)
    ]
    root, ratio = (torch.cat([each[index].flatten(1) for each in parts], 1) for index in (0, 1))
    return root.view(parameter.shape), ratio.view(parameter.shape)


@BITS
@pytest.mark.parametrize("shape", CODED, ids=str)
def test_a_step_equals_adamw_on_the_decoded_moments(bits: int, shape: tuple[int, ...]) -> None:
    lr, beta1, beta2, eps, decay = 1e-2, 0.9, 0.99, 1e-4, 0.1
    [parameter] = model = parameters_of([shape])
    optimizer = BlockwiseAdamW(model, lr, (beta1, beta2), eps, decay, state_bits=bits)
    root = ratio = torch.zeros(shape, dtype=torch.float64)
    for step in range(1, 7):
        give_gradients(step, model)
        assert parameter.grad is not None
        before, gradient = parameter.detach().double(), parameter.grad.double()
        eps_before, eps_now = (eps * math.sqrt(1 - beta2**count) for count in (step - 1, step))
        first = beta1 * ratio * (root + eps_before) + (1 - beta1) * gradient
        second = beta2 * root**2 + (1 - beta2) * gradient**2
        corrected = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + eps)
        optimizer.step()
        torch.testing.assert_close(
            parameter.detach().double(), before * (1 - lr * decay) - lr * corrected, rtol=1e-6, atol=3e-7 * lr
        )
        root, ratio = held(optimizer.state[parameter], parameter)
        in_rows = [
            each.reshape(shape[0], -1) for each in (root, second.sqrt(), ratio, first / (second.sqrt() + eps_now))
        ]
        size = block_size(in_rows[0].shape[1], bits)
        for now, exact, now_ratio, exact_ratio in zip(*(each.split(size, dim=1) for each in in_rows), strict=True):
            code = exact.amax(1, keepdim=True).sqrt() / 2**bits
            assert ((now.sqrt() - exact.sqrt()).abs() <= code * 1.001).all()
            code = exact_ratio.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            assert ((now_ratio - exact_ratio).abs() <= code * 1.001).all()


@BITS
def test_losses_stay_near_adamw(bits: int) -> None:
    ours, theirs = parameters_of(CODED), parameters_of(CODED)
    first = [each.detach().clone() for each in ours]
    one, other = BlockwiseAdamW(ours, lr=1e-2, state_bits=bits), torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(60):
        give_gradients(step, ours, theirs)
        one.step()
        other.step()
    for mine, twin, start in zip(ours, theirs, first, strict=True):
        apart = (mine - twin).norm() / (twin - start).norm()
        assert apart < (0.05 if bits == 8 else 0.4)


@BITS
def test_no_gradient_moves_a_weight_far(bits: int) -> None:
    """Adam moves a weight by at most about ``(1 - beta1) / sqrt(1 - beta2)`` times the learning rate."""
    [parameter] = model = parameters_of([(40, 128)])
    optimizer = BlockwiseAdamW(model, lr=1.0, weight_decay=0.0, state_bits=bits)
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        before = parameter.detach().clone()
        sparse = torch.rand(parameter.shape, generator=generator) < 0.1
        size = 10 ** (12 * torch.rand(parameter.shape, generator=generator) - 9)
        parameter.grad = torch.randn(parameter.shape, generator=generator) * size * sparse
        optimizer.step()
        assert (parameter - before).abs().max() < 7.3


@BITS
def test_a_weight_without_gradient_stops_moving(bits: int) -> None:
    """With rounding to the nearest code, a small move would be repeated forever."""
    [parameter] = model = parameters_of([(40, 128)])
    optimizer = BlockwiseAdamW(model, lr=1.0, weight_decay=0.0, state_bits=bits)
    for step in range(300):
        give_gradients(step, model)
        assert parameter.grad is not None
        if step:
            parameter.grad[:, :64] = 0
        optimizer.step()
    before = parameter.detach().clone()
    give_gradients(300, model)
    parameter.grad[:, :64] = 0
    optimizer.step()
    assert torch.equal(parameter[:, :64], before[:, :64])


@pytest.mark.parametrize(("bits", "limit"), [(8, 2.1), (4, 1.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_states(bits: int, limit: float, dtype: torch.dtype) -> None:
    model = parameters_of([(64, 80), (33, 1009), (90,), (20, 20)], dtype)
    optimizer = BlockwiseAdamW(model, state_bits=bits)
    give_gradients(0, model)
    optimizer.step()
    for parameter in model:
        num_bytes = sum(each.numel() * each.itemsize for each in optimizer.state[parameter].values())
        assert num_bytes == blockwise_adamw_bytes(parameter.shape, bits, dtype, "split")
        low_bits = 2 if dtype is torch.bfloat16 else 0
        if parameter.numel() > 4096:
            assert num_bytes - 4 <= (limit + low_bits) * parameter.numel()
        else:
            assert num_bytes - 4 == (8 + low_bits) * parameter.numel()


def test_a_group_can_keep_32_bit_states() -> None:
    coded, whole = model = parameters_of([(64, 80), (64, 80)])
    optimizer = BlockwiseAdamW([{"params": [coded]}, {"params": [whole], "state_bits": 32}], state_bits=4)
    give_gradients(0, model)
    optimizer.step()
    assert set(optimizer.state[coded]) == {"step", "codes", "root_scales", "ratio_scales"}
    assert set(optimizer.state[whole]) == {"step", "exp_avg", "exp_avg_sq"}


@BITS
def test_the_memory_layout_of_a_weight_does_not_matter(bits: int) -> None:
    [plain] = parameters_of([(12, 16, 9, 13)])
    last = nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    one, other = BlockwiseAdamW([plain], state_bits=bits), BlockwiseAdamW([last], state_bits=bits)
    for step in range(3):
        give_gradients(step, [plain], [last])
        one.step()
        other.step()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)


@BITS
@pytest.mark.parametrize("rounding", ["split", "stochastic", "nearest"])
def test_bfloat16_weights_follow_float32_weights(bits: int, rounding: str) -> None:
    narrow = parameters_of([(64, 200)], torch.bfloat16)
    wide = [nn.Parameter(each.detach().float()) for each in narrow]
    one = BlockwiseAdamW(narrow, lr=1e-4, state_bits=bits, weight_rounding=rounding)
    other = BlockwiseAdamW(wide, lr=1e-4, state_bits=bits)
    first = wide[0].detach().clone()
    for step in range(100):
        give_gradients(step, narrow)
        for each, twin in zip(narrow, wide, strict=True):
            assert each.grad is not None
            twin.grad = each.grad.float()
        one.step()
        other.step()
    moved, moved_wide = narrow[0].detach().float() - first, wide[0].detach() - first
    if rounding == "split":
        kept = narrow[0].detach().float().view(torch.int32) + one.state[narrow[0]]["low_bits"]
        assert torch.equal(kept.view(torch.float32), wide[0])
    elif rounding == "stochastic":
        assert moved.mean().item() == pytest.approx(moved_wide.mean().item(), abs=1e-4)
    else:
        assert moved.norm() < 0.7 * moved_wide.norm(), "small updates are lost, so this is not the default"


@BITS
def test_training_resumes_from_its_state_bit_for_bit(bits: int) -> None:
    ours = parameters_of()
    optimizer = BlockwiseAdamW(ours, state_bits=bits)
    for step in range(3):
        give_gradients(step, ours)
        optimizer.step()
    twins = [nn.Parameter(each.detach().clone()) for each in ours]
    copies = BlockwiseAdamW(twins, state_bits=bits)
    for twin, each in zip(twins, ours, strict=True):
        copies.state[twin] = {name: value.clone() for name, value in optimizer.state[each].items()}
    for step in range(3, 6):
        give_gradients(step, ours, twins)
        optimizer.step()
        copies.step()
    assert all(map(torch.equal, [*ours, *state_of(optimizer)], [*twins, *state_of(copies)]))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_deep_copy_steps(duplicate: Callable[[Any], Any]) -> None:
    model = parameters_of([(64, 80)])
    optimizer = duplicate(BlockwiseAdamW(model))
    model = optimizer.param_groups[0]["params"]
    give_gradients(0, model)
    before = model[0].detach().clone()
    optimizer.step()
    assert not torch.equal(model[0], before)


@BITS
def test_nan_gradients_reach_the_weights(bits: int) -> None:
    [parameter] = model = parameters_of([(64, 80)])
    optimizer = BlockwiseAdamW(model, state_bits=bits)
    for step in range(2):
        give_gradients(step, model)
        assert parameter.grad is not None
        if step == 0:
            parameter.grad[3, 4] = math.nan
        optimizer.step()
    assert parameter[3].isnan().all()
    assert parameter[[2, 4]].isfinite().all()


def test_a_closure_is_called_with_gradients() -> None:
    [parameter] = model = parameters_of([(64, 80)])
    optimizer = BlockwiseAdamW(model)

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(PlanError, match=r"state_bits.*Use 4, 8 or 32"):
        BlockwiseAdamW(parameters_of(), state_bits=2)
    with pytest.raises(PlanError, match=r"weight_rounding.*split, stochastic, nearest"):
        BlockwiseAdamW(parameters_of(), weight_rounding="up")
    with pytest.raises(PlanError, match=r"float64.*optimizer='adamw'"):
        BlockwiseAdamW(parameters_of(dtype=torch.float64))
    BlockwiseAdamW(parameters_of(dtype=torch.float64), state_bits=32)
    embedding = nn.Embedding(64, 80, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(PlanError, match=r"sparse"):
        BlockwiseAdamW(embedding.parameters()).step()


# ---- compiled --------------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_update_runs_uncompiled_with_a_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(torch_private, "missing_compiler", lambda device: "a C++ compiler")
    monkeypatch.setattr(adamw, "WORTH_COMPILING", 4096)
    compiled_update.cache_clear()
    request.addfinalizer(compiled_update.cache_clear)
    notices: list[str] = []
    monkeypatch.setattr(adamw, "notice", notices.append)
    ours, theirs = parameters_of(CODED), parameters_of(CODED)
    give_gradients(0, ours, theirs)
    BlockwiseAdamW(ours).step()
    BlockwiseAdamW(theirs, compiled=False).step()
    assert all(map(torch.equal, ours, theirs))
    assert len(notices) == 1
    assert "a C++ compiler, which torch.compile requires for cpu, was not found" in notices[0]
    with pytest.raises(PlanError, match=r"compiled.*a C\+\+ compiler, which torch.compile requires"):
        BlockwiseAdamW(ours, compiled=True).step()


def test_a_failing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no header\nmore lines")

    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    compiled_update.cache_clear()
    request.addfinalizer(compiled_update.cache_clear)
    model = parameters_of(CODED)
    give_gradients(0, model)
    with pytest.raises(PlanError, match=r"torch.compile failed: no header"):
        BlockwiseAdamW(model, compiled=True).step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@BITS
def test_the_compiled_update_equals_eager_and_compiles_once(bits: int) -> None:
    missing = torch_private.missing_compiler(torch.device("cpu"))
    if missing is not None:
        pytest.skip(f"needs {missing}")
    shapes = [(64, 256), (33, 1024), (60, 3000), (17, 768), (700, 1500)]
    ours, theirs = parameters_of(shapes), parameters_of(shapes)
    one = BlockwiseAdamW(ours, state_bits=bits, compiled=True)
    other = BlockwiseAdamW(theirs, state_bits=bits, compiled=False)
    torch.compiler.reset()
    compiled_update.cache_clear()
    num_before = torch_private.num_compiled_graphs()
    give_gradients(0, ours, theirs)
    with torch_private.intercept(lambda function, types, args, kwargs: function(*args, **kwargs)):
        one.step()  # as with a memory tracker, which disables torch.compile permanently
    other.step()
    num_graphs = torch_private.num_compiled_graphs()
    assert num_graphs > num_before
    for step in range(1, 5):
        give_gradients(step, ours, theirs)
        one.step()
        other.step()
    assert torch_private.num_compiled_graphs() == num_graphs
    for mine, twin in zip(ours, theirs, strict=True):
        # A sum that differs in its last bit can be rounded to the adjacent code. This affects one code in one step.
        assert ((mine - twin).abs() > 1e-6).float().mean() < 1e-3
        assert (mine - twin).abs().max() < 1e-3
        for name, value in one.state[mine].items():
            if "codes" in name:
                assert (value != other.state[twin][name]).float().mean() < 1e-3
