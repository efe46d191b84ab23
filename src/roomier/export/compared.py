"""Whether what was exported computes what the model computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core.errors import RoomierError
from roomier.core.torch_private import iter_leaves
from roomier.export.examples import Example

MAX_DIFFERENCE = 1e-4
"""Of an output and the model's, over the largest value in it (or 1): kernels add up in another order."""


@dataclass(frozen=True)
class Compared:
    """How the outputs differed.

    Attributes:
        max_difference: the largest of all, over the largest value of its output, or 1.
        num_calls: how many inputs were tried. batch_sizes: theirs.
    """

    max_difference: float
    num_calls: int
    batch_sizes: tuple[int, ...]

    def __str__(self) -> str:
        sizes = ", ".join(map(str, dict.fromkeys(self.batch_sizes)))
        return f"differs from the model by {self.max_difference:.1e} at most, in batches of {sizes}"


def check_same(
    model: nn.Module,
    exported: Callable[[Example], Sequence[Tensor]],
    example: Example,
    *,
    fixed_shapes: bool,
    max_difference: float,
    to: str,
    hints: Sequence[str] = (),
) -> Compared:
    """Call both with ``example``, with other values, and with another batch size.

    Args:
        exported: gives the tensors it returns, in order.
        fixed_shapes: the batch size is not to change.
        hints: what the exporter said on its way, for the error.

    Raises:
        RoomierError: an output differs by more than ``max_difference``, or the export failed.
    """
    others = [each for each in example.others() if not (fixed_shapes and each.batch_size != example.batch_size)]
    worst, sizes = 0.0, []
    for number, each in enumerate((example, *others)):
        try:
            expected = tensors_in(each.call(model))
        except (RuntimeError, ValueError, IndexError):
            if number:  # these values, or this batch, are not for this model
                continue
            raise
        try:
            found = exported(each)
        except Exception as error:
            size, first = each.batch_size, example.batch_size
            where = f"in a batch of {size} (it was exported with {first})" if size != first else "with other values"
            raise _differs(model, to, f"fails {where}: {_first_line(error)}", hints) from error
        difference = _difference(expected, found)
        if not difference <= max_difference:
            what = f"differs from the model by {difference:.1e} of the largest value (allowed: {max_difference:.0e})"
            raise _differs(model, to, f"{what} with {'other values than ' * bool(number)}the example", hints)
        worst = max(worst, difference)
        sizes.append(each.batch_size or 1)
    return Compared(worst, len(sizes), tuple(sizes))


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors in what a model returned, in order."""
    return [each for each in iter_leaves(output) if isinstance(each, Tensor)]


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    if len(expected) != len(found):
        return float("inf")
    worst = 0.0
    for own, other in zip(expected, found, strict=True):
        if own.shape != other.shape:
            return float("inf")
        own, other = own.detach().cpu().to(torch.float64), other.detach().cpu().to(torch.float64)
        if torch.equal(own.isnan(), other.isnan()) and torch.equal(own.isinf(), other.isinf()):
            own, other = (each.nan_to_num(0.0, 0.0, 0.0) for each in (own, other))
            if own.numel():
                scale = max(1.0, float(own.abs().max()))
                worst = max(worst, float((own - other).abs().max()) / scale)
        else:
            return float("inf")
    return worst


def _differs(model: nn.Module, to: str, problem: str, hints: Sequence[str]) -> RoomierError:
    seen = f" ({'; '.join(hints)})" if hints else ""
    actions = {
        "torchscript": "Write what depends on values with torch.where, or export with method='script'",
        "onnx": "Write what depends on values with torch.where or torch.cond; or fix the batch size: dynamic_shapes={}",
        "torch-export": "Write what depends on values with torch.where or torch.cond",
    }
    return RoomierError(f"to {to}", type(model).__name__, f"what was exported {problem}{seen}", actions[to])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
