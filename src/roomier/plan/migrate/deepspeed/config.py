"""Conversion of a DeepSpeed configuration to arguments of the Trainer.

Each key of the configuration has an answer: an argument of the Trainer, a reason why the key has no effect, or an
error.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from roomier.core.errors import nearest
from roomier.plan.migrate.answers import Answers
from roomier.plan.migrate.deepspeed.auto import without_auto
from roomier.plan.migrate.deepspeed.keys import KNOWN, MARKS, NUMBERS, REJECTED, SECTIONS, WITHOUT_EFFECT
from roomier.plan.migrate.deepspeed.optimizer import answer_optimizer, answer_scheduler
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
    """Return the answers to all keys of ``config``.

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
    _answer_batch(answers, leaves, num_ranks)
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


def _leaves(config: Mapping[str, Any], answers: Answers, prefix: str = "") -> dict[str, Any]:
    """Return the values of ``config`` by key. Record the answers to sections without an equivalent in roomier."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if key == "bfloat16":
            key = "bf16"
        if key in SECTIONS:
            _answer_section(answers, key, value)
        elif key in ("optimizer", "scheduler"):
            continue
        elif isinstance(value, Mapping) and any(known.startswith(f"{key}.") for known in KNOWN):
            found |= _leaves(value, answers, f"{key}.")
        else:
            found[key] = value
    return found


def _answer_section(answers: Answers, key: str, value: Any) -> None:
    switch, problem, action = SECTIONS[key]
    given = value.get(switch) if switch and isinstance(value, Mapping) else value
    is_off = given in _OFF or (switch in ("stages", "autotp_size") and given in ("auto", 1))
    if is_off:
        answers.ignore(key, value, _DISABLED)
    else:
        answers.reject(key, value, problem, action)


def _answer_rest(answers: Answers, key: str, value: Any) -> None:
    """Record the answer to a key that determines no argument."""
    if key in WITHOUT_EFFECT:
        answers.ignore(key, value, WITHOUT_EFFECT[key])
    elif key in REJECTED and value in _OFF:
        answers.ignore(key, value, _DISABLED)
    elif key in REJECTED:
        answers.reject(key, value, *REJECTED[key])
    elif key in NUMBERS and value in (None, 0, 1):
        answers.ignore(key, value, _DISABLED)
    elif key in NUMBERS:
        answers.reject(key, value, *NUMBERS[key])
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
    for setting, name, smallest_stage in (
        ("offload_optimizer", "optimizer_states", 1),
        ("offload_param", "parameters", 3),
    ):
        _answer_offload(answers, leaves, setting, name, stage >= smallest_stage)
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
