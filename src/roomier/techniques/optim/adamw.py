"""AdamW whose moments use 8, 4 or 32 bits each, for float32 or bfloat16 weights.

[Note: a step on codes]
The formulas use ``r`` and ``q = m / (r + e')`` as in ``block_codes.py``, the gradient ``g``, the bias corrections
``c1`` and ``c2`` of the moments, ``e = eps * sqrt(c2)``, and ``e'``, the value of ``e`` in the previous step::

    m = beta1 * q * (r + e') + (1 - beta1) * g
    r = sqrt(beta2 * r^2 + (1 - beta2) * g^2)
    q = m / (r + e)
    w = w * (1 - lr * weight_decay) - lr * sqrt(c2) / c1 * q

These formulas are equivalent to AdamW (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", arXiv
1711.05101, Algorithm 2), except that ``r`` and ``q`` are rounded when they are stored. On a CPU, the step runs in
place, on as many rows at a time as fit in the cache. On CUDA, the step is compiled to a few kernels over full
parameters.

[Note: cautious updates]
Liang et al. 2024, "Cautious Optimizers: Improving Training with One Line of Code" (arXiv 2411.16085), Algorithm 2: an
element of the update ``u`` of a parameter is used only if it has the sign of the gradient ``g``. The other elements are
0, and ``u`` is scaled up in return, by the number of elements of the parameter::

    u = u * (u * g > 0) * numel / (number of elements with u * g > 0, plus 1)

If a parameter is sharded, the elements of all shards are counted, in one collective per call of ``step``. Unlike in the
paper, weight decay precedes the update, as in torch's AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core import torch_fake, torch_private
from roomier.core.device.capability import capabilities_of
from roomier.core.errors import PlanError
from roomier.core.log import notice
from roomier.core.sharded import is_sharded, with_local_part
from roomier.techniques.optim import block_codes
from roomier.techniques.optim.block_codes import EqualBlocks
from roomier.techniques.optim.local import NumberedOptimizer, first_element, local, shard_group, sum_over
from roomier.techniques.optim.rounding import empty_low_bits, flat_parts, noise_key, read, rounded_parts, write

SEED = 0  # seed for stochastic rounding; all runs can use the same seed
STATE_BITS = (4, 8, 32)
_ROUNDINGS = ("split", "stochastic", "nearest")
_CHUNK = 2**16  # number of elements per chunk, chosen so that temporaries fit in the cache
_CHUNK_COMPILED = 2**19  # larger, because compiled code has only two temporaries per element and fewer calls are faster
_CHUNK_ON_DEVICE = 2**24
WORTH_COMPILING = 2**22  # with fewer quantized elements, 1,000 steps save less time than the compilation takes

UpdateBlocks = Callable[..., None]


class BlockwiseAdamW(NumberedOptimizer):
    """AdamW with moments of ``state_bits`` bits; see [Note: a step on codes].

    Parameters can be sharded by rows (``fully_shard``). Each rank updates its shard of a parameter, and the result
    equals the result of a single process. Tensors with one dimension, with fewer than 4096 elements, or with rows of
    fewer than 80 elements have 32-bit moments. With ``state_bits=32``, the results are bitwise equal to
    ``torch.optim.AdamW(foreach=False)``, and bfloat16 weights with ``weight_rounding="split"`` behave like float32
    weights.

    Args:
        params: as for any optimizer; a group can override ``state_bits`` and ``weight_rounding``.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: term added to the square root of the second moment.
        weight_decay: decoupled weight decay.
        state_bits: number of bits per moment: 4, 8 or 32.
        weight_rounding: storage of bfloat16 weights: ``"split"``, ``"stochastic"`` or ``"nearest"`` (see
            ``rounding.py``).
        cautious: True to use only elements of the update that agree with the gradient; see [Note: cautious updates].
            Requires 32-bit moments.
        compiled: True to compile the update of quantized moments. The compilation takes a few seconds in the first step
            and makes the update 4 times as fast. None compiles the update if this saves time and a compiler is
            available. The compiled and uncompiled updates can differ in the last bit of a float32 number, which
            occasionally selects the adjacent code.

    Raises:
        PlanError: an option is invalid, or ``compiled=True`` is set but no compiler is available. With 4-bit or 8-bit
            moments, this error is also raised for weights that are neither float32 nor bfloat16, and for weights that
            are sharded other than by rows.

    Example:
        >>> optimizer = BlockwiseAdamW(model.parameters(), lr=3e-4, state_bits=8)
    """

    row_states = ("root_scales", "ratio_scales")
    """Names of states that are sharded by rows like their parameter but have a different shape."""

    compiled: bool | None = None  # defined on the class, because a copy lacks the instance attribute
    _update_codes: UpdateBlocks | None = None

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
        cautious: bool = False,
        compiled: bool | None = None,
    ) -> None:
        self.compiled = compiled
        self._index = {}
        self._coded: list[Tensor] = []
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "state_bits": state_bits}
        super().__init__(params, {**defaults, "weight_rounding": weight_rounding})
        self.defaults["cautious"] = cautious  # not an option of the groups, which checkpoints contain
        if cautious and self._coded:
            problem = "is not supported with quantized moments"
            raise PlanError("optimizer.cautious", cautious, problem, "Use optimizer='adamw', or remove cautious")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._coded = []
        super().__setstate__(state)

    def _number(self, group: Mapping[str, Any]) -> None:
        _check(group)
        super()._number(group)
        self._coded += [each for each in group["params"] if uses_codes(each.shape, group["state_bits"])]
        self._update_codes = None

    def _update_all(self) -> None:
        update = self._update_codes or self._choose_update()
        scales = self._scales() if self.defaults.get("cautious") else {}
        for group, parameter in self._trained():
            self._update(group, parameter, update, scales.get(parameter))

    def _scales(self) -> dict[Tensor, Tensor]:
        """Return the factor of the update of each parameter with a gradient (1-dim); see [Note: cautious updates]."""
        counts: dict[Any, dict[Tensor, Tensor]] = {}
        for group, parameter in self._trained():
            assert parameter.grad is not None
            exp_avg, gradient = local(self._state(group, parameter)["exp_avg"]), local(parameter.grad)
            count = torch.zeros(1, dtype=torch.int64, device=gradient.device)
            for _, (own, mean) in flat_parts(gradient, exp_avg):
                own = own.to(mean.dtype)
                count += torch.count_nonzero(mean.lerp(own, 1 - group["betas"][0]) * own > 0)
            counts.setdefault(shard_group(parameter), {})[parameter] = count
        scales: dict[Tensor, Tensor] = {}
        for ranks, of_ranks in counts.items():
            totals = sum_over([[each] for each in of_ranks.values()], ranks)
            scales |= {each: each.numel() / (total + 1) for each, [total] in zip(of_ranks, totals, strict=True)}
        return scales

    def _state(self, group: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update(_empty_state(parameter, group))
        return state

    def update_as(self, other: BlockwiseAdamW) -> None:
        """Compile the update of quantized moments if ``other`` compiles its update, for parameters of any size."""
        self._update_codes = other._update_codes or other._choose_update()

    def _choose_update(self) -> UpdateBlocks:
        # Unsharded sizes are used, so the decision does not depend on the number of ranks.
        pays = sum(parameter.numel() for parameter in self._coded) >= WORTH_COMPILING
        self._update_codes = update_blocks
        if self._coded and (pays if self.compiled is None else self.compiled):
            found, problem = _update_of(self._coded[0].device)
            if problem and self.compiled:
                raise PlanError("optimizer.compiled", True, problem, "Remove the option to run the update uncompiled")
            if problem:
                notice(
                    f"{type(self).__name__}: the update runs uncompiled and takes about 4 times as long, because "
                    f"{problem}"
                )
            self._update_codes = found
        return self._update_codes

    def _update(
        self, group: Mapping[str, Any], parameter: nn.Parameter, update: UpdateBlocks, scale: Tensor | None
    ) -> None:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            action = "Create the embedding with sparse=False, or use torch.optim.SparseAdam for the embedding"
            raise PlanError("optimizer", type(self).__name__, "does not support sparse gradients", action)
        state = self._state(group, parameter)
        state["step"] += 1
        values = StepValues.of(group, int(state["step"]))
        own = {name: local(each) for name, each in state.items()}
        weight, gradient = local(parameter), local(parameter.grad)
        if not weight.numel():
            return
        key, first = None, 0
        if parameter.dtype is torch.bfloat16 and group["weight_rounding"] == "stochastic":
            key, first = noise_key(SEED, values.step, self._index[parameter]), first_element(parameter)
        if "root_scales" in own:
            if type(weight) is not Tensor and not torch_fake.is_fake([weight]):
                update = update_blocks  # the update of tensor subclasses cannot be compiled
            _update_rows(weight, gradient, own, values, key, first, update)
        else:
            moments, low_bits = (own["exp_avg"], own["exp_avg_sq"]), own.get("low_bits")
            parts = rounded_parts(weight, gradient, *moments, low_bits=low_bits, key=key, first=first)
            for value, own_gradient, exp_avg, exp_avg_sq in parts:
                adamw_(value, own_gradient, exp_avg, exp_avg_sq, values, scale)


@dataclass(frozen=True)
class StepValues:
    """Scalars of a step. The names are explained in [Note: a step on codes].

    Attributes:
        step: number of the step, starting at 1.
        beta1, beta2, eps, lr: options of the group.
        shrinks: factor by which weight decay multiplies the weight, ``1 - lr * weight_decay``.
    """

    step: int
    beta1: float
    beta2: float
    eps: float
    shrinks: float
    lr: float

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int) -> StepValues:
        """Create the scalars of a step from the options of a parameter group."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return cls(step, beta1, beta2, group["eps"], 1 - lr * group["weight_decay"], lr)

    @property
    def correction1(self) -> float:
        """Bias correction of the first moment."""
        return float(1 - self.beta1**self.step)

    @property
    def root_correction2(self) -> float:
        """Square root of the bias correction of the second moment."""
        return float((1 - self.beta2**self.step) ** 0.5)

    def numbers(self, device: torch.device) -> Tensor:
        """Return the scalar arguments of :func:`update_blocks` as one tensor, because Python scalars would cause
        recompilation."""
        root_beta2 = math.sqrt(self.beta2)
        eps_before = root_beta2 * self.eps * (1 - self.beta2 ** (self.step - 1)) ** 0.5
        moves = -self.lr * self.root_correction2 / self.correction1
        factors = (root_beta2, self.beta1 / root_beta2, 1 - self.beta1, 1 - self.beta2)
        found = torch.tensor([*factors, eps_before, self.eps * self.root_correction2, self.shrinks, moves])
        copies_asynchronously = capabilities_of(device).copies_asynchronously
        return found.pin_memory().to(device, non_blocking=True) if copies_asynchronously else found.to(device)


# ---- 32-bit moments --------------------------------------------------------------------------------------------------


def adamw_(
    value: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, values: StepValues, scale: Tensor | None
) -> None:
    """Run one step of AdamW with torch's operations in torch's order. ``value``, ``exp_avg`` and ``exp_avg_sq`` change
    in place. If ``scale`` is not None, the update is cautious and multiplied by ``scale``."""
    gradient = gradient.to(value.dtype)
    if values.shrinks != 1:
        value.mul_(values.shrinks)
    exp_avg.lerp_(gradient, 1 - values.beta1)
    exp_avg_sq.mul_(values.beta2).addcmul_(gradient, gradient, value=1 - values.beta2)
    denominator = exp_avg_sq.sqrt().div_(values.root_correction2).add_(values.eps)
    if scale is not None:
        exp_avg = (exp_avg * scale).mul_(exp_avg * gradient > 0)
    value.addcdiv_(exp_avg, denominator, value=-values.lr / values.correction1)


# ---- quantized moments -----------------------------------------------------------------------------------------------


def _update_rows(
    weight: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    values: StepValues,
    key: int | None,
    first: int,
    update: UpdateBlocks,
) -> None:
    """Update a few rows at a time. A block never spans several rows, and each weight is read and written once."""
    names = ("root_codes", "ratio_codes") if "root_codes" in state else ("codes",)
    # If the memory of a tensor is not in row order, _rows returns a copy.
    weights, gradients, low_bits = _rows(weight), _rows(gradient), state.get("low_bits")
    low_rows = None if low_bits is None else _rows(low_bits)
    codes, scales = [_rows(state[name]) for name in names], [state[name] for name in BlockwiseAdamW.row_states]
    num_rows, num_columns = weights.shape
    regions = block_codes.regions(num_columns, 8 if len(codes) == 2 else 4)
    shifts = block_codes.dither(num_columns, values.step, weight.device)[None]
    numbers = values.numbers(weight.device)
    on_host = _CHUNK if update is update_blocks else _CHUNK_COMPILED
    chunk = on_host if torch_fake.kind_of(weight) == "cpu" else _CHUNK_ON_DEVICE
    rows_at_once = max(1, chunk // num_columns)
    for start in torch_fake.few_of(range(0, num_rows, rows_at_once)):
        rows = slice(start, start + rows_at_once)
        own_bits = None if low_rows is None else low_rows[rows]
        value = read(weights[rows], own_bits)
        own_gradient = gradients[rows].float()
        for region in regions:
            update(
                [region.cut(each[rows]) for each in codes],
                [each[rows, region.scales, None] for each in scales],
                region.cut(value),
                region.cut(own_gradient),
                region.cut(shifts)[0],
                numbers,
            )
        write(weights[rows], value, low_bits=own_bits, key=key, first=first + start * num_columns)
    for original, rows_of_it in ((weight, weights), (low_bits, low_rows)):
        if original is not None and rows_of_it is not None and not torch_private.is_same_memory(original, rows_of_it):
            original.copy_(rows_of_it.view(original.shape))


def update_blocks(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    weight: Tensor,
    gradient: Tensor,
    dither: Tensor,
    numbers: Tensor,
) -> None:
    """Apply the formulas of [Note: a step on codes] to blocks of one size, and update ``codes``, ``scales`` and
    ``weight`` in place.

    Args:
        codes, scales: arguments of :func:`roomier.techniques.optim.block_codes.decode`.
        weight, gradient: float32 ``[rows, blocks, size]``.
        dither: ``[blocks, size]``.
        numbers: result of :meth:`StepValues.numbers`.
    """
    root_beta2, of_ratio, of_gradient, of_square, eps_before, eps_now, shrinks, moves = numbers.unbind()
    root, ratio = block_codes.decode(codes, [scales[0] * root_beta2, scales[1] * of_ratio])
    moment = ratio * (root + eps_before) + of_gradient * gradient
    root = (root * root + of_square * gradient * gradient).sqrt()
    ratio = moment / (root + eps_now)
    weight.copy_(weight * shrinks + moves * ratio)
    block_codes.encode(codes, scales, root, ratio, dither)


def _update_of(device: torch.device) -> tuple[UpdateBlocks, str | None]:
    if not torch_fake.makes_fake_tensors():
        return compiled_update(device)
    # A dry run compiles no code and must not store its update in the cache of compiled_update. The compiled update
    # creates no tensors, so a no-op replaces it. A machine without an accelerator can plan for CUDA and does not need
    # Triton for that.
    kind = torch_fake.fake_kind()
    is_elsewhere = kind == "cuda" and not torch.accelerator.is_available()
    missing = None if is_elsewhere else torch_private.missing_compiler(torch.device(kind))
    return (_skip_update if missing is None else update_blocks), None


def _skip_update(*arguments: Any) -> None:
    """Do nothing. In a dry run, this function replaces the compiled update, because the tensors have no memory."""


@cache
def compiled_update(device: torch.device) -> tuple[UpdateBlocks, str | None]:
    """Return :func:`update_blocks`, compiled for any number and size of blocks, and None. If no compiler is available
    or the compilation fails, return the uncompiled function and the reason."""
    missing = torch_private.missing_compiler(device)
    if missing is not None:
        return update_blocks, f"{missing}, which torch.compile requires for {device.type}, was not found"
    notice(
        "the update of 8-bit and 4-bit states is compiled now, which takes seconds, or minutes on a busy machine; "
        "torch caches the result on disk (TORCHINDUCTOR_CACHE_DIR), so later runs start faster"
    )
    compiled = torch.compile(update_blocks, dynamic=True)

    def update(*arguments: Any) -> None:
        with torch_private.without_interception():  # a memory tracker may be active
            compiled(*arguments)

    try:
        for bits in (8, 4):  # the update is compiled in advance, so a failed compilation leaves no partial update
            update(*_example(bits, device))
    except Exception as error:  # compilers raise various errors
        return update_blocks, f"torch.compile failed: {str(error).strip().splitlines()[0]}"
    return update, None


def _example(bits: int, device: torch.device) -> tuple[Any, ...]:
    """Return example arguments of :func:`update_blocks`: rows of zeros."""
    rows = torch.zeros(3, 1024, device=device)  # several blocks per row, because torch.compile specializes on size 1
    *codes, root_scales, ratio_scales = block_codes.empty_codes(rows, bits).values()
    blocks = EqualBlocks(slice(None), slice(None), rows.shape[1] // root_scales.shape[1])
    scales = [root_scales[..., None], ratio_scales[..., None]]
    numbers = StepValues(1, 0.9, 0.999, 1e-8, 1.0, 0.0).numbers(device)
    return (
        [blocks.cut(each) for each in codes],
        scales,
        blocks.cut(rows),
        blocks.cut(rows),
        blocks.cut(rows)[0],
        numbers,
    )


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1)


# ---- states ----------------------------------------------------------------------------------------------------------


def uses_codes(shape: Sequence[int], state_bits: int) -> bool:
    """Return True if the moments of a parameter with this unsharded shape are quantized to ``state_bits`` bits."""
    return state_bits < 32 and block_codes.can_be_coded(shape)


def blockwise_adamw_bytes(
    shape: Sequence[int], state_bits: int, dtype: torch.dtype, weight_rounding: str, *, num_rows: int | None = None
) -> int:
    """Return the size in bytes of the states of :class:`BlockwiseAdamW` for a parameter.

    Args:
        shape: unsharded shape of the parameter.
        state_bits: bits per moment.
        dtype: dtype of the parameter.
        weight_rounding: storage of bfloat16 weights.
        num_rows: number of the parameter's rows on this rank; None for all rows.
    """
    part = [shape[0] if num_rows is None else num_rows, *shape[1:]] if shape else []
    num_elements = math.prod(part)
    in_codes = uses_codes(shape, state_bits)
    whole_bytes = 2 * _moment_dtype(dtype).itemsize * num_elements
    moments = block_codes.state_bytes(part, state_bits) if in_codes else whole_bytes
    keeps_low_bits = dtype is torch.bfloat16 and weight_rounding == "split"
    return moments + (2 * num_elements if keeps_low_bits else 0) + 4  # the step count is a float32


def _empty_state(parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
    state = {"step": torch.zeros(())}
    if uses_codes(parameter.shape, group["state_bits"]):
        codes = block_codes.empty_codes(local(parameter), group["state_bits"])
        state |= {
            name: with_local_part(parameter, each, (parameter.shape[0], *each.shape[1:]))
            for name, each in codes.items()
        }
    else:
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=_moment_dtype(parameter.dtype), requires_grad=False)
    if parameter.dtype is torch.bfloat16 and group["weight_rounding"] == "split":
        state["low_bits"] = empty_low_bits(parameter)
    return state


def _moment_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.bfloat16 else dtype


def _check(group: Mapping[str, Any]) -> None:
    """Raise PlanError if the options of a group are invalid."""
    if group["state_bits"] not in STATE_BITS:
        raise PlanError("optimizer.state_bits", group["state_bits"], "is invalid", "Use 4, 8 or 32")
    if group["weight_rounding"] not in _ROUNDINGS:
        action = f"Use one of {', '.join(_ROUNDINGS)}"
        raise PlanError("optimizer.weight_rounding", group["weight_rounding"], "is invalid", action)
    for parameter in group["params"]:
        if not uses_codes(parameter.shape, group["state_bits"]):
            continue
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            problem = f"supports float32 and bfloat16 weights, but a weight has dtype {parameter.dtype}"
            raise PlanError("optimizer.state_bits", group["state_bits"], problem, "Use optimizer='adamw'")
        if is_sharded(parameter) and not all(each.is_replicate() or each.is_shard(0) for each in parameter.placements):
            problem = f"requires weights sharded by rows, but a weight has the placements {parameter.placements}"
            raise PlanError("optimizer.state_bits", group["state_bits"], problem, "Use optimizer='adamw'")
