"""Compares the outputs of an exported model with the outputs of the original model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roomier.checkpoint.export.examples import Example
from roomier.core.errors import RoomierError
from roomier.core.torch_private import iter_leaves

MAX_DIFFERENCE = 1e-4
"""Largest accepted difference between the outputs of both models, relative to the largest absolute value of the output
or to 1, whichever is greater. Outputs differ slightly, because kernels sum in different orders."""


@dataclass(frozen=True)
class Compared:
    """Result of a comparison.

    Attributes:
        max_difference: largest difference between the outputs of both models, relative to the largest absolute value of
            the output or to 1, whichever is greater.
        num_calls: number of compared inputs.
        batch_sizes: batch size of each input.
    """

    max_difference: float
    num_calls: int
    batch_sizes: tuple[int, ...]

    def __str__(self) -> str:
        sizes = ", ".join(map(str, dict.fromkeys(self.batch_sizes)))
        return f"differs from the model by at most {self.max_difference:.1e} for batch sizes {sizes}"


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
    """Compare the outputs of ``model`` and ``exported`` for ``example``, for other values, and for another batch size.

    Args:
        exported: function that calls the exported model and returns its output tensors in order.
        fixed_shapes: True if the batch size must not change.
        max_difference: largest accepted difference of any output, relative to the largest absolute value of the output
            or to 1, whichever is greater.
        to: name of the format, for messages.
        hints: messages of the exporter, which are added to the error.

    Raises:
        RoomierError: an output differs by more than ``max_difference``, or the exported model fails.
    """
    others = [each for each in example.others() if not (fixed_shapes and each.batch_size != example.batch_size)]
    worst, sizes = 0.0, []
    for number, each in enumerate((example, *others)):
        try:
            expected = tensors_in(each.call(model))
        except (RuntimeError, ValueError, IndexError):
            if number:  # the model does not accept these values or this batch size
                continue
            raise
        try:
            found = exported(each)
        except Exception as error:
            size, first = each.batch_size, example.batch_size
            where = f"with batch size {size} (exported with {first})" if size != first else "with other values"
            raise _differs(model, to, f"fails {where}: {_first_line(error)}", hints) from error
        difference = _difference(expected, found)
        if not difference <= max_difference:
            differs = f"differs from the model by {difference:.1e} of the largest value (maximum: {max_difference:.0e})"
            raise _differs(model, to, f"{differs} for {'values other than ' * bool(number)}the example", hints)
        worst = max(worst, difference)
        sizes.append(each.batch_size or 1)
    return Compared(worst, len(sizes), tuple(sizes))


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors in the output of a model, in order."""
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
        "torchscript": "Use torch.where for value-dependent code, or export with method='script'",
        "onnx": "Use torch.where or torch.cond for value-dependent code, or fix the batch size with dynamic_shapes={}",
        "torch-export": "Use torch.where or torch.cond for value-dependent code",
    }
    return RoomierError(f"to {to}", type(model).__name__, f"the exported model {problem}{seen}", actions[to])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
