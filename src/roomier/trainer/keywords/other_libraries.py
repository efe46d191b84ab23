"""Conversion of Trainer arguments that are objects or settings of other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roomier.core.log import notice
from roomier.plan.migrate.answers import Answers, merged
from roomier.plan.migrate.deepspeed.objects import answers_to_source, is_source
from roomier.plan.migrate.lightning_strategies import answer_accelerator, answer_plugin, answers_to_strategy
from roomier.plan.migrate.training_arguments import (
    FIELDS,
    accepted,
    answers_to_fields,
    answers_to_object,
    is_training_arguments,
)
from roomier.trainer.keywords.arguments import num_ranks_of


def of_roomier(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given``, the arguments of the Trainer, with objects of other libraries replaced by roomier's arguments.

    A notice reports each setting of such an object that has no effect.

    Args:
        defaults: the default values of the Trainer's arguments.

    Raises:
        RoomierError: an argument was removed from Lightning, or a setting is not supported.
    """
    if not given.keys() & (_CANDIDATES | (FIELDS - defaults.keys())):
        return dict(given)
    found = dict(given)
    if "args" in given or given.keys() & (FIELDS - defaults.keys()):
        found = _with_training_arguments(found, defaults)
    for name in ("deepspeed", "strategy", "plan"):
        value = found.get(name)
        if name == "deepspeed" and name in found and value is None:
            del found[name]
        elif name in found and (name == "deepspeed" or is_source(value, of_plan=name == "plan")):
            del found[name]
            found = _with_deepspeed(name, value, found, defaults)
    for name in _ON_SEVERAL_RANKS:
        if name in found and _without_effect_on_one_rank(name, found[name], found):
            del found[name]
    for name, answer in _ANSWERS.items():
        answers = answer(found[name]) if name in found else None
        if answers is not None:
            del found[name]
            found = merged(answers, found, defaults)
            answers.report()
    return found


def _with_training_arguments(given: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with ``args`` and fields of transformers' TrainingArguments replaced by equivalent arguments."""
    fields = accepted({name: value for name, value in given.items() if name not in defaults and name != "deepspeed"})
    sources = [answers_to_fields(fields)] if fields else []
    found = {name: value for name, value in given.items() if name not in fields}
    if is_training_arguments(found.get("args")):
        sources.append(answers_to_object(found.pop("args")))
    for answers in sources:
        settings = answers.settings_of("optimizer")
        if settings and found.get("optimizer") is None and answers.meaning_of("optimizer.name") is None:
            setting, value = settings[0].setting, settings[0].value
            answers.reject(setting, value, "requires a named optimizer", "Use optimizer={'name': 'adamw', ...}")
        found = merged(answers, found, defaults)
        answers.report()
    return found


def _with_deepspeed(field: str, value: object, given: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with arguments that replace the DeepSpeed configuration in the argument ``field``, and print a
    table with all keys."""
    own = {name: each for name, each in given.items() if name not in defaults or each != defaults[name]}
    answers = answers_to_source(value, num_ranks_of(given), own, field)
    notice(answers.table())  # also if keys are rejected, because the table answers all other keys
    return merged(answers, given, defaults)


def _of_accelerator(value: object) -> Answers | None:
    if value is None or isinstance(value, (str, int, float)):
        return None
    answers = Answers("accelerator")
    answer_accelerator(answers, value)
    return answers


def _of_plugins(value: object) -> Answers | None:
    if value is None:
        return None
    answers = Answers("plugins")
    for plugin in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(plugin, str) or is_source(plugin):
            answers.reject(type(plugin).__name__, plugin, "is a strategy", "Pass it as strategy")
        else:
            answer_plugin(answers, type(plugin).__name__, plugin)
    return answers


def _of_barebones(value: object) -> Answers | None:
    """Return the arguments that disable the same parts of a run as Lightning's ``barebones=True``."""
    if value is not True:
        return None
    answers = Answers("barebones=True")
    for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
        answers.use("barebones", True, name, False)
    answers.use("barebones", True, "num_sanity_val_steps", 0)
    return answers


def _without_effect_on_one_rank(name: str, value: object, given: Mapping[str, Any]) -> bool:
    """Return True and print a notice if the run has one rank and ``value`` affects only runs with several ranks."""
    ordinary = {"sync_batchnorm": False, "use_distributed_sampler": True, "replace_sampler_ddp": True}
    if not isinstance(value, bool) or value == ordinary[name] or num_ranks_of(given, alone_by_default=True) > 1:
        return False
    notice(f"{name}={value}: no effect: this run has one rank")
    return True


_ON_SEVERAL_RANKS = ("sync_batchnorm", "use_distributed_sampler", "replace_sampler_ddp")
_ANSWERS = {
    "strategy": lambda value: None if isinstance(value, (str, Mapping)) else answers_to_strategy(value),
    "accelerator": _of_accelerator,
    "plugins": _of_plugins,
    "barebones": _of_barebones,
}
_CANDIDATES = _ANSWERS.keys() | {"deepspeed", "plan", "args", *_ON_SEVERAL_RANKS}
