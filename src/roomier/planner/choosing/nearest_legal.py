"""The valid plan that is nearest to an invalid request. A few keywords differ from the request, and all other keywords
stay as requested.

[Note: near]
Some keywords determine the result of training, and other keywords determine how the result is computed. If possible,
the nearest plan changes only keywords that determine how the result is computed. A different strategy computes the same
result. Without a memory technique, training computes the same result, but requires more memory. A different precision
or optimizer changes the result and has the highest cost. Among changes of equal cost, changes that the error itself
suggests have precedence.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roomier.api.module import Module
from roomier.core.device.resolve import accelerator_type, resolve_device
from roomier.core.errors import PlanError, RoomierError
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.plan import Plan, plan_from_flags
from roomier.plan.choices import CHOICES, OFFLOADING_STRATEGIES, STRATEGY_SUFFIXES, canonical
from roomier.plan.levers import LEVERS
from roomier.plan.rules import CombinedPlanError, each_error
from roomier.planner.choosing.keywords import as_call
from roomier.planner.fake.fake_world import fake_world
from roomier.planner.fake.shapes import shapes_of

Keywords = Mapping[str, Any]
Works = Callable[[Plan], bool]

_MAX_EDITS = 3
_MAX_BUILDS = 12  # maximum number of builds that are tried for one error
_STRATEGIES = ("zero2", "ddp", "zero3", "zero1", "single", "hsdp")
_DEFAULT = object()


@dataclass(frozen=True)
class _Edit:
    """One change to a request, which consists of keywords with new values and the cost of the change. The value
    ``_DEFAULT`` removes a keyword."""

    changes: Mapping[str, Any]
    cost: float


def with_nearest(
    error: RoomierError, asked: Keywords, works: Works | None = None, *, fixed: Collection[str] = ()
) -> RoomierError:
    """Return ``error`` with advice that contains the nearest valid plan as keywords to copy. If no such plan is found,
    return ``error`` unchanged.

    Args:
        error: error that the request caused.
        asked: keywords of the Trainer that the user set to values other than the defaults.
        works: function that returns whether a valid plan can be built; None checks only the device of the plan. The
            device is not checked if this machine lacks the accelerator in ``asked``, because the run is planned for
            another machine.
        fixed: keywords that must not change.
    """
    found = nearest_legal(error, asked, works or _works_here(asked), fixed=fixed)
    if not found:  # either None, or a Trainer without keywords, which is no useful advice
        return error
    advice = f"The nearest plan that works: {as_call(found)}"
    if isinstance(error, CombinedPlanError):
        *others, last = each_error(error)
        last = PlanError(last.field, last.received, last.problem, _with(last, advice))
        return CombinedPlanError([*others, last], error.subject)
    return type(error)(error.field, error.received, error.problem, _with(error, advice))


def nearest_legal(
    error: RoomierError, asked: Keywords, works: Works, *, fixed: Collection[str] = ()
) -> dict[str, Any] | None:
    """Return ``asked`` with the smallest changes that result in a valid plan; None if no such changes are found."""
    edits = sorted(_edits(asked, error), key=lambda each: each.cost)
    edits = [each for each in edits if not each.changes.keys() & set(fixed)]
    num_builds = 0
    for num_edits in range(1, _MAX_EDITS + 1):
        combined = [
            each for each in itertools.combinations(edits[: 40 // num_edits + 4], num_edits) if _are_apart(each)
        ]
        for chosen in sorted(combined, key=lambda each: sum(edit.cost for edit in each)):
            changed = _changed(asked, chosen)
            plan = _legal(changed)
            if plan is None:
                continue
            if works(plan):
                return changed
            num_builds += 1
            if num_builds == _MAX_BUILDS:
                return None
    return None


def has_its_device(plan: Plan) -> bool:
    """Return True if this machine has the device of the plan."""
    try:
        resolve_device(plan.parallel.accelerator)
    except RoomierError:
        return False
    return True


def _works_here(asked: Keywords) -> Works:
    try:
        resolve_device(asked.get("accelerator", "auto"))
    except RoomierError:
        return lambda plan: True
    return has_its_device


def can_build(plan: Plan, module: Module) -> bool:
    """Return whether ``build`` accepts the plan for ``module``. No memory is allocated."""
    if not has_its_device(plan):
        return False
    world = World(0, plan.parallel.num_ranks, 0, 0, plan.parallel.devices)
    try:
        with fake_world(world, is_pairwise=True) as ranks:
            copied = shapes_of(module)
            engine, _ = build(
                plan, copied, lambda blocks: configure(plan, copied, lambda: 1000.0, blocks), EagerEngine, ranks
            )
            engine.close()
    except Exception:  # the result is only advice, so a failure here must not hide the original error
        return False
    return True


def _legal(keywords: Keywords) -> Plan | None:
    try:
        return plan_from_flags(**keywords)
    except PlanError:
        return None


def _with(error: RoomierError, advice: str) -> str:
    end = "" if error.action.endswith(("?", ".")) else "."
    return f"{error.action}{end} {advice}"


def _are_apart(edits: tuple[_Edit, ...]) -> bool:
    names = [name for edit in edits for name in edit.changes]
    return len(names) == len(set(names))


def _changed(asked: Keywords, edits: tuple[_Edit, ...]) -> dict[str, Any]:
    values = dict(asked)
    for name, value in ((name, value) for edit in edits for name, value in edit.changes.items()):
        if value is _DEFAULT:
            values.pop(name, None)
        else:
            values[name] = value
    return values


# ---- possible changes ------------------------------------------------------------------------------------------------


def _edits(asked: Keywords, error: RoomierError) -> Iterator[_Edit]:
    named = " ".join(each.action for each in _singles(error))
    fields = {each.field.partition(".")[0] for each in _singles(error)}
    is_alone = asked.get("devices", 1) == 1 and asked.get("num_nodes", 1) == 1
    misspelled = _of_misspelled(asked, error)
    of_computation = (*_of_strategy(asked), *_of_levers(asked), *_of_offload(asked))
    for edit in (*misspelled, *of_computation, *_of_arithmetic(asked), *_of_hardware(asked)):
        [*values] = edit.changes.values()
        is_named = any(isinstance(value, str) and f"'{value}'" in named for value in values)
        near = 0.9 if is_named else 0.0
        if fields & edit.changes.keys():
            near += 0.05
        elif is_alone and "strategy" in edit.changes:
            near -= 3  # on one rank, all strategies are equivalent
        yield _Edit(edit.changes, edit.cost - near)


def _singles(error: RoomierError) -> tuple[RoomierError, ...]:
    return each_error(error) if isinstance(error, PlanError) else (error,)


def _of_misspelled(asked: Keywords, error: RoomierError) -> Iterator[_Edit]:
    """Yield the corrections of misspelled values that the error suggests."""
    for each in _singles(error):
        meant = re.search(r"Did you mean '([^']+)'", each.action)
        if meant is not None and isinstance(each.received, str) and asked.get(each.field) == each.received:
            yield _Edit({each.field: meant[1]}, 1)


def _of_strategy(asked: Keywords) -> Iterator[_Edit]:
    name, settings = _strategy_of(asked)
    base, in_name = _split(name)
    tiers = {"offload": {**in_name, **_offload_of(asked)}} if in_name else {}
    for index, other in enumerate(_STRATEGIES):
        alike = difflib.SequenceMatcher(None, base, other).ratio() if base not in CHOICES["parallel.strategy"] else 0.0
        cost = 1 + 0.05 * index - 0.5 * alike
        if other != base:
            yield _Edit({"strategy": _named(other, settings), **tiers}, cost)
            if settings:
                yield _Edit({"strategy": other, **tiers}, cost + 2)
    for left_out in settings:
        rest = {key: value for key, value in settings.items() if key != left_out}
        yield _Edit({"strategy": _named(name, rest)}, 1.2 if left_out == "shard_size" else 2)
    size = settings.get("shard_size")
    if isinstance(size, int):
        for other_size in range(1, 4 * max(size, 1) + 1):
            if other_size != size:
                cost = 0.5 + 0.01 * abs(other_size - size) + (0.3 if other_size == 1 else 0)
                yield _Edit({"strategy": {"name": name, **settings, "shard_size": other_size}}, cost)


def _strategy_of(asked: Keywords) -> tuple[str, dict[str, Any]]:
    """Return the name of the strategy in ``asked``, and its other settings."""
    given = asked.get("strategy", "single")
    settings = dict(given) if isinstance(given, Mapping) else {"name": given}
    return str(settings.pop("name", "single")), settings


def _split(name: str) -> tuple[str, Mapping[str, str]]:
    """Return the strategy in ``name`` without the tiers that ``name`` includes, and these tiers."""
    base, _, suffix = name.partition("+")
    if suffix in STRATEGY_SUFFIXES:
        return base, {"optimizer_states": STRATEGY_SUFFIXES[suffix]}
    return OFFLOADING_STRATEGIES.get(name.lower(), (name, {}))


def _offload_of(asked: Keywords) -> Mapping[str, Any]:
    """Return the ``offload`` argument in ``asked`` as fields of the Plan."""
    given = asked.get("offload", {})
    if isinstance(given, Mapping):
        return given
    return {"optimizer_states": "cpu" if given is True else given}


def _named(name: str, settings: Keywords) -> Any:
    return {"name": name, **settings} if settings else name


def _of_levers(asked: Keywords) -> Iterator[_Edit]:
    for name in (*(lever.keyword for lever in LEVERS), "compile", "attention", "gradient_clip_algorithm"):
        if name in asked:
            yield _Edit({name: _DEFAULT}, 2)
    if "activation_checkpointing" in asked:
        for index, policy in enumerate(("full", "selective", _DEFAULT)):
            yield _Edit({"activation_checkpointing": policy}, 1.5 + 0.3 * index)
    for lever in LEVERS:
        others = [value for value in CHOICES.get(lever.field, {}) if value not in (lever.on, lever.off)]
        if asked.get(lever.keyword) in others:
            yield _Edit({lever.keyword: True}, 1)
    schedule = asked.get("lr_schedule")
    if schedule is not None:
        settings = schedule if isinstance(schedule, Mapping) else {}
        for left_out in settings.keys() - {"name"}:
            yield _Edit({"lr_schedule": {key: value for key, value in settings.items() if key != left_out}}, 3)
        yield _Edit({"lr_schedule": _DEFAULT}, 4)
    lora = asked.get("lora")
    if isinstance(lora, Mapping) and "base" in lora:
        yield _Edit({"lora": {key: value for key, value in lora.items() if key != "base"}}, 2.5)
    if "learning_rate" in asked and "optimizer" not in asked:
        yield _Edit({"optimizer": "adamw"}, 2)
    elif "learning_rate" in asked:
        yield _Edit({"learning_rate": _DEFAULT}, 3)
    if "memory_budget" in asked:
        yield _Edit({"memory_budget": _DEFAULT}, 3)


def _of_offload(asked: Keywords) -> Iterator[_Edit]:
    """Yield changes to the tiers and the update mode. The strategy and the tiers that its name includes are separate
    keywords in the changes."""
    name, settings = _strategy_of(asked)
    base, in_name = _split(name)
    tiers = {**in_name, **_offload_of(asked)}
    if not tiers:
        return
    strategy = {"strategy": _named(base, settings)} if in_name else {}
    yield _Edit({**strategy, "offload": _DEFAULT}, 2)
    on_disk = {
        name: "disk" if name != "activations" and canonical(f"offload.{name}", value) == "cpu" else value
        for name, value in tiers.items()
    }
    if on_disk != tiers:
        yield _Edit({**strategy, "offload": on_disk}, 1)
    for index, left_out in enumerate(tiers if len(tiers) > 1 else ()):
        rest = {name: value for name, value in tiers.items() if name != left_out}
        yield _Edit({**strategy, "offload": rest}, (1.2 if left_out in _SETTINGS_OF_TIERS else 1.5) + 0.05 * index)
    if "update" in tiers:
        yield _Edit({**strategy, "offload": {**tiers, "update": "deferred"}}, 1)
    if "optimizer_states" not in tiers:
        yield _Edit({**strategy, "offload": {**tiers, "optimizer_states": "disk"}}, 1.8)
    for lever in LEVERS:
        if lever.frees_gradients and lever.keyword in asked:
            together = {lever.keyword: _DEFAULT, "offload": {**tiers, "update": "speculative"}}
            yield _Edit({**strategy, **together}, 1)


_SETTINGS_OF_TIERS = ("folder", "share", "buffers", "update")


def _of_arithmetic(asked: Keywords) -> Iterator[_Edit]:
    if "precision" in asked:
        for index, mode in enumerate(("bf16-mixed", "32-true", "16-mixed")):
            if mode != asked["precision"]:
                yield _Edit({"precision": mode}, 3 + 0.1 * index)
    optimizer = asked.get("optimizer")
    if optimizer is not None and optimizer != "adamw":
        settings = {}
        if isinstance(optimizer, Mapping):
            settings = {key: optimizer[key] for key in ("lr", "weight_decay") if key in optimizer}
        yield _Edit({"optimizer": {"name": "adamw", **settings} if settings else "adamw"}, 4)
    if "gradient_clip_val" in asked:
        yield _Edit({"gradient_clip_val": _DEFAULT}, 4)


def _of_hardware(asked: Keywords) -> Iterator[_Edit]:
    if asked.get("accelerator", "auto") not in ("auto", "cpu"):
        yield _Edit({"accelerator": accelerator_type() or "cpu"}, 2.5)
    if asked.get("devices", 1) not in (1, "auto"):
        yield _Edit({"devices": 1}, 5)
