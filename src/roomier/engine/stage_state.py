"""State of one stage of a pipeline in the form of the full model, for checkpoints.

Each parameter and each of its optimizer states is a DTensor that is replicated on the ranks of its stages. On other
ranks, this DTensor has a shape, but no values. Checkpoints of a pipeline are therefore written and read like those of a
sharded model: the ranks of a stage take turns in writing, and each rank reads only the tensors that it stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roomier.checkpoint.agree import together
from roomier.checkpoint.tree import TensorSpec
from roomier.core import torch_private
from roomier.core.ranks import Ranks
from roomier.core.sharded import is_sharded, local_part, with_local_part
from roomier.core.tree import map_tensors
from roomier.engine.optimizer_state import shard_like


class StageState:
    """Conversion between the state of a stage and the state of the full model. Every rank must create it.

    Args:
        network: network whose parameters are on the meta device if this stage does not store them.
        owners: for each parameter, and for each buffer of a unit, the first stages of the ranks that store it.
        ranks: all ranks of the run.
        stage: number of this rank's first stage.
    """

    def __init__(self, network: nn.Module, owners: Mapping[str, tuple[int, ...]], ranks: Ranks, stage: int) -> None:
        self._network, self._ranks, self._stage = network, ranks, stage
        self._stages = ranks.gather(stage)
        self._stages_of_peers = ranks.peers.gather(stage)
        tensors: list[tuple[str, Tensor]] = [*network.named_parameters(remove_duplicate=False)]
        first_names = {each: name for name, each in reversed(tensors)}
        self._owners = {name: owners[first_names[each]] for name, each in tensors}
        self._first_names = {name: first_names[each] for name, each in tensors}
        self._buffers = {name: stages for name, stages in owners.items() if name not in self._owners}

    def share_buffers(self) -> None:
        """Copy each buffer of a unit from the stage that runs the unit to the other stages. Every rank must call this
        method."""
        buffers = dict(self._network.named_buffers(remove_duplicate=False))
        for name, stages in self._buffers.items():
            sent = buffers[name].contiguous()
            source, peers = self._stages_of_peers.index(stages[0]), self._ranks.peers
            # gloo does not send all dtypes
            dist.broadcast(sent.view(-1).view(torch.uint8), group_src=source, group=peers.process_group)
            if sent is not buffers[name]:
                buffers[name].copy_(sent)

    def full_weights(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``weights``, a state dict of the network, with a DTensor for each parameter."""
        made: dict[str, Tensor] = {}  # tied parameters are the same DTensor, also on ranks without values
        for name, each in weights.items():
            if name in self._owners and self._first_names[name] not in made:
                made[self._first_names[name]] = self._placed(each, self._owners[name])
        return {name: made.get(self._first_names.get(name, ""), each) for name, each in weights.items()}

    def own_weights(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``weights``, a state dict of the full model, with the shards of this rank. Parameters that this
        stage does not store are on the meta device."""
        parameters = dict(self._network.named_parameters(remove_duplicate=False))

        def own(name: str, value: Any) -> Any:
            parameter = parameters.get(name)
            if not isinstance(value, Tensor) or parameter is None:
                return local_part(value) if isinstance(value, Tensor) else value
            if parameter.is_meta:
                return parameter
            return with_local_part(parameter, local_part(value)) if is_sharded(value) else shard_like(parameter, value)

        return {name: own(name, each) for name, each in weights.items()}

    def full_optimizer(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``state``, a result of :func:`roomier.engine.optimizer_state.optimizer_state`, with the states of all
        stages. Every rank must call this method."""
        own = self.own_optimizer(state)["state"]
        is_first = self._stages.index(self._stage) == self._ranks.world.rank
        sent = {name: map_tensors(_spec_of, each) for name, each in own.items() if is_first}
        specs: dict[str, Any] = {}
        for of_rank in together(self._ranks, lambda: sent):
            specs.update(of_rank)
        names = (name for group in state["param_groups"] for name in group["params"] if name in specs)
        return {**state, "state": {name: self._placed_all(own.get(name, specs[name]), name) for name in names}}

    def own_optimizer(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``state`` without the states of parameters that this stage does not store."""
        own = {name: each for name, each in state["state"].items() if self._stage in self._owners[name]}
        return {**state, "state": own}

    def own_places(self, state: Mapping[str, Any], unneeded: object) -> dict[str, Any]:
        """Return ``state``, the places of an optimizer's states, with ``unneeded`` in place of each tensor that this
        stage does not store."""
        own = self.own_optimizer(state)["state"]
        others = map_tensors(lambda _: unneeded, state["state"])
        return {**state, "state": {**others, **own}}

    def _placed_all(self, values: Any, name: str) -> Any:
        place = partial(self._placed, stages=self._owners[name])
        return map_tensors(place, values, is_leaf=lambda each: isinstance(each, TensorSpec))

    def _placed(self, values: Tensor | TensorSpec, stages: Iterable[int]) -> Tensor:
        """Return a DTensor with the shape of ``values``, replicated on ``stages`` and sharded like ``values``."""
        from torch.distributed.tensor import DTensor, Replicate  # slow to import

        like = torch.empty(values.shape, dtype=values.dtype, device="meta")
        local = torch.empty([0] * like.dim(), dtype=like.dtype)
        if isinstance(values, Tensor) and not values.is_meta:
            local = local_part(values.detach())
        own = values.placements if isinstance(values, DTensor) else [Replicate()]
        ranks = [[rank for rank, stage in enumerate(self._stages) if stage == each] for each in stages]
        mesh, own = torch_private.mesh_without_groups(local.device.type, ranks), [Replicate(), *own]
        return DTensor.from_local(local, mesh, own, run_check=False, shape=like.shape, stride=like.stride())


def _spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)
