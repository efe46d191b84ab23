"""``roomier plan``: forecast memory and time of each plan on a machine, and select the fastest plan that fits."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace
from torch import nn

from roomier.api.callback import KeptWeights, kept_by
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.cli import workloads
from roomier.cli.options import VerbParser, add_data_and_options_of_lightning, parse
from roomier.cli.trainer_verbs import current_folder_importable
from roomier.cli.workloads import Asked
from roomier.core.device.resolve import num_devices, resolve_device
from roomier.core.errors import RoomierError
from roomier.core.units import format_count, parse_bytes
from roomier.models.gpt import SIZES, GPTConfig
from roomier.plan import Plan
from roomier.plan.flags import default_strategy
from roomier.plan.levers import without_host_tiers
from roomier.plan.migrate.deepspeed.objects import is_source
from roomier.planner.hardware.machine import Machine
from roomier.planner.hardware.spec import machine_of
from roomier.planner.hardware.this_machine import this_machine
from roomier.trainer import Trainer
from roomier.trainer.keywords.arguments import plan_of
from roomier.trainer.keywords.other_libraries import of_roomier
from roomier.trainer.lightning.callbacks import adopted

if TYPE_CHECKING:
    from roomier.planner.choice import Choice
    from roomier.planner.choosing.lever import UsefulLever
    from roomier.planner.choosing.pricing import ClosedForms
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
        with contextlib.redirect_stdout(sys.stderr):  # the output of the user's code must not mix with the result
            asked, plan, choice, prices = planned(parser, config, words, gpt)
            from roomier.planner.choosing.lever import most_useful_lever  # late import: --help needs no planner

            lever = most_useful_lever(asked.workload, choice, prices)
            has_grid = config.what_if or config.html is not None
            grid = _what_if(asked, choice, has_sizes=config.what_if) if has_grid else None
        if config.html is not None:
            _write_page(Path(config.html), asked, choice, grid)
    if config.json:
        more: dict[str, Any] = {} if grid is None else {"what_if": grid.as_dict()}
        more["lever"] = None if lever is None else lever.as_dict()
        print(json.dumps(choice.as_dict() | more))
    else:
        _show(asked, plan, choice, lever, grid if config.what_if else None)
        _print_configured_strategy(config, choice)
    return 0 if choice.chosen is not None else EXIT_NOTHING_FITS


def planned(
    parser: ArgumentParser, config: Namespace, words: Sequence[str], gpt: str | None = None, *, as_fit: bool = False
) -> tuple[Asked, Plan, Choice, ClosedForms]:
    """Return the workload, the requested plan, the choice of the planner, and its forecasts.

    Args:
        parser, words: the parser of ``config``, and the words that it has parsed.
        gpt: the GPT that ``--model`` names; see :func:`plan_parser`.
        as_fit: True to plan only the strategy that ``roomier fit`` uses with these options.

    Raises:
        RoomierError: an option is invalid, or the request is not supported.
    """
    from roomier.planner.choosing.choose import choose  # late imports: --help needs no planner
    from roomier.planner.choosing.pricing import ClosedForms

    check_one_model(config, gpt)
    given = set(trainer_words(words))
    deepspeed = take_deepspeed(config, given)
    apply_strategy_option(config, given)
    if as_fit and deepspeed is None:
        own, stored = _name_of(config.trainer.strategy), config.trainer.plan
        config.strategy = own if stored is None else Plan.of(stored).parallel.strategy
    machine = machine_of_options(config, given)
    if as_fit and deepspeed is None:
        config.strategy = config.strategy or default_strategy(machine.devices_per_node, machine.num_nodes)
    if deepspeed is not None:
        apply_deepspeed(config, deepspeed, machine)
    asked = _with_copies(_asked(parser, config, gpt), copies_of_options(config))
    optimizes_itself = overrides(asked.workload.module, "configure_optimizers", Module)
    plan = plan_of_options(config, machine, optimizes_itself=optimizes_itself)
    prices = ClosedForms(asked.workload, machine)
    return asked, plan, choose(asked.workload, plan, machine, prices=prices), prices


def _name_of(strategy: Any) -> Any:
    return strategy.get("name") if isinstance(strategy, dict) else strategy


def _asked(parser: ArgumentParser, config: Namespace, gpt: str | None) -> Asked:
    if config.hf is not None:
        return workloads.hugging_face_request(config.hf, config.batch_size, config.seq_len)
    if gpt is not None:
        return workloads.gpt_request(GPTConfig(**config.model.as_dict()), config.batch_size, config.seq_len)
    stand_in = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    return workloads.class_request(parser, config, config.input, config.batch_size, stand_in)


def _with_copies(asked: Asked, copies: tuple[KeptWeights, ...]) -> Asked:
    """Return ``asked`` with ``copies`` in its workload at every sequence length."""
    at_length = asked.at_length
    later = None if at_length is None else lambda length: replace(at_length(length), copies=copies)
    return replace(asked, workload=replace(asked.workload, copies=copies), at_length=later)


def _what_if(asked: Asked, choice: Choice, *, has_sizes: bool) -> Grid | None:
    """Return the memory peaks for different batches under the chosen plan, or under the best plan if no plan fits. With
    ``has_sizes``, also return the longest sequences that fit."""
    from roomier.planner.report.what_if import around, longest_sequences, what_if

    shown = next((each.forecast for each in choice.considered if each.forecast is not None), None)
    if shown is None:
        return None
    workload, at_length = asked.workload, asked.at_length
    rows: list[tuple[int, Any]] = [(0, lambda: workload)]
    name = ""
    if at_length is not None and asked.length is not None:
        name = "tokens"
        rows = [(each, partial(at_length, each)) for each in around(asked.length, asked.longest)]
    grid = what_if(rows, around(shown.micro_batch), shown.plan, choice.machine, choice.budget_bytes, row_name=name)
    if not has_sizes or at_length is None or asked.length is None or shown.plan.parallel.num_ranks == 1:
        return grid
    longest = longest_sequences(at_length, asked.length, asked.longest, shown, choice.budget_bytes)
    return replace(grid, longest=longest)


def _show(asked: Asked, plan: Plan, choice: Choice, lever: UsefulLever | None, grid: Grid | None) -> None:
    from rich.console import Console

    from roomier.planner.report.tables import choice_table, longest_table, what_if_table

    console = Console(soft_wrap=False)
    console.print(_subject(asked, plan), highlight=False, markup=False)
    console.print(choice_table(choice, tokens_per_sample=workloads.tokens_per_sample(asked.workload)))
    if choice.chosen is not None and choice.chosen.plan.parallel.context_parallel_size > 1:
        console.print("The support of the blocks for slices of a sequence is not verified before the run", markup=False)
    if lever is not None:
        console.print(lever.line, highlight=False, markup=False)
    if grid is not None:
        console.print()
        console.print(what_if_table(grid))
        if len(grid.longest) > 1:
            console.print()
            console.print(longest_table(grid))


def _print_configured_strategy(config: Namespace, choice: Choice) -> None:
    """Print the strategy of the configuration, and whether this strategy fits. All strategies are compared, so another
    strategy may have been selected."""
    name = _name_of(config.trainer.strategy)
    if config.strategy is None and name not in (None, "auto", "single"):
        best = next((each for each in choice.considered if each.plan.parallel.strategy == name and each.forecast), None)
        fits = "" if best is None else ", which fits" if best.fits else ", which does not fit"
        print(f"The configuration uses {name}{fits}. To plan only this strategy, pass --strategy {name}")


def _subject(asked: Asked, plan: Plan) -> str:
    length = "" if asked.length is None else f" of {asked.length} tokens"
    own = " (of the model)" if plan.optimizer.name is None else ""
    num_peers = plan.parallel.num_peers
    device = "device" if num_peers == 1 else f"group of {num_peers} devices"
    batch = f"{plan.batch.accumulate_grad_batches} x {asked.workload.batch_size} samples{length}"
    return (
        f"{asked.name}, {format_count(asked.workload.num_parameters)} parameters; {batch} on each {device}; "
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


def take_deepspeed(config: Namespace, given: set[str]) -> Any:
    """Remove the DeepSpeed configuration from ``config``, and return this configuration; None if ``config`` contains
    none.

    Args:
        config: the parsed options.
        given: names of the Trainer options on the command line. The option that contained the configuration is removed
            from this set.

    Raises:
        RoomierError: two options contain a configuration.
    """
    found = {} if config.deepspeed is None else {"deepspeed": config.deepspeed}
    for name in ("strategy", "plan"):
        value = config.trainer[name]
        if value is not None and is_source(value, of_plan=name == "plan"):
            found[f"trainer.{name}"] = value
            config.trainer[name] = None
            given.discard(name)
    if len(found) > 1:
        first, second, *_ = found
        action = "Pass one of the two"
        raise RoomierError(f"--{second}", found[second], f"cannot be combined with --{first}", action)
    return next(iter(found.values()), None)


def apply_deepspeed(config: Namespace, value: Any, machine: Machine) -> None:
    """Replace keywords of the Trainer with the settings of a DeepSpeed configuration and print a table of all keys.

    The strategy of the configuration is planned, unless ``--strategy`` selects another strategy.
    """
    defaults = {name: each.default for name, each in inspect.signature(Trainer.__init__).parameters.items()}
    ranks = {"devices": machine.devices_per_node, "num_nodes": machine.num_nodes}
    found = of_roomier({**config.trainer.as_dict(), **ranks, "deepspeed": value}, defaults)
    if config.strategy is None:
        config.strategy = _name_of(found["strategy"])
    for name in found.keys() - ranks.keys():
        config.trainer[name] = found[name]


_DESCRIPTION = (
    "Forecast the memory and the time of each plan on a machine, and select the fastest plan that fits. Training does "
    "not run, and the machine need not be available. Exit code 0: a plan fits; 1: no plan fits; 2: the request is "
    "invalid."
)
_GPT = "gpt"
PLAN_OPTIONS: dict[str, tuple[Any, str]] = {
    "seed_everything": (bool | int, "accepted in YAML files, but ignored"),
    "ckpt_path": (str, "accepted in YAML files, but ignored"),
    "hardware": (str, "devices of each node, such as a100-40gb:8; default: this machine"),
    "nodes": (int, "number of nodes; default: --trainer.num_nodes"),
    "strategy": (
        str,
        "plan only this strategy, as in --trainer.strategy; default: all strategies, even if a YAML file sets one",
    ),
    "deepspeed": (str, "DeepSpeed configuration with the strategy and settings to plan, such as ds_config.json"),
    "memory_budget": (str | int, "memory limit per device, such as 38GiB; default: all memory"),
    "hf": (str, "a Hugging Face config.json, or a folder that contains one"),
    "batch_size": (int, "samples per micro-batch on each device"),
    "seq_len": (int, "tokens per sequence, for --hf and gpt"),
    "input": (str, "tensors of a batch, such as 'x=float32[8,3,224,224]; label=int64[8]'"),
    "html": (str, "write the result to this HTML file, which works offline"),
}


def plan_parser(gpt: str | None) -> ArgumentParser:
    """Return the parser of ``roomier plan``, with options for the arguments of the Trainer, the model class and the
    data class.

    Args:
        gpt: value of ``--model`` if it is ``"gpt"`` or the name of a GPT size. The model options are then the fields of
            :class:`GPTConfig`.
    """
    parser = VerbParser(prog="roomier plan", description=_DESCRIPTION, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with these options, as for `roomier fit`")
    for name, (kind, about) in PLAN_OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind | None, default=None, help=about)
    parser.add_argument("--what_if", action="store_true", help="also show the peak memory for other batch sizes")
    parser.add_argument("--json", action="store_true", help="print only one JSON object with the result")
    parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, instantiate=False)
    if gpt is None:
        parser.add_subclass_arguments(
            nn.Module, "model", fail_untyped=False, help=f"import path of a module, {_GPT}, or the name of a GPT size"
        )
    else:
        parser.add_class_arguments(GPTConfig, "model")
        if gpt != _GPT:
            parser.set_defaults({f"model.{name}": value for name, value in asdict(GPTConfig.named(gpt)).items()})
    add_data_and_options_of_lightning(
        parser, "import path of a DataModule of roomier or Lightning, which provides the batch"
    )
    return parser


def without_gpt(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return a pair: the GPT that ``--model`` names (None if it names no GPT), and the remaining words."""
    words, found = list(arguments), None
    for index, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        following = value if is_joined else words[index + 1] if index + 1 < len(words) else ""
        if name == "--model" and (following == _GPT or following in SIZES):
            found = following
            del words[index : index + (1 if is_joined else 2)]
            break
    return found, words


def check_one_model(config: Namespace, gpt: str | None) -> None:
    """Check that the options describe exactly one model.

    Raises:
        RoomierError: no model or two models are given, or an option is not supported with this kind of model.
    """
    has_class = gpt is None and config.get("model") is not None
    ways = [*(["--hf"] if config.hf is not None else []), *(["--model"] if has_class or gpt is not None else [])]
    if len(ways) != 1:
        problem = "a model is required" if not ways else f"cannot be combined: {' and '.join(ways)}"
        action = "Pass one of --hf config.json, --model my_package.MyModule, --model gpt, or --config run.yaml"
        raise RoomierError("--model", None, problem, action)
    if has_class and config.seq_len is not None:
        action = "Remove it, or pass the shapes of a batch: --input 'x=int64[8,2048]'"
        problem = "is not supported with a model class, because its data determines the batch"
        raise RoomierError("--seq_len", config.seq_len, problem, action)
    if not has_class and (config.input is not None or config.get("data") is not None):
        name = "--input" if config.input is not None else "--data"
        problem = "is not supported with this model, because its configuration determines the batch"
        action = "Remove it. Set the size of the batch with --batch_size and --seq_len"
        raise RoomierError(name, config.input or config.data.class_path, problem, action)
    for name in ("nodes", "batch_size", "seq_len"):
        if config[name] is not None and config[name] < 1:
            raise RoomierError(f"--{name}", config[name], "must be at least 1", "Use a positive integer")


def trainer_words(words: Sequence[str]) -> frozenset[str]:
    """Return the Trainer keywords that ``words`` contains. Keywords in YAML files are not included."""
    options = (word.partition("=")[0] for word in words)
    return frozenset(option.split(".")[1] for option in options if option.startswith("--trainer."))


def apply_strategy_option(config: Namespace, given: Collection[str]) -> None:
    """If ``--trainer.strategy`` was passed on the command line, plan only this strategy, as with ``--strategy``.

    Args:
        given: result of :func:`trainer_words`.

    Raises:
        RoomierError: ``--strategy`` and ``--trainer.strategy`` differ.
    """
    if "strategy" not in given:
        return
    name = _name_of(config.trainer.strategy)
    if config.strategy is not None and config.strategy != name:
        action = "Pass one of the two options, or neither option to compare all strategies"
        raise RoomierError("--trainer.strategy", name, f"differs from --strategy {config.strategy}", action)
    config.strategy = None if name == "auto" else name


def machine_of_options(config: Namespace, given: Collection[str] = ()) -> Machine:
    """Return the machine that ``--hardware`` and ``--nodes`` describe; by default, this machine with the devices of the
    Trainer.

    Args:
        given: result of :func:`trainer_words`; these keywords must not contradict ``--hardware``.

    Raises:
        RoomierError: the device is unknown, or two options contradict each other.
    """
    num_nodes = _num_nodes(config, given)
    if config.hardware is not None:
        machine = machine_of(config.hardware, num_nodes)
        _check_names_the_same(config, machine, given)
    else:
        accelerator = config.trainer.accelerator
        try:
            device = resolve_device(accelerator)
        except RoomierError as error:
            action = f"Pass the hardware to plan for: --hardware a100-80gb:8. {error.action} with --trainer.accelerator"
            raise RoomierError("--trainer.accelerator", accelerator, error.problem, action) from error
        devices = config.trainer.devices
        if not isinstance(devices, int) or devices <= 0:  # "auto" and -1 mean all accelerators
            devices = num_devices(device)
        machine = this_machine(devices, num_nodes or 1, accelerator)
    if config.strategy == "single":
        machine = replace(machine, devices_per_node=1, num_nodes=1)
    return machine


def _num_nodes(config: Namespace, given: Collection[str]) -> int | None:
    """Return the number of nodes. If no option sets the number, return None. The machine file then determines the
    number; without a file, the number is 1."""
    own, asked = config.trainer.num_nodes, config.nodes
    is_meant = isinstance(own, int) and ("num_nodes" in given or config.hardware is None)
    if asked is not None and "num_nodes" in given and own != asked:
        raise RoomierError("--trainer.num_nodes", own, f"differs from --nodes {asked}", "Pass one of the two")
    return own if asked is None and is_meant else asked  # type: ignore[no-any-return]


def _check_names_the_same(config: Namespace, machine: Machine, given: Collection[str]) -> None:
    trainer, hardware = config.trainer, f"--hardware {config.hardware}"
    kind, accelerator = machine.device.kind, trainer.accelerator
    is_same = accelerator in ("auto", kind) or (accelerator == "gpu" and kind != "cpu")
    action = "Remove one of the two"
    if "accelerator" in given and not is_same:
        problem = f"contradicts {hardware}, which is {kind}"
        raise RoomierError("--trainer.accelerator", accelerator, problem, action)
    own = trainer.devices
    if "devices" in given and isinstance(own, int) and own not in (-1, machine.devices_per_node):
        problem = f"contradicts {hardware}, which has {machine.devices_per_node} devices per node"
        raise RoomierError("--trainer.devices", own, problem, action)


def copies_of_options(config: Namespace) -> tuple[KeptWeights, ...]:
    """Return the copies of weights that the configured callbacks store. Other callbacks are not created."""
    callbacks = config.trainer.callbacks or ()
    made: list[Any] = []
    for each in callbacks if isinstance(callbacks, (list, tuple)) else (callbacks,):
        found = resolve_name(each.class_path)
        is_average = found.__name__ in ("WeightAveraging", "EMAWeightAveraging")  # also Lightning's
        if hasattr(found, "held_weights") or hasattr(found, "kept_weights") or is_average:
            arguments = each.get("init_args")
            made.append(found(**({} if arguments is None else arguments.as_dict())))
    return kept_by(adopted(made))


def plan_of_options(config: Namespace, machine: Machine, *, optimizes_itself: bool) -> Plan:
    """Return the Plan that the Trainer's keywords describe on ``machine``. Its strategy is ``"auto"`` if no strategy is
    selected.

    Args:
        optimizes_itself: True if the model configures its optimizer. Otherwise, the default optimizer is AdamW.

    Raises:
        PlanError: the settings are invalid.
    """
    keywords: dict[str, Any] = config.trainer.as_dict()
    own = keywords["strategy"] if isinstance(keywords["strategy"], dict) else {}
    kind = machine.device.kind
    ranks = {"devices": machine.devices_per_node, "num_nodes": machine.num_nodes, "accelerator": kind}
    name = config.strategy or "auto"
    if keywords["plan"] is None:
        keywords |= ranks | {"strategy": name if "+" in name else {**own, "name": name}}
        if keywords["optimizer"] is None and not optimizes_itself:
            keywords["optimizer"] = "adamw"
        if config.memory_budget is not None:
            keywords["memory_budget"] = config.memory_budget
        return without_host_tiers(plan_of(keywords, Trainer.__init__, None), kind)
    given = Plan.of(keywords["plan"])
    budget = config.memory_budget
    budget_bytes = parse_bytes("memory_budget", budget) if isinstance(budget, str) else budget
    settled = Plan.from_dict({"parallel": {**ranks, "strategy": name}, "choice": {"memory_budget_bytes": budget_bytes}})
    parallel = replace(settled.parallel, reduce_dtype=given.parallel.reduce_dtype)
    choice = given.choice if budget is None else settled.choice
    optimizer = given.optimizer
    if optimizer.name is None and not optimizes_itself:
        optimizer = replace(optimizer, name="adamw")
    given = replace(given, parallel=parallel, choice=choice, optimizer=optimizer)
    return without_host_tiers(given, kind)
