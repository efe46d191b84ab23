"""Programs with offloaded optimizer states, in which a missing synchronization changes numbers or is a race."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from roomier.checkpoint.agree import all_ranks
from roomier.core.log import quiet
from roomier.core.sharded import local_part
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.plan import plan_from_flags
from tests.device.mutant_programs import Language
from tests.device.mutant_scenario import DEVICE
from tests.simulator.gpt import batches

_NUM_STEPS = 4


class FrozenLater(Language):
    """A small GPT. After some steps, the first blocks receive no gradients.

    Attributes:
        is_frozen: True if gradients end after the second block.
    """

    def __init__(self) -> None:
        super().__init__((0, 1, 2), None, False)
        self.is_frozen = False
        self.network.blocks[1].register_forward_hook(self._detached)

    def _detached(self, block: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.detach() if self.is_frozen else output


def offloaded_states() -> list[Any]:
    """Train with optimizer states in host memory. Return the states, which are read there, and the weights.

    The states of the frozen blocks are copied ahead and dropped, because no gradient requires an update.
    """
    module = FrozenLater()
    engine = _engine_of(module, {"optimizer_states": "cpu", "update": "speculative"})
    for step, batch in enumerate(batches(_NUM_STEPS)):
        module.is_frozen = step >= _NUM_STEPS - 2
        engine.forward_backward(lambda own, _: module.training_step(own, 0), [[batch]])
        engine.step()
    engine.settle()
    (optimizer,) = engine.optimizers
    states = [each for own in optimizer.state.values() for each in own.values() if each.device.type == "cpu"]
    found = [each.clone() for each in states]  # before other code waits for the device
    engine.close()
    return [*found, *(each.detach().cpu() for each in module.parameters())]


def offloaded_states_of_shards() -> list[Any]:
    """Train a sharded model with deferred updates. Return this rank's shards of the weights."""
    module = Language((0, 1, 2), None, False)
    engine = _engine_of(module, {"optimizer_states": "cpu", "update": "deferred"}, strategy="zero3", devices=2)
    for batch in batches(_NUM_STEPS):
        engine.forward_backward(lambda own, _: module.training_step(own, 0), [[batch]])
        engine.step()
    engine.close()
    return [local_part(each.detach()).cpu() for each in module.parameters()]


def _engine_of(module: Language, offload: dict[str, str], **options: Any) -> EagerEngine:
    plan = plan_from_flags(accelerator=DEVICE, optimizer="adamw", learning_rate=3e-3, offload=offload, **options)
    with quiet():
        engine, _ = build(
            plan, module, lambda blocks: configure(plan, module, lambda: 1.0, blocks), EagerEngine, all_ranks()
        )
    return engine
