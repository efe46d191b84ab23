"""Answers to the settings in objects and files that contain a DeepSpeed configuration: dicts, JSON files, Lightning's
``DeepSpeedStrategy``, and Accelerate's ``DeepSpeedPlugin``."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from roomier.core.errors import PlanError
from roomier.core.untrusted import read_text
from roomier.plan.migrate.answers import Answers, setting_of
from roomier.plan.migrate.deepspeed.config import answers_to_config, is_config
from roomier.plan.migrate.lightning_strategies import WITHOUT_EFFECT, answer_environment
from roomier.plan.text import load_json

CLASSES = ("DeepSpeedStrategy", "DeepSpeedPlugin")

_REASONS = {
    "remote_device": "configure_model of the module creates large models part by part",
    "load_full_weights": "fit(weights=...) reads each shard from a full checkpoint",
    "exclude_frozen_parameters": "checkpoints contain all parameters; `roomier export` can write only the adapters",
    "logging_level": "DeepSpeed is not used",
    "zero3_init_flag": "configure_model of the module creates large models part by part",
    "transformer_moe_cls_names": WITHOUT_EFFECT["auto_wrap_policy"],
    "is_train_batch_min": "the DataLoader determines the batch",
}
_SCALES = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
"""Settings of the loss scale, with the defaults of Lightning."""


def is_object(value: object) -> bool:
    """Return whether ``value`` is a strategy or a plugin for DeepSpeed."""
    return type(value).__name__ in CLASSES


def answers_to_object(value: object, num_ranks: int, given: Mapping[str, Any]) -> Answers:
    """Return the results for the settings of a strategy or plugin. For the arguments, see :func:`answers_to_config`."""
    source = type(value).__name__
    config = setting_of(value, "deepspeed_config", "config")
    if not isinstance(config, Mapping):
        config = read_config(config)
    if source == "DeepSpeedStrategy":
        config = {"zero_optimization": {"stage": 0}, **config}
    answers = answers_to_config(config, source, num_ranks, given, fills_clipping=True)
    for name, reason in _REASONS.items():
        if attribute := setting_of(value, name):
            answers.ignore(name, attribute, reason)
    for name, default in _SCALES.items():
        if getattr(value, name, default) != default:
            reason = "torch's GradScaler scales the loss, which does not change the gradient of a step"
            answers.ignore(name, getattr(value, name), reason)
    if source == "DeepSpeedStrategy":
        answer_environment(answers, value)
    if setting_of(value, "enable_msamp"):
        action = "Use precision='bf16-mixed' and optimizer='adamw8bit'"
        answers.reject("enable_msamp", True, "is not supported", action)
    return answers


def read_config(source: object, field: str = "deepspeed") -> Mapping[str, Any]:
    """Return the configuration in the JSON file ``source``.

    Args:
        source: path of the file.
        field: name of the argument in errors.

    Raises:
        PlanError: the file cannot be read, or does not contain a JSON object.
    """
    action = "Pass a dict, or the path of a JSON file with a DeepSpeed configuration"
    if not isinstance(source, (str, PathLike)):
        raise PlanError(field, source, "is not a DeepSpeed configuration", action)
    path = Path(fspath(source))
    try:
        config = load_json(read_text(path), source=str(path))
    except PlanError as error:
        key = "" if error.received == str(path) else f"contains {error.received!r}, which "
        raise PlanError(field, str(path), key + error.problem, "Correct the file") from error
    except (OSError, UnicodeError) as error:
        raise PlanError(field, str(path), f"cannot be read: {error}", action) from error
    if not isinstance(config, Mapping):
        raise PlanError(field, str(path), "must contain a JSON object", action)
    return config


def answers_to_source(value: object, num_ranks: int, given: Mapping[str, Any], field: str) -> Answers:
    """Return the results for a dict, a file or an object. For the arguments, see :func:`answers_to_config`.

    Args:
        field: name of the argument in errors.
    """
    if is_object(value):
        return answers_to_object(value, num_ranks, given)
    if isinstance(value, Mapping):
        return answers_to_config(value, "DeepSpeed configuration", num_ranks, given)
    return answers_to_config(read_config(value, field), Path(str(value)).name, num_ranks, given)


def is_source(value: object, *, of_plan: bool = False) -> bool:
    """Return whether an argument of the Trainer is a DeepSpeed configuration.

    Args:
        of_plan: True if ``value`` is the ``plan`` argument, which also accepts a Plan in a JSON file.
    """
    if is_object(value) or is_config(value):
        return True
    if not isinstance(value, (str, PathLike)) or not fspath(value).endswith(".json"):
        return False
    return not of_plan or (Path(value).is_file() and is_config(read_config(value, "plan")))
