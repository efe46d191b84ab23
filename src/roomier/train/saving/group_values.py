"""Learning rate, weight decay, betas: after a resume the Plan's where the Plan names the optimizer, else the saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import SGD, Optimizer

from roomier.core.errors import CheckpointError
from roomier.core.log import notice
from roomier.plan import Plan
from roomier.plan.lever_rules import KEEPS_MASTERS, rounding_in_force

_ALL_OF_ONE = ({"lr", "initial_lr", "adamw_lr"}, {"fused", "foreach", "differentiable"})
_NEED_STATES = ("amsgrad", "centered", "momentum")
_DRIVEN = {"lr", "betas", "momentum"}  # by schedulers: what is there is not what was configured
_NUMBERS = (int, float, str, tuple, list)


def check_same_optimizer(stored: Plan, plan: Plan) -> None:
    """Refuse to go on with states of one optimizer by name under another.

    Raises:
        CheckpointError: says how to go on.
    """
    if None not in (stored.optimizer.name, plan.optimizer.name) and stored.optimizer.name != plan.optimizer.name:
        raise CheckpointError(
            "optimizer",
            plan.optimizer.name,
            f"the checkpoint holds the states of {stored.optimizer.name!r}",
            f"Resume with optimizer={stored.optimizer.name!r}, or start a new fit from the weights: "
            "fit(..., weights=<the checkpoint>)",
        )


def changed_in_plan(stored: Plan, plan: Plan, optimizers: Sequence[Optimizer]) -> set[str]:
    """The values of parameter groups that ``plan`` names otherwise than ``stored``.

    Raises:
        CheckpointError: one of them needs states beside each parameter that the checkpoint does not have, or weights
            were kept in another way.
    """
    if plan.optimizer.name is None:
        return set()
    if stored.optimizer.name is None:
        raise CheckpointError(
            "optimizer",
            plan.optimizer.name,
            "the module of the checkpoint configured its own",
            "Configure it as in the run that was saved, or start a new fit from the weights: fit(..., weights=...)",
        )
    _check_rounding(stored, plan)
    before, now = dict(stored.optimizer.options), dict(plan.optimizer.options)
    changed = {name for name in {**before, **now} if before.get(name) != now.get(name)}
    changed |= {
        name for name in ("lr", "weight_decay") if getattr(stored.optimizer, name) != getattr(plan.optimizer, name)
    }
    for name in _NEED_STATES:
        has_states = name == "momentum" and isinstance(optimizers[0], SGD)  # it makes them when they are missing
        if name in changed and now.get(name) and not before.get(name) and not has_states:
            raise CheckpointError(
                f"optimizer.options.{name}",
                now[name],
                "needs optimizer states that the checkpoint does not have",
                "Leave it as in the run that was saved, or start a new fit from the weights",
            )
    return changed.union(*(names for names in _ALL_OF_ONE if names & changed))


def _check_rounding(stored: Plan, plan: Plan) -> None:
    """What weights of bfloat16 had no room for is among the states; in another way of keeping them it would be lost."""
    before, now = rounding_in_force(stored), rounding_in_force(plan)
    if plan.optimizer.name in KEEPS_MASTERS and before != now:
        kept = f"kept {before!r}" if before else f"kept in precision {stored.precision.mode!r}"
        action = "Resume with the precision and weight_rounding of that run, or start a new fit from the weights"
        raise CheckpointError("optimizer.weight_rounding", now, f"the checkpoint has weights {kept}", action)


def put_changed(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], changed: Iterable[str]) -> None:
    """Write the values that were ``changed``, as ``optimizers`` have them, into ``states``, which are loaded next."""
    for optimizer, state in zip(optimizers, states, strict=True):
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            saved.update({name: group[name] for name in changed if name in group and name in saved})


def tell_kept(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], *, has_schedulers: bool) -> None:
    """Say which values a module configures otherwise than those of ``states``, which are used."""
    told: dict[str, None] = {}
    for optimizer, state in zip(optimizers, states, strict=True):
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for name in group.keys() & saved.keys() - ({"params"} | _DRIVEN if has_schedulers else {"params"}):
                now, then = group[name], saved[name]
                if isinstance(now, _NUMBERS) and isinstance(then, _NUMBERS) and _plain(now) != _plain(then):
                    shown = "lr" if name == "initial_lr" else name
                    told[f"{shown}: this run configured {now!r}, the checkpoint's {then!r} is used"] = None
    if told:
        notice("; ".join(sorted(told)))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
