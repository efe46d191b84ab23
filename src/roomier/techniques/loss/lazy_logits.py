"""Logits that are computed only when an operation reads their values. Cross-entropy computes them in chunks.

[Note: lazy logits]
The output layer returns a tensor that has a shape, a dtype and a device, but no memory, and stores references to the
layer's input and weights. Between the layer and the loss, most models apply only operations that preserve the rows
(``view(-1, V)``, ``[:, :-1]``, ``float()``). These operations are applied to the layer's input or are postponed, and
``F.cross_entropy`` then computes the logits in chunks. Any other operation on the tensor computes the full logits, or
only the rows that an earlier operation selected, and later operations reuse them. The result is still correct, but the
memory use is the same as without a chunked loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from roomier.core import torch_private
from roomier.core.errors import TrainingError
from roomier.core.log import notice
from roomier.core.tree import map_tensors, tensors
from roomier.techniques.loss.cross_entropy import LossOfLinear, linear_cross_entropy

Replay = Callable[[Tensor], Tensor]


@dataclass
class Use:
    """Record of the operations that use the logits of a layer.

    Attributes:
        reported: names of the operations that were reported because they read the logits of many tokens.
        is_chunked: True if a cross-entropy computed these logits in chunks.
    """

    reported: set[str] = field(default_factory=set)
    is_chunked: bool = False


@dataclass
class Output:
    """One call of the output layer.

    Attributes:
        hidden: input of the layer, ``[..., D]``.
        weight: weight of the layer, ``[V, D]``.
        bias: bias of the layer, ``[V]``, or None.
        dtype: dtype of the layer's matrix product.
        chunk_tokens: number of rows of logits in a chunk; None uses the default.
        use: record that all calls of the layer share.
        group: ranks that call the layer with the same input; see :class:`LossOfLinear`.
        whole: the full logits; None until an operation requires them.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    chunk_tokens: int | None
    use: Use
    group: dist.ProcessGroup | None = None
    whole: Tensor | None = None

    def __post_init__(self) -> None:
        self.is_grad_enabled = torch.is_grad_enabled()
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        inputs = (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)
        return [0 if each.is_inference() else torch_private.version_of(each) for each in inputs]

    def check(self) -> None:
        """Check that the layer's weights have not changed since the layer was called.

        Raises:
            TrainingError: the weights were updated or resharded.
        """
        is_freed = not self.weight.untyped_storage().nbytes() and self.weight.numel() > 0
        if is_freed or self._versions_now() != self._versions:
            raise TrainingError(
                "logits",
                tuple(self.hidden.shape[:-1]),
                "are read after the weights from which they are computed were updated or resharded. With a chunked "
                "loss, logits are computed only when they are read",
                "Compute the result, such as logits.argmax(-1), within the step and before the update",
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that the layer would compute for ``hidden``."""
        self.check()
        bias = None if self.bias is None else self.bias.to(self.dtype)
        with torch.set_grad_enabled(self.is_grad_enabled), torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)

    def report(self, operation: str, hidden: Tensor) -> None:
        """Print a notice if ``operation`` reads more rows of logits than a chunk contains. The notice is printed once
        per operation, and only if gradients were enabled when the layer was called."""
        num_rows = hidden.shape[:-1].numel()
        is_small = num_rows <= LossOfLinear((self.dtype,), self.chunk_tokens).chunk_size(len(self.weight))
        if is_small or operation in self.use.reported or not self.is_grad_enabled:
            return
        self.use.reported.add(operation)
        notice(
            f"chunked loss: {operation} reads the logits of {num_rows} tokens, so all these logits must be stored in "
            "memory"
        )


@dataclass(frozen=True)
class Rows:
    """Rows of an :class:`Output`, reshaped and converted.

    Attributes:
        output: the call of the layer.
        hidden: input of the layer for these rows, in the shape of the rows.
        dtypes: dtype of the layer's result, followed by the dtypes to which the result is converted, in order.
        replays: the operations that compute these rows from the full logits, in order.
        is_selection: True if rows may have been skipped or repeated.
        is_detached: True if the rows are detached from the graph.
    """

    output: Output
    hidden: Tensor
    dtypes: tuple[torch.dtype, ...]
    replays: tuple[Replay, ...] = ()
    is_selection: bool = False
    is_detached: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logits."""
        return (*self.hidden.shape[:-1], len(self.output.weight))

    def then(self, replay: Replay, **changes: Any) -> Rows:
        """Return the rows after the operation ``replay``, with ``changes`` to their attributes."""
        is_detached = self.is_detached or not torch.is_grad_enabled()
        return replace(self, **{"replays": (*self.replays, replay), "is_detached": is_detached, **changes})

    def logits(self, operation: str, *, is_written: bool = False) -> Tensor:
        """Compute the rows for ``operation``.

        The rows are views of the full logits if the full logits already exist, or if ``operation`` writes to the rows.
        """
        output = self.output
        is_alone = output.whole is None and self.is_selection and not is_written
        if is_alone:
            output.report(operation, self.hidden)
            logits = output.logits(self.hidden)
            for dtype in self.dtypes:
                logits = logits.to(dtype)
        else:
            if output.whole is None:
                output.report(operation, output.hidden)
                output.whole = output.logits(output.hidden)
            logits = output.whole
            for replay in self.replays:
                logits = replay(logits)
        return logits.detach() if self.is_detached else logits


class LazyLogits(Tensor):
    """Tensor without memory; see [Note: lazy logits].

    Attributes:
        rows: the rows that the tensor represents.
    """

    rows: Rows

    @staticmethod
    def of(rows: Rows) -> LazyLogits:
        """Create the tensor that represents ``rows``."""
        output = rows.output
        inputs = (rows.hidden, output.weight) if output.bias is None else (rows.hidden, output.weight, output.bias)
        requires_grad = output.is_grad_enabled and not rows.is_detached and any(each.requires_grad for each in inputs)
        made = torch_private.make_wrapper(LazyLogits, rows.shape, rows.dtypes[-1], rows.hidden.device, requires_grad)
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
            "the operation reads the memory of logits that are not computed (the operation may be a custom "
            "autograd.Function)",
            "Pass logits.clone() to the function, or set chunked_loss=False",
        )


def computed(output: Any) -> Any:
    """Return the ``output`` of a step with all lazy logits computed."""
    if not any(isinstance(each, LazyLogits) for each in tensors(output)):
        return output
    return map_tensors(lambda leaf: leaf.rows.logits("a prediction") if isinstance(leaf, LazyLogits) else leaf, output)


def _rows_of(logits: LazyLogits) -> Rows:
    """Return the rows that ``logits`` represents.

    Raises:
        TrainingError: the autograd graph contains an operation that the rows do not include.
    """
    if logits.requires_grad and logits.rows.is_detached:
        raise TrainingError(
            "chunked_loss",
            tuple(logits.shape),
            "logits passed through an autograd.Function (such as a backward hook of the output layer), through which "
            "gradients cannot pass",
            "Pass logits.clone() to the function, or set chunked_loss=False",
        )
    return logits.rows


def _refuse_gradient(gradient: Tensor) -> None:
    problem = "received a gradient that does not reach the model (the cause may be a custom autograd.Function)"
    action = "Pass logits.clone() to the function, or set chunked_loss=False"
    raise TrainingError("chunked_loss", tuple(gradient.shape), problem, action)


def _check_hook(hook: Any = None) -> None:
    if hook is _refuse_gradient or getattr(hook, "__module__", "").startswith("torch.distributed."):
        # fully_shard registers a hook before each backward pass. The weights remain unsharded until this hook runs.
        return
    problem = "does not support hooks on logits, because they are not computed and receive no gradient"
    raise TrainingError("chunked_loss", True, problem, "Register the hook on logits.clone(), or set chunked_loss=False")


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
    """Return the result of ``F.cross_entropy``, computed in chunks; None if the arguments require the full logits."""
    if not isinstance(input, LazyLogits) or isinstance(target, LazyLogits):
        return None
    rows = _rows_of(input)
    output = rows.output
    is_chunkable = rows.hidden.dim() == 2 and target.shape == rows.hidden.shape[:1] and target.dtype is torch.int64
    if output.whole is not None or not is_chunkable or not (weight is size_average is reduce is None):
        return None
    if reduction not in ("mean", "sum", "none"):
        return None  # torch raises the error
    output.check()
    dtypes = rows.dtypes
    device_type = rows.hidden.device.type
    if torch.is_autocast_enabled(device_type):
        # Autocast uses the same dtype for this operation.
        dtypes = (*dtypes, torch.promote_types(dtypes[-1], torch.float32))
    output.use.is_chunked = True
    how = LossOfLinear(dtypes, output.chunk_tokens, reduction, ignore_index, label_smoothing, output.group)
    is_trained = torch.is_grad_enabled() and output.is_grad_enabled and not rows.is_detached
    with torch.set_grad_enabled(is_trained):
        return linear_cross_entropy(rows.hidden, output.weight, output.bias, target, how)


def _reshaped(rows: Rows, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows | None:
    """Return the rows after an operation that preserves all elements and their order, or None if the operation changes
    the last dimension."""
    shape = func(torch.empty(rows.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != rows.shape[-1]:
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
            return False  # compute the full logits, because the effect of this rare index depends on its values
        elif each is not None and each is not Ellipsis:
            num_taken += 1
    ends_whole = isinstance(index[-1], slice) and index[-1] == slice(None) if index else True
    has_ellipsis = any(each is Ellipsis for each in index)
    return ends_whole or (num_taken < num_dims and (not has_ellipsis or index[-1] is Ellipsis))


def _detached(rows: Rows, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows:
    # The result shares memory with the logits.
    return rows.then(torch.detach, hidden=rows.hidden.detach(), is_detached=True)


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
