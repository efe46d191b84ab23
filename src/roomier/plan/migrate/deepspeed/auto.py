"""Replacement of the values ``"auto"`` in a DeepSpeed configuration.

Hugging Face replaces these values with its training arguments. roomier replaces them with arguments of the Trainer. If
an argument is not given, the value is the default of Hugging Face's TrainingArguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roomier.plan.migrate.answers import Answers
from roomier.plan.migrate.deepspeed.keys import SECTIONS, WITHOUT_EFFECT

_ABSENT = object()

_DEFAULTS: dict[str, tuple[str, object]] = {
    # key of the configuration: (argument that determines its value, default of Hugging Face)
    "gradient_accumulation_steps": ("accumulate_grad_batches", _ABSENT),
    "train_batch_size": ("", _ABSENT),
    "train_micro_batch_size_per_gpu": ("", _ABSENT),
    "gradient_clipping": ("gradient_clip_val", 1.0),
    "fp16.enabled": ("precision", _ABSENT),
    "bf16.enabled": ("precision", _ABSENT),
    "bfloat16.enabled": ("precision", _ABSENT),
    "optimizer.params.lr": ("learning_rate", 5e-5),
    "optimizer.params.betas": ("", [0.9, 0.999]),
    "optimizer.params.eps": ("", 1e-8),
    "optimizer.params.weight_decay": ("", 0.0),
    "optimizer.params.torch_adam": ("", _ABSENT),
    "scheduler.params.warmup_min_lr": ("", 0.0),
    "scheduler.params.warmup_max_lr": ("", _ABSENT),
    "scheduler.params.warmup_num_steps": ("", 1),
    "scheduler.params.total_num_steps": ("", _ABSENT),
}


def without_auto(
    config: Mapping[str, Any], answers: Answers, given: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Return a copy of ``config`` in which the values ``"auto"`` are replaced or removed. Record an answer for each of
    these values.

    Args:
        given: arguments of the Trainer that differ from their defaults.
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found[name] = without_auto(value, answers, given, f"{key}.")
        elif value != "auto" or key in WITHOUT_EFFECT or key.partition(".")[0] in SECTIONS:
            found[name] = value
        elif key not in _DEFAULTS:
            answers.reject(
                key, "auto", "is not supported here, because Hugging Face does not replace it", "Set a value"
            )
        elif (own := _setting_of(key, given)) is not None:
            found[name] = own
        else:
            argument, default = _DEFAULTS[key]
            if argument and given.get(argument) is not None:
                answers.ignore(key, "auto", f"{argument}={given[argument]!r} determines it")
            elif default is _ABSENT:
                answers.ignore(key, "auto", f"the argument {argument} determines it" if argument else _DETERMINED[name])
                if prefix == "scheduler.params.":
                    found[name] = None  # None, so that the defaults of DeepSpeed are not used
            else:
                found[name] = default
                answers.notes.append(f"{key}='auto' means {default!r}, the default of Hugging Face")
    return found


def _setting_of(key: str, given: Mapping[str, Any]) -> Any:
    """Return the setting of a dict argument of the Trainer that determines ``key``, or None."""
    argument, name = _IN_DICT.get(key, ("", ""))
    settings = given.get(argument)
    return settings.get(name) if isinstance(settings, Mapping) else None


_IN_DICT = {
    **{f"optimizer.params.{name}": ("optimizer", name) for name in ("lr", "betas", "eps", "weight_decay")},
    "scheduler.params.warmup_num_steps": ("lr_schedule", "warmup_steps"),
    "scheduler.params.total_num_steps": ("lr_schedule", "decay_steps"),
}
"""Keys of the configuration that a setting in a dict argument of the Trainer determines."""

_DETERMINED = {
    "train_batch_size": "the DataLoader and the number of ranks determine the size",
    "train_micro_batch_size_per_gpu": "the DataLoader determines the size",
    "warmup_max_lr": "the learning rate of the optimizer determines this rate",
    "total_num_steps": "the number of steps of the run determines this number",
    "torch_adam": "the optimizer is always torch's",
}
