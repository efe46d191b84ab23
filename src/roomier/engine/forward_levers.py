"""Memory techniques that act inside a forward pass. Comments explain the order in which they are installed.

[Note: compiled blocks]
The compiled function replaces the ``forward`` method of a block and contains its recomputation.
The compiler can therefore process the forward pass together with the recomputation and decide which activations to
save. Hooks are not compiled: ``fully_shard`` unshards the parameters before the compiled call and reshards them after
the call. torch caches compiled code by the code object of the ``forward`` method and treats weights as inputs. Blocks
of one class therefore share the compiled code. The code consists of one graph for training and one graph for
evaluation, regardless of the number of blocks.

The guards of torch's cache do not check which attention kernel is allowed. The cache also stores at most eight variants
of one code object, and additional variants run uncompiled. In a process that builds several models, compiled code of an
earlier model could use a kernel that is no longer allowed, or fill the cache. Each build therefore resets the cache.

A key-value cache (Hugging Face's ``use_cache=True``) has a different length in each layer, so the compiler would create
one graph per layer. In training, empty caches are removed from the arguments of a block. In evaluation, a block that
receives a cache runs uncompiled.

Compiled dropout and uncompiled dropout use different random numbers from the same distribution.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roomier.core import torch_private
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.log import notice
from roomier.core.wrapped_forward import WrappedForward, install, unwrap
from roomier.engine.facts import Facts
from roomier.plan import CompilePlan, Plan
from roomier.techniques.activation.block_forward import Recompute
from roomier.techniques.activation.recompute import apply_recompute
from roomier.techniques.activation.repeat import without_caches
from roomier.techniques.attention.kernels import attention_context
from roomier.techniques.loss.chunked import LossWatch, apply_chunked_loss
from roomier.techniques.precision.lstm import replace_missing_lstm_kernels
from roomier.techniques.precision.sizes import size_warnings

if TYPE_CHECKING:
    from roomier.techniques.offload.parameters import OffloadedParameters


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
        elif _has_cache((*args, *kwargs.values())):
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


def _has_cache(arguments: tuple[Any, ...]) -> bool:
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or not any(isinstance(each, caches.Cache) for each in arguments):
        return False
    _report_uncompiled()
    return True


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


MakeContext = Callable[[], AbstractContextManager[Any]]
"""Function that creates a context."""


class FirstForward:
    """Factory that creates the context of each forward pass with ``make``, and enters ``watches`` around the first
    forward pass that computes gradients.

    Attributes:
        make: function that creates the context of a forward pass.
        watches: contexts that are entered once, around the next forward pass with gradients.
    """

    def __init__(self, make: MakeContext) -> None:
        self.make = make
        self.watches: list[AbstractContextManager[Any]] = []

    def __call__(self) -> AbstractContextManager[Any]:
        if self.watches and torch.is_grad_enabled():
            return self._watched()
        return self.make()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        watches, self.watches = self.watches, []
        with ExitStack() as stack:
            for each in watches:
                stack.enter_context(each)
            stack.enter_context(self.make())
            yield


def both(outer: MakeContext, inner: MakeContext) -> MakeContext:
    """Return a function that enters the context of ``inner`` inside the context of ``outer``."""

    @contextmanager
    def make() -> Iterator[None]:
        with outer(), inner():
            yield

    return make


@dataclass
class Levers:
    """Techniques that are installed in the ``forward`` methods of a network.

    Attributes:
        network: the network in which the techniques are installed.
        forward_context: object that creates the context for each forward pass.
        backward_context: function that creates the context for each backward pass, in which blocks can be recomputed.
        recompute: object that recomputes or offloads the activations of its blocks; without effect if it has no blocks.
        output_layer: the layer whose logits are computed in chunks; None without a chunked loss.
    """

    network: nn.Module
    forward_context: FirstForward
    backward_context: MakeContext
    recompute: Recompute = field(default_factory=lambda: Recompute(()))
    output_layer: nn.Linear | None = None

    def end_update(self) -> None:
        """Mark the output layer's weights as changed, because fused optimizers bypass autograd's version counters."""
        if self.output_layer is not None:
            torch.autograd.graph.increment_version(list(self.output_layer.parameters()))

    def undo(self) -> None:
        """Restore the original ``forward`` methods, and free offloaded activations. Parameters keep their values."""
        unwrap(self.network)
        self.recompute.close()


def apply_levers(plan: Plan, facts: Facts, residency: OffloadedParameters | None = None) -> Levers:
    """Install the techniques of ``plan`` in a network whose parameters are on the device, but not sharded yet.

    Args:
        residency: the offloaded parameters, which are on the device only while their block runs.

    Raises:
        RoomierError: the network lacks the blocks or the output layer that a technique requires.
    """
    network, blocks, device, precision = facts.network, facts.blocks, facts.device, facts.precision
    kernel = attention_context(plan.attention, device, precision.autocast_dtype or precision.weight_dtype)
    context = precision.forward_context()
    levers = Levers(network, FirstForward(context if kernel is nullcontext else both(context, kernel)), kernel)
    levers.undo()  # of an earlier engine
    if residency is not None:
        residency.install()  # innermost, because recomputation calls ``forward`` again
    replace_missing_lstm_kernels(network, precision)  # innermost, because recomputed and compiled blocks call LSTMs
    for warning in size_warnings(network, precision, device):
        notice(warning)
    try:
        if plan.loss.chunked:
            levers.output_layer = apply_chunked_loss(network, blocks, plan.loss.chunk_tokens)
            levers.forward_context.watches.append(LossWatch(levers.output_layer))
        levers.recompute = apply_recompute(blocks, plan.activation, plan.offload, device, facts.ranks)
        if plan.compile.enabled:
            compile_blocks(blocks, device, plan.compile)  # outside recomputation, which is also traced
            levers.recompute.move_compiled()  # outside the compiler, which cannot trace the transfers
            levers.forward_context.watches.append(CompileClock())
    except BaseException:
        levers.undo()
        raise
    return levers
