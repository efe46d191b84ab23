"""The table of a Plan, which lists each part, its choice, and the label of the choice (exact, near or approximate)."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from roomier.core.units import format_bytes
from roomier.plan.choices import Kind, choice_of
from roomier.plan.levers import read, rounding_in_force, update_mode, used_levers
from roomier.plan.parts import OffloadPlan, PlanParts

if TYPE_CHECKING:
    from rich.table import Table

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
    return [
        *_strategy_rows(plan),
        _row(plan, "accelerator", "parallel.accelerator"),
        *_precision_rows(plan),
        _row(plan, "matmul", "precision.matmul"),
        *_batch_rows(plan),
        *_optimizer_rows(plan),
        _activation_row(plan),
        *_offload_rows(plan),
        *_lever_rows(plan),
        _compile_row(plan),
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


def rich_table(plan: PlanParts) -> "Table":
    """Return the table for a rich console, with the verdict as its caption."""
    from rich.table import Table
    from rich.text import Text

    result = Table(*HEADER, caption=verdict(plan))
    for cells in map(_cells, rows(plan)):
        result.add_row(*map(Text, cells))
    return result


def _cells(row: Row) -> tuple[str, str, str, str]:
    return row.part, row.choice, row.kind or "", row.note


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _row(plan: PlanParts, part: str, field: str, words: str | None = None) -> Row:
    """Return the row for a field of ``plan``, with its value or ``words`` as the choice."""
    value = read(plan, field)
    choice = choice_of(field, value)
    return Row(part, str(value) if words is None else words, choice.kind, choice.note)


def _strategy_rows(plan: PlanParts) -> Iterator[Row]:
    parallel = plan.parallel
    ranks = f" on {parallel.num_ranks} ranks" if parallel.strategy != "single" else ""
    groups = f" in groups of {parallel.num_shards}" if parallel.strategy == "hsdp" else ""
    yield _row(plan, "strategy", "parallel.strategy", f"{parallel.strategy}{ranks}{groups}")
    if parallel.strategy != "single":
        yield _row(plan, "reduce", "parallel.reduce_dtype")
    if parallel.context_parallel_size > 1:
        words = f"{parallel.context_parallel_size} ranks per sequence"
        yield Row("context", words, Kind.NEAR, "blocks run on slices; attention exchanges them for heads")
    if parallel.pipeline_parallel_size > 1:
        words = f"{parallel.num_stages} stages, {parallel.schedule_of_stages}"
        held = "one stage" if parallel.stages_per_rank == 1 else f"{parallel.stages_per_rank} stages"
        yield Row("pipeline", words, Kind.NEAR, f"each rank holds and computes {held} of the model")
    if parallel.communication != "overlapped":
        yield _row(plan, "communication", "parallel.communication")
    if parallel.find_unused_parameters:
        yield _row(plan, "unused", "parallel.find_unused_parameters", "supported")
    if parallel.gradient_compression != "none":
        settings = {"rank": parallel.compression_rank, "warm-up": parallel.compression_warmup_steps}
        given = [f"{name}={value}" for name, value in settings.items() if value is not None]
        words = " ".join([parallel.gradient_compression, *given])
        yield _row(plan, "compression", "parallel.gradient_compression", words)


def _precision_rows(plan: PlanParts) -> Iterator[Row]:
    rounding = rounding_in_force(plan)
    if rounding is None:
        yield _row(plan, "precision", "precision.mode")
        return
    stored = choice_of("optimizer.weight_rounding", rounding)
    bits = "; the low bits of weights are stored" if stored.kind is Kind.EXACT else ""
    yield Row("precision", plan.precision.mode, Kind.NEAR, f"everything is computed in bfloat16{bits}")
    yield Row("weights", rounding, stored.kind, stored.note)


def _batch_rows(plan: PlanParts) -> Iterator[Row]:
    batch = plan.batch
    if batch.accumulate_grad_batches == 1:
        yield Row("accumulate", "none", Kind.EXACT)
    else:
        words = f"{batch.accumulate_grad_batches} micro-batches"
        yield _row(plan, "accumulate", "batch.accumulate_grad_batches", words)
    if batch.gradient_clip_val is None:
        yield Row("clip", "none", Kind.EXACT)
    else:
        words = f"{batch.gradient_clip_algorithm} at most {batch.gradient_clip_val!r}"
        yield _row(plan, "clip", "batch.gradient_clip_algorithm", words)
    if batch.seeding != "stream":
        yield _row(plan, "seeding", "batch.seeding")


def _activation_row(plan: PlanParts) -> Row:
    activation = plan.activation
    settings = {
        "every_n": f" with n = {activation.every_n or 2}",
        "budget": f" of {format_bytes(activation.budget_bytes)}"
        if activation.budget_bytes is not None
        else f", fraction {activation.budget_fraction}",
    }
    return _row(plan, "recompute", "activation.policy", activation.policy + settings.get(activation.policy, ""))


def _compile_row(plan: PlanParts) -> Row:
    if not plan.compile.enabled:
        return Row("compile", "off", Kind.EXACT)
    settings = ", ".join(each for each in (plan.compile.backend, plan.compile.mode) if each is not None)
    return _row(plan, "compile", "compile.enabled", settings or "on")


def _choice_rows(plan: PlanParts) -> Iterator[Row]:
    choice = plan.choice
    if choice.memory_budget_bytes is not None:
        budget = format_bytes(choice.memory_budget_bytes)
        yield _row(plan, "memory budget", "choice.memory_budget_bytes", budget)
    if choice.words:
        yield Row("auto may use", ", ".join(choice.words), None, "in addition to exact choices and strategies")


def _lever_rows(plan: PlanParts) -> Iterator[Row]:
    """Yield rows for options that most plans do not use."""
    for lever in used_levers(plan):
        yield _row(plan, lever.row, lever.field, lever.text(plan))
    if plan.attention.kernel != "auto":
        yield _row(plan, "attention", "attention.kernel")
    adapter = plan.adapter
    if adapter.lora_rank is not None:
        words = f"LoRA, rank {adapter.lora_rank}, on {adapter.lora_targets}"
        trained = f" except {adapter.lora_trained}" if adapter.lora_trained else ""
        note = f"all other parameters{trained} are frozen"
        yield Row("adapter", words, Kind.EXACT, note)
        yield _row(plan, "frozen base", "adapter.frozen_base")


def _offload_rows(plan: PlanParts) -> Iterator[Row]:
    offload = plan.offload
    tiers = {name: getattr(offload, name) for name in ("optimizer_states", "parameters", "activations")}
    moved = {name: tier for name, tier in tiers.items() if tier != "none"}
    for name, tier in moved.items():
        part = f", {100 * offload.share:g} %" if name == "optimizer_states" and offload.share != 1 else ""
        if name == "optimizer_states" and offload.buffers != OffloadPlan.buffers:
            part += f", {offload.buffers} buffers" if offload.buffers > 1 else ", 1 buffer"
        yield _row(plan, "offload", f"offload.{name}", f"{name} to {tier}{part}")
    if not moved:
        yield _row(plan, "offload", "offload.optimizer_states")
    if offload.optimizer_states != "none" or offload.parameters != "none":
        mode = offload.update if plan.parallel.strategy == "auto" else update_mode(plan)
        words, choice = mode if mode == offload.update else f"{mode} (auto)", choice_of("offload.update", mode)
        yield Row("update", words, choice.kind, choice.note)
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
    choice = choice_of("optimizer.name", optimizer.name)
    note = choice.note
    if optimizer.name == "adamw" and rounding_in_force(plan) in ("split", "stochastic"):
        note = "AdamW, states in float32"
    left_out = [name for name, value in settings.items() if value is None]
    yield Row("optimizer", words, choice.kind, f"{note}; default {', '.join(left_out)}" if left_out else note)
    if optimizer.schedule is not None:
        shape = " (logarithmic)" if optimizer.log_warmup else ""
        warmup = f", warm-up {optimizer.warmup_steps} steps{shape}" if optimizer.warmup_steps else ""
        end = f", to {optimizer.min_lr_ratio!r} of lr" if optimizer.schedule != "constant" else ""
        end += f" at step {optimizer.decay_steps}" if optimizer.decay_steps is not None else ""
        yield _row(plan, "schedule", "optimizer.schedule", optimizer.schedule + warmup + end)
