"""What makes a Plan impossible, as a list of small functions; each finding says what to do instead.

Every field is looked at by itself first: type, vocabulary, range. Where every type is right, ``RULES`` look at
the Plan as a whole. All findings are reported at once.
"""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from roomier.core.errors import PlanError, did_you_mean
from roomier.core.units import format_bytes
from roomier.plan.choices import ALIASES, CHOICES, REFUSED, aliases_of
from roomier.plan.lever_rules import LEVER_RULES
from roomier.plan.levers import BY_PERMISSION
from roomier.plan.parts import FIELDS, MIN_BUDGET_BYTES, PARTS, Options

if TYPE_CHECKING:
    from roomier.plan.plan import Plan

Rule = Callable[["Plan"], Iterator[PlanError]]


class CombinedPlanError(PlanError):
    """Several things wrong with one Plan, told together.

    Args:
        errors: two or more; the first lends its ``field``, ``received``, ``problem`` and ``action``.
    """

    def __init__(self, errors: list[PlanError]) -> None:
        first = errors[0]
        super().__init__(first.field, first.received, first.problem, first.action)
        self.errors = tuple(errors)
        self.args = ("\n".join([f"{len(errors)} things are wrong with the plan", *map(str, errors)]),)


def refuse(errors: list[PlanError]) -> None:
    """Raise what ``errors`` holds: nothing, the one error itself, or all in one.

    Raises:
        PlanError: ``errors`` is not empty.
    """
    if errors:
        raise one_of(errors)


def one_of(errors: list[PlanError]) -> PlanError:
    """One error that tells all of ``errors``, at least one."""
    return errors[0] if len(errors) == 1 else CombinedPlanError(errors)


def each_error(error: PlanError) -> tuple[PlanError, ...]:
    """The single findings in ``error``."""
    return error.errors if isinstance(error, CombinedPlanError) else (error,)


def check(plan: "Plan") -> None:
    """Refuse a Plan that cannot run.

    Raises:
        PlanError: the one thing that is wrong, or (as ``CombinedPlanError``) all of them.
    """
    errors = [error for section in PARTS for error in _check_part(section, getattr(plan, section))]
    if not any(isinstance(error, _WrongTypeError) for error in errors):
        wrong = {error.field for error in errors}
        errors += [error for rule in RULES for error in rule(plan) if error.field not in wrong]
    refuse(errors)


# ---- one field at a time -------------------------------------------------------------------------------------


class _WrongTypeError(PlanError):
    """A value of another type; rules that would compare it are not asked."""


@dataclass(frozen=True)
class _Range:
    """What a number must be: ``low`` and ``high`` as an interval, ``low`` itself inside it or not."""

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
    "parallel.shard_size": _Range(1, "Give the number of ranks that share one copy of the model"),
    "parallel.compression_rank": _Range(1, "Use 4, or 1 for the fewest bytes"),
    "parallel.compression_warmup_steps": _Range(3, "Use 3 or more, about a tenth of the run"),
    "batch.accumulate_grad_batches": _Range(1, "Use 1 for one micro-batch per optimizer step"),
    "batch.gradient_clip_val": _Range(0, "Use None to clip nothing, or 1.0", low_is_allowed=False),
    "optimizer.lr": _Range(0, "Use a learning rate such as 3e-4", low_is_allowed=False),
    "optimizer.weight_decay": _Range(0, "Use 0.0 for no weight decay"),
    "optimizer.warmup_steps": _Range(0, "Use 0 for no warm-up"),
    "optimizer.min_lr_ratio": _Range(0, "Give the last learning rate as a share of the highest", high=1),
    "activation.every_n": _Range(1, "Use 2 for every second block"),
    "activation.budget_bytes": _Range(
        MIN_BUDGET_BYTES, "Give the bytes of the device, such as '6GiB', or a fraction up to 1", is_in_bytes=True
    ),
    "activation.budget_fraction": _Range(0, "Use 0 for the least memory, 1 for the least computation", high=1),
    "loss.chunk_tokens": _Range(1, "Use None, or 1024"),
    "choice.memory_budget_bytes": _Range(
        MIN_BUDGET_BYTES, "Give the bytes of the device, such as '22GiB', or None", is_in_bytes=True
    ),
    "adapter.lora_rank": _Range(1, "Use 8, or None for no adapters"),
    "adapter.lora_alpha": _Range(0, "Use twice lora_rank, or None", low_is_allowed=False),
    "adapter.lora_dropout": _Range(0, "Use a probability such as 0.05", high=1),
}

_TYPE_WORDS: dict[object, tuple[str, str]] = {
    str: ("a string", "Write its name in quotes"),
    int: ("an integer", "Give a whole number such as 1"),
    float: ("a number", "Give a number such as 1.0, without quotes"),
    bool: ("True or False", "Give True or False"),
    Mapping[str, object]: ("a mapping", "Give keyword arguments such as {'betas': (0.9, 0.95)}"),
}

_TYPE_ACTIONS = {
    "optimizer.name": "Write its name such as 'adamw', a dict with name and options, or return an optimizer of your own"
    " from configure_optimizers",
    "adapter.lora_rank": "Give a whole number such as 8, or a dict with rank, alpha, dropout, targets, trained, base",
}


def _check_part(section: str, part: object) -> Iterator[PlanError]:
    expected = PARTS[section]
    if not isinstance(part, expected):
        action = f"Write {section}={expected.__name__}(...), or make the plan with Plan.from_dict"
        yield _WrongTypeError(section, part, f"is not a {expected.__name__}", action)
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
        yield _WrongTypeError(field, value, f"is not {what}{nothing}", _TYPE_ACTIONS.get(field, action))
    elif field in CHOICES:
        yield from _check_word(field, str(value))
    elif field in RANGES and isinstance(value, (int, float)) and not RANGES[field].holds(value):
        yield PlanError(field, value, f"is not {RANGES[field]}", RANGES[field].action)


def _check_word(field: str, value: str) -> Iterator[PlanError]:
    if value in CHOICES[field]:
        return
    refused = REFUSED.get(field, {})
    if value in refused:
        also = aliases_of(field, value)
        meaning = f" ({', '.join(also)} mean{'s' * (len(also) == 1)} {value!r})" if also else ""
        yield PlanError(field, value, refused[value].problem + meaning, refused[value].instead)
        return
    aliases = ALIASES.get(field, {})
    near = difflib.get_close_matches(value.lower(), [*CHOICES[field], *refused, *aliases], n=1)
    meant = refused.get(aliases.get(near[0], near[0])) if near else None
    if meant is None:
        action = did_you_mean(value.lower(), [*CHOICES[field], *(near if near else ())])
    else:
        action = f"Did you mean {near[0]!r}? It {meant.problem}. {meant.instead}"
    yield PlanError(field, value, "is not known", action)


def _check_options(field: str, options: Options) -> Iterator[PlanError]:
    own_fields = [name for name in FIELDS["optimizer"] if name != "options"]
    for name, value in options.items():
        path = f"{field}.{name}"
        if not isinstance(name, str):
            yield _WrongTypeError(field, name, "is not the name of a keyword argument", "Use strings as keys")
        elif name in own_fields:
            yield PlanError(path, value, "has a field of its own", f"Write it as optimizer.{name}")
        elif name in ("params", "options"):
            yield PlanError(path, value, "is not a keyword argument of an optimizer", "Leave it out")
        elif not _is_plain(value):
            action = "Give numbers, strings, True, False, None, or lists of these"
            yield _WrongTypeError(path, value, "cannot be written to a file and read back", action)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(element) for element in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


# ---- the Plan as a whole -------------------------------------------------------------------------------------


def single_has_one_rank(plan: "Plan") -> Iterator[PlanError]:
    """One process cannot use several devices."""
    parallel = plan.parallel
    for name, value in (("devices", parallel.devices), ("num_nodes", parallel.num_nodes)):
        if parallel.strategy == "single" and value > 1:
            action = "Name one: strategy='ddp', 'zero2' (half the memory on 2 ranks) or 'zero3' (the least memory)"
            yield PlanError(f"parallel.{name}", value, "needs a strategy that uses several", action)


def shards_fill_the_ranks(plan: "Plan") -> Iterator[PlanError]:
    """The groups of hsdp are of one size, and no other strategy has groups."""
    parallel = plan.parallel
    if parallel.strategy != "hsdp":
        if parallel.shard_size is not None:
            action = "Use strategy='hsdp', or leave it out"
            problem = f"has no meaning for strategy {parallel.strategy!r}"
            yield PlanError("parallel.shard_size", parallel.shard_size, problem, action)
        return
    if parallel.num_shards > 0 and parallel.num_ranks % parallel.num_shards:  # devices=0 has an error of its own
        fitting = [size for size in range(1, parallel.num_ranks + 1) if parallel.num_ranks % size == 0]
        problem = f"does not divide the {parallel.num_ranks} ranks"
        yield PlanError("parallel.shard_size", parallel.shard_size, problem, f"Use one of {fitting}")


def mps_is_one_device(plan: "Plan") -> Iterator[PlanError]:
    """Apple's GPU is one, and torch has no collectives for it."""
    if plan.parallel.accelerator == "mps" and plan.parallel.strategy != "single":
        problem = "runs on several ranks, which mps does not have"
        action = "Use strategy='single', or accelerator='cpu'"
        yield PlanError("parallel.strategy", plan.parallel.strategy, problem, action)


def compression_is_of_ddp(plan: "Plan") -> Iterator[PlanError]:
    """What is cut among ranks is reduced by other collectives."""
    parallel = plan.parallel
    if parallel.gradient_compression != "none" and parallel.strategy != "ddp":
        problem = f"does not work with strategy {parallel.strategy!r}"
        action = "Use strategy='ddp', or reduce_dtype='bf16' for half the bytes"
        yield PlanError("parallel.gradient_compression", parallel.gradient_compression, problem, action)


def compression_has_what_it_needs(plan: "Plan") -> Iterator[PlanError]:
    """Its settings belong to it, and it keeps what it left out from step to step: one infinity would stay for good."""
    parallel = plan.parallel
    if parallel.gradient_compression == "none":
        for name in ("compression_rank", "compression_warmup_steps"):
            if getattr(parallel, name) is not None:
                problem = "has no effect while gradient_compression is 'none'"
                action = "Leave it out, or set gradient_compression='powersgd'"
                yield PlanError(f"parallel.{name}", getattr(parallel, name), problem, action)
        return
    if plan.precision.mode == "16-mixed":
        problem = "does not go with 16-mixed, where gradients may be infinite for a step"
        action = "Use precision='bf16-mixed', or leave it 'none'"
        yield PlanError("parallel.gradient_compression", parallel.gradient_compression, problem, action)
    if parallel.reduce_dtype != "32":
        problem = "has no effect with gradient_compression: its factors travel in the dtype of the weights"
        yield PlanError("parallel.reduce_dtype", parallel.reduce_dtype, problem, "Keep one of the two")


def onebit_adam_sends_for_itself(plan: "Plan") -> Iterator[PlanError]:
    """It needs the gradients of each rank as they are, and leaves none of all ranks to clip, round or compress."""
    if plan.optimizer.name != "onebit_adam":
        return
    parallel, batch = plan.parallel, plan.batch
    if parallel.strategy not in ("ddp", "zero1", "auto"):
        action = "Use strategy='ddp' or 'zero1', or optimizer='adamw'"
        problem = "does not go with optimizer 'onebit_adam': each rank needs all weights and gradients of its own"
        yield PlanError("parallel.strategy", parallel.strategy, problem, action)
    if parallel.gradient_compression != "none":
        problem = "does not go with optimizer 'onebit_adam', which sends signs of the momentum and no gradients"
        action = "Leave it 'none', or use optimizer='adamw'"
        yield PlanError("parallel.gradient_compression", parallel.gradient_compression, problem, action)
    if parallel.reduce_dtype != "32":
        problem = "does not go with optimizer 'onebit_adam': full precision until the variance is frozen, then signs"
        yield PlanError("parallel.reduce_dtype", parallel.reduce_dtype, problem, "Leave it '32'")
    if batch.gradient_clip_val is not None:
        problem = "does not go with optimizer 'onebit_adam': no rank has the gradient of the whole batch to clip"
        action = "Leave it None, or use optimizer='adamw'"
        yield PlanError("batch.gradient_clip_val", batch.gradient_clip_val, problem, action)
    if plan.precision.mode == "16-mixed":
        problem = "does not go with optimizer 'onebit_adam', which cannot leave out a step: ranks would part"
        yield PlanError("precision.mode", "16-mixed", problem, "Use precision='bf16-mixed'")


def adafactor_is_not_cut(plan: "Plan") -> Iterator[PlanError]:
    """torch's Adafactor takes norms of rows and columns, which it cannot of parameters that are cut."""
    parallel = plan.parallel
    if plan.optimizer.name == "adafactor" and parallel.strategy not in ("single", "ddp", "auto"):
        problem = f"does not work on parameters that are cut (strategy {parallel.strategy!r})"
        action = "Use optimizer='adamw', whose states are cut among the ranks, or strategy='ddp'"
        yield PlanError("optimizer.name", "adafactor", problem, action)


def float64_needs_hardware(plan: "Plan") -> Iterator[PlanError]:
    """Apple's GPUs have no float64."""
    if plan.precision.mode == "64-true" and plan.parallel.accelerator == "mps":
        yield PlanError(
            "precision.mode", "64-true", "mps has no float64", "Use precision='32-true', or accelerator='cpu'"
        )


def clipping_has_a_bound(plan: "Plan") -> Iterator[PlanError]:
    """An algorithm that was chosen, with nothing to clip at, would silently do nothing."""
    batch = plan.batch
    if batch.gradient_clip_val is None and batch.gradient_clip_algorithm != "norm":
        action = "Give gradient_clip_val as well, such as 1.0"
        problem = "clips nothing while gradient_clip_val is None"
        yield PlanError("batch.gradient_clip_algorithm", batch.gradient_clip_algorithm, problem, action)


def optimizer_settings_have_an_optimizer(plan: "Plan") -> Iterator[PlanError]:
    """Settings without a name would be ignored, as the module makes its own optimizer."""
    optimizer = plan.optimizer
    if optimizer.name is not None:
        return
    action = "Name the optimizer as well, such as 'adamw', or set this in configure_optimizers"
    for name in ("lr", "weight_decay", "options", "schedule"):
        value = getattr(optimizer, name)
        if value is not None and value != Options():
            yield PlanError(f"optimizer.{name}", value, "has no effect without optimizer.name", action)


def schedule_settings_have_a_schedule(plan: "Plan") -> Iterator[PlanError]:
    """Warm-up and a last learning rate belong to a schedule; without one they would be ignored."""
    optimizer = plan.optimizer
    if optimizer.warmup_steps > 0 and optimizer.schedule is None:
        action = "Choose a schedule as well: 'constant', 'linear' or 'cosine'"
        yield PlanError("optimizer.warmup_steps", optimizer.warmup_steps, "has no effect without a schedule", action)
    if optimizer.min_lr_ratio > 0 and optimizer.schedule in (None, "constant"):
        action = "Choose a schedule that falls as well: 'linear' or 'cosine'"
        problem = f"has no effect with schedule {optimizer.schedule!r}"
        yield PlanError("optimizer.min_lr_ratio", optimizer.min_lr_ratio, problem, action)


def allowances_are_of_auto(plan: "Plan") -> Iterator[PlanError]:
    """Reject allowed choices that do not exist, or that no strategy uses."""
    choice = plan.choice
    if not choice.words:
        return
    if plan.parallel.strategy != "auto":
        problem = f"has no effect with strategy {plan.parallel.strategy!r}: nothing is chosen"
        yield PlanError("choice.allowed", choice.allowed, problem, "Use strategy='auto', or leave it out")
        return
    known = [*CHOICES["precision.mode"], *CHOICES["optimizer.name"], *BY_PERMISSION]
    for word in choice.words:
        if word not in known:
            problem = f"is not a precision, an optimizer or one of {', '.join(map(repr, BY_PERMISSION))}"
            yield PlanError("choice.allowed", word, problem, did_you_mean(word, known))


RULES: list[Rule] = [
    single_has_one_rank,
    shards_fill_the_ranks,
    mps_is_one_device,
    compression_is_of_ddp,
    adafactor_is_not_cut,
    compression_has_what_it_needs,
    onebit_adam_sends_for_itself,
    float64_needs_hardware,
    clipping_has_a_bound,
    optimizer_settings_have_an_optimizer,
    schedule_settings_have_a_schedule,
    allowances_are_of_auto,
    *LEVER_RULES,
]
