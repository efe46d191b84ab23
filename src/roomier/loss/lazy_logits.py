"""Logits that are computed when somebody reads them; a cross-entropy does without.

[Note: lazy logits]
The output layer returns a tensor that has a shape, a dtype and a device, but no memory: it remembers what the logits
are computed from. What models do to logits before the loss keeps each row a row (``view(-1, V)``, ``[:, :-1]``,
``float()``), so that it can be done to the layer's input, or be left for later. ``F.cross_entropy`` then computes in
chunks. Whatever else is called on the tensor computes the logits, whole and once, and works on them from then on: that
is right for every model, and costs what it costs without this. Rows that were selected are computed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from roomier.core import torch_private
from roomier.core.errors import TrainingError
from roomier.core.log import notice
from roomier.core.tree import map_tensors, tensors
from roomier.loss.cross_entropy import LossOfLinear, linear_cross_entropy

Replay = Callable[[Tensor], Tensor]


@dataclass
class Use:
    """What became of all logits of a layer.

    Attributes:
        told: the operations of which it was said that they need the logits of many tokens.
        is_chunked: whether a cross-entropy took some in chunks.
    """

    told: set[str] = field(default_factory=set)
    is_chunked: bool = False


@dataclass
class Output:
    """What the output layer was called with, once.

    Attributes:
        dtype: in which it computes.
        use: shared by all calls of the layer.
        whole: the logits, once somebody needed them.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    chunk_tokens: int | None
    use: Use
    whole: Tensor | None = None

    def __post_init__(self) -> None:
        self.is_grad_enabled = torch.is_grad_enabled()
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        inputs = (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)
        return [0 if each.is_inference() else torch_private.version_of(each) for each in inputs]

    def check(self) -> None:
        """Refuse to compute with what is not there any more.

        Raises:
            TrainingError: the weight was updated, or is no longer gathered.
        """
        is_freed = not self.weight.untyped_storage().nbytes() and self.weight.numel() > 0
        if is_freed or self._versions_now() != self._versions:
            raise TrainingError(
                "logits",
                tuple(self.hidden.shape[:-1]),
                "are read after the weights they come from were updated or freed; with a chunked loss logits are "
                "computed when they are read",
                "Compute what you need of them within the step, before the update, such as logits.argmax(-1)",
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """Of ``hidden``, as the layer would have returned them."""
        self.check()
        bias = None if self.bias is None else self.bias.to(self.dtype)
        with torch.set_grad_enabled(self.is_grad_enabled), torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)

    def tell(self, operation: str, hidden: Tensor) -> None:
        """Say, once, that ``operation`` needs more logits of ``hidden`` than a chunk has. An evaluation is meant to."""
        num_rows = hidden.shape[:-1].numel()
        is_small = num_rows <= LossOfLinear((self.dtype,), self.chunk_tokens).chunk_size(len(self.weight))
        if is_small or operation in self.use.told or not self.is_grad_enabled:
            return
        self.use.told.add(operation)
        notice(f"chunked loss: {operation} reads the logits of {num_rows} tokens, which are in memory together for it")


@dataclass(frozen=True)
class Rows:
    """Rows of an :class:`Output`, in a shape and in a dtype.

    Attributes:
        hidden: what they are computed from, in their shape.
        dtypes: of the layer's result, and what it is converted to, one after the other.
        replays: what was called on the whole logits to come here.
        is_selection: whether rows were left out, or taken twice.
    """

    output: Output
    hidden: Tensor
    dtypes: tuple[torch.dtype, ...]
    replays: tuple[Replay, ...] = ()
    is_selection: bool = False
    is_detached: bool = False

    @property
    def num_classes(self) -> int:
        return len(self.output.weight)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.num_classes)

    def then(self, replay: Replay, **changes: Any) -> Rows:
        is_detached = self.is_detached or not torch.is_grad_enabled()
        return replace(self, **{"replays": (*self.replays, replay), "is_detached": is_detached, **changes})

    def logits(self, operation: str, *, is_written: bool = False) -> Tensor:
        """Them, for ``operation``; as a part of the whole where that was computed, or is about to be written to."""
        output = self.output
        is_alone = output.whole is None and self.is_selection and not is_written
        if is_alone:
            output.tell(operation, self.hidden)
            logits = output.logits(self.hidden)
            for dtype in self.dtypes:
                logits = logits.to(dtype)
        else:
            if output.whole is None:
                output.tell(operation, output.hidden)
                output.whole = output.logits(output.hidden)
            logits = output.whole
            for replay in self.replays:
                logits = replay(logits)
        return logits.detach() if self.is_detached else logits


class LazyLogits(Tensor):
    """See [Note: lazy logits]."""

    rows: Rows

    @staticmethod
    def of(rows: Rows) -> LazyLogits:
        output = rows.output
        inputs = (rows.hidden, output.weight) if output.bias is None else (rows.hidden, output.weight, output.bias)
        requires_grad = output.is_grad_enabled and not rows.is_detached and any(each.requires_grad for each in inputs)
        hidden = rows.hidden
        made = torch_private.make_wrapper(LazyLogits, rows.shape, rows.dtypes[-1], hidden.device, requires_grad)
        made.rows = rows
        if requires_grad:
            made.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(args), dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if func in (Tensor.register_hook, Tensor.retain_grad):
            _check_hook(*args[1:2])
        if func in _ABOUT_THE_TENSOR or (name == "__get__" and func not in _OTHER_VIEWS):
            return torch_private.disabled_torch_function(func, types, args, kwargs)
        if func is F.cross_entropy:
            loss = _chunked_loss(*args, **kwargs)
            if loss is not None:
                return loss
        elif args and isinstance(args[0], LazyLogits) and name in _KEPT_LAZY:
            rows = _KEPT_LAZY[name](_rows_of(args[0]), func, args[1:], kwargs)
            if rows is not None:
                return LazyLogits.of(rows)
        is_written = (name.endswith("_") and not name.endswith("__")) or name in _WRITING or "out" in kwargs

        def logits(leaf: Any) -> Any:
            return _rows_of(leaf).logits(name, is_written=is_written) if isinstance(leaf, LazyLogits) else leaf

        real_args, real_kwargs = torch_private.map_leaves(logits, (args, kwargs))
        return func(*real_args, **real_kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TrainingError(
            "chunked_loss",
            func,
            "logits reached an operation that reads memory they do not have (an autograd.Function of your own, say)",
            "Pass it logits.clone(), or leave chunked_loss out",
        )


def computed(output: Any) -> Any:
    """``output`` of a step with lazy logits computed."""
    if not any(isinstance(each, LazyLogits) for each in tensors(output)):
        return output
    return map_tensors(lambda leaf: leaf.rows.logits("a prediction") if isinstance(leaf, LazyLogits) else leaf, output)


def _rows_of(logits: LazyLogits) -> Rows:
    """Its rows.

    Raises:
        TrainingError: autograd knows of more than they do.
    """
    if logits.requires_grad and logits.rows.is_detached:
        raise TrainingError(
            "chunked_loss",
            tuple(logits.shape),
            "logits went through an autograd.Function (a hook on the backward of the output layer is one), past which "
            "no gradient would come to the model",
            "Pass it logits.clone(), or leave chunked_loss out",
        )
    return logits.rows


def _refuse_gradient(gradient: Tensor) -> None:
    raise TrainingError(
        "chunked_loss",
        tuple(gradient.shape),
        "a gradient came to logits in a way that does not reach the model (an autograd.Function of your own, say)",
        "Pass it logits.clone(), or leave chunked_loss out",
    )


def _check_hook(hook: Any = None) -> None:
    if hook is _refuse_gradient or getattr(hook, "__module__", "").startswith("torch.distributed."):
        return  # fully_shard asks to be called before a backward; this layer's weights stay gathered until then
    problem = "no gradient comes to logits that are not computed, so a hook on them would not be called"
    raise TrainingError("chunked_loss", True, problem, "Put it on logits.clone(), or leave chunked_loss out")


def _chunked_loss(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """``F.cross_entropy`` where it can be computed in chunks: of classes, each with the same weight."""
    if not isinstance(input, LazyLogits) or isinstance(target, LazyLogits):
        return None
    rows = _rows_of(input)
    output = rows.output
    is_chunkable = rows.hidden.dim() == 2 and target.shape == rows.hidden.shape[:1] and target.dtype is torch.int64
    if output.whole is not None or not is_chunkable or not (weight is size_average is reduce is None):
        return None
    if reduction not in ("mean", "sum", "none"):
        return None  # torch says what is wrong with it
    output.check()
    dtypes = rows.dtypes
    device_type = rows.hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtypes = (*dtypes, torch.promote_types(dtypes[-1], torch.float32))  # as autocast does for this operation
    output.use.is_chunked = True
    how = LossOfLinear(dtypes, output.chunk_tokens, reduction, ignore_index, label_smoothing)
    is_trained = torch.is_grad_enabled() and output.is_grad_enabled and not rows.is_detached
    with torch.set_grad_enabled(is_trained):
        return linear_cross_entropy(rows.hidden, output.weight, output.bias, target, how)


def _reshaped(rows: Rows, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows | None:
    """After an operation that keeps all elements in their order: where the last dimension stays, so do the rows."""
    shape = func(torch.empty(rows.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != rows.num_classes:
        return None
    return rows.then(
        lambda it: func(it, *args, **kwargs), hidden=rows.hidden.reshape(*shape[:-1], rows.hidden.shape[-1])
    )


def _converted(rows: Rows, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows | None:
    device = rows.hidden.device
    probe = func(torch.empty(0, dtype=rows.dtypes[-1], device=device), *args, **kwargs)
    if probe.device != device or not probe.is_floating_point():
        return None
    return rows.then(lambda it: func(it, *args, **kwargs), dtypes=(*rows.dtypes, probe.dtype))


def _selected(rows: Rows, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows | None:
    (index,) = args
    if not _leaves_last_dimension(index if isinstance(index, tuple) else (index,), len(rows.shape)):
        return None
    return rows.then(lambda it: func(it, index), hidden=rows.hidden[index], is_selection=True)


def _leaves_last_dimension(index: tuple[Any, ...], num_dims: int) -> bool:
    num_taken = 0
    for each in index:
        if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8):
            num_taken += each.dim()
        elif isinstance(each, (bool, list)):
            return False  # rare, and told apart by what is in it
        elif each is not None and each is not Ellipsis:
            num_taken += 1
    ends_whole = isinstance(index[-1], slice) and index[-1] == slice(None) if index else True
    has_ellipsis = any(each is Ellipsis for each in index)
    return ends_whole or (num_taken < num_dims and (not has_ellipsis or index[-1] is Ellipsis))


def _detached(rows: Rows, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows:
    return rows.then(torch.detach, hidden=rows.hidden.detach(), is_detached=True)  # it shares memory with the logits


_ORDER_KEEPING = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "view_as")
_CONVERTING = ("to", "float", "double", "half", "bfloat16", "type_as", "cpu", "cuda")
_KEPT_LAZY: dict[str, Callable[[Rows, Any, Sequence[Any], Mapping[str, Any]], Rows | None]] = {
    **dict.fromkeys(_ORDER_KEEPING, _reshaped),
    **dict.fromkeys(_CONVERTING, _converted),
    "__getitem__": _selected,
    "detach": _detached,
}
_WRITING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imod__", "__ifloordiv__")
_ABOUT_THE_TENSOR = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_inference,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.register_hook,
    Tensor.__len__,
    Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_inference,
    torch.numel,
}
_OTHER_VIEWS = {
    getter.__get__  # type: ignore[attr-defined]
    for getter in (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag, Tensor.data)
}
