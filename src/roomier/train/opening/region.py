"""Search for the blocks of a model that run on slices of the sequence, before the model is built."""

from __future__ import annotations

from typing import Any

from roomier.api.adapt import seen_by_user
from roomier.api.module import Module
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.units import format_bytes
from roomier.engine.divide import is_sharded
from roomier.engine.facts import Facts, check_module
from roomier.run.settled import Settled
from roomier.techniques.context.region import FIELD, SequenceRegion
from roomier.train.settling.context import checked_region
from roomier.train.settling.planned import alone, on_host

_REGION = "_roomier_region"


def region_of(settled: Settled, module: Module, facts: Facts) -> SequenceRegion | None:
    """Return the blocks of ``module`` that run on slices of the sequence. Every rank must call this function.

    In a fit, rank 0 runs two dry passes of the training step with the first batch, and checks the blocks. If an earlier
    fit sharded the network, its region is returned, because a dry pass is no longer possible. ``validate`` and ``test``
    use the region of the earlier fit, as the validation in a fit does. Without an earlier fit, and in ``predict``,
    whose outputs can contain any hidden state, the blocks run on full sequences, and the result is None.

    Raises:
        RoomierError: the model or the batch does not support slices, or another module class sharded the network.
    """
    network, plan, request = facts.network, settled.plan, settled.request
    size, user_class = plan.parallel.context_parallel_size, type(seen_by_user(module))
    key = f"{size} {user_class.__module__}.{user_class.__qualname__}"
    known: dict[str, SequenceRegion] = network.__dict__.setdefault(_REGION, {})
    if not request.is_fit:
        return None if request.stage == "predict" else known.get(key)
    check_module(plan, module, network)
    if key not in known and is_sharded(network):
        problem = "requires a dry run of the training step, which is not possible with a model that a run of "
        problem += "another class, or validate, test or predict, has sharded"
        action = "Call fit first, or create the model again and load its weights from a checkpoint"
        raise RoomierError(FIELD, size, problem, action)
    if not is_sharded(network):
        _ = settled.data.train_loader  # created on all ranks, because the constructor may use collectives
        known[key] = SequenceRegion.from_data(settled.ranks.on_zero(lambda: _find(settled, module)))
    region = known[key]
    if region.logits_bytes and not plan.loss.chunked:
        notice(
            f"context_parallel_size={size}: each of the {size} ranks computes the logits of all tokens, which need "
            f"{format_bytes(region.logits_bytes)} with their gradients, although it requires only 1/{size} of them. "
            "Set chunked_loss=True, so that each rank computes its share in chunks"
        )
    return region


def _find(settled: Settled, module: Module) -> list[Any]:
    batch = settled.data.first_batch()
    with alone(module):
        return checked_region(settled.plan, module, on_host(settled, module, batch))
