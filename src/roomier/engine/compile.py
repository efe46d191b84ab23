"""Compilation of blocks with ``torch.compile``.

[Note: compiled blocks]
The compiled function replaces the ``forward`` method of a block and contains its recomputation, so the compiler can
process both together and decide which activations to save. Hooks are not compiled: ``fully_shard`` unshards the
parameters before the compiled call and reshards them afterwards. torch caches compiled code by the code object of the
``forward`` method and treats weights as inputs, so all blocks of one class share the compiled code. It consists of one
graph for training and one graph for evaluation, regardless of the number of blocks.

The guards of torch's cache do not check which attention kernel is allowed. The cache also stores at most eight variants
of one code object; additional variants run uncompiled. In a process that builds several models, compiled code of an
earlier model could therefore use a kernel that is no longer allowed, or fill the cache, so each build resets it.

A key-value cache (Hugging Face's ``use_cache=True``) has a different length in each layer, so the compiler would create
one graph per layer. In training, empty caches are removed from the arguments of a block. In evaluation, a block that
receives a cache runs uncompiled.

Compiled dropout and uncompiled dropout use different random numbers from the same distribution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from roomier.core import torch_private
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.hugging_face import is_cache
from roomier.core.log import notice
from roomier.core.wrapped_forward import WrappedForward, install
from roomier.plan import CompilePlan
from roomier.techniques.activation.repeat import without_caches

INDUCTOR = "inductor"
DEFAULT = CompilePlan(enabled=True)


class CompiledForward(WrappedForward):
    """``forward`` method of a block, which is compiled on its first call, and again for other kinds of inputs."""

    is_compiled = True

    def __init__(self, module: nn.Module, plan: CompilePlan) -> None:
        super().__init__(module)
        self._plan = plan
        self._compiled = _compiled(self.forward, plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args = tuple(without_caches(dict(enumerate(args)), is_repeated=False).values())
            kwargs = without_caches(kwargs, is_repeated=False)
        elif any(map(is_cache, (*args, *kwargs.values()))):
            _report_uncompiled()
            return self.forward(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Compiled code is not copied with a block. The copy of the block is compiled separately.
        return {"forward": self.forward, "plan": self._plan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.forward, self._plan = state["forward"], state["plan"]
        self._compiled = _compiled(self.forward, self._plan)


def _compiled(forward: Callable[..., Any], plan: CompilePlan) -> Callable[..., Any]:
    given = {"backend": plan.backend, "mode": plan.mode}
    return torch.compile(forward, **{name: value for name, value in given.items() if value is not None})  # type: ignore[call-overload,no-any-return]


def compile_blocks(blocks: Sequence[nn.Module], device: torch.device, plan: CompilePlan = DEFAULT) -> None:
    """Compile each of ``blocks`` for ``device``, in place. :func:`roomier.core.wrapped_forward.unwrap` reverts the
    compilation.

    Args:
        blocks: blocks to compile.
        device: the device of the run.
        plan: the backend and the mode.

    Raises:
        RoomierError: ``blocks`` is empty, a requirement of torch's compiler (such as Triton) is missing, or torch does
            not have the backend or the mode.
    """
    if not blocks:
        action = "Define model_blocks() on the model to return its repeated layers, or call torch.compile on the model"
        raise RoomierError("compile", True, "requires blocks, but no layer of the model repeats", action)
    _check(plan)
    missing = torch_private.missing_compiler(device) if plan.backend in (None, INDUCTOR) else None
    if missing is not None:
        action = f"Install {missing}, or use compile=False"
        problem = f"torch.compile requires {missing} for {device.type}, but it is not installed"
        raise RoomierError("compile", True, problem, action)
    torch.compiler.reset()
    for block in blocks:
        install(block, CompiledForward(block, plan))


def _check(plan: CompilePlan) -> None:
    """Check that torch has the backend and the mode.

    Raises:
        RoomierError: torch does not have the backend or the mode.
    """
    if plan.backend is not None:
        backends = torch.compiler.list_backends(())
        if plan.backend not in backends:
            action = did_you_mean(plan.backend, backends)
            raise RoomierError("compile.backend", plan.backend, "is not a backend of torch.compile", action)
    if plan.mode is None:
        return
    try:
        _compiled(_check, plan)
    except RuntimeError as error:
        action = "Use 'default', 'reduce-overhead' or 'max-autotune'"
        raise RoomierError("compile.mode", plan.mode, f"is rejected by torch.compile: {error}", action) from error


@functools.cache
def _report_uncompiled() -> None:
    notice(
        "compile: blocks with a key-value cache run uncompiled in evaluation. Set use_cache=False to compile these "
        "blocks"
    )


class CompileClock:
    """Context for the first forward pass. On exit without an error, it prints the number of compiled graphs and the
    compile time since its construction."""

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
