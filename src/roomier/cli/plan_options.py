"""Options of ``roomier plan``: the options of ``fit``, and options for the model and the hardware."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pkgutil import resolve_name
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import nn

from roomier.api.callback import KeptWeights, kept_by
from roomier.api.datamodule import DataModule
from roomier.api.overrides import LightningDataModule
from roomier.cli.options import VerbParser, add_options_of_lightning
from roomier.core.device.resolve import num_devices, resolve_device
from roomier.core.errors import RoomierError
from roomier.core.units import parse_bytes
from roomier.models.gpt import SIZES, GPTConfig
from roomier.plan import Plan
from roomier.plan.levers import without_host_tiers
from roomier.planner.hardware.machine import Machine
from roomier.planner.hardware.spec import machine_of
from roomier.planner.hardware.this_machine import this_machine
from roomier.trainer import Trainer
from roomier.trainer.keywords.arguments import plan_of
from roomier.trainer.lightning.callbacks import adopted

_DESCRIPTION = (
    "Forecast memory and time of each plan on a machine, and select the fastest plan that fits. Training does not run, "
    "and the machine need not be available. Exit code 0: a plan fits; 1: no plan fits; 2: the request is invalid."
)
_GPT = "gpt"


def plan_parser(gpt: str | None) -> ArgumentParser:
    """Return the parser of ``roomier plan``, with options for the arguments of the Trainer, the model class and the
    data class.

    Args:
        gpt: value of ``--model`` if it is ``"gpt"`` or the name of a GPT size. The model options are then the fields of
            :class:`GPTConfig`.
    """
    parser = VerbParser(prog="roomier plan", description=_DESCRIPTION, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with these options, as for `roomier fit`")
    for name, kind in (("seed_everything", bool | int | None), ("ckpt_path", str | None)):
        parser.add_argument(f"--{name}", type=kind, default=None, help="accepted in YAML files, but ignored")
    parser.add_argument("--hardware", type=str | None, default=None, help="such as a100-40gb:8; default: this machine")
    parser.add_argument("--nodes", type=int | None, default=None, help="number of nodes; default: --trainer.num_nodes")
    parser.add_argument(
        "--strategy",
        type=str | None,
        default=None,
        help="plan only this strategy, like --trainer.strategy; default: all strategies, regardless of a YAML file",
    )
    parser.add_argument(
        "--deepspeed",
        type=str | None,
        default=None,
        help="a DeepSpeed configuration, such as ds_config.json, whose strategy and settings are planned",
    )
    parser.add_argument(
        "--memory_budget",
        type=str | int | None,
        default=None,
        help="memory limit per device, such as 38GiB; default: all memory",
    )
    parser.add_argument("--hf", type=str | None, default=None, help="a Hugging Face config.json, or a folder with one")
    parser.add_argument("--batch_size", type=int | None, default=None, help="samples per micro-batch on each device")
    parser.add_argument("--seq_len", type=int | None, default=None, help="tokens per sequence, for --hf and gpt")
    parser.add_argument(
        "--input", type=str | None, default=None, help="tensors of a batch: 'x=float32[8,3,224,224]; label=int64[8]'"
    )
    parser.add_argument(
        "--calibrated_by",
        type=str | None,
        default=None,
        help="run folder of this model, as for `roomier report`: scale the forecast of activations to its measurement, "
        "and store the measured GPU memory outside tensors for all plans on the same GPU",
    )
    parser.add_argument("--what_if", action="store_true", help="also show the peak memory for other batch sizes")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--html", type=str | None, default=None, help="write an HTML page that works without a network")
    parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, instantiate=False)
    if gpt is None:
        parser.add_subclass_arguments(
            nn.Module, "model", fail_untyped=False, help=f"import path of a module, {_GPT}, or the name of a GPT size"
        )
    else:
        parser.add_class_arguments(GPTConfig, "model")
        if gpt != _GPT:
            parser.set_defaults({f"model.{name}": value for name, value in asdict(GPTConfig.named(gpt)).items()})
    parser.add_subclass_arguments(
        (DataModule, LightningDataModule),
        "data",
        fail_untyped=False,
        help="import path of a DataModule of roomier or Lightning, which provides the batch",
    )
    add_options_of_lightning(parser)
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
    own = config.trainer.strategy
    name = own.get("name") if isinstance(own, dict) else own
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
        machine = this_machine(_num_devices(config.trainer.devices, device), num_nodes or 1, accelerator)
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
    nodes: int | None = own if asked is None and is_meant else asked
    return nodes


def _num_devices(devices: Any, device: torch.device) -> int:
    """Return the number of devices to plan for. ``"auto"`` and -1 mean all accelerators, or 1 device if there are no
    accelerators."""
    if isinstance(devices, int) and devices > 0:
        return devices
    return num_devices(device)


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
        if hasattr(found, "held_weights") or found.__name__ in (
            "WeightAveraging",
            "EMAWeightAveraging",
        ):  # also Lightning's
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
    ranks: dict[str, Any] = {
        "devices": machine.devices_per_node,
        "num_nodes": machine.num_nodes,
        "accelerator": machine.device.kind,
    }
    name = config.strategy or "auto"
    if keywords["plan"] is None:
        keywords |= ranks | {"strategy": {**own, "name": name} if own and "+" not in name else name}
        if keywords["optimizer"] is None and not optimizes_itself:
            keywords["optimizer"] = "adamw"
        if config.memory_budget is not None:
            keywords["memory_budget"] = config.memory_budget
        return without_host_tiers(plan_of(keywords, Trainer.__init__, None), machine.device.kind)
    given = Plan.of(keywords["plan"])
    settled = Plan.from_dict({"parallel": {**ranks, "strategy": name}, "choice": _budget_of(config)})
    parallel = replace(settled.parallel, reduce_dtype=given.parallel.reduce_dtype)
    choice = given.choice if config.memory_budget is None else settled.choice
    optimizer = given.optimizer
    if optimizer.name is None and not optimizes_itself:
        optimizer = replace(optimizer, name="adamw")
    given = replace(given, parallel=parallel, choice=choice, optimizer=optimizer)
    return without_host_tiers(given, machine.device.kind)


def _budget_of(config: Namespace) -> dict[str, object]:
    given = config.memory_budget
    if given is None:
        return {}
    return {"memory_budget_bytes": parse_bytes("memory_budget", given) if isinstance(given, str) else given}
