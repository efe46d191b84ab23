"""Preparation of a model for an export, its example inputs, and the comparison of the outputs of the exported model
with the outputs of the original model."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from roomier.api.module import Module
from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.core.torch_private import iter_tensors, map_leaves
from roomier.core.tree import to_device
from roomier.techniques.adapters.layers import Adapted
from roomier.techniques.adapters.lora import merge_lora


@dataclass(frozen=True)
class Example:
    """Arguments of one call of ``forward``.

    Attributes:
        args: positional arguments: tensors, or lists, tuples and dicts of tensors.
        kwargs: keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, model: Callable[..., Any]) -> Any:
        """Call ``model`` and return its output. Tensors are copied, because a model may modify its inputs."""
        copied = self.mapped(Tensor.clone)
        return model(*copied.args, **copied.kwargs)

    def tensors(self) -> list[Tensor]:
        """Return all tensors in the arguments, in order."""
        return list(iter_tensors((self.args, self.kwargs)))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Example:
        """Return a copy in which each tensor is replaced by ``change(tensor)``."""
        args, kwargs = map_leaves(
            lambda each: change(each) if isinstance(each, Tensor) else each, (self.args, self.kwargs)
        )
        return Example(args, kwargs)

    @property
    def batch_size(self) -> int | None:
        """Size of the first dimension of the first tensor that is not a scalar; None if all tensors are scalars.

        The first dimension of any other tensor is also a batch dimension if it has the same size.
        """
        return next((each.shape[0] for each in self.tensors() if each.dim()), None)

    def with_batch(self) -> Example:
        """Return an example with at least two samples, because exporters treat a dimension of size 1 as a constant."""
        return self.repeated(2) if self.batch_size == 1 else self

    def repeated(self, num_times: int) -> Example:
        """Return an example with each sample repeated ``num_times`` times."""
        size = self.batch_size
        return self.mapped(lambda each: torch.cat([each] * num_times) if each.dim() and len(each) == size else each)

    def dynamic_shapes(self, name: str = "batch") -> tuple[Any, Any]:
        """Return the dynamic dimensions of ``args`` and ``kwargs`` in the format of ``torch.export``."""
        size, batch = self.batch_size, torch.export.Dim(name)

        def dims(each: Any) -> Any:
            return {0: batch} if isinstance(each, Tensor) and each.dim() and len(each) == size else None

        found: tuple[Any, Any] = map_leaves(dims, (self.args, self.kwargs))
        return found

    def others(self) -> list[Example]:
        """Return two examples: one example with different values, and one example that also has a different batch
        size."""
        changed = self.mapped(_other_values)
        return [changed, changed.repeated(3)]


def example_of(model: nn.Module, sample: Any, field: str) -> Example:
    """Create an Example from ``sample``, or from the model's ``example_input_array``, on the device of the model.

    Args:
        sample: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
        field: name of the argument that contains ``sample``, for messages.

    Raises:
        RoomierError: there is no sample, or the model cannot be called with the sample.
    """
    given = getattr(model, "example_input_array", None) if sample is None else sample
    if given is None:
        action = f"Pass {field}, the arguments of one call of forward, or set self.example_input_array in the model"
        raise RoomierError(field, None, "is required to call the model", action)
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    given = to_device(given, device)
    if isinstance(given, Mapping):
        example = Example(kwargs=dict(given))
    else:
        example = Example(tuple(given) if isinstance(given, (tuple, list)) else (given,))
    _check_call(model, example, field)
    return example


def _check_call(model: nn.Module, example: Example, field: str) -> None:
    # The model is called before the export, because the error of an exporter would not refer to the arguments.
    try:
        example.call(model)
    except Exception as error:
        shown = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in example.tensors()]
        names = f" for {', '.join(example.kwargs)}" if example.kwargs else ""
        text = " ".join(str(error).split())[:200]
        problem = f"cannot be passed to forward ({type(error).__name__}: {text})"
        taken = ", ".join(inspect.signature(model.forward).parameters)
        action = f"Pass the arguments of forward({taken}), with the shapes and dtypes used in training"
        raise RoomierError(field, f"{', '.join(shown)}{names}", problem, action) from error


def _other_values(tensor: Tensor) -> Tensor:
    # Token ids must stay in range, so integers are only moved to other positions. Branches that depend on values most
    # often test the sign, so the signs are changed.
    moved = tensor.roll(1, dims=-1) if tensor.dim() else tensor.clone()
    if not tensor.is_floating_point():
        return moved
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0))
    return -moved + noise.to(tensor)


MAX_DIFFERENCE = 1e-4
"""Largest accepted difference between the outputs of both models, relative to the largest absolute value of the output
or to 1, whichever is greater. Outputs differ slightly, because kernels sum in different orders."""


@dataclass(frozen=True)
class Compared:
    """Result of a comparison.

    Attributes:
        max_difference: largest difference between the outputs of both models, relative to the largest absolute value of
            the output or to 1, whichever is greater.
        batch_sizes: batch size of each input.
    """

    max_difference: float
    batch_sizes: tuple[int, ...]

    def __str__(self) -> str:
        sizes = ", ".join(map(str, dict.fromkeys(self.batch_sizes)))
        return f"differs from the model by at most {self.max_difference:.1e} for batch sizes {sizes}"


def check_same(
    model: nn.Module,
    exported: Callable[[Example], Sequence[Tensor]],
    example: Example,
    to: str,
    max_difference: float,
    *,
    fixed_shapes: bool = False,
    hints: Sequence[str] = (),
) -> Compared:
    """Compare the outputs of ``model`` and ``exported`` for ``example``, for other values, and for another batch size.

    Args:
        exported: function that calls the exported model and returns its output tensors in order.
        to: name of the format, for messages.
        max_difference: largest accepted difference of any output, relative to the largest absolute value of the output
            or to 1, whichever is greater.
        fixed_shapes: True if the batch size must not change.
        hints: messages of the exporter, which are added to the error.

    Raises:
        RoomierError: an output differs by more than ``max_difference``, or the exported model fails.
    """
    others = [each for each in example.others() if not (fixed_shapes and each.batch_size != example.batch_size)]
    worst, sizes = 0.0, []
    for number, each in enumerate((example, *others)):
        try:
            expected = list(iter_tensors(each.call(model)))
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
    return Compared(worst, tuple(sizes))


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


@contextmanager
def ready_for_export(model: nn.Module, to: str) -> Iterator[nn.Module]:
    """Yield the module to export in place of ``model``, in evaluation mode, without gradients and without compilation.

    If ``model`` has adapters, the module is a copy with the adapters merged into its weights. The mode of each
    submodule is restored at the end of the block.

    Raises:
        RoomierError: the model is sharded, lacks the weights of other stages, or has no ``forward``.
    """
    if any(hasattr(each, "placements") or each.is_meta for each in model.parameters()):
        problem = "must not be sharded or divided into stages"
        action = (
            "Export the checkpoint with `roomier export CHECKPOINT --to ...`, or load the checkpoint into a new model"
        )
        raise RoomierError(f"to {to}", type(model).__name__, problem, action)
    if inspect.getattr_static(type(model), "forward", None) in (nn.Module.forward, Module.forward):
        action = "Define forward(self, ...), which the exported model runs"
        raise RoomierError(f"to {to}", type(model).__name__, "has no forward method", action)
    model = torch_private.uncompiled(model)
    if any(isinstance(each, Adapted) for each in model.modules()):
        model = merge_lora(copy.deepcopy(model))
    modes = {part: part.training for part in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), torch_private.called_eagerly(model):
            yield model
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def quietly() -> Iterator[list[warnings.WarningMessage]]:
    """Suppress the log messages and the output of exporters, and yield the list of their warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("always")
            yield caught
    finally:
        logging.disable(before)
