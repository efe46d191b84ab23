"""Values of parameter groups after a resume, such as learning rate, weight decay and betas.

If the Plan names the optimizer, values that differ from the Plan of the checkpoint are taken from the current Plan. All
other values are taken from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import SGD, Optimizer

from roomier.core.errors import CheckpointError
from roomier.core.log import notice
from roomier.plan import Plan
from roomier.plan.levers import keeps_low_bits, rounding_in_force

_ALL_OF_ONE = ({"lr", "initial_lr", "adamw_lr"}, {"fused", "foreach", "differentiable"})
_NEED_STATES = ("amsgrad", "centered", "momentum")
_DRIVEN = {"lr", "betas", "momentum"}  # schedulers change these values, so current values differ from configured values
_NUMBERS = (int, float, str, tuple, list)


def check_same_optimizer(stored: Plan, plan: Plan) -> None:
    """Check that the stored plan and the current plan do not name different optimizers.

    Raises:
        CheckpointError: the plans name different optimizers.
    """
    if None not in (stored.optimizer.name, plan.optimizer.name) and stored.optimizer.name != plan.optimizer.name:
        raise CheckpointError(
            "optimizer",
            plan.optimizer.name,
            f"the checkpoint contains the states of {stored.optimizer.name!r}",
            f"Resume with optimizer={stored.optimizer.name!r}, or start a new fit from the weights: "
            "fit(..., weights=<the checkpoint>)",
        )


def changed_in_plan(stored: Plan, plan: Plan, optimizers: Sequence[Optimizer]) -> set[str]:
    """Return the names of the parameter-group values that differ between ``plan`` and ``stored``.

    Raises:
        CheckpointError: a value requires optimizer states that the checkpoint does not contain, or the weights were
            stored with a different rounding mode.
    """
    if plan.optimizer.name is None:
        return set()
    if stored.optimizer.name is None:
        raise CheckpointError(
            "optimizer",
            plan.optimizer.name,
            "the module of the checkpoint configured its optimizer itself",
            "Configure the optimizer as in the saved run, or start a new fit from the weights: fit(..., weights=...)",
        )
    _check_rounding(stored, plan)
    before, now = dict(stored.optimizer.options), dict(plan.optimizer.options)
    changed = {name for name in {**before, **now} if before.get(name) != now.get(name)}
    changed |= {
        name for name in ("lr", "weight_decay") if getattr(stored.optimizer, name) != getattr(plan.optimizer, name)
    }
    for name in _NEED_STATES:
        has_states = name == "momentum" and isinstance(optimizers[0], SGD)  # SGD creates missing states
        if name in changed and now.get(name) and not before.get(name) and not has_states:
            problem = "requires optimizer states that the checkpoint does not have"
            action = "Use the value of the saved run, or start a new fit from the weights"
            raise CheckpointError(f"optimizer.options.{name}", now[name], problem, action)
    return changed.union(*(names for names in _ALL_OF_ONE if names & changed))


def _check_rounding(stored: Plan, plan: Plan) -> None:
    """Check that the rounding of bfloat16 weights did not change.

    The optimizer states contain the bits that bfloat16 weights cannot store. A different rounding mode would lose these
    bits.
    """
    before, now = rounding_in_force(stored), rounding_in_force(plan)
    if keeps_low_bits(plan.optimizer.name) and before != now:
        kept = f"weight_rounding={before!r}" if before else f"precision={stored.precision.mode!r}"
        action = "Resume with the precision and weight_rounding of the saved run, or start a new fit from the weights"
        raise CheckpointError(
            "optimizer.weight_rounding", now, f"the weights in the checkpoint were trained with {kept}", action
        )


def put_changed(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], changed: Iterable[str]) -> None:
    """Copy the values named in ``changed`` from ``optimizers`` to ``states``, which are loaded afterwards."""
    for optimizer, state in zip(optimizers, states, strict=True):
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            saved.update({name: group[name] for name in changed if name in group and name in saved})


def report_kept_values(
    optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], *, has_schedulers: bool
) -> None:
    """Print a notice about values in the module's configuration that differ from the values in ``states``. The saved
    values are used."""
    reported: dict[str, None] = {}
    for optimizer, state in zip(optimizers, states, strict=True):
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for name in group.keys() & saved.keys() - ({"params"} | _DRIVEN if has_schedulers else {"params"}):
                now, then = group[name], saved[name]
                if isinstance(now, _NUMBERS) and isinstance(then, _NUMBERS) and _plain(now) != _plain(then):
                    shown = "lr" if name == "initial_lr" else name
                    text = f"{shown}: this run configured {now!r}, but the saved value {then!r} is used"
                    reported[text] = None
    if reported:
        notice("; ".join(sorted(reported)))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
