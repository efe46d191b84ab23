"""Parameters of a pipeline: each rank stores those of its stage, and the gradients are summed after the last backward
pass of a step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roomier.core.mesh import REPLICATE, STAGE
from roomier.core.ranks import Ranks
from roomier.techniques.parallel.parallel import Parallel
from roomier.techniques.parallel.replicate import reduce_gradients


class Stages(Parallel):
    """Network of which each rank stores one stage, or a shard of it. Ranks of the same stage have the same parameters,
    or shards of them, and different samples.

    Parameters of other stages are *absent*: they have their names and shapes, but are on the meta device.

    Args:
        network: network whose absent parameters are on the meta device.
        ranks: all ranks of the run.
        owners: for each parameter, the first stages of the ranks that store it.
        wire_dtype: dtype in which gradients are sent; None uses the dtype of each gradient.
    """

    def __init__(
        self,
        network: nn.Module,
        ranks: Ranks,
        owners: Mapping[str, tuple[int, ...]],
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._replicas, self._column, self._wire_dtype = ranks.along(REPLICATE), ranks.along(STAGE), wire_dtype
        self._network, self._owners_by_name, self._stage = network, owners, ranks.mesh.stage_index
        size = ranks.world.size // ranks.mesh.stage
        columns = [range(ranks.world.size)[first::size][::-1] for first in range(size)]  # the ranks of each stage
        self._sharing: dict[tuple[int, ...], Ranks] = {}
        for stages in sorted(each for each in {*owners.values()} if len(each) > 1):
            sharing = ranks.among([column[stage] for stage in stages] for column in columns)
            if sharing is not None:
                self._sharing[stages] = sharing

    @cached_property
    def _owners(self) -> Mapping[Tensor, tuple[int, ...]]:
        self.release()  # before reading parameters by name
        return {each: self._owners_by_name[name] for name, each in self._network.named_parameters()}

    def reduce(self) -> None:
        """Sum the gradients of shared weights over the stages that use them, and all gradients over the replicas."""
        own = [each for each, stages in self._owners.items() if self._stage in stages and each.requires_grad]
        for stages, ranks in self._sharing.items():
            reduce_gradients([each for each in own if self._owners[each] == stages], ranks, self._wire_dtype)
        if not self._replicas.is_alone:
            reduce_gradients(own, self._replicas, self._wire_dtype)

    def join_norms(self, norms: Mapping[Tensor, Tensor]) -> Tensor:
        # A shared weight is counted by the first of its stages.
        own = {each: norm for each, norm in norms.items() if self._owners[each][0] == self._stage}
        norm = super().join_norms(own)
        square = norm.double().square()  # a stage without gradients does not know their dtype
        dist.all_reduce(square, group=self._column.process_group)
        return square.sqrt().to(norm.dtype)
