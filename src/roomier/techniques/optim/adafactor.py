"""Adafactor for parameters that are sharded by rows.

[Note: Adafactor on shards]
Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost". ``torch.optim.Adafactor``
stores the mean squares of the rows and columns of a matrix instead of a second moment. Its step reads norms of full
matrices, for which torch 2.13 lacks the required DTensor operations. This class has the same options, state names and
arithmetic, but processes one shard at a time. Four values depend on the rows of all ranks:

    column means, sum of the row means, norm of the weight      one all-reduce for all parameters
    norm of the update                                          a second all-reduce

The update is computed twice, before and after its norm is known, so the temporaries have the size of one shard. The
scaling factors stay on the device, so a step does not wait for it. Row means are sharded like the rows of the
parameter, and the column means of a matrix are replicated on every rank. For a tensor with more than two dimensions,
torch factorizes the last two dimensions, so the row and column means are both sharded in dimension 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roomier.core.sharded import with_local_part
from roomier.techniques.optim.local import ShardOptimizer, local, shard_group, sum_over

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Adafactor(ShardOptimizer, torch.optim.Adafactor):
    """Adafactor whose parameters can be sharded; see [Note: Adafactor on shards].

    The arguments and the states are the same as in ``torch.optim.Adafactor``. Unsharded parameters are updated one at a
    time, even with ``foreach=True``.
    """

    row_states = ("row_var", "col_var")

    def _update_all(self) -> None:
        parts: dict[ProcessGroup | None, list[_ShardUpdate]] = {}
        for group, parameter in self._trained():
            parts.setdefault(shard_group(parameter), []).append(self._part(group, parameter))
        for ranks, of_ranks in parts.items():
            _update(of_ranks, ranks)

    def _part(self, group: dict[str, Any], parameter: nn.Parameter) -> _ShardUpdate:
        assert parameter.grad is not None
        state = self.state[parameter] or self._start(parameter)
        state["step"] += 1
        count, lr = state["step"].item(), float(group["lr"])
        eps1, eps2 = group["eps"]
        gradient = local(parameter.grad)
        return _ShardUpdate(
            weight=local(parameter),
            gradient=-gradient if group["maximize"] else gradient,
            moments=[local(value) for key, value in state.items() if key != "step"],
            shape=parameter.shape,
            newest=count ** group["beta2_decay"],
            rate=min(lr, 1 / math.sqrt(count)),
            kept=1 - lr * group["weight_decay"],
            eps=(torch.finfo(parameter.dtype).eps if eps1 is None else eps1, eps2),
            largest=group["d"],
        )

    def _start(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        state["step"] = torch.tensor(0.0)
        if parameter.dim() > 1:
            state["row_var"] = _zeros((*parameter.shape[:-1], 1), parameter)
            state["col_var"] = _zeros((*parameter.shape[:-2], 1, parameter.shape[-1]), parameter)
        else:
            state["variance"] = _zeros(tuple(parameter.shape), parameter)
        return state


@dataclass(frozen=True)
class _ShardUpdate:
    """This rank's shard of a parameter, and the scalars for its update.

    Attributes:
        weight: the shard of the weight.
        gradient: the shard of the gradient.
        moments: mean squares of the gradient's rows and columns; for a vector, mean squares of its elements.
        shape: shape of the unsharded parameter.
        newest: coefficient of the current squared gradients in the means.
        rate: learning rate relative to the root mean square of the weight.
        kept: factor by which weight decay multiplies the weight.
        eps: ``eps`` of ``torch.optim.Adafactor``: lower limits of the mean squared gradient and of the root mean square
            of the weight.
        largest: root mean square above which an update is scaled down.
    """

    weight: Tensor
    gradient: Tensor
    moments: list[Tensor]
    shape: torch.Size
    newest: float
    rate: float
    kept: float
    eps: tuple[float, float]
    largest: float

    def begin(self) -> list[Tensor]:
        """Update the means that depend only on this shard. Return the values to sum over the ranks."""
        sums = [_square(self.weight.norm(2))]
        if len(self.moments) == 1:
            self.moments[0].lerp_(self.gradient * self.gradient, self.newest)
            return sums
        rows, columns = self.moments
        rows.lerp_(torch.norm(self.gradient, dim=-1, keepdim=True).square_().div_(self.shape[-1]), self.newest)
        of_columns = torch.norm(self.gradient, dim=-2, keepdim=True)
        if len(self.shape) == 2:
            return [*sums, rows.sum(dtype=sums[0].dtype).view(1), _square(of_columns)]
        columns.lerp_(of_columns.square_().div_(self.shape[-2]), self.newest)
        return sums

    def add_columns(self, of_columns: Tensor) -> None:
        """Update the column means of a matrix. ``of_columns`` is the sum of squared gradients in each column over all
        ranks."""
        columns = self.moments[1]
        if columns.numel():  # the column means of a matrix with one row are on one rank
            columns.lerp_((of_columns / self.shape[0]).to(columns.dtype).view_as(columns), self.newest)

    def update(self, rows_sum: Tensor | None) -> Tensor:
        """Return the update of the shard, before it is scaled.

        Args:
            rows_sum: sum of the row means over all ranks; None if the parameter is not a matrix.
        """
        if len(self.moments) == 1:
            estimate = self.moments[0].clone()
        else:
            rows, columns = self.moments
            mean = rows.mean(dim=-2, keepdim=True) if rows_sum is None else rows_sum.to(rows.dtype) / self.shape[0]
            if len(self.shape) == 2 and columns.shape[0] != 1:  # this rank has no rows
                columns = columns.new_zeros(1, self.shape[1])
            estimate = (rows @ columns).div_(mean.clamp_(min=self.eps[0]))
        return estimate.clamp_(min=self.eps[0] ** 2).rsqrt_().mul_(self.gradient)

    def apply(self, update: Tensor, of_weight: Tensor, of_update: Tensor) -> None:
        """Add the scaled update to the weight.

        Args:
            of_weight: sum of the squares of the unsharded weight.
            of_update: sum of the squares of the unsharded update.
        """
        size = math.sqrt(self.shape.numel())
        factor = (of_weight.sqrt() / size).clamp_(min=self.eps[1]).mul_(-self.rate)
        factor /= (of_update.sqrt() / (size * self.largest)).clamp_(min=1.0)
        if self.kept != 1:
            self.weight.mul_(self.kept)
        self.weight.add_(update.mul_(factor.to(update.dtype).squeeze()))


def _update(parts: Sequence[_ShardUpdate], ranks: ProcessGroup | None) -> None:
    """Update ``parts``, which are sharded across the process group ``ranks`` (None if they are not sharded)."""
    totals = sum_over([each.begin() for each in parts], ranks)
    for part, values in zip(parts, totals, strict=True):
        if len(values) == 3:
            part.add_columns(values[2])
    sums_of_rows = [values[1] if len(values) == 3 else None for values in totals]
    squares = [[_square(part.update(of_rows).norm(2))] for part, of_rows in zip(parts, sums_of_rows, strict=True)]
    of_updates = sum_over(squares, ranks)
    for part, values, of_rows, [of_update] in zip(parts, totals, sums_of_rows, of_updates, strict=True):
        part.apply(part.update(of_rows), values[0], of_update)


def _square(norm: Tensor) -> Tensor:
    """Return the squares of norms as a 1-dim tensor, in at least float32 precision."""
    return norm.to(torch.promote_types(norm.dtype, torch.float32)).square().flatten()


def _zeros(shape: tuple[int, ...], parameter: nn.Parameter) -> Tensor:
    """Return a state of zeros in the dtype of the gradient. The state is sharded if it has as many rows as
    ``parameter``."""
    assert parameter.grad is not None
    own, is_by_rows = local(parameter.grad), shape[:1] == parameter.shape[:1]
    part = own.new_zeros((*own.shape[:1], *shape[1:]) if is_by_rows else shape)
    return with_local_part(parameter, part, shape, is_replicated=not is_by_rows)
