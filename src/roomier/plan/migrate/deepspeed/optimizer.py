"""Answers to the optimizer and the scheduler of a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roomier.core.errors import did_you_mean
from roomier.plan.migrate.answers import Answers

_NAMES = {
    "adagrad": "adagrad",
    "lion": "lion",
    "muon": "muon",
    "onebitadam": "onebit_adam",
    "sgd": "sgd",
    "rmsprop": "rmsprop",
    "nadam": "nadam",
    "radam": "radam",
    "adafactor": "adafactor",
}
"""Mapping from DeepSpeed's optimizer types, in lower case, to the roomier optimizers with the same parameters."""

_REJECTED = {
    "lamb": "roomier has no LAMB",
    "onebitlamb": "roomier has no LAMB",
    "zerooneadam": "roomier does not have 0/1 Adam; onebit_adam also compresses the communication",
    "muadam": "roomier does not scale learning rates by width",
    "muadamw": "roomier does not scale learning rates by width",
    "musgd": "roomier does not scale learning rates by width",
}

_OWN = "Return the optimizer from configure_optimizers, and remove it from the configuration"
_WITHOUT_EFFECT = {
    "torch_adam": "the optimizer is torch's",
    "adam_w_mode": "the type of the optimizer determines this setting",
    "fp32_optimizer_states": "optimizer states are float32",
    "set_grad_none": "gradients are freed after each step",
    "cuda_aware": "torch's collectives are used",
    "comm_backend_name": "torch's collectives are used",
    "legacy_fusion": "torch selects the kernels",
}
_UNSUPPORTED = {
    "max_grad_norm": ("is not a parameter of DeepSpeed's optimizers", "Set gradient_clipping"),
    "muon_lr": ("is not supported, because all parameters have one learning rate", _OWN),
    "adam_lr": ("is not supported, because all parameters have one learning rate", _OWN),
    "ns_method": ("is not supported", "Remove it"),
}


def answer_optimizer(answers: Answers, section: Any) -> None:
    """Record the answers to the section ``optimizer``. If the section is None, the model configures its optimizer."""
    if not section or not _is_section(answers, "optimizer", section):
        return
    kind = str(section.get("type", "")).lower()
    params = dict(section.get("params") or {})
    for key, value in section.items():
        if key == "legacy_fusion":
            answers.ignore("optimizer.legacy_fusion", value, _WITHOUT_EFFECT[key])
        elif key not in ("type", "params"):
            answers.reject(f"optimizer.{key}", value, "is not a key of DeepSpeed's configuration", "Remove it")
    if kind in ("adam", "adamw"):
        _answer_adam(answers, str(section["type"]), params)
    elif kind in _NAMES:
        answers.use("optimizer.type", section["type"], "optimizer", _NAMES[kind])
    elif kind in _REJECTED:
        answers.reject("optimizer.type", section["type"], f"is not supported: {_REJECTED[kind]}", _OWN)
        return
    else:
        action = did_you_mean(kind, ["adam", "adamw", *_NAMES])
        answers.reject("optimizer.type", section.get("type"), "is not an optimizer that roomier creates", action)
        return
    for name, value in params.items():
        setting = f"optimizer.params.{name}"
        if name in _UNSUPPORTED:
            answers.reject(setting, value, *_UNSUPPORTED[name])
        elif name == "bias_correction" and value is False and kind not in ("adam", "adamw"):
            answers.reject(setting, value, "is supported only for Adam and AdamW", _OWN)
        elif name in _WITHOUT_EFFECT or (name == "bias_correction" and value is not False):
            answers.ignore(setting, value, _WITHOUT_EFFECT.get(name, "torch corrects the bias"))
        else:
            answers.use(setting, value, f"optimizer.{name}", value)


def _is_section(answers: Answers, name: str, section: Any) -> bool:
    params = section.get("params") if isinstance(section, Mapping) else None
    if isinstance(section, Mapping) and (params is None or isinstance(params, Mapping)):
        return True
    answers.reject(name, section, "must be a section with type and params", "Use {'type': ..., 'params': {...}}")
    return False


def _answer_adam(answers: Answers, kind: str, params: dict[str, Any]) -> None:
    """Record the answers to ``AdamW``, and to ``Adam``, which is AdamW in DeepSpeed unless ``adam_w_mode`` is false."""
    mode = params.get("adam_w_mode", True)
    is_adamw = kind.lower() == "adamw" or bool(mode)
    name = "adamw" if is_adamw else "adam"
    remark = "in DeepSpeed, Adam is AdamW unless adam_w_mode is false" if name != kind.lower() else ""
    answers.use("optimizer.type", kind, "optimizer", name, remark)
    if "weight_decay" not in params and is_adamw and not params.get("torch_adam"):
        answers.use("optimizer.params.weight_decay", None, "optimizer.weight_decay", 0.0, "the default of DeepSpeed")


_SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_OWN_SCHEDULER = "Return the scheduler from configure_optimizers, and remove it from the configuration"
_MAX_LR = 0.001


def answer_scheduler(answers: Answers, section: Any, *, has_optimizer: bool) -> None:
    """Record the answers to the section ``scheduler``.

    Args:
        has_optimizer: whether the configuration contains an optimizer. A schedule in the Plan requires an optimizer in
            the Plan.
    """
    if not section or not _is_section(answers, "scheduler", section):
        return
    kind = str(section.get("type", ""))
    name = _SCHEDULES.get(kind.lower())
    if name is None:
        known = {"OneCycle": _OWN_SCHEDULER, "LRRangeTest": "Use auto_lr_find=True, which runs a range test"}
        action = known.get(kind) or did_you_mean(kind, ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
        answers.reject("scheduler.type", kind, "is not implemented", action)
        return
    if not has_optimizer:
        problem = "requires an optimizer in the configuration, because roomier creates both objects"
        answers.reject("scheduler.type", kind, problem, _OWN_SCHEDULER)
        return
    params = dict(section.get("params") or {})
    is_linear = params.get("warmup_type") == "linear"
    if is_linear or name == "cosine":
        remark = f"the warm-up ends {'two steps' if is_linear else 'one step'} earlier than in DeepSpeed"
    else:
        remark = "DeepSpeed uses the same rates one step later"
    answers.use("scheduler.type", kind, "lr_schedule", name, remark)
    _answer_warmup(answers, params)
    _answer_peak(answers, kind, params)
    total = params.pop("total_num_steps", None)
    if total is not None:
        answers.use("scheduler.params.total_num_steps", total, "lr_schedule.decay_steps", total)
    if name == "cosine":
        ratio = params.pop("cos_min_ratio", 0.0001)
        answers.use("scheduler.params.cos_min_ratio", ratio, "lr_schedule.min_lr_ratio", ratio)
    if params.pop("last_batch_iteration", -1) != -1:
        answers.reject("scheduler.params.last_batch_iteration", "...", "is not supported", "Use fit(ckpt_path=...)")
    for each, value in params.items():
        problem = f"is not a parameter of {kind}"
        answers.reject(f"scheduler.params.{each}", value, problem, did_you_mean(each, _PARAMETERS))


_PARAMETERS = ("total_num_steps", "warmup_max_lr", "warmup_min_lr", "warmup_num_steps", "warmup_type", "cos_min_ratio")


def _answer_warmup(answers: Answers, params: dict[str, Any]) -> None:
    for each in ("warmup_min_lr", "warmup_min_ratio"):
        value = params.pop(each, None)
        if value:
            answers.reject(
                f"scheduler.params.{each}", value, "must be 0, because the warm-up starts at 0", "Set it to 0"
            )
        elif value is not None:
            answers.ignore(f"scheduler.params.{each}", value, "the warm-up starts at 0")
    given = params.pop("warmup_num_steps", None)
    steps = 1000 if given is None else given
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        answers.reject("scheduler.params.warmup_num_steps", steps, "must be a non-negative integer", "Correct it")
        return
    remark = "the default of DeepSpeed" if given is None else ""
    answers.use("scheduler.params.warmup_num_steps", given, "lr_schedule.warmup_steps", steps, remark)
    shape = params.pop("warmup_type", None)
    if shape not in (None, "log", "linear"):
        answers.reject("scheduler.params.warmup_type", shape, "must be 'log' or 'linear'", "Correct it")
    elif shape == "linear":
        answers.ignore("scheduler.params.warmup_type", shape, "the warm-up of roomier is linear by default")
    elif steps > 0:
        remark = "the default of DeepSpeed" if shape is None else ""
        answers.use("scheduler.params.warmup_type", shape, "lr_schedule.log_warmup", True, remark)


def _answer_peak(answers: Answers, kind: str, params: dict[str, Any]) -> None:
    """Record the answer to the highest learning rate of the schedule, which replaces the learning rate of the
    optimizer."""
    own = answers.meaning_of("optimizer.lr")
    default = _MAX_LR if kind.lower() == "warmupdecaylr" and own is None else None
    highest = params.pop("warmup_max_lr", default)
    if highest is None or highest == own:
        if highest is not None:
            answers.ignore(
                "scheduler.params.warmup_max_lr", highest, "the value is equal to the learning rate of the optimizer"
            )
        return
    if own is None:
        answers.use("scheduler.params.warmup_max_lr", highest, "optimizer.lr", highest)
        return
    problem = f"differs from optimizer.params.lr ({own}), which DeepSpeed ignores in this case"
    answers.reject("scheduler.params.warmup_max_lr", highest, problem, f"Set optimizer.params.lr to {highest}")
