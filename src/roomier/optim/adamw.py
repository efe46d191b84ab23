"""AdamW whose two moments take 8 or 4 bits each, or 32; weights of float32 or bfloat16.

[Note: a step on codes]
With ``r`` and ``q = m / (r + e')`` of ``block_codes.py``, ``g`` the gradient, ``c1`` and ``c2`` the corrections of both
moments for their start, ``e = eps * sqrt(c2)`` and ``e'`` that of the step before::

    m = beta1 * q * (r + e') + (1 - beta1) * g
    r = sqrt(beta2 * r^2 + (1 - beta2) * g^2)
    q = m / (r + e)
    w = w * (1 - lr * weight_decay) - lr * sqrt(c2) / c1 * q

This is AdamW (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", arXiv 1711.05101, Algorithm 2) in
other words, exact but for what is rounded when ``r`` and ``q`` are stored. On CPU it runs over as many rows as stay in
the processor's cache, in place; on CUDA it is compiled into few kernels over whole parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import PlanError
from roomier.optim import block_codes
from roomier.optim.block_codes import Region
from roomier.optim.local import first_element, is_cut, local
from roomier.optim.rounding import empty_low_bits, flat_parts, noise_key, read, write

SEED = 0  # of weights that are rounded at random: the noise need not differ from run to run
STATE_BITS = (4, 8, 32)
_ROUNDINGS = ("split", "stochastic", "nearest")
_CHUNK = 2**15  # elements: with three numbers beside each they stay in a cache of 1 MiB


class BlockwiseAdamW(Optimizer):
    """AdamW with moments of ``state_bits`` bits, see [Note: a step on codes].

    Parameters may be cut among ranks by rows (``fully_shard``): each rank updates its own, and all together do what one
    process would. Tensors of one dimension, of fewer than 4096 elements, or with rows of fewer than 80 keep moments of
    32 bits. With ``state_bits=32`` it is ``torch.optim.AdamW(foreach=False)`` to the bit, and of bfloat16 weights with
    ``weight_rounding="split"`` as of weights of float32.

    Args:
        params: as for any optimizer; a group may have ``state_bits`` and ``weight_rounding`` of its own.
        weight_rounding: how weights of bfloat16 are kept: ``"split"``, ``"stochastic"``, ``"nearest"`` (see
            ``rounding.py``).

    Raises:
        PlanError: an option is none of those; or moments of 4 or 8 bits are asked for weights that are neither float32
            nor bfloat16, or are cut otherwise than by rows.
    """

    row_states = ("root_scales", "ratio_scales")
    """States that are cut among ranks as the rows of their parameters are, and have another shape."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_bits: int = 8,
        weight_rounding: str = "split",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "state_bits": state_bits}
        super().__init__(params, {**defaults, "weight_rounding": weight_rounding})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        _check(self.param_groups[-1])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        spare, index = _Spare(), 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, index, spare)
                index += 1
        return loss

    def _update(self, group: Mapping[str, Any], parameter: nn.Parameter, index: int, spare: _Spare) -> None:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            action = "Make the embedding with sparse=False, or use torch.optim.SparseAdam for it"
            raise PlanError("optimizer", type(self).__name__, "takes no sparse gradients", action)
        state = self.state[parameter]
        if not state:
            state.update(_empty_state(parameter, group))
        state["step"] += 1
        values = StepValues.of(group, int(state["step"]))
        own = {name: local(each) for name, each in state.items()}
        weight, gradient = local(parameter), local(parameter.grad)
        if not weight.numel():
            return
        key, first = None, 0
        if parameter.dtype is torch.bfloat16 and group["weight_rounding"] == "stochastic":
            key, first = noise_key(SEED, values.step, index), first_element(parameter)
        if "root_scales" in own:
            _update_rows(weight, gradient, own, values, key, first, spare)
        else:
            _update_whole(weight, gradient, own, values, key, first)


@dataclass(frozen=True)
class StepValues:
    """What the formulas of a step take besides tensors; names as in [Note: a step on codes].

    Attributes:
        shrinks: what weight decay leaves of a weight.
        eps_before: ``e'``; ``eps_now`` is ``e``.
    """

    step: int
    beta1: float
    beta2: float
    eps: float
    shrinks: float
    lr: float

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int) -> StepValues:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return cls(step, beta1, beta2, group["eps"], 1 - lr * group["weight_decay"], lr)

    @property
    def correction1(self) -> float:
        return float(1 - self.beta1**self.step)

    @property
    def root_correction2(self) -> float:
        return float((1 - self.beta2**self.step) ** 0.5)

    @property
    def eps_now(self) -> float:
        return self.eps * self.root_correction2

    @property
    def eps_before(self) -> float:
        return float(self.eps * (1 - self.beta2 ** (self.step - 1)) ** 0.5)


# ---- moments of 32 bits ----------------------------------------------------------------------------------------------


def _update_whole(
    weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], values: StepValues, key: int | None, first: int
) -> None:
    parts = flat_parts(weight, gradient, state["exp_avg"], state["exp_avg_sq"], state.get("low_bits"))
    for start, (each, own_gradient, exp_avg, exp_avg_sq, low_bits) in parts:
        value = read(each, low_bits)
        adamw_(value, own_gradient.to(value.dtype), exp_avg, exp_avg_sq, values)
        write(each, value, low_bits=low_bits, key=key, first=first + start)


def adamw_(value: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, values: StepValues) -> None:
    """A step of AdamW in place of all but ``gradient``: the operations of torch, in its order."""
    if values.shrinks != 1:
        value.mul_(values.shrinks)
    exp_avg.lerp_(gradient, 1 - values.beta1)
    exp_avg_sq.mul_(values.beta2).addcmul_(gradient, gradient, value=1 - values.beta2)
    denominator = exp_avg_sq.sqrt().div_(values.root_correction2).add_(values.eps)
    value.addcdiv_(exp_avg, denominator, value=-values.lr / values.correction1)


# ---- moments in codes ------------------------------------------------------------------------------------------------


def _update_rows(
    weight: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    values: StepValues,
    key: int | None,
    first: int,
    spare: _Spare,
) -> None:
    """A step, some rows at a time: blocks lie within rows, and a weight is read and written once."""
    bits = 8 if "root_codes" in state else 4
    names = ("root_codes", "ratio_codes") if bits == 8 else ("codes",)
    num_rows = weight.shape[0]
    # Where a tensor lies in memory in another order its rows are a copy.
    weights, gradients, low_bits = _rows(weight), _rows(gradient), state.get("low_bits")
    bits_left = None if low_bits is None else _rows(low_bits)
    codes, scales = [_rows(state[name]) for name in names], [state[name] for name in BlockwiseAdamW.row_states]
    num_columns = weights.shape[1]
    shifts = block_codes.dither(num_columns, values.step, weight.device)
    update = _compiled() if weight.is_cuda else update_blocks
    rows_at_once = max(1, _CHUNK // num_columns) if weight.is_cpu else num_rows
    for start in range(0, num_rows, rows_at_once):
        rows = slice(start, start + rows_at_once)
        own_bits = None if bits_left is None else bits_left[rows]
        value = read(weights[rows], own_bits)
        own_gradient = gradients[rows].float()
        for region in block_codes.regions(num_columns, bits):
            update(
                bits,
                [region.cut(each[rows]) for each in codes],
                [each[rows, region.scales, None] for each in scales],
                region.cut(value),
                region.cut(own_gradient),
                region.cut(shifts[None])[0],
                *_numbers(values),
                scratch=spare.of(value, region) if weight.is_cpu else None,
            )
        write(weights[rows], value, low_bits=own_bits, key=key, first=first + start * num_columns)
    for original, rows_of_it in ((weight, weights), (low_bits, bits_left)):
        if original is not None and rows_of_it is not None and original.data_ptr() != rows_of_it.data_ptr():
            original.copy_(rows_of_it.view(original.shape))


def _numbers(values: StepValues) -> tuple[float, ...]:
    moves = -values.lr * values.root_correction2 / values.correction1
    return values.beta1, values.beta2, values.eps_before, values.eps_now, values.shrinks, moves


def update_blocks(
    bits: int,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    weight: Tensor,
    gradient: Tensor,
    dither: Tensor,
    beta1: float,
    beta2: float,
    eps_before: float,
    eps_now: float,
    shrinks: float,
    moves: float,
    *,
    scratch: Sequence[Tensor] | None = None,
) -> None:
    """[Note: a step on codes] for blocks of one size, in place of ``codes``, ``scales`` and ``weight``.

    Args:
        codes, scales: as :func:`roomier.optim.block_codes.decode` takes them.
        weight, gradient: float32 ``[rows, blocks, size]``.
        dither: ``[blocks, size]``.
        moves: what a ratio of 1 moves a weight by.
        scratch: three contiguous tensors of the shape of ``weight``; None makes them.
    """
    root, ratio, other = scratch or [torch.empty_like(gradient) for _ in range(3)]
    root_beta2 = math.sqrt(beta2)
    block_codes.decode(bits, codes, scales, root, ratio, root_factor=root_beta2, ratio_factor=beta1 / root_beta2)
    other.copy_(root).add_(root_beta2 * eps_before)
    moment = ratio.mul_(other).add_(gradient, alpha=1 - beta1)
    root.mul_(root).addcmul_(gradient, gradient, value=1 - beta2).sqrt_()
    other.copy_(root).add_(eps_now)
    ratio = moment.div_(other)
    weight.mul_(shrinks).add_(ratio, alpha=moves)
    block_codes.encode(bits, codes, scales, root, ratio, dither, other)


@cache
def _compiled() -> Callable[..., None]:
    """:func:`update_blocks` for blocks of any number and size, compiled once."""
    return torch.compile(update_blocks, dynamic=True, fullgraph=True)


class _Spare:
    """Memory for the numbers of a chunk, the same for all chunks of a step."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)

    def of(self, value: Tensor, region: Region) -> list[Tensor]:
        """Three tensors of the shape of ``region.cut(value)``."""
        shape = region.cut(value).shape
        size = shape.numel()
        if self._numbers.numel() < 3 * size:
            self._numbers = torch.empty(3 * size)
        return [self._numbers[index * size : (index + 1) * size].view(shape) for index in range(3)]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1)


# ---- states ----------------------------------------------------------------------------------------------------------


def uses_codes(shape: Sequence[int], state_bits: int) -> bool:
    """Whether moments of a parameter of this (whole) shape are kept in codes where ``state_bits`` are asked for."""
    return state_bits < 32 and block_codes.can_be_coded(shape)


def blockwise_adamw_bytes(
    shape: Sequence[int], state_bits: int, dtype: torch.dtype, weight_rounding: str, *, num_rows: int | None = None
) -> int:
    """What :class:`BlockwiseAdamW` keeps for a parameter.

    Args:
        shape: of the whole parameter.
        num_rows: how many of its rows this rank has; None for all.
    """
    part = [shape[0] if num_rows is None else num_rows, *shape[1:]] if shape else []
    num_elements = math.prod(part)
    in_codes = uses_codes(shape, state_bits)
    moments = block_codes.state_bytes(part, state_bits) if in_codes else 2 * max(4, dtype.itemsize) * num_elements
    keeps_low_bits = dtype is torch.bfloat16 and weight_rounding == "split"
    return moments + (2 * num_elements if keeps_low_bits else 0) + 4  # the number of steps, a float32


def _empty_state(parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
    state = {"step": torch.zeros(())}
    if uses_codes(parameter.shape, group["state_bits"]):
        codes = block_codes.empty_codes(local(parameter), group["state_bits"])
        state |= {name: _cut_as(parameter, each) for name, each in codes.items()}
    else:
        dtype = torch.float32 if parameter.dtype is torch.bfloat16 else parameter.dtype
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if parameter.dtype is torch.bfloat16 and group["weight_rounding"] == "split":
        state["low_bits"] = empty_low_bits(parameter)
    return state


def _cut_as(parameter: Tensor, rows: Tensor) -> Tensor:
    """``rows``, of this rank's part of ``parameter``, as part of a whole that is cut among the same ranks."""
    if not is_cut(parameter):
        return rows
    from torch.distributed.tensor import DTensor  # slow to import; who cut the parameter has done so

    shape = torch.Size([parameter.shape[0], *rows.shape[1:]])
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=tuple(stride))


def _check(group: Mapping[str, Any]) -> None:
    """Refuse what cannot be computed."""
    if group["state_bits"] not in STATE_BITS:
        raise PlanError("optimizer.state_bits", group["state_bits"], "is not known", "Use 4, 8 or 32")
    if group["weight_rounding"] not in _ROUNDINGS:
        action = f"Use one of {', '.join(_ROUNDINGS)}"
        raise PlanError("optimizer.weight_rounding", group["weight_rounding"], "is not known", action)
    for parameter in group["params"]:
        if not uses_codes(parameter.shape, group["state_bits"]):
            continue
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            problem = f"is computed in float32, and a weight is of {parameter.dtype}"
            raise PlanError("optimizer.state_bits", group["state_bits"], problem, "Use optimizer='adamw'")
        if is_cut(parameter) and not all(_keeps_rows(each) for each in parameter.placements):
            problem = f"a weight is cut as {parameter.placements}, across the rows that blocks lie in"
            raise PlanError("optimizer.state_bits", group["state_bits"], problem, "Use optimizer='adamw'")


def _keeps_rows(placement: Any) -> bool:
    from torch.distributed.tensor import Replicate, Shard  # slow to import; who cut the parameter has done so

    return isinstance(placement, Replicate) or (type(placement) is Shard and placement.dim == 0)
