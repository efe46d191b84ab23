"""Validation of a Plan.

The type, the accepted words and the range of each field are checked first. If all types are correct, the functions in
``RULES`` check combinations of fields. All errors are reported together, and each error suggests an alternative.
"""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from roomier.core.device.names import accelerator_of_torch
from roomier.core.errors import CombinedError, PlanError, did_you_mean
from roomier.core.units import format_bytes
from roomier.plan.choices import ALIASES, CHOICES, REFUSED, aliases_of, averages_itself
from roomier.plan.levers import BY_PERMISSION, LEVER_RULES, set_fields
from roomier.plan.parts import FIELDS, MIN_BUDGET_BYTES, PARTS, Options, PlanParts

Rule = Callable[[PlanParts], Iterator[PlanError]]


class CombinedPlanError(CombinedError, PlanError):
    """Several errors in one Plan, or in settings that determine a Plan."""

    errors: tuple[PlanError, ...]


def refuse(errors: list[PlanError], subject: str = "The plan") -> None:
    """Raise ``errors`` if the list is not empty.

    Args:
        subject: name of the object that has the errors.

    Raises:
        PlanError: the only error, or all errors as a ``CombinedPlanError``.
    """
    if errors:
        raise one_of(errors, subject)


def one_of(errors: list[PlanError], subject: str = "The plan") -> PlanError:
    """Combine one or more ``errors`` into one error."""
    return errors[0] if len(errors) == 1 else CombinedPlanError(errors, subject)


def each_error(error: PlanError) -> tuple[PlanError, ...]:
    """Return the individual errors in ``error``."""
    return error.errors if isinstance(error, CombinedPlanError) else (error,)


def check(plan: PlanParts) -> None:
    """Validate ``plan``.

    Raises:
        PlanError: the only error, or all errors as a ``CombinedPlanError``.
    """
    errors = [error for section in PARTS for error in _check_part(section, getattr(plan, section))]
    if not any(isinstance(error, _WrongTypeError) for error in errors):
        wrong = {error.field for error in errors}
        errors += [error for rule in RULES for error in rule(plan) if error.field not in wrong]
    refuse(errors)


# ---- single fields ---------------------------------------------------------------------------------------------


class _WrongTypeError(PlanError):
    """Error for a value of the wrong type. The rules are not applied to a Plan that contains such a value."""


@dataclass(frozen=True)
class _Range:
    """An interval of numbers from ``low`` to ``high``. The interval includes ``low`` if ``low_is_allowed`` is True."""

    low: float
    action: str
    low_is_allowed: bool = True
    high: float = math.inf
    is_in_bytes: bool = False

    def holds(self, value: float) -> bool:
        above = value >= self.low if self.low_is_allowed else value > self.low
        return above and value <= self.high and value != math.inf

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"between {self.low:g} and {self.high:g}"
        low = format_bytes(self.low) if self.is_in_bytes else f"{self.low:g}"
        return f"at least {low}" if self.low_is_allowed else f"above {low} and finite"


RANGES: dict[str, _Range] = {
    "parallel.devices": _Range(1, "Use 1"),
    "parallel.num_nodes": _Range(1, "Use 1"),
    "parallel.context_parallel_size": _Range(1, "Use 1, so that each rank has its own sequences"),
    "parallel.pipeline_parallel_size": _Range(1, "Use 1, so that each rank computes the full model"),
    "parallel.stages_per_rank": _Range(1, "Use 1, so that each rank computes one stage"),
    "parallel.shard_size": _Range(1, "Set it to the number of ranks that share one replica of the model"),
    "parallel.compression_rank": _Range(1, "Use 4, or 1 to send the fewest bytes"),
    "parallel.compression_warmup_steps": _Range(3, "Use at least 3, for example a tenth of the run"),
    "batch.accumulate_grad_batches": _Range(1, "Use 1 for one micro-batch per optimizer step"),
    "batch.gradient_clip_val": _Range(0, "Use None to disable clipping, or a value such as 1.0", low_is_allowed=False),
    "optimizer.lr": _Range(0, "Use a learning rate such as 3e-4", low_is_allowed=False),
    "optimizer.weight_decay": _Range(0, "Use 0.0 for no weight decay"),
    "optimizer.warmup_steps": _Range(0, "Use 0 for no warm-up"),
    "optimizer.decay_steps": _Range(1, "Use None for the length of the run, or the last step of the decay"),
    "optimizer.min_lr_ratio": _Range(0, "Set it to the final learning rate divided by the peak learning rate", high=1),
    "activation.every_n": _Range(1, "Use 2 for every second block"),
    "activation.budget_bytes": _Range(
        MIN_BUDGET_BYTES, "Use a size such as '6GiB', or a fraction up to 1", is_in_bytes=True
    ),
    "activation.budget_fraction": _Range(0, "Use 0 for the least memory, or 1 for the least computation", high=1),
    "offload.share": _Range(0, "Use 1.0 for all optimizer states, or a fraction such as 0.5", high=1),
    "offload.buffers": _Range(1, "Use 3, or 1 for the least memory", high=1024),
    "loss.chunk_tokens": _Range(1, "Use None, or 1024"),
    "choice.memory_budget_bytes": _Range(MIN_BUDGET_BYTES, "Use a size such as '22GiB', or None", is_in_bytes=True),
    "adapter.lora_rank": _Range(1, "Use a rank such as 8, or None for no adapters"),
    "adapter.lora_alpha": _Range(0, "Use twice lora_rank, or None", low_is_allowed=False),
    "adapter.lora_dropout": _Range(0, "Use a probability such as 0.05", high=1),
}

_TYPE_WORDS: dict[object, tuple[str, str]] = {
    str: ("a string", "Pass a name in quotes"),
    int: ("an integer", "Pass an integer such as 1"),
    float: ("a number", "Pass a number such as 1.0, without quotes"),
    bool: ("True or False", "Pass True or False"),
    Mapping[str, object]: ("a mapping", "Pass keyword arguments such as {'betas': (0.9, 0.95)}"),
}

_TYPE_ACTIONS = {
    "optimizer.name": "Pass a name such as 'adamw' or a dict with name and options, or return an optimizer from"
    " configure_optimizers",
    "adapter.lora_rank": "Pass an integer such as 8, or a dict with rank, alpha, dropout, targets, trained and base",
}


def _check_part(section: str, part: object) -> Iterator[PlanError]:
    expected = PARTS[section]
    if not isinstance(part, expected):
        action = f"Pass {section}={expected.__name__}(...), or create the plan with Plan.from_dict"
        yield _WrongTypeError(section, part, f"must be a {expected.__name__}", action)
        return
    for name, hint in FIELDS[section].items():
        yield from _check_field(f"{section}.{name}", getattr(part, name), hint)


def _check_field(field: str, value: object, hint: object) -> Iterator[PlanError]:
    if isinstance(value, Options) and hint == Mapping[str, object]:
        yield from _check_options(field, value)
        return
    wanted = hint if hint in _TYPE_WORDS else get_args(hint)[0]
    if value is None and wanted != hint:
        return
    if wanted == Mapping[str, object] or type(value) is not wanted:
        what, action = _TYPE_WORDS[wanted]
        nothing = "" if wanted == hint else " or None"
        yield _WrongTypeError(field, value, f"must be {what}{nothing}", _TYPE_ACTIONS.get(field, action))
    elif field in CHOICES:
        yield from _check_word(field, str(value))
    elif field in RANGES and isinstance(value, (int, float)) and not RANGES[field].holds(value):
        yield PlanError(field, value, f"must be {RANGES[field]}", RANGES[field].action)


def _check_word(field: str, value: str) -> Iterator[PlanError]:
    choices = list(CHOICES[field])
    added = accelerator_of_torch() if field == "parallel.accelerator" and value not in choices else None
    choices += [added] if added is not None and added not in choices else []
    if value in choices:
        return
    refused = REFUSED.get(field, {})
    if value in refused:
        also = aliases_of(field, value)
        meaning = f" (aliases: {', '.join(also)})" if also else ""
        yield PlanError(field, value, refused[value].problem + meaning, refused[value].instead)
        return
    aliases = ALIASES.get(field, {})
    near = difflib.get_close_matches(value.lower(), [*choices, *refused, *aliases], n=1)
    meant = refused.get(aliases.get(near[0], near[0])) if near else None
    if meant is None:
        action = did_you_mean(value.lower(), [*choices, *(near if near else ())])
    else:
        action = f"Did you mean {near[0]!r}? It {meant.problem}. {meant.instead}"
    yield PlanError(field, value, "is unknown", action)


def _check_options(field: str, options: Options) -> Iterator[PlanError]:
    own_fields = [name for name in FIELDS["optimizer"] if name != "options"]
    for name, value in options.items():
        path = f"{field}.{name}"
        if not isinstance(name, str):
            yield _WrongTypeError(field, name, "is not a string", "Use names of keyword arguments as keys")
        elif name in own_fields:
            yield PlanError(path, value, "cannot be set in optimizer.options", f"Set optimizer.{name} instead")
        elif name in ("params", "options"):
            yield PlanError(path, value, "is not a keyword argument of an optimizer", "Remove it")
        elif not _is_plain(value):
            action = "Use numbers, strings, True, False, None, or lists of these"
            yield _WrongTypeError(path, value, "cannot be serialized", action)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(element) for element in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


# ---- combinations of fields ------------------------------------------------------------------------------------


def single_has_one_rank(plan: PlanParts) -> Iterator[PlanError]:
    """Reject several devices or machines if the strategy supports only one rank."""
    parallel = plan.parallel
    for name, value in (("devices", parallel.devices), ("num_nodes", parallel.num_nodes)):
        if parallel.strategy == "single" and value > 1:
            action = "Use strategy='ddp', 'zero2' (half the memory on 2 ranks) or 'zero3' (the least memory)"
            yield PlanError(f"parallel.{name}", value, "must be 1 with strategy 'single'", action)


def shards_fill_the_ranks(plan: PlanParts) -> Iterator[PlanError]:
    """Reject a shard size that does not divide the number of ranks, a shard size without hsdp, a context size or number
    of stages that does not fit the plan, and settings of stages without stages."""
    parallel = plan.parallel
    if parallel.context_parallel_size > 1:
        yield from _context_errors(plan, parallel.context_parallel_size)
    if parallel.pipeline_parallel_size > 1:
        yield from _pipeline_errors(plan, parallel.pipeline_parallel_size)
    else:
        problem, action = "has no effect with pipeline_parallel_size=1", "Set pipeline_parallel_size, or remove it"
        yield from set_fields(plan, "parallel.schedule parallel.stages_per_rank parallel.split", problem, action)
    if parallel.strategy != "hsdp":
        problem = f"is supported only with strategy 'hsdp', not {parallel.strategy!r}"
        yield from set_fields(plan, "parallel.shard_size", problem, "Use strategy='hsdp', or remove shard_size")
    elif parallel.num_shards > 0 and parallel.num_ranks % parallel.num_shards:  # devices=0 has its own error
        fitting = [size for size in range(1, parallel.num_ranks + 1) if parallel.num_ranks % size == 0]
        problem = f"must divide the number of ranks ({parallel.num_ranks})"
        yield PlanError("parallel.shard_size", parallel.shard_size, problem, f"Use one of {fitting}")


def _context_errors(plan: PlanParts, size: int) -> Iterator[PlanError]:
    """Reject a context size that the strategy or the number of ranks does not support, and techniques that are not
    implemented for slices of a sequence."""
    parallel, field = plan.parallel, "parallel.context_parallel_size"
    if parallel.strategy == "single":
        problem = "is not supported with strategy 'single'"
        yield PlanError(field, size, problem, "Use strategy='zero3' (the least memory), 'zero2' or 'ddp'")
        return
    whole = {"number of ranks": parallel.num_ranks}
    if parallel.strategy == "hsdp":
        whole["shard_size"] = parallel.num_shards
    for name, number in whole.items():
        if number % size:
            action = f"Use context_parallel_size={_nearest_divisor(number, size)}"
            yield PlanError(field, size, f"must divide the {name} ({number})", action)
    rejected = f"is not supported with context_parallel_size={size}"
    if plan.batch.seeding != "events":
        problem = f"{rejected}, because all slices of a sequence would have the same dropout masks"
        yield PlanError("batch.seeding", plan.batch.seeding, problem, "Set seeding='events'")
    problem = f"{rejected}, because the gradients of a rank are a part of the gradients of its samples"
    action = "Set gradient_compression='none', or context_parallel_size=1"
    yield from set_fields(plan, "parallel.gradient_compression", problem, action)
    if averages_itself(plan.optimizer.name):
        action = "Use optimizer='adamw', or context_parallel_size=1"
        yield PlanError("optimizer.name", plan.optimizer.name, problem, action)
    if plan.compile.enabled:
        problem = f"{rejected}, because the compiler does not trace the exchange between the ranks"
        yield PlanError("compile.enabled", True, problem, "Set compile=False, or context_parallel_size=1")


def _pipeline_errors(plan: PlanParts, size: int) -> Iterator[PlanError]:
    """Reject a number of stages that the strategy or the number of ranks does not support, and techniques that are not
    implemented for stages."""
    parallel, field = plan.parallel, "parallel.pipeline_parallel_size"
    if parallel.strategy in ("single", "hsdp"):
        problem = f"is supported only with 'ddp', 'zero1', 'zero2' and 'zero3', not {parallel.strategy!r}"
        yield PlanError(field, size, problem, "Use strategy='zero2', or pipeline_parallel_size=1")
    elif parallel.num_ranks % size:
        action = f"Use pipeline_parallel_size={_nearest_divisor(parallel.num_ranks, size)}"
        yield PlanError(field, size, f"must divide the number of ranks ({parallel.num_ranks})", action)
    per_rank, num_stages = parallel.stages_per_rank, parallel.num_stages
    if (per_rank > 1) != (parallel.schedule_of_stages == "interleaved_1f1b"):
        problem = f"is not supported with schedule {parallel.schedule_of_stages!r}"
        action = "Use schedule='interleaved_1f1b'" if per_rank > 1 else "Use schedule='1f1b', or stages_per_rank=2"
        yield PlanError("parallel.stages_per_rank", per_rank, problem, action)
    if parallel.split and len(names := parallel.split.split(",")) != num_stages - 1:
        problem = f"has {len(names)} names, but must have one for each of the {num_stages} stages after the first"
        fitting = f"Use pipeline_parallel_size={len(names) + 1}, or name" if per_rank == 1 else "Name"
        yield PlanError("parallel.split", parallel.split, problem, f"{fitting} {num_stages - 1} modules")
    problem = f"is not implemented with pipeline_parallel_size={size}"
    for fields, action in _WITHOUT_PIPELINES.items():
        yield from set_fields(plan, fields, problem, f"{action}, or pipeline_parallel_size=1")
    for name, value, is_rejected, action in (
        ("precision.mode", plan.precision.mode, plan.precision.mode == "16-mixed", "Use precision='bf16-mixed'"),
        ("activation.policy", "budget", plan.activation.policy == "budget", "Use activation_checkpointing='full'"),
        ("optimizer.name", plan.optimizer.name, averages_itself(plan.optimizer.name), "Use optimizer='adamw'"),
    ):
        if is_rejected:
            yield PlanError(name, value, problem, f"{action}, or pipeline_parallel_size=1")
    if plan.batch.seeding != "events":
        problem = (
            f"is not supported with pipeline_parallel_size={size}, because a stage does not draw the random numbers of "
            "other stages"
        )
        yield PlanError("batch.seeding", plan.batch.seeding, problem, "Set seeding='events'")


_WITHOUT_PIPELINES = {
    "parallel.context_parallel_size": "Use context_parallel_size=1",
    "parallel.gradient_compression": "Set gradient_compression='none'",
    "optimizer.step_in_backward": "Set step_in_backward=False",
    "offload.optimizer_states offload.parameters offload.activations": "Remove it",
    "compile.enabled": "Set compile=False",
}
"""Fields that must have their default values in a pipeline, with the advice in the error."""


def _nearest_divisor(number: int, size: int) -> int:
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    return min(divisors, key=lambda each: (abs(each - size), each))


def mps_is_one_device(plan: PlanParts) -> Iterator[PlanError]:
    """Reject several ranks on mps, because torch has no collectives for mps."""
    if plan.parallel.accelerator == "mps" and plan.parallel.strategy != "single":
        problem = "requires several ranks, but mps supports only one"
        action = "Use strategy='single' or accelerator='cpu'"
        yield PlanError("parallel.strategy", plan.parallel.strategy, problem, action)


def communication_fits_the_strategy(plan: PlanParts) -> Iterator[PlanError]:
    """Reject gradient compression with strategies other than ddp, because other strategies use different collectives.
    Also reject sequential communication with strategies that do not shard parameters."""
    parallel = plan.parallel
    if parallel.strategy != "ddp":
        problem = f"is supported only with strategy 'ddp', not {parallel.strategy!r}"
        action = "Use strategy='ddp', or replace gradient_compression by reduce_dtype='bf16', which halves the traffic"
        yield from set_fields(plan, "parallel.gradient_compression", problem, action)
    if parallel.strategy in ("single", "ddp"):
        problem = f"is supported only if the model is sharded, not with strategy {parallel.strategy!r}"
        action = "Use strategy='zero3', or remove communication"
        yield from set_fields(plan, "parallel.communication", problem, action)


def compression_settings_are_complete(plan: PlanParts) -> Iterator[PlanError]:
    """Reject compression settings without gradient compression. Also reject compression with precisions in which
    gradients can be infinite."""
    parallel = plan.parallel
    if parallel.gradient_compression == "none":
        fields, problem = "parallel.compression_rank parallel.compression_warmup_steps", "has no effect with"
        action = "Remove it, or set gradient_compression='powersgd'"
        yield from set_fields(plan, fields, f"{problem} gradient_compression 'none'", action)
        return
    if plan.precision.mode == "16-mixed":
        problem = "is not supported with precision '16-mixed', in which gradients can be infinite"
        action = "Use precision='bf16-mixed', or set gradient_compression='none'"
        yield PlanError("parallel.gradient_compression", parallel.gradient_compression, problem, action)
    problem = "has no effect with gradient_compression, which determines what is sent"
    yield from set_fields(plan, "parallel.reduce_dtype", problem, "Remove one of the two settings")


def optimizer_sends_for_itself(plan: PlanParts) -> Iterator[PlanError]:
    """With 1-bit Adam, which averages over the ranks itself, reject settings that change the gradients of a rank or
    that require reduced gradients."""
    if not averages_itself(plan.optimizer.name):
        return
    parallel, rejected = plan.parallel, f"is not supported with optimizer {plan.optimizer.name!r},"
    if parallel.strategy not in ("ddp", "zero1", "auto"):
        action = "Use strategy='ddp' or 'zero1', or use optimizer='adamw'"
        problem = f"{rejected} which requires unsharded weights and gradients"
        yield PlanError("parallel.strategy", parallel.strategy, problem, action)
    problem = f"{rejected} which sends signs of the momentum instead of gradients"
    action = "Set gradient_compression='none', or use optimizer='adamw'"
    yield from set_fields(plan, "parallel.gradient_compression", problem, action)
    problem = f"{rejected} which sends float32 until the variance is frozen"
    yield from set_fields(plan, "parallel.reduce_dtype", problem, "Set reduce_dtype='32'")
    problem = f"{rejected} because no rank has the gradient of the full batch"
    action = "Set gradient_clip_val=None, or use optimizer='adamw'"
    yield from set_fields(plan, "batch.gradient_clip_val", problem, action)
    if plan.precision.mode == "16-mixed":
        problem = f"{rejected} because the ranks would diverge if one rank skipped a step"
        yield PlanError("precision.mode", "16-mixed", problem, "Use precision='bf16-mixed'")


def float64_needs_hardware(plan: PlanParts) -> Iterator[PlanError]:
    """Reject float64 on mps, because mps does not support float64."""
    if plan.precision.mode == "64-true" and plan.parallel.accelerator == "mps":
        yield PlanError(
            "precision.mode", "64-true", "is not supported on mps", "Use precision='32-true' or accelerator='cpu'"
        )


def clipping_has_a_bound(plan: PlanParts) -> Iterator[PlanError]:
    """Reject a clipping algorithm other than the default if clipping is disabled."""
    if plan.batch.gradient_clip_val is None:
        problem, action = "has no effect if gradient_clip_val is None", "Set gradient_clip_val, for example to 1.0"
        yield from set_fields(plan, "batch.gradient_clip_algorithm", problem, action)


def optimizer_settings_have_an_optimizer(plan: PlanParts) -> Iterator[PlanError]:
    """Reject optimizer settings if the plan names no optimizer, because the module then creates its own optimizer."""
    if plan.optimizer.name is None:
        fields = "optimizer.lr optimizer.weight_decay optimizer.options optimizer.schedule"
        action = "Set optimizer.name, for example to 'adamw', or set this value in configure_optimizers"
        yield from set_fields(plan, fields, "has no effect without optimizer.name", action)


def schedule_settings_have_a_schedule(plan: PlanParts) -> Iterator[PlanError]:
    """Reject schedule settings if no schedule is named, or if the named schedule does not use them."""
    optimizer = plan.optimizer
    if optimizer.schedule is None:
        action = "Set a schedule: 'constant', 'linear' or 'cosine'"
        yield from set_fields(plan, "optimizer.warmup_steps", "has no effect without a schedule", action)
    if optimizer.warmup_steps == 0:
        yield from set_fields(plan, "optimizer.log_warmup", "has no effect without a warm-up", "Set warmup_steps")
    if optimizer.schedule in (None, "constant"):
        fields, action = "optimizer.min_lr_ratio optimizer.decay_steps", "Use the schedule 'linear' or 'cosine'"
        yield from set_fields(plan, fields, f"has no effect with schedule {optimizer.schedule!r}", action)
    if optimizer.decay_steps is not None and optimizer.decay_steps < optimizer.warmup_steps:
        problem = f"must be at least the number of warm-up steps ({optimizer.warmup_steps})"
        action = "decay_steps includes the warm-up. Increase decay_steps, or decrease warmup_steps"
        yield PlanError("optimizer.decay_steps", optimizer.decay_steps, problem, action)


def allowances_are_of_auto(plan: PlanParts) -> Iterator[PlanError]:
    """Reject allowed choices that do not exist, and any allowed choices if the strategy is not ``"auto"``."""
    choice = plan.choice
    if not choice.words:
        return
    if plan.parallel.strategy != "auto":
        problem = f"has no effect with strategy {plan.parallel.strategy!r}"
        yield PlanError("choice.allowed", choice.allowed, problem, "Use strategy='auto', or remove it")
        return
    known = [*CHOICES["precision.mode"], *CHOICES["optimizer.name"], *BY_PERMISSION]
    for word in choice.words:
        if word not in known:
            problem = f"must be a precision, an optimizer or one of {', '.join(map(repr, BY_PERMISSION))}"
            yield PlanError("choice.allowed", word, problem, did_you_mean(word, known))


RULES: list[Rule] = [
    single_has_one_rank,
    shards_fill_the_ranks,
    mps_is_one_device,
    communication_fits_the_strategy,
    compression_settings_are_complete,
    optimizer_sends_for_itself,
    float64_needs_hardware,
    clipping_has_a_bound,
    optimizer_settings_have_an_optimizer,
    schedule_settings_have_a_schedule,
    allowances_are_of_auto,
    *LEVER_RULES,
]
