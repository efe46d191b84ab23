"""Conversion of a DeepSpeed configuration to arguments of the Trainer.

Each key of the configuration is converted to an argument of the Trainer, a reason why the key has no effect, or an
error.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from roomier.core.errors import did_you_mean, nearest
from roomier.plan.choices import canonical
from roomier.plan.migrate.answers import Answers
from roomier.plan.migrate.deepspeed.keys import KNOWN, MARKS, REJECTED, SECTIONS, reason_of
from roomier.plan.parts import PARTS

_DISABLED = "is disabled"
_OFF: tuple[object, ...] = (False, None, 0, "none")


def is_config(value: object) -> bool:
    """Return whether ``value`` is a DeepSpeed configuration rather than a Plan or the settings of a strategy."""
    if not isinstance(value, Mapping) or "name" in value or "stage" in value:
        return False
    optimizer = value.get("optimizer")
    has_type = isinstance(optimizer, Mapping) and "type" in optimizer
    return has_type or any(key in MARKS and key not in PARTS for key in value)


def answers_to_config(
    config: Mapping[str, Any], source: str, num_ranks: int, given: Mapping[str, Any], *, fills_clipping: bool = False
) -> Answers:
    """Return the results for all keys of ``config``.

    Args:
        config: DeepSpeed configuration, as nested mappings.
        source: name of the configuration in messages, such as ``"ds_config.json"``.
        num_ranks: number of ranks of the run.
        given: arguments of the Trainer, which replace ``"auto"`` values.
        fills_clipping: True if ``gradient_clip_val`` of the Trainer sets a missing ``gradient_clipping``, as in
            Lightning.
    """
    answers = Answers(source)
    config = without_auto(config, answers, given)
    leaves = _leaves(config, answers)
    _answer_batch(answers, leaves, num_ranks // _answer_sequences(answers, leaves))
    _answer_precision(answers, leaves)
    _answer_zero(answers, leaves)
    _answer_recomputation(answers, leaves)
    _answer_clipping(answers, leaves, is_optional=fills_clipping or given.get("gradient_clip_val") is not None)
    _answer_communication(answers, leaves)
    answer_optimizer(answers, config.get("optimizer"))
    answer_scheduler(answers, config.get("scheduler"), has_optimizer=bool(config.get("optimizer")))
    for key, value in leaves.items():
        _answer_rest(answers, key, value)
    return answers


def _answer_sequences(answers: Answers, leaves: dict[str, Any]) -> int:
    """Record the answer to the number of ranks that share a sequence, and return this number."""
    key = "sequence_parallel_size"
    if key not in leaves:
        return 1
    size = leaves.pop(key)
    if size in (None, 0, 1):
        answers.ignore(key, size, _DISABLED)
    elif isinstance(size, int) and size > 1:
        answers.use(key, size, "strategy.context_parallel_size", size)
        return size
    else:
        answers.reject(key, size, "must be an integer", "Correct it")
    return 1


def _leaves(config: Mapping[str, Any], answers: Answers, prefix: str = "") -> dict[str, Any]:
    """Return the values of ``config`` by key. Record the answers to sections without an equivalent in roomier."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if key == "bfloat16":
            key = "bf16"
        if key in SECTIONS:
            switch, problem, action = SECTIONS[key]
            given = value.get(switch) if switch and isinstance(value, Mapping) else value
            is_off = given in _OFF or (switch in ("stages", "autotp_size") and given in ("auto", 1))
            if is_off:
                answers.ignore(key, value, _DISABLED)
            else:
                answers.reject(key, value, problem, action)
        elif key in ("optimizer", "scheduler"):
            continue
        elif isinstance(value, Mapping) and (reason_of(key) or any(known.startswith(f"{key}.") for known in KNOWN)):
            found |= _leaves(value, answers, f"{key}.")
        else:
            found[key] = value
    return found


def _answer_rest(answers: Answers, key: str, value: Any) -> None:
    """Record the answer to a key that determines no argument."""
    if (reason := reason_of(key)) is not None:
        answers.ignore(key, value, reason)
    elif key in REJECTED and value in _OFF:
        answers.ignore(key, value, _DISABLED)
    elif key in REJECTED:
        answers.reject(key, value, *REJECTED[key])
    else:
        answers.reject(key, value, "is not a key of DeepSpeed's configuration", _nearest_key(key))


def _nearest_key(key: str) -> str:
    """Return a suggestion for an unknown key: a similar name in the same section, otherwise in any section."""
    section, _, name = key.rpartition(".")
    known = {each.rpartition(".")[2]: each for each in sorted(KNOWN | MARKS, reverse=True)}
    siblings = {each.rpartition(".")[2]: each for each in KNOWN | MARKS if each.rpartition(".")[0] == section}
    for names in (siblings, known):
        near = nearest(name, names)
        if near is not None:
            return f"Did you mean {names[near]!r}?"
    return "Correct the name, or remove the key"


def _answer_batch(answers: Answers, leaves: dict[str, Any], num_ranks: int) -> None:
    """Record the answers to the three batch sizes, two of which determine the third."""
    total = leaves.pop("train_batch_size", None)
    micro = leaves.pop("train_micro_batch_size_per_gpu", None)
    steps = leaves.pop("gradient_accumulation_steps", None)
    sizes = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    for name, value in sizes.items():
        if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            answers.reject(name, value, "must be a positive integer", "Correct it, or remove it")
            return
    if total is not None and steps is not None and micro is None:
        micro = total / (steps * num_ranks)
    elif total is not None and micro is None:
        micro = total / num_ranks
    if total is not None and micro and steps is None:
        steps = total / (micro * num_ranks)
    parts = {"the micro-batch": micro, "the number of accumulation steps": steps}
    fraction = next((name for name, value in parts.items() if value is not None and value != int(value)), None)
    if fraction is not None or (total is not None and micro and steps and total != micro * steps * num_ranks):
        problem = (
            f"must be train_micro_batch_size_per_gpu ({micro:g}) x gradient_accumulation_steps ({steps or 1:g}) x "
            f"ranks ({num_ranks})"
        )
        answers.reject("train_batch_size", total, problem, "Change one of the sizes, or devices")
        return
    if steps is not None:
        setting = "train_batch_size" if sizes["gradient_accumulation_steps"] is None else "gradient_accumulation_steps"
        answers.use(setting, sizes[setting], "accumulate_grad_batches", int(steps))
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if sizes[name] is not None:
            size = "" if micro is None else f": use batch_size={int(micro)}"
            answers.ignore(name, sizes[name], f"the DataLoader determines the micro-batch size of a rank{size}")


def _flag(answers: Answers, leaves: dict[str, Any], key: str) -> bool | None:
    """Remove and return the value of ``key``, which must be a bool; None if the key is missing or invalid."""
    value = leaves.pop(key, None)
    if value is None or isinstance(value, bool):
        return value
    answers.reject(key, value, "must be true or false", "Correct it")
    return None


def _answer_precision(answers: Answers, leaves: dict[str, Any]) -> None:
    modes = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
    enabled = [name for name in modes if leaves.get(f"{name}.enabled") is True]
    for name, mode in modes.items():
        value = _flag(answers, leaves, f"{name}.enabled")
        has_masters = _flag(answers, leaves, "bf16.bf16_master_weights_and_grads") if name == "bf16" else None
        remark = "weights and updates stay in float32, but DeepSpeed also casts the weights"
        if has_masters:
            mode, remark = "bf16-true", "weight_rounding='split' stores the 16 bits that bfloat16 weights lack"
            answers.use("bf16.bf16_master_weights_and_grads", True, "precision", mode)
        elif has_masters is not None:
            answers.ignore("bf16.bf16_master_weights_and_grads", has_masters, _DISABLED)
        if value is True:
            answers.use(f"{name}.enabled", True, "precision", mode, remark)
        elif value is not None:
            answers.ignore(f"{name}.enabled", value, _DISABLED)
    if len(enabled) == 2:
        answers.reject("fp16.enabled", True, "cannot be combined with bf16.enabled", "Disable one of the two")
    value = _flag(answers, leaves, "torch_autocast.enabled")
    dtype = leaves.pop("torch_autocast.dtype", None)
    for setting, each in (("torch_autocast.enabled", value), ("torch_autocast.dtype", dtype)):
        if value is True and each is not None:
            half = str(dtype).removeprefix("torch.") in ("float16", "fp16", "half")
            answers.use(setting, each, "precision", "16-mixed" if half else "bf16-mixed")
        elif each is not None:
            answers.ignore(setting, each, _DISABLED)


def _answer_zero(answers: Answers, leaves: dict[str, Any]) -> None:
    section = "zero_optimization"
    whole = leaves.pop(section, None)
    if not isinstance(whole, (bool, NoneType)):
        answers.reject(section, whole, "must be a section", "Use {'stage': 3}")
    stage = leaves.pop(f"{section}.stage", 1 if whole is True else 0)
    strategies = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in strategies:
        answers.reject(f"{section}.stage", stage, "must be 0, 1, 2 or 3", "Correct it")
        stage = 3  # all other keys of the section are possible, so their errors are also reported
    groups = leaves.pop(f"{section}.mics_shard_size", None)
    if groups is not None and not isinstance(groups, int):
        answers.reject(f"{section}.mics_shard_size", groups, "must be an integer", "Correct it")
    elif isinstance(groups, int) and groups > 0:
        answers.use(f"{section}.stage", stage, "strategy", "hsdp")
        answers.use(f"{section}.mics_shard_size", groups, "strategy", "hsdp")
        answers.use(f"{section}.mics_shard_size", groups, "strategy.shard_size", groups)
    else:
        answers.use(f"{section}.stage", stage, "strategy", strategies[stage])
        if groups is not None:
            answers.ignore(f"{section}.mics_shard_size", groups, _DISABLED)
    _answer_offload(answers, leaves, "offload_optimizer", "optimizer_states", stage >= 1)
    _answer_offload(answers, leaves, "offload_param", "parameters", stage >= 3)
    ratio = leaves.pop(f"{section}.offload_optimizer.ratio", None)
    if ratio is not None and not isinstance(ratio, (int, float)):
        answers.reject(f"{section}.offload_optimizer.ratio", ratio, "must be a number", "Correct it")
    elif ratio is not None and answers.meaning_of("offload.optimizer_states") and ratio < 1:
        answers.use(f"{section}.offload_optimizer.ratio", ratio, "offload.share", ratio)
    elif ratio is not None:
        answers.ignore(f"{section}.offload_optimizer.ratio", ratio, "all optimizer states are stored in the same tier")


_TIERS = {"cpu": "cpu", "nvme": "disk", "none": None, None: None}
_FORMER_OFFLOAD = {"offload_optimizer": ("cpu_offload",), "offload_param": ("cpu_offload_param", "cpu_offload_params")}


def _answer_offload(answers: Answers, leaves: dict[str, Any], setting: str, name: str, is_possible: bool) -> None:
    """Record the answers to ``offload_optimizer`` or ``offload_param``."""
    key = f"zero_optimization.{setting}"
    device = leaves.pop(f"{key}.device", None)
    setting = f"{key}.device"
    if key in leaves:  # the value can be null, or a bool that Lightning accepts
        whole = leaves.pop(key)
        device = "cpu" if whole is True else whole or "none"
    for former in _FORMER_OFFLOAD[key.rpartition(".")[2]]:
        if leaves.pop(f"zero_optimization.{former}", False):
            device, setting = "cpu", f"zero_optimization.{former}"
    folder = leaves.pop(f"{key}.nvme_path", None)
    tier = _TIERS.get(device, "") if isinstance(device, (str, NoneType)) else ""
    if tier == "":
        answers.reject(setting, device, "must be 'cpu', 'nvme' or 'none'", "Correct it")
    elif tier is not None and not is_possible:
        stage = 3 if name == "parameters" else "1, 2 or 3"
        answers.ignore(setting, device, f"DeepSpeed requires stage {stage}")
    elif tier is not None:
        answers.use(setting, device, f"offload.{name}", tier)
    elif device is not None:
        answers.ignore(setting, device, _DISABLED)
    if folder is None:
        return
    if tier == "disk" and is_possible:
        answers.use(f"{key}.nvme_path", folder, "offload.folder", str(folder))
    else:
        answers.ignore(f"{key}.nvme_path", folder, "no tensors are stored on disk")


def _answer_recomputation(answers: Answers, leaves: dict[str, Any]) -> None:
    section = "activation_checkpointing"
    if leaves.get(section, False) in _OFF:
        leaves.pop(section, None)
    remark = "each block is recomputed, but DeepSpeed recomputes only modules that call its checkpointing function"
    for name in ("partition_activations", "cpu_checkpointing"):
        value = _flag(answers, leaves, f"{section}.{name}")
        if value is False:
            answers.ignore(f"{section}.{name}", value, "the argument activation_checkpointing selects a policy")
        elif value:
            answers.use(f"{section}.{name}", value, "activation_checkpointing", "full", remark)
            if name == "cpu_checkpointing":
                answers.use(f"{section}.{name}", value, "offload.activations", "cpu")


def _answer_clipping(answers: Answers, leaves: dict[str, Any], *, is_optional: bool) -> None:
    if "gradient_clipping" in leaves:
        value = leaves.pop("gradient_clipping")
        if value:
            answers.use("gradient_clipping", value, "gradient_clip_val", value)
        else:
            answers.ignore("gradient_clipping", value, "gradients are not clipped by default")
    elif not is_optional:
        reason = "gradients are not clipped, as in DeepSpeed before 0.19, but later versions of DeepSpeed clip to 1.0"
        answers.ignore("gradient_clipping", None, reason)


def _answer_communication(answers: Answers, leaves: dict[str, Any]) -> None:
    dtype = leaves.pop("communication_data_type", None)
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(str(dtype), dtype)
    if short in ("fp32", "bf16"):
        meaning = "32" if short == "fp32" else "bf16"
        answers.use("communication_data_type", dtype, "strategy.reduce_dtype", meaning)
    elif dtype is not None:
        action = "Use 'bf16', which halves the communication volume, or 'fp32'"
        answers.reject(
            "communication_data_type", dtype, "sends numbers in a format in which gradients underflow", action
        )
    operation = leaves.pop("gradient_allreduce_op", None)
    if operation == "sum":
        action = "Use 'mean', and multiply the learning rate by the number of ranks"
        answers.reject("gradient_allreduce_op", "sum", "is not supported, because gradients are averaged", action)
    elif operation is not None:
        answers.ignore("gradient_allreduce_op", operation, "gradients are averaged over the global batch")


_ABSENT = object()

_DEFAULTS: dict[str, tuple[str, object]] = {
    # key of the configuration: (argument that determines its value, default of Hugging Face)
    "gradient_accumulation_steps": ("accumulate_grad_batches", _ABSENT),
    "gradient_clipping": ("gradient_clip_val", 1.0),
    "fp16.enabled": ("precision", _ABSENT),
    "bf16.enabled": ("precision", _ABSENT),
    "bfloat16.enabled": ("precision", _ABSENT),
    "optimizer.params.lr": ("learning_rate", 5e-5),
    "optimizer.params.betas": ("", [0.9, 0.999]),
    "optimizer.params.eps": ("", 1e-8),
    "optimizer.params.weight_decay": ("", 0.0),
    "scheduler.params.warmup_min_lr": ("", 0.0),
    "scheduler.params.warmup_num_steps": ("", 1),
}


def without_auto(
    config: Mapping[str, Any], answers: Answers, given: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Return a copy of ``config`` in which the values ``"auto"`` are replaced or removed. Record the result for each of
    these values.

    Hugging Face replaces these values with its training arguments. roomier replaces them with arguments of the Trainer.
    If an argument is not given, the value is the default of Hugging Face's TrainingArguments.

    Args:
        given: arguments of the Trainer that differ from their defaults.
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found[name] = without_auto(value, answers, given, f"{key}.")
        elif value != "auto" or reason_of(key) or key.partition(".")[0] in SECTIONS:
            found[name] = value
        elif key not in _DEFAULTS and key not in _DETERMINED:
            answers.reject(
                key, "auto", "is not supported here, because Hugging Face does not replace it", "Set a value"
            )
        elif (own := _setting_of(key, given)) is not None:
            found[name] = own
        elif key in _DETERMINED:
            answers.ignore(key, "auto", _DETERMINED[key])
            if prefix == "scheduler.params.":
                found[name] = None  # None, so that the defaults of DeepSpeed are not used
        else:
            argument, default = _DEFAULTS[key]
            if argument and given.get(argument) is not None:
                answers.ignore(key, "auto", f"{argument}={given[argument]!r} determines it")
            elif default is _ABSENT:
                answers.ignore(key, "auto", f"the argument {argument} determines it")
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
    "optimizer.params.torch_adam": "the optimizer is always torch's",
    "scheduler.params.warmup_max_lr": "the learning rate of the optimizer determines this rate",
    "scheduler.params.total_num_steps": "the number of steps of the run determines this number",
}
"""Keys of the configuration that no argument determines, with the reason why ``"auto"`` has no effect."""


_NAMES = ("adagrad", "lion", "muon", "onebitadam", "sgd", "rmsprop", "nadam", "radam", "adafactor")
"""DeepSpeed's optimizer types, in lower case, that are names of roomier optimizers with the same parameters."""

_REJECTED = {
    **dict.fromkeys(("lamb", "onebitlamb"), "roomier has no LAMB"),
    "zerooneadam": "roomier does not have 0/1 Adam; onebit_adam also compresses the communication",
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "roomier does not scale learning rates by width"),
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
    """Record the results for the section ``optimizer``. If the section is None, the model configures its optimizer."""
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
        answers.use("optimizer.type", section["type"], "optimizer", canonical("optimizer.name", kind))
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
    """Record the results for the section ``scheduler``.

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
