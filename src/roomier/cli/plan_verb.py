"""``roomier plan``: forecast memory and time of each plan on a machine, and select the fastest plan that fits."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.cli import workloads
from roomier.cli.deepspeed_option import apply_deepspeed, take_deepspeed
from roomier.cli.options import parse
from roomier.cli.plan_options import (
    apply_strategy_option,
    check_one_model,
    copies_of_options,
    machine_of_options,
    plan_of_options,
    plan_parser,
    trainer_words,
    without_gpt,
)
from roomier.cli.report_verb import find_run
from roomier.cli.trainer_verbs import current_folder_importable
from roomier.cli.workloads import Asked
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.units import format_count
from roomier.models.gpt import GPTConfig
from roomier.plan import Plan
from roomier.planner.hardware.cache import cache_file
from roomier.trainer import Trainer

if TYPE_CHECKING:
    from roomier.planner.choice import Choice
    from roomier.planner.hardware.machine import Machine
    from roomier.planner.report.what_if import Grid

EXIT_NOTHING_FITS = 1


def run(verb: str, arguments: Sequence[str]) -> int:
    """Plan and print the result: a table, or with ``--json`` only one JSON object, on standard output.

    Returns:
        0 if a plan fits, otherwise 1.

    Raises:
        RoomierError: an option is invalid, or the request is not supported.
        SystemExit: after ``--help`` or ``--print_config``.
    """
    with current_folder_importable():
        gpt, words = without_gpt(arguments)
        parser = plan_parser(gpt)
        config = parse(parser, words)
        check_one_model(config, gpt)
        given = set(trainer_words(words))
        deepspeed = take_deepspeed(config, given)
        apply_strategy_option(config, given)
        with contextlib.redirect_stdout(sys.stderr):  # the output of the user's code must not mix with the result
            machine = machine_of_options(config, given)
            if deepspeed is not None:
                apply_deepspeed(config, deepspeed, machine)
            asked = _with(_asked(parser, config, gpt), copies=copies_of_options(config))
            if config.calibrated_by is not None:
                asked = _calibrated(asked, config.calibrated_by, machine)
            plan = plan_of_options(config, machine, optimizes_itself=_optimizes_itself(asked.workload.module))
            choice = _choose(asked, plan, machine)
            grid = _what_if(asked, plan, choice) if config.what_if or config.html is not None else None
        if config.html is not None:
            _write_page(Path(config.html), asked, choice, grid)
    if config.json:
        more: dict[str, Any] = {} if grid is None else {"what_if": _grid_as_dict(grid)}
        if config.calibrated_by is not None:
            more["activation_factor"] = asked.workload.activation_factor
        print(json.dumps(choice.as_dict() | more))
    else:
        _show(asked, plan, choice, grid if config.what_if else None)
        _print_configured_strategy(config, choice)
    return 0 if choice.chosen is not None else EXIT_NOTHING_FITS


def _asked(parser: ArgumentParser, config: Namespace, gpt: str | None) -> Asked:
    if config.hf is not None:
        return workloads.hugging_face_request(config.hf, config.batch_size, config.seq_len)
    if gpt is not None:
        return workloads.gpt_request(GPTConfig(**config.model.as_dict()), config.batch_size, config.seq_len)
    stand_in = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    return workloads.class_request(parser, config, config.input, config.batch_size, stand_in)


def _calibrated(asked: Asked, run: str, machine: Machine) -> Asked:
    """Store the device measurements of the run. Return ``asked`` with activations scaled to the measurement of the
    run."""
    from roomier.planner.measured.calibrated import learn_device, learned_of  # late import: --help needs no planner
    from roomier.planner.measured.record import read_record

    record = read_record(find_run(Path(run)))
    workload = learned_of(asked.workload, record, machine, run)
    factor = workload.activation_factor
    notice(f"activations and temporaries are scaled by {factor:.3g}, as measured in {run} ({record.line()})")
    if learn_device(record) is not None:
        name = record.forecast.machine.device.name
        where = f"{cache_file()}; to remove it, run `roomier hardware --forget`"
        notice(f"stored the memory outside tensors on a {name}, as measured in {run}. File: {where}")
    return _with(asked, activation_factor=factor)


def _with(asked: Asked, **changes: Any) -> Asked:
    """Return ``asked`` with ``changes`` applied to its workload at every sequence length."""
    at_length = asked.at_length
    later = None if at_length is None else lambda length: replace(at_length(length), **changes)
    return replace(asked, workload=replace(asked.workload, **changes), at_length=later)


def _optimizes_itself(module: Module) -> bool:
    return overrides(module, "configure_optimizers", Module)


def _choose(asked: Asked, plan: Plan, machine: Machine) -> Choice:
    from roomier.planner.choosing.choose import choose

    return choose(asked.workload, plan, machine)


def _what_if(asked: Asked, plan: Plan, choice: Choice) -> Grid | None:
    """Return the memory peaks for different batches under the chosen plan, or under the best plan if no plan fits."""
    from roomier.planner.report.what_if import around, what_if

    shown = next((each for each in choice.considered if each.forecast is not None), None)
    if shown is None:
        return None
    workload, at_length = asked.workload, asked.at_length
    rows: list[tuple[int, Any]] = [(0, lambda: workload)]
    name = ""
    if at_length is not None and asked.length is not None:
        name = "tokens"
        rows = [(each, _later(at_length, each)) for each in around(asked.length, asked.longest)]
    batches = around(shown.micro_batch)
    return what_if(rows, batches, shown.plan, choice.machine, choice.budget_bytes, row_name=name)


def _later(make: Any, length: int) -> Any:
    return lambda: make(length)


def _grid_as_dict(grid: Grid) -> dict[str, Any]:
    return {
        "rows": {"name": grid.row_name, "values": list(grid.rows)},
        "columns": {"name": grid.column_name, "values": list(grid.columns)},
        "peak_bytes": [list(each) for each in grid.peak_bytes],
    }


def _show(asked: Asked, plan: Plan, choice: Choice, grid: Grid | None) -> None:
    from rich.console import Console

    from roomier.planner.report.tables import choice_table, what_if_table

    console = Console(soft_wrap=False)
    console.print(_subject(asked, plan), highlight=False, markup=False)
    console.print(choice_table(choice, tokens_per_sample=workloads.tokens_per_sample(asked.workload)))
    if grid is not None:
        console.print()
        console.print(what_if_table(grid))


def _print_configured_strategy(config: Namespace, choice: Choice) -> None:
    """Print the strategy of the configuration, and whether this strategy fits. All strategies are compared, so another
    strategy may have been selected."""
    own = config.trainer.strategy
    name = own.get("name") if isinstance(own, dict) else own
    if config.strategy is None and name not in (None, "auto", "single"):
        best = next((each for each in choice.considered if each.plan.parallel.strategy == name and each.forecast), None)
        fits = "" if best is None else ", which fits" if best.fits else ", which does not fit"
        print(f"The configuration uses {name}{fits}. To plan only this strategy, pass --strategy {name}")


def _subject(asked: Asked, plan: Plan) -> str:
    length = "" if asked.length is None else f" of {asked.length} tokens"
    own = " (of the model)" if plan.optimizer.name is None else ""
    batch = f"{plan.batch.accumulate_grad_batches} x {asked.workload.batch_size} samples{length}"
    return (
        f"{asked.name}, {format_count(asked.workload.num_parameters)} parameters; {batch} on each device; "
        f"{plan.optimizer.name or 'optimizer'}{own}, {plan.precision.mode}"
    )


def _write_page(path: Path, asked: Asked, choice: Choice, grid: Grid | None) -> None:
    from roomier.planner.report.page import page_of

    name = f"{asked.name}, {format_count(asked.workload.num_parameters)} parameters"
    try:
        path.write_text(page_of(choice, grid, title="", subject=name))
    except OSError as error:
        raise RoomierError("--html", str(path), f"cannot be written: {error.strerror}", "Use another file") from error
    print(f"roomier: wrote {path}", file=sys.stderr)
