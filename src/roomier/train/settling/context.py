"""Checks of a plan in which ranks share samples, before the model is built. Only rank 0 calls these functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roomier.api.module import Module, network_of
from roomier.core.errors import PlanError, RoomierError
from roomier.core.ranks import Ranks
from roomier.data.share import share_of
from roomier.plan import Plan
from roomier.planner.workload import Workload
from roomier.run.loaders import RunLoaders
from roomier.run.settled import Settled
from roomier.techniques.context.check import check_blocks
from roomier.techniques.context.region import FIELD
from roomier.train.settling.checks import check_hooks_allow_stages, check_supports_stages


def checked_region(plan: Plan, module: Module, batch: Any) -> list[Any]:
    """Return the blocks of ``module`` that run on slices of the sequence, as plain data, after a check of these blocks.

    Raises:
        RoomierError: the model or the batch does not support slices.
    """
    from roomier.planner.context import find_context_region  # late import: loads torch's sharding

    region, examples = find_context_region(module, batch, plan)
    if failing := check_blocks(network_of(module), examples, plan.parallel.context_parallel_size):
        region, _ = find_context_region(module, batch, plan, failing)
    return region.as_data()


def peers_check(settled: Settled, workload: Workload) -> Callable[[Plan], None]:
    """Return a function that checks whether the model, the batch, the callbacks and the loader support the context size
    and the number of stages of a plan. The blocks are checked once for each context size.

    The function raises a RoomierError if the model, the batch or a callback does not support them, or if the planner
    chose them and the loader already divides its data among all ranks.
    """
    known: dict[int, RoomierError | None] = {}

    def check(plan: Plan) -> None:
        check_supports_stages(plan, settled.callbacks, workload.module)
        if plan.parallel.num_peers > settled.plan.parallel.num_peers:
            check_is_divided_by_roomier(plan, settled.data, settled.ranks)
            check_hooks_allow_stages(plan, settled.callbacks)
        size = plan.parallel.context_parallel_size
        if size > 1 and size not in known:
            try:
                checked_region(plan, workload.module, workload.batch)
                known[size] = None
            except RoomierError as error:
                known[size] = error
        if (error_of_size := known.get(size)) is not None:
            raise error_of_size

    return check


def check_is_divided_by_roomier(plan: Plan, data: RunLoaders, ranks: Ranks) -> None:
    """Check that the training data can be divided among the data ranks of ``plan``, which the planner chose.

    Raises:
        PlanError: the loader already divides its data among all ranks.
    """
    divided_by = share_of(data.train_loader, ranks.world).divided_by
    if divided_by is not None:
        problem = f"cannot be chosen by strategy='auto', because {divided_by} divides the training data among all ranks"
        field = FIELD if plan.parallel.context_parallel_size > 1 else "pipeline_parallel_size"
        action = f"Set {field} in the dict of the strategy"
        raise PlanError(field, plan.parallel.num_peers, problem, action)
