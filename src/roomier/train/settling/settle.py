"""Settle a call, that is, determine its plan and its micro-batches before the model is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from roomier.core.errors import NoForecastError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.plan import Plan
from roomier.plan.parts import ChoicePlan
from roomier.run.loaders import RunLoaders
from roomier.run.settled import Request, Settled, Start
from roomier.train.settling.job import with_global_batch
from roomier.train.settling.planned import may_not_fit, planned


def settle(
    request: Request, data: RunLoaders, ranks: Ranks, *, start: Start | None = None, callbacks: Sequence[Any] = ()
) -> Settled:
    """Determine the facts of a run: a plan with a named strategy, and the corresponding micro-batches.

    Args:
        request: call to settle.
        data: the loaders. The function adjusts the size of their micro-batches to the returned plan.
        ranks: the ranks of the run. All ranks must call this function.
        start: the checkpoint and the folder of the run.
        callbacks: the callbacks of the run.

    Raises:
        RoomierError: no plan fits, the steps of the model cannot be forecast, or the batches cannot be split.
    """
    start = start or Start()
    settled = Settled(request, start, request.plan, data, ranks, callbacks)
    if not request.is_fit:
        settled = dataclasses.replace(settled, plan=_plan_without_forecast(request.plan))
    elif request.is_planned or (start.batch is not None and may_not_fit(settled)):
        try:
            settled = planned(settled)
        except NoForecastError as error:
            asked = request.plan.parallel.strategy
            if request.plan.choice.memory_budget_bytes is not None or (request.is_planned and asked != "auto"):
                raise
            plan = _plan_without_forecast(request.plan)
            if ranks.is_zero:
                name = plan.parallel.strategy
                notice(f"strategy={asked!r} uses {name!r}, because no forecast is possible: {error}")
            settled = dataclasses.replace(settled, plan=plan)
    plan = settled.plan
    if request.cut is not None:
        plan = request.cut(plan, data, request)
    if start.batch is not None:
        plan = with_global_batch(plan, request.module, data, start.batch)
    if not ranks.is_alone:  # the plan determines which ranks read the same samples
        ranks = data.ranks = ranks.arranged(plan.parallel.mesh_on(ranks.world))
    return dataclasses.replace(settled, plan=plan, ranks=ranks)


def _plan_without_forecast(asked: Plan) -> Plan:
    """Return ``asked`` with Lightning's meaning of ``strategy="auto"``: each rank has a full replica.

    In an evaluation, a later fit can then shard the model in any way.
    """
    if asked.parallel.strategy != "auto":
        return asked
    parallel = dataclasses.replace(asked.parallel, strategy="single" if asked.parallel.num_ranks == 1 else "ddp")
    return dataclasses.replace(asked, parallel=parallel, choice=ChoicePlan(asked.choice.memory_budget_bytes))
