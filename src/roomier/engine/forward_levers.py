"""Memory techniques that act inside a forward pass. Comments explain the order in which they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roomier.api.blocks import open_blocks
from roomier.core.device.events import install_events
from roomier.core.log import notice
from roomier.core.mesh import CONTEXT
from roomier.core.wrapped_forward import unwrap
from roomier.engine.compile import CompileClock, compile_blocks
from roomier.engine.facts import Facts
from roomier.plan import Plan
from roomier.techniques.activation.block_forward import Recompute
from roomier.techniques.activation.recompute import apply_recompute
from roomier.techniques.attention.kernels import attention_context
from roomier.techniques.context.exchange import ContextGroup
from roomier.techniques.context.forward import install_exchange, install_slices
from roomier.techniques.loss.chunked import LossWatch, apply_chunked_loss
from roomier.techniques.pipeline.stage import PipelineStage
from roomier.techniques.pipeline.units import find_units
from roomier.techniques.precision.lstm import replace_missing_lstm_kernels
from roomier.techniques.precision.sizes import size_warnings

if TYPE_CHECKING:
    from roomier.techniques.offload.parameters import OffloadedParameters


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
        stage: the stage of a pipeline that this rank runs; None without a pipeline.
        output_layer: the layer whose logits are computed in chunks; None without a chunked loss.
    """

    network: nn.Module
    forward_context: FirstForward
    backward_context: MakeContext
    recompute: Recompute = field(default_factory=lambda: Recompute(()))
    output_layer: nn.Linear | None = None
    stage: PipelineStage | None = None

    def end_update(self) -> None:
        """Mark the output layer's weights as changed, because fused optimizers bypass autograd's version counters."""
        if self.output_layer is not None:
            torch.autograd.graph.increment_version(list(self.output_layer.parameters()))

    def undo(self) -> None:
        """Restore the original ``forward`` methods, and free offloaded activations. Parameters keep their values."""
        unwrap(self.network)
        if self.stage is not None:
            self.stage.close()
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
    region, group, peers = facts.region, None, None
    if region is not None:
        peers = facts.ranks.along(CONTEXT).process_group
        group = ContextGroup(peers)
        install_exchange(network, region, group)  # innermost, because recomputation repeats it
    if residency is not None:
        residency.install()  # innermost, because recomputation calls ``forward`` again
    replace_missing_lstm_kernels(network, precision)  # innermost, because recomputed and compiled blocks call LSTMs
    for warning in size_warnings(network, precision, device):
        notice(warning)
    try:
        if plan.loss.chunked:
            levers.output_layer = apply_chunked_loss(network, blocks, plan.loss.chunk_tokens, peers)
            levers.forward_context.watches.append(LossWatch(levers.output_layer))
        recomputed = blocks if facts.pipeline is None else open_blocks(blocks)  # a stage can begin within a block
        levers.recompute = apply_recompute(recomputed, plan.activation, plan.offload, device, facts.ranks)
        if plan.compile.enabled:
            compile_blocks(blocks, device, plan.compile)  # outside recomputation, which is also traced
            levers.recompute.move_compiled()  # outside the compiler, which cannot trace the transfers
            levers.forward_context.watches.append(CompileClock())
        if region is not None and group is not None:
            install_slices(network, region, group)  # outermost, because other code uses the full sequence
        if facts.pipeline is not None:
            levers.stage = PipelineStage(network, find_units(network, blocks), device)  # skips all of the above
        if plan.batch.seeding == "events":
            blocks_on_slices = [] if region is None else [network.get_submodule(each.name) for each in region.blocks]
            sliced = {part for each in blocks_on_slices for part in each.modules()}
            # Outermost, because its seeds are set outside of compiled code, and skipped units draw the same numbers.
            install_events(find_units(network, blocks).values(), sliced)
    except BaseException:
        levers.undo()
        raise
    return levers
