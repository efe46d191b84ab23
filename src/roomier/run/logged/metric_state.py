"""States of torchmetrics objects in a checkpoint. The ``state_dict`` of a module does not contain these states.

The state of each rank is stored separately: ``{"0": {...}, "1": {...}}``. If the run resumes on fewer ranks, the states
of several ranks are merged; if it resumes on more, the additional ranks start without a state.

This module does not import torchmetrics, because a program that uses torchmetrics objects has already imported the
package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from roomier.core import torch_private
from roomier.core.forms import anything, fields, item_of, tensor
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.world import World


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """Return the torchmetrics metrics among the submodules of ``module``, by qualified name."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return {}
    for each in module.modules():
        if isinstance(each, torchmetrics.MetricCollection):
            each.values(copy_state=False)  # metrics that share an update get the state of the updated metric
    return {name: each for name, each in module.named_modules() if isinstance(each, torchmetrics.Metric)}


class _GatherOfDataRanks:
    """Function that torchmetrics calls to gather a state. Each sample counts once, although several ranks read it.

    A copied module keeps the function. A pickled module does not, because a process group cannot be pickled.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        from torchmetrics.utilities.distributed import (
            gather_all_tensors,  # late import: see the docstring of the module
        )

        gathered: list[Tensor] = gather_all_tensors(tensor, self._ranks.process_group if group is None else group)
        return gathered

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOfDataRanks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def gather_from_data_ranks(module: nn.Module, ranks: Ranks) -> None:
    """Let the metrics of ``module`` compute over the data ranks of ``ranks``, unless the user chose other ranks."""
    for metric in metrics_of(module).values():
        if metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, _GatherOfDataRanks):
            metric.dist_sync_fn = None if ranks.data is ranks else _GatherOfDataRanks(ranks.data)


def metric_states(module: nn.Module) -> dict[str, Any]:
    """Return ``{name: {"state": {...}, "num_updates": n}}`` for the metrics that were updated since their last
    reset."""
    return {
        name: {
            "state": _mapped(metric.metric_state, lambda tensor: tensor.detach().clone()),
            "num_updates": metric.update_count,
        }
        for name, metric in metrics_of(module).items()
        if metric.update_count
    }


def check_metric_states(module: nn.Module, by_rank: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that stored states have the same names and kinds as the states of the metrics in ``module``.

    Without this check, a state with a different name could replace a method. Shapes are not checked, because the first
    batch may change them.

    Raises:
        FormError: the name or the kind of a state differs.
    """
    metrics = metrics_of(module)
    for rank, states in by_rank.items():
        for name in metrics.keys() & states.keys():
            place = item_of(item_of(item_of("metrics", rank), name), "state")
            own = metrics[name].metric_state.items()
            forms = {key: anything if isinstance(value, list) else tensor() for key, value in own}
            fields(forms)(states[name]["state"], place)


def load_metric_states(module: nn.Module, by_rank: Mapping[str, Mapping[str, Any]], world: World) -> None:
    """Restore the values that :func:`metric_states` returned on each rank.

    A notice reports stored states of metrics that no longer exist, and states that roomier cannot merge.
    """
    metrics = metrics_of(module)
    for rank in sorted(map(int, by_rank)):
        for name, saved in by_rank[str(rank)].items():
            if name not in metrics:
                action = "which this module does not have. The state is ignored"
                notice(f"the checkpoint has a state of metric {name!r}, {action}")
            elif rank % world.size == world.rank:
                _load(metrics[name], name, saved, merges=rank >= world.size)


def _load(metric: Any, name: str, saved: Mapping[str, Any], *, merges: bool) -> None:
    state = _mapped(saved["state"], lambda tensor: tensor.to(metric.device))
    num_updates = saved["num_updates"]
    if merges and metric.update_called:
        own, num_own = dict(metric.metric_state), metric.update_count
        try:
            metric.merge_state(state)
        except RuntimeError as error:
            notice(
                f"metric {name!r} cannot be merged for fewer ranks, so its value of this epoch is incomplete ({error})"
            )
            state, num_updates = own, 0
        else:
            state = dict(metric.metric_state)
        num_updates += num_own
    torch_private.load_metric_state(metric, state, num_updates)


def _mapped(state: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    # A state is a tensor or a list of tensors.
    return {
        name: [change(each) for each in value] if isinstance(value, list) else change(value)
        for name, value in state.items()
    }
