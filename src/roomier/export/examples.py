"""What a model is called with while it is exported, and the other inputs that the result is held against it with."""

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

    Args:
        args, kwargs: tensors, or lists, tuples and dicts of them.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, model: Callable[..., Any]) -> Any:
        """What ``model`` returns for it. Tensors are copies: a model may write to what it gets."""
        args, kwargs = map_leaves(_copied, (self.args, self.kwargs))
        return model(*args, **kwargs)

    def tensors(self) -> list[Tensor]:
        return [each for each in iter_leaves((self.args, self.kwargs)) if isinstance(each, Tensor)]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Example:
        """With ``change(tensor)`` for each tensor."""
        args, kwargs = map_leaves(
            lambda each: change(each) if isinstance(each, Tensor) else each, (self.args, self.kwargs)
        )
        return Example(args, kwargs)

    @property
    def batch_size(self) -> int | None:
        """The first dimension of the first tensor that has one; that of all others that are as long is the batch's."""
        return next((each.shape[0] for each in self.tensors() if each.dim()), None)

    def with_batch(self) -> Example:
        """With two samples at least: exporters take a dimension of one for a constant."""
        return self.repeated(2) if self.batch_size == 1 else self

    def repeated(self, num_times: int) -> Example:
        """Each sample that often."""
        size = self.batch_size
        return self.mapped(lambda each: torch.cat([each] * num_times) if each.dim() and len(each) == size else each)

    def dynamic_shapes(self, name: str = "batch") -> tuple[Any, Any]:
        """The dimensions of ``args`` and of ``kwargs`` that a call may change, as ``torch.export`` takes them."""
        size, batch = self.batch_size, torch.export.Dim(name)

        def dims(each: Any) -> Any:
            return {0: batch} if isinstance(each, Tensor) and each.dim() and len(each) == size else None

        found: tuple[Any, Any] = map_leaves(dims, (self.args, self.kwargs))
        return found

    def others(self) -> list[Example]:
        """Inputs of other values; and, with them, of another batch size."""
        changed = self.mapped(_other_values)
        return [changed, changed.repeated(3)]


def example_of(model: nn.Module, sample: Any, field: str) -> Example:
    """``sample``, or the model's ``example_input_array``, on the model's device.

    Args:
        sample: a tensor; a tuple or list of the arguments; a dict of the arguments by name.
        field: what the user calls it.

    Raises:
        RoomierError: there is none, or the model cannot be called with it.
    """
    given = getattr(model, "example_input_array", None) if sample is None else sample
    if given is None:
        action = f"Pass {field}, the arguments of one call of forward, or set self.example_input_array in the model"
        raise RoomierError(field, None, "there is nothing to call the model with", action)
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    given = to_device(given, device)
    if isinstance(given, Mapping):
        example = Example(kwargs=dict(given))
    else:
        example = Example(tuple(given) if isinstance(given, (tuple, list)) else (given,))
    _check_call(model, example, field)
    return example


def _check_call(model: nn.Module, example: Example, field: str) -> None:
    # Before an exporter meets it, whose error would be about anything but the arguments.
    try:
        example.call(model)
    except Exception as error:
        shown = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in example.tensors()]
        names = f" for {', '.join(example.kwargs)}" if example.kwargs else ""
        text = " ".join(str(error).split())[:200]
        problem = f"forward fails when it is called with it ({type(error).__name__}: {text})"
        taken = ", ".join(inspect.signature(model.forward).parameters)
        action = f"Pass what forward({taken}) takes, in shapes and dtypes of the training"
        raise RoomierError(field, f"{', '.join(shown)}{names}", problem, action) from error


def _copied(each: Any) -> Any:
    return each.clone() if isinstance(each, Tensor) else each


def _other_values(tensor: Tensor) -> Tensor:
    # Token ids must stay in their range; the sign of numbers is what branches ask about most.
    moved = tensor.roll(1, dims=-1) if tensor.dim() else tensor.clone()
    if not tensor.is_floating_point():
        return moved
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0))
    return -moved + noise.to(tensor)
