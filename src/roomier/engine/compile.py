"""Blocks compiled one by one.

[Note: compiled blocks]
A block is compiled in place of its forward, around what is computed again, so that the compiler sees both and decides
what is worth keeping. Hooks stay outside: ``fully_shard`` gathers before the compiled call and frees after it.
torch keeps compiled code by the code of the forward and takes weights as inputs, so equal blocks share it: one graph
for training and one for evaluation, however deep the model.

What it keeps does not ask which attention kernel is allowed, and holds at most eight variants of one code, beyond which
it runs uncompiled. A process that builds one model after another would meet both, so each build begins anew.

A cache of keys and values (Hugging Face's ``use_cache=True``) is at another stage in each layer, which would make a
graph for each. An empty one is left out in training, and in evaluation a block that is given one runs uncompiled.

Dropout draws other numbers than uncompiled, from the same distribution.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from roomier.activation.repeat import without_caches
from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.wrapped_forward import WrappedForward, install


class CompiledForward(WrappedForward):
    """The forward of a block, compiled at its first call, and again for inputs of another kind."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._compiled = torch.compile(self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args = tuple(without_caches(dict(enumerate(args)), is_repeated=False).values())
            kwargs = without_caches(kwargs, is_repeated=False)
        elif _has_cache((*args, *kwargs.values())):
            return self.forward(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"forward": self.forward}  # compiled code is of one block; a copy compiles that of the copied one

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.forward = state["forward"]
        self._compiled = torch.compile(self.forward)


def compile_blocks(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Compile each of ``blocks``, in place, for ``device``; :func:`roomier.core.wrapped_forward.unwrap` undoes it.

    Raises:
        RoomierError: there are no blocks, or no compiler on this machine.
    """
    if not blocks:
        action = "Give the model a model_blocks() that returns the layers that repeat, or call torch.compile on it"
        raise RoomierError("compile", True, "the model has no blocks: nothing in it repeats", action)
    missing = torch_private.missing_compiler(device)
    if missing is not None:
        action = f"Install {missing}, or use compile=False"
        raise RoomierError("compile", True, f"torch.compile needs {missing} for {device.type} and finds none", action)
    torch.compiler.reset()
    for block in blocks:
        install(block, CompiledForward(block))


def _has_cache(arguments: tuple[Any, ...]) -> bool:
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or not any(isinstance(each, caches.Cache) for each in arguments):
        return False
    _say_uncompiled()
    return True


@functools.cache
def _say_uncompiled() -> None:
    notice(
        "compile: blocks with a cache of keys and values run uncompiled in evaluation; use_cache=False compiles them"
    )


class CompileClock:
    """A context around the first forward: tells how long was compiled since it was made."""

    def __init__(self) -> None:
        self._before_s = torch_private.compile_s()
        self._num_before = torch_private.num_compiled_graphs()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            taken_s = torch_private.compile_s() - self._before_s
            num_graphs = torch_private.num_compiled_graphs() - self._num_before
            graphs = "1 graph" if num_graphs == 1 else f"{num_graphs} graphs"
            notice(f"compiled the blocks as {graphs} in {taken_s:.1f} s")
