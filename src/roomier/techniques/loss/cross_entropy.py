"""Cross-entropy of the output of a linear layer, computed in chunks of rows.

[Note: gradients in the forward pass]
The gradient of the logits of a token depends on other tokens only through a common factor, from the mean or the loss
scale. The forward pass can therefore compute the logits and losses of each chunk and add the contribution of the chunk
to the gradients of the layer's input, weight and bias. The backward pass only multiplies these gradients by the common
factor, so the logits are computed once. The saved gradients are as large as the input and the parameters. With
``reduction="none"``, each loss has its own factor, so the backward pass computes the logits again.

[Note: rows of a group]
If the ranks of a process group have the same input and the same targets, each rank computes only its share of the rows,
and the loss on every rank is the sum of the shares. A loss that every rank of the group computes is divided by the
number of ranks before the gradients are summed over the ranks, as if each rank had its own samples. To compensate for
this division, the gradients on a rank are the gradients of its rows, times the number of ranks.

The suffixes of tensor names use the letters of :mod:`roomier.models.gpt` and two additional letters:

    N  tokens with a loss      C  tokens in a chunk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from roomier.core import torch_private
from roomier.core.errors import TrainingError

CHUNK_BYTES = 64 * 2**20
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_FP16_SUM, _FP16_HIDDEN = 1024.0, 32.0  # the product of these constants is about half of the largest float16 value


@dataclass(frozen=True)
class LossOfLinear:
    """Settings of the cross-entropy.

    Attributes:
        dtypes: dtype of the matmul, followed by the dtypes to which the logits are converted, in order.
        chunk_tokens: number of rows of logits in a chunk; None uses as many rows as fit into :data:`CHUNK_BYTES` in
            float32.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: target that does not contribute to the loss.
        label_smoothing: as in ``F.cross_entropy``.
        group: ranks that have the same rows, of which each computes a share; see [Note: rows of a group]. None if this
            rank computes all rows.
    """

    dtypes: tuple[torch.dtype, ...]
    chunk_tokens: int | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    group: dist.ProcessGroup | None = None

    @property
    def num_shares(self) -> int:
        """Number of ranks among which the rows are divided."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def own_rows(self, num_rows: int) -> slice:
        """Return the rows that this rank computes. The shares of the ranks differ by at most one row."""
        rank = 0 if self.group is None else dist.get_rank(self.group)
        return slice(num_rows * rank // self.num_shares, num_rows * (rank + 1) // self.num_shares)

    def chunk_size(self, num_classes: int) -> int:
        """Return the number of rows in a chunk."""
        return self.chunk_tokens or max(1, CHUNK_BYTES // (4 * num_classes))

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype in which losses and gradients are summed."""
        return torch.promote_types(self.dtypes[-1], torch.float32)


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, how: LossOfLinear
) -> Tensor:
    """Compute ``F.cross_entropy(F.linear(hidden, weight, bias), targets)`` in chunks.

    Args:
        hidden_ND: input of the layer.
        weight_VD: weight of the layer.
        bias_V: bias of the layer, or None.
        targets_N: class index of each row, int64.
        how: settings of the cross-entropy.

    Returns:
        The loss in the dtype of the logits: 0-dim, or ``[N]`` if ``how.reduction`` is ``"none"``.

    Raises:
        RuntimeError: a target is not the index of a class. On a GPU, a device assertion fails instead.
        TrainingError: the backward pass uses ``create_graph``.
    """
    if not torch.is_grad_enabled():  # ``forward`` of an autograd.Function always runs without gradients
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
        bias_V = None if bias_V is None else bias_V.detach()
    with torch.autocast(hidden_ND.device.type, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(hidden_ND, weight_VD, bias_V, targets_N, how)  # type: ignore[no-untyped-call]
        return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, how: LossOfLinear
    ) -> Tensor:
        ctx.how, ctx.needs, ctx.num_rows = how, tuple(ctx.needs_input_grad[:3]), len(hidden_ND)
        rows = how.own_rows(ctx.num_rows)
        inputs, own_targets = (hidden_ND[rows], weight_VD, bias_V), targets_N[rows]
        if how.reduction == "none":  # each loss has a separate factor, which only the backward pass receives
            losses, _ = _in_chunks(*inputs, own_targets, how, needs=(False, False, False))
            ctx.save_for_backward(*inputs, own_targets)
            losses_N: Tensor = _among_all_rows(losses, ctx)
            if how.group is not None:
                dist.all_reduce(losses_N, group=how.group)
            return losses_N.to(how.dtypes[-1])
        losses, gradients = _in_chunks(*inputs, own_targets, how, needs=ctx.needs)
        loss = losses.sum()
        if how.group is not None:
            dist.all_reduce(loss, group=how.group)
        num_terms = None
        if how.reduction == "mean":
            num_terms = (targets_N != how.ignore_index).sum()
            # If all targets are ignored, the loss is 0/0, as in torch, and the gradients are zero.
            loss = loss / num_terms
        ctx.save_for_backward(*gradients, num_terms)
        return loss.to(how.dtypes[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            problem = "does not support create_graph=True: a gradient that is differentiated again requires all logits"
            raise TrainingError("chunked_loss", True, problem, "Set chunked_loss=False")
        how: LossOfLinear = ctx.how
        if how.num_shares > 1:
            gradient = gradient * how.num_shares
        if how.reduction == "none":
            hidden, weight_VD, bias_V, targets = ctx.saved_tensors
            factors = gradient[how.own_rows(ctx.num_rows)]
            _, kept = _in_chunks(hidden, weight_VD, bias_V, targets, how, needs=ctx.needs, factors_N=factors)
            return _among_all_rows(kept[0], ctx), *kept[1:], None, None
        *kept, num_terms = ctx.saved_tensors
        factor = gradient.to(how.sum_dtype)
        if num_terms is not None:
            factor = factor / num_terms.clamp(min=1)
        is_last = not torch_private.keeps_graph()  # no other backward pass reads the saved gradients
        times = Tensor.mul_ if is_last else Tensor.mul
        of_hidden, *others = (None if each is None else times(each, factor) for each in kept)
        return _among_all_rows(of_hidden, ctx), *others, None, None


def _among_all_rows(own: Any, ctx: Any) -> Any:
    """Return a tensor with all rows, in which the rows of other ranks are zero. None stays None."""
    if own is None or ctx.how.group is None:
        return own
    found = own.new_zeros(ctx.num_rows, *own.shape[1:])
    found[ctx.how.own_rows(ctx.num_rows)] = own
    return found


def _in_chunks(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    how: LossOfLinear,
    *,
    needs: tuple[bool, ...],
    factors_N: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the losses (0 for ignored targets) and the gradients of the sum of the losses, with respect to the layer's
    input, weight and bias. A gradient that is not required is None.

    Args:
        needs: flags that select the gradients to compute: input, weight and bias.
        factors_N: factor of each loss in the sum; None means 1 for every loss.
    """
    dtype = how.dtypes[0]
    weight = weight_VD.to(dtype)
    bias = None if bias_V is None else bias_V.to(dtype)
    grad_hidden = torch.empty_like(hidden_ND) if needs[0] else None
    grad_weight = torch.zeros_like(weight_VD, dtype=how.sum_dtype) if needs[1] else None
    grad_bias = torch.zeros_like(bias_V, dtype=how.sum_dtype) if needs[2] and bias_V is not None else None
    losses_N = hidden_ND.new_empty(len(hidden_ND), dtype=how.sum_dtype)
    size = how.chunk_size(len(weight_VD))
    for begin in range(0, len(hidden_ND), size):
        rows = slice(begin, begin + size)
        hidden_CD = hidden_ND[rows].to(dtype)
        logits_CV = _logits(hidden_CD, weight, bias, how.dtypes)
        losses_N[rows], slope_CV = _loss_and_slope(logits_CV, targets_N[rows], how, needs_slope=any(needs))
        if not any(needs):
            continue
        if factors_N is not None:
            slope_CV.mul_(factors_N[rows, None])
        # The loss scale is unknown in the forward pass. The slopes (gradients of the logits) are in [-1, 1]. Many of
        # them are close to 0, so they are scaled in float16.
        scale = _fp16_scale(hidden_CD) if dtype is torch.float16 and factors_N is None else None
        if grad_bias is not None:
            grad_bias += slope_CV.sum(0)
        slope_CV = (slope_CV if scale is None else slope_CV.mul_(scale)).to(dtype)
        if grad_hidden is not None:
            product_CD = slope_CV @ weight
            grad_hidden[rows] = product_CD if scale is None else product_CD.div_(scale)
        if grad_weight is not None:
            _add_product(grad_weight, slope_CV, hidden_CD, scale)
        del logits_CV, slope_CV  # free memory for the next chunk
    return losses_N, (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight_VD.dtype),
        None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype),
    )


def _logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return logits in newly allocated memory, in float32 or float64."""
    logits_CV = F.linear(hidden_CD, weight_VD, bias_V)
    for dtype in dtypes:
        logits_CV = logits_CV.to(dtype)
    return logits_CV.float() if logits_CV.dtype in _SIXTEEN_BITS else logits_CV


def _loss_and_slope(
    logits_CV: Tensor, targets_C: Tensor, how: LossOfLinear, *, needs_slope: bool
) -> tuple[Tensor, Tensor]:
    """Return the losses and their derivatives with respect to the logits. The derivatives overwrite ``logits_CV``."""
    is_ignored_C = targets_C == how.ignore_index
    targets_C1 = targets_C.masked_fill(is_ignored_C, 0).unsqueeze(1)
    smoothing, num_classes = how.label_smoothing, logits_CV.shape[1]
    logits_CV -= logits_CV.amax(1, keepdim=True)  # after this subtraction, exponentials are at most 1
    expected_C = logits_CV.gather(1, targets_C1).squeeze(1)
    if smoothing:
        expected_C = torch.lerp(expected_C, logits_CV.mean(1), smoothing)
    sums_C1 = logits_CV.exp_().sum(1, keepdim=True)
    losses_C = (sums_C1.squeeze(1).log() - expected_C).masked_fill_(is_ignored_C, 0.0)
    if needs_slope:
        logits_CV /= sums_C1
        logits_CV.scatter_add_(1, targets_C1, torch.full_like(sums_C1, smoothing - 1))
        if smoothing:
            logits_CV -= smoothing / num_classes
        logits_CV.masked_fill_(is_ignored_C.unsqueeze(1), 0.0)
    return losses_C, logits_CV


def _fp16_scale(hidden_CD: Tensor) -> Tensor:
    """Return a factor by which the slopes can be scaled without an overflow of a float16 sum over the chunk.

    Returns:
        float32, 0-dim, on the device.
    """
    largest = hidden_CD.abs().amax().float()
    return _FP16_SUM / len(hidden_CD) / (largest / _FP16_HIDDEN).clamp(min=1.0)


def _add_product(sum_VD: Tensor, slope_CV: Tensor, hidden_CD: Tensor, scale: Tensor | None) -> None:
    if sum_VD.dtype == slope_CV.dtype:
        sum_VD.addmm_(slope_CV.T, hidden_CD)
        return
    # The contribution of each chunk is rounded to 16 bits, but the sum of the contributions is not.
    product_VD = slope_CV.T @ hidden_CD
    if scale is None:
        sum_VD.add_(product_VD)
    else:
        sum_VD.addcdiv_(product_VD, scale)
