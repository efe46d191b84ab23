"""The table of a Plan, which lists each part, its choice, and the label of the choice (exact, near or approximate)."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from roomier.core.units import format_bytes
from roomier.plan.choices import SWITCHES, Kind, kind_of, note_of
from roomier.plan.lever_rules import rounding_in_force
from roomier.plan.levers import used_levers
from roomier.plan.offload_rules import update_mode
from roomier.plan.parts import OffloadPlan, PlanParts

if TYPE_CHECKING:
    from rich.table import Table

    from roomier.plan.parts import ActivationPlan, CompilePlan, ParallelPlan

_NUM_COLUMNS = 100
_PART_COLUMNS = 16
_CHOICE_COLUMNS = 32


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        part: first column.
        choice: the choice in words.
        kind: label of the choice; None for an additional fact.
        note: a remark.
    """

    part: str
    choice: str
    kind: Kind | None = None
    note: str = ""


HEADER = ("part", "choice", "kind", "note")


def rows(plan: PlanParts, facts: Mapping[str, str] | None = None) -> list[Row]:
    """Return the lines of the table in the order of the Plan, followed by ``facts``, which have no label."""
    parallel, precision = plan.parallel, plan.precision
    return [
        *_strategy_rows(parallel),
        Row("accelerator", parallel.accelerator, *_label("parallel.accelerator", parallel.accelerator)),
        *_precision_rows(plan),
        Row("matmul", precision.matmul, *_label("precision.matmul", precision.matmul)),
        *_batch_rows(plan),
        *_optimizer_rows(plan),
        *_activation_rows(plan.activation),
        *_offload_rows(plan),
        *_lever_rows(plan),
        _compile_row(plan.compile),
        *_choice_rows(plan),
        *(Row(name, text) for name, text in (facts or {}).items()),
    ]


def verdict(plan: PlanParts) -> str:
    """Return a sentence that lists the rows that are not exact, or states that every choice is exact."""
    inexact = [f"{row.part} {row.choice} ({row.kind})" for row in rows(plan) if row.kind not in (Kind.EXACT, None)]
    if inexact:
        return f"Not exact: {', '.join(inexact)}. All other choices are exact."
    return "Every choice is exact: the same bits as a plain PyTorch loop."


def table(plan: PlanParts, facts: Mapping[str, str] | None = None) -> str:
    """Return the table as plain text, at most 100 columns wide. The verdict follows the rows."""
    lines = rows(plan, facts)
    part_columns = min(_PART_COLUMNS, max(len(row.part) for row in lines))
    kind_columns = len(Kind.APPROXIMATE)
    choice_columns = min(_CHOICE_COLUMNS, max(len(row.choice) for row in lines))
    note_columns = _NUM_COLUMNS - part_columns - choice_columns - kind_columns - 6
    widths = (part_columns, choice_columns, kind_columns, note_columns)
    text = [_line(HEADER, widths), "-" * _NUM_COLUMNS]
    for cells in map(_cells, lines):
        wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, widths, strict=True)]
        for index in range(max(map(len, wrapped))):
            text.append(_line([cell[index] if index < len(cell) else "" for cell in wrapped], widths))
    return "\n".join([*text, *textwrap.wrap(verdict(plan), _NUM_COLUMNS)])


def rich_table(plan: PlanParts, facts: Mapping[str, str] | None = None) -> "Table":
    """Return the table for a rich console, with the verdict as its caption."""
    from rich.table import Table
    from rich.text import Text

    result = Table(*HEADER, caption=verdict(plan))
    for cells in map(_cells, rows(plan, facts)):
        result.add_row(*map(Text, cells))
    return result


def _cells(row: Row) -> tuple[str, str, str, str]:
    return row.part, row.choice, row.kind or "", row.note


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _label(field: str, value: str) -> tuple[Kind | None, str]:
    return kind_of(field, value), note_of(field, value)


def _switch_label(field: str) -> tuple[Kind | None, str]:
    return SWITCHES[field].kind, SWITCHES[field].note


def _strategy_rows(parallel: "ParallelPlan") -> Iterator[Row]:
    ranks = f" on {parallel.num_ranks} ranks" if parallel.strategy != "single" else ""
    groups = f" in groups of {parallel.num_shards}" if parallel.strategy == "hsdp" else ""
    choice = f"{parallel.strategy}{ranks}{groups}"
    yield Row("strategy", choice, *_label("parallel.strategy", parallel.strategy))
    if parallel.strategy != "single":
        yield Row("reduce", parallel.reduce_dtype, *_label("parallel.reduce_dtype", parallel.reduce_dtype))
    if parallel.communication != "overlapped":
        label = _label("parallel.communication", parallel.communication)
        yield Row("communication", parallel.communication, *label)
    if parallel.find_unused_parameters:
        yield Row("unused", "supported", *_switch_label("parallel.find_unused_parameters"))
    if parallel.gradient_compression != "none":
        compression = parallel.gradient_compression
        settings = {"rank": parallel.compression_rank, "warm-up": parallel.compression_warmup_steps}
        words = " ".join([compression, *(f"{name}={value}" for name, value in settings.items() if value is not None)])
        yield Row("compression", words, *_label("parallel.gradient_compression", compression))


def _precision_rows(plan: PlanParts) -> Iterator[Row]:
    mode, rounding = plan.precision.mode, rounding_in_force(plan)
    if rounding is None:
        yield Row("precision", mode, *_label("precision.mode", mode))
        return
    kind, note = _label("optimizer.weight_rounding", rounding)
    computed = "everything is computed in bfloat16"
    yield Row(
        "precision", mode, Kind.NEAR, computed + ("; the low bits of weights are stored" if kind is Kind.EXACT else "")
    )
    yield Row("weights", rounding, kind, note)


def _batch_rows(plan: PlanParts) -> Iterator[Row]:
    batch = plan.batch
    if batch.accumulate_grad_batches == 1:
        yield Row("accumulate", "none", Kind.EXACT)
    else:
        choice = f"{batch.accumulate_grad_batches} micro-batches"
        yield Row("accumulate", choice, *_switch_label("batch.accumulate_grad_batches"))
    if batch.gradient_clip_val is None:
        yield Row("clip", "none", Kind.EXACT)
    else:
        algorithm = batch.gradient_clip_algorithm
        choice = f"{algorithm} at most {batch.gradient_clip_val!r}"
        yield Row("clip", choice, *_label("batch.gradient_clip_algorithm", algorithm))


def _activation_rows(activation: "ActivationPlan") -> Iterator[Row]:
    settings = {
        "every_n": f" with n = {activation.every_n or 2}",
        "budget": f" of {format_bytes(activation.budget_bytes)}"
        if activation.budget_bytes is not None
        else f", fraction {activation.budget_fraction}",
    }
    choice = activation.policy + settings.get(activation.policy, "")
    yield Row("recompute", choice, *_label("activation.policy", activation.policy))


def _compile_row(compile: "CompilePlan") -> Row:
    if not compile.enabled:
        return Row("compile", "off", Kind.EXACT)
    settings = ", ".join(each for each in (compile.backend, compile.mode) if each is not None)
    return Row("compile", settings or "on", *_switch_label("compile.enabled"))


def _choice_rows(plan: PlanParts) -> Iterator[Row]:
    choice = plan.choice
    if choice.memory_budget_bytes is not None:
        yield Row(
            "memory budget", format_bytes(choice.memory_budget_bytes), *_switch_label("choice.memory_budget_bytes")
        )
    if choice.words:
        yield Row("auto may use", ", ".join(choice.words), None, "in addition to exact choices and strategies")


def _lever_rows(plan: PlanParts) -> Iterator[Row]:
    """Yield rows for options that most plans do not use."""
    for lever in used_levers(plan):
        choice = lever.choice(lever.value(plan))
        yield Row(lever.row, lever.text(plan), choice.kind, choice.note)
    if plan.attention.kernel != "auto":
        yield Row("attention", plan.attention.kernel, *_label("attention.kernel", plan.attention.kernel))
    adapter = plan.adapter
    if adapter.lora_rank is not None:
        words = f"LoRA, rank {adapter.lora_rank}, on {adapter.lora_targets}"
        trained = f" except {adapter.lora_trained}" if adapter.lora_trained else ""
        note = f"all other parameters{trained} are frozen"
        yield Row("adapter", words, _switch_label("adapter.lora_rank")[0], note)
        yield Row("frozen base", adapter.frozen_base, *_label("adapter.frozen_base", adapter.frozen_base))


def _offload_rows(plan: PlanParts) -> Iterator[Row]:
    offload = plan.offload
    tiers = {name: getattr(offload, name) for name in ("optimizer_states", "parameters", "activations")}
    moved = {name: tier for name, tier in tiers.items() if tier != "none"}
    for name, tier in moved.items():
        part = f", {100 * offload.share:g} %" if name == "optimizer_states" and offload.share != 1 else ""
        if name == "optimizer_states" and offload.buffers != OffloadPlan.buffers:
            part += f", {offload.buffers} buffers" if offload.buffers > 1 else ", 1 buffer"
        yield Row("offload", f"{name} to {tier}{part}", *_label(f"offload.{name}", tier))
    if not moved:
        yield Row("offload", "none", *_label("offload.optimizer_states", "none"))
    if offload.optimizer_states != "none" or offload.parameters != "none":
        mode = offload.update if plan.parallel.strategy == "auto" else update_mode(plan)
        words = mode if mode == offload.update else f"{mode} (auto)"
        yield Row("update", words, *_label("offload.update", mode))
    if offload.folder is not None:
        yield Row("folder", offload.folder, None, "files of the disk tier")


def _optimizer_rows(plan: PlanParts) -> Iterator[Row]:
    optimizer = plan.optimizer
    if optimizer.name is None:
        yield Row("optimizer", "of the module", Kind.EXACT, "from configure_optimizers")
        return
    settings = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    given = {name: value for name, value in settings.items() if value is not None} | dict(optimizer.options)
    words = " ".join([optimizer.name, *(f"{name}={value!r}" for name, value in given.items())])
    kind, note = _label("optimizer.name", optimizer.name)
    if optimizer.name == "adamw" and rounding_in_force(plan) in ("split", "stochastic"):
        note = "AdamW, states in float32"
    left_out = [name for name, value in settings.items() if value is None]
    yield Row("optimizer", words, kind, f"{note}; default {', '.join(left_out)}" if left_out else note)
    if optimizer.schedule is not None:
        shape = " (logarithmic)" if optimizer.log_warmup else ""
        warmup = f", warm-up {optimizer.warmup_steps} steps{shape}" if optimizer.warmup_steps else ""
        end = f", to {optimizer.min_lr_ratio!r} of lr" if optimizer.schedule != "constant" else ""
        end += f" at step {optimizer.decay_steps}" if optimizer.decay_steps is not None else ""
        yield Row("schedule", optimizer.schedule + warmup + end, *_label("optimizer.schedule", optimizer.schedule))
