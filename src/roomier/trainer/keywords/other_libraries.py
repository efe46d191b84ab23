"""Conversion of Trainer arguments that are objects or settings of other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.plan.migrate.answers import Answers, merged
from roomier.plan.migrate.deepspeed import objects
from roomier.plan.migrate.deepspeed.objects import answers_to_source, is_object, is_source
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
    refuse_former_flags(given)
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
    for plugin in _as_list(value):
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


_DEVICE_FLAGS = {"gpus": "gpu", "tpu_cores": "tpu"}
CANDIDATES = {*_DEVICE_FLAGS, "auto_lr_finder", "accelerator", "plugins"}
"""Arguments that may be former arguments of Lightning, depending on their values."""
_CANDIDATES = CANDIDATES | _ANSWERS.keys() | {"deepspeed", "plan", "args", *_ON_SEVERAL_RANKS}

_KEPT = ("accelerator", "devices", "num_nodes", "strategy", "precision")
_ACCELERATORS = {**dict.fromkeys(("dp", "ddp", "ddp2", "ddp_cpu", "ddp_spawn"), "ddp"), "ddp_sharded": "zero2"}
"""Former values of ``accelerator`` and ``plugins``, with the strategies that replace them."""


def refuse_former_flags(given: Mapping[str, Any]) -> None:
    """Reject arguments of earlier Lightning versions. ``given`` contains the arguments of the Trainer.

    Raises:
        RoomierError: an argument of an earlier version of Lightning is given. The error message shows the call
            ``Trainer(...)`` with current arguments.
    """
    former = [name for name in given if _is_former(name, given[name])]
    if not former:
        return
    today, remarks = _todays(given)
    call = ", ".join(f"{name}={value!r}" for name, value in today.items())
    problem = ", like ".join(filter(None, ["was removed from the Trainer", ", ".join(former[1:])]))
    raise RoomierError(former[0], given[former[0]], problem, ". ".join([f"Use Trainer({call})", *remarks]))


def written_today(name: str, value: Any) -> tuple[dict[str, Any], list[str]] | None:
    """Return the arguments that replace the former argument ``name``, with remarks; None for any other argument."""
    return _todays({name: value}) if _is_former(name, value) else None


def _is_former(name: str, value: Any) -> bool:
    if name == "plugins":
        return any(is_object(each) or _is_former("accelerator", each) for each in _as_list(value))
    if name == "accelerator":
        return isinstance(value, str) and value.lower() in _ACCELERATORS
    return name in CANDIDATES


def _todays(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the current arguments for devices, strategy and precision, together with remarks."""
    today = {name: given[name] for name in _KEPT if name in given and not _is_former(name, given[name])}
    remarks: list[str] = []
    for name in filter(given.__contains__, _DEVICE_FLAGS):
        _add_devices(today, remarks, name, given[name])
    for name in ("accelerator", "plugins"):
        for each in _as_list(given[name]) if name in given and _is_former(name, given[name]) else ():
            if is_object(each):
                answers = objects.answers_to_object(each, num_ranks_of(today), today)
                today.update(answers.keywords())
                remarks += answers.remarks()
            elif _is_former("accelerator", each):
                today["strategy"] = _ACCELERATORS[each.lower()]
                if each.lower() == "ddp_cpu":
                    today |= {"accelerator": "cpu", "devices": given.get("num_processes", given.get("devices", 1))}
    if given.get("precision") in ("16", 16):
        today["precision"] = "16-mixed"
    if "auto_lr_finder" in given:
        today["auto_lr_find"] = bool(given["auto_lr_finder"])
    if (today.get("devices", 1) != 1 or today.get("num_nodes", 1) != 1) and "strategy" not in today:
        today["strategy"] = "ddp"
    return today, remarks


def _add_devices(today: dict[str, Any], remarks: list[str], name: str, value: Any) -> None:
    listed = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if isinstance(value, str) and "," not in value:
        number: Any = int(value) if value.strip().lstrip("-").isdecimal() else value
    else:
        number = len(listed) if isinstance(listed, (list, tuple)) else value
    if not number:
        today.setdefault("accelerator", "cpu")
        return
    today["accelerator"], today["devices"] = _DEVICE_FLAGS[name], "auto" if number == -1 else number
    if name == "tpu_cores":
        remarks.append("accelerator='tpu' requires the package torch-tpu")
    elif isinstance(value, (list, tuple)) or "," in str(value):
        variable = f"CUDA_VISIBLE_DEVICES={','.join(str(each).strip() for each in listed)}"
        remarks.append(f"Select the devices with the environment variable {variable}")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
