"""Inputs for the export of a model, and additional inputs for comparing the exported model with the original model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core.errors import RoomierError
from roomier.core.torch_private import iter_leaves, map_leaves
from roomier.core.tree import to_device


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
        args, kwargs = map_leaves(_copied, (self.args, self.kwargs))
        return model(*args, **kwargs)

    def tensors(self) -> list[Tensor]:
        """Return all tensors in the arguments, in order."""
        return [each for each in iter_leaves((self.args, self.kwargs)) if isinstance(each, Tensor)]

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


def _copied(each: Any) -> Any:
    return each.clone() if isinstance(each, Tensor) else each


def _other_values(tensor: Tensor) -> Tensor:
    # Token ids must stay in range, so integers are only moved to other positions. Branches that depend on values most
    # often test the sign, so the signs are changed.
    moved = tensor.roll(1, dims=-1) if tensor.dim() else tensor.clone()
    if not tensor.is_floating_point():
        return moved
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0))
    return -moved + noise.to(tensor)
