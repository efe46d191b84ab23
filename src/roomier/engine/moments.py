"""Moments of a step. At each moment, the engine calls the methods that its techniques provide for this moment.

[Note: moments]
A technique that is not used could be an object with empty methods, but calling these methods in every step would take
time. Instead, the engine determines once which techniques are active, and collects their methods in one tuple per
moment. Most tuples are empty. A new technique adds its methods in :func:`moments_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roomier.engine.forward_levers import Levers
from roomier.engine.parallel import Parallel
from roomier.engine.updates import Updates

Calls = tuple[Callable[..., Any], ...]


@dataclass(frozen=True)
class Moments:
    """Functions to call at each moment of a step, in the order of the calls.

    Attributes:
        begin_step: called before the first micro-batch. Arguments: the optimizers and the micro-batches.
        begin_micro_batch: called before each forward pass. Keyword arguments: ``is_first`` and ``is_last``.
        begin_backward: called before each backward pass.
        end_backward: called after each backward pass.
        end_gradients: called after the last backward pass of a step.
        abandon: called in place of ``end_gradients`` if an error interrupted the step.
        begin_update: called before the optimizers step. Argument: the closure or None.
        end_update: called after the steps of the optimizers.
    """

    begin_step: Calls
    begin_micro_batch: Calls
    begin_backward: Calls
    end_backward: Calls
    end_gradients: Calls
    abandon: Calls
    begin_update: Calls
    end_update: Calls


def moments_of(parallel: Parallel, levers: Levers, updates: Updates) -> Moments:
    """Collect the methods of the active techniques."""
    recompute = levers.recompute
    divides, recomputes, chunks = parallel.runner is not None, bool(recompute.blocks), levers.output_layer is not None
    return Moments(
        # Recomputation is last, because its measurement is not abandoned if a later begin_step method raises an error.
        begin_step=(updates.begin_step,) * updates.acts + (recompute.begin_step,) * recomputes,
        begin_micro_batch=(parallel.begin_micro_batch,) * divides + (updates.begin_micro_batch,) * updates.acts,
        begin_backward=(parallel.begin_backward,) * divides,
        end_backward=(parallel.end_backward,) * divides,
        end_gradients=(recompute.end_step,) * recomputes,
        abandon=(recompute.abandon_step,) * recomputes,
        begin_update=(updates.end_step,) * updates.acts,
        end_update=(levers.end_update,) * chunks + (parallel.end_update,) * divides,
    )
