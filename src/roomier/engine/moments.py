"""Moments of a step. At each moment, the engine calls the methods that its techniques provide for this moment.

[Note: moments]
A technique that is not used could be an object with empty methods, but calling these methods in every step would take
time. The engine instead determines once which techniques are active, and collects their methods in one tuple per
moment. Most tuples are empty. To add a technique, add its methods in :class:`Moments`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roomier.engine.forward_levers import Levers
from roomier.engine.updates import Updates
from roomier.techniques.parallel.parallel import Parallel

Calls = tuple[Callable[..., Any], ...]


class Moments:
    """Functions to call at each moment of a step, in the order of the calls.

    Args:
        parallel, levers, updates: the techniques. Only the methods of active techniques are collected.

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

    def __init__(self, parallel: Parallel, levers: Levers, updates: Updates) -> None:
        recompute, divides, chunks = levers.recompute, parallel.runner is not None, levers.output_layer is not None
        recomputes = bool(recompute.blocks)
        # Recomputation is last, because its measurement is not abandoned if a later begin_step method raises an error.
        self.begin_step: Calls = (updates.begin_step,) * updates.acts + (recompute.begin_step,) * recomputes
        self.begin_micro_batch: Calls = (parallel.begin_micro_batch,) * divides
        self.begin_micro_batch += (updates.begin_micro_batch,) * updates.acts
        self.begin_backward: Calls = (parallel.begin_backward,) * divides
        self.end_backward: Calls = (parallel.end_backward,) * divides
        self.end_gradients: Calls = (recompute.end_step,) * recomputes
        self.abandon: Calls = (recompute.abandon_step,) * recomputes
        self.begin_update: Calls = (updates.end_step,) * updates.acts
        self.end_update: Calls = (levers.end_update,) * chunks + (parallel.end_update,) * divides
