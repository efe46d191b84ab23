"""Detects parameters that a forward pass reads outside the block that contains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roomier.core.tree import tensors
from roomier.core.wrapped_forward import has_compiled_forward
from roomier.techniques.offload.states import Unit

_METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        *("device", "dtype", "layout", "shape", "ndim", "itemsize", "nbytes"),
        *("requires_grad", "is_leaf", "grad", "grad_fn"),
        *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested"),
    )
) | {Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_contiguous}
"""Functions that return properties of a parameter instead of its values. ``fully_shard`` calls some of these functions
before its first forward pass."""


class OutsideReads(TorchFunctionMode):
    """Context for a forward pass. It detects torch functions that receive a parameter of a block while the block is not
    running.

    Torch functions are slower in this context, so the context is used for only one forward pass. The context is paused
    in compiled blocks, because it must not become part of the compiled code.

    Args:
        units: units whose parameters are checked. Units without a module are ignored.
        report: function that receives the first parameter that was read outside its block.
    """

    def __init__(self, units: Sequence[Unit], report: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._owner = {each: unit.module for unit in units if unit.module is not None for each in unit.parameters}
        self._report: Callable[[Tensor], Any] | None = report
        self._running: set[nn.Module] = set()
        self._handles = ExitStack()

    def __enter__(self) -> OutsideReads:
        for module in set(self._owner.values()):
            begin = module.register_forward_pre_hook(self._begin, prepend=True)
            end = module.register_forward_hook(self._end, always_call=True)
            self._handles.callback(begin.remove)
            self._handles.callback(end.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._handles.close()

    def _begin(self, block: nn.Module, _: Any) -> None:
        self._running.add(block)
        if has_compiled_forward(block):
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _end(self, block: nn.Module, *_: Any) -> None:
        if block in self._running and has_compiled_forward(block):
            super().__enter__()  # type: ignore[no-untyped-call]
        self._running.discard(block)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if torch.compiler.is_compiling():  # a module that the user compiled
            return func(*args, **(kwargs or {}))
        if self._report is not None and func not in _METADATA:
            for each in tensors((args, kwargs)):
                owner = self._owner.get(each)  # type: ignore[call-overload]
                if owner is not None and owner not in self._running:
                    report, self._report = self._report, None
                    report(each)
                    break
        return func(*args, **(kwargs or {}))
