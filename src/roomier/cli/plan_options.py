"""The options of ``roomier plan``: those of ``fit``, and what is planned for on which hardware."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import nn

from roomier.api.datamodule import DataModule
from roomier.api.kept_weights import KeptWeights, kept_by
from roomier.api.lightning_types import LightningDataModule
from roomier.cli.options import VerbParser
from roomier.core.device import resolve_device
from roomier.core.errors import RoomierError
from roomier.core.units import parse_bytes
from roomier.hardware.machine import Machine
from roomier.hardware.spec import machine_of
from roomier.hardware.this_machine import this_machine
from roomier.models.gpt import SIZES, GPTConfig
from roomier.plan import Plan
from roomier.trainer import Trainer
from roomier.trainer.keywords.arguments import plan_of
from roomier.trainer.lightning.callbacks import adopted

_DESCRIPTION = (
    "What each plan costs on a machine, and the fastest that fits. Nothing is run, and the machine need not be there. "
    "Exit code 0: one fits; 1: none does; 2: what was asked for is wrong."
)
_GPT = "gpt"


def plan_parser(gpt: str | None) -> ArgumentParser:
    """The parser. It knows every keyword of the Trainer, and those of any class it is given.

    Args:
        gpt: ``"gpt"`` or the name of one of its sizes where ``--model`` is that; its options are then those of
            :class:`GPTConfig`.
    """
    parser = VerbParser(prog="roomier plan", description=_DESCRIPTION, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML with these options, as `roomier fit` takes it")
    parser.add_argument("--seed_everything", type=int | None, default=None, help="is read from a run's YAML; unused")
    parser.add_argument("--ckpt_path", type=str | None, default=None, help="is read from a run's YAML; unused")
    parser.add_argument("--hardware", type=str | None, default=None, help="a100-40gb:8; without it this machine")
    parser.add_argument("--nodes", type=int | None, default=None, help="number of machines; --trainer.num_nodes else")
    parser.add_argument(
        "--strategy",
        type=str | None,
        default=None,
        help="plan this one alone, as --trainer.strategy does; without either all are compared, whatever a YAML says",
    )
    parser.add_argument(
        "--memory_budget", type=str | int | None, default=None, help="of each device, such as 38GiB; else all it has"
    )
    parser.add_argument("--hf", type=str | None, default=None, help="a Hugging Face config.json, or a folder with one")
    parser.add_argument("--batch_size", type=int | None, default=None, help="samples of a micro-batch on each device")
    parser.add_argument("--seq_len", type=int | None, default=None, help="tokens of a sequence, with --hf and gpt")
    parser.add_argument(
        "--input", type=str | None, default=None, help="tensors of a batch: 'x=float32[8,3,224,224]; label=int64[8]'"
    )
    parser.add_argument(
        "--calibrated_by",
        type=str | None,
        default=None,
        help="the folder of a run of this model, as `roomier report` reads it: activations are forecast as they were "
        "measured there, and what it tells of a GPU beside tensors is kept for all plans on such GPUs",
    )
    parser.add_argument("--what_if", action="store_true", help="also the peak for other batches")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--html", type=str | None, default=None, help="write a page that needs no network")
    parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, instantiate=False)
    if gpt is None:
        parser.add_subclass_arguments(
            nn.Module, "model", fail_untyped=False, help=f"import path of a module; or {_GPT}, or one of its sizes"
        )
    else:
        parser.add_class_arguments(GPTConfig, "model")
        if gpt != _GPT:
            parser.set_defaults({f"model.{name}": value for name, value in asdict(GPTConfig.named(gpt)).items()})
    parser.add_subclass_arguments(
        (DataModule, LightningDataModule),
        "data",
        fail_untyped=False,
        help="import path of a DataModule, roomier's or Lightning's, which gives the batch",
    )
    return parser


def without_gpt(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The GPT that ``--model`` names, if it does, and the other words; ``--input`` in the form the parser reads."""
    words, found = list(arguments), None
    for index, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        following = value if is_joined else words[index + 1] if index + 1 < len(words) else ""
        if name == "--model" and (following == _GPT or following in SIZES):
            found = following
            del words[index : index + (1 if is_joined else 2)]
            break
    return found, words


def check_asked(config: Namespace, gpt: str | None) -> None:
    """Refuse what does not name one model.

    Raises:
        RoomierError: none or two are named, or an option belongs to another way of naming it.
    """
    has_class = gpt is None and config.get("model") is not None
    ways = [*(["--hf"] if config.hf is not None else []), *(["--model"] if has_class or gpt is not None else [])]
    if len(ways) != 1:
        problem = "there is no model to plan for" if not ways else f"{' and '.join(ways)} are given"
        action = "Pass --hf config.json, --model my_package.MyModule, --model gpt, or --config run.yaml; one of them"
        raise RoomierError("--model", None, problem, action)
    if has_class and config.seq_len is not None:
        action = "Leave it out, or give the shapes of a batch: --input 'x=int64[8,2048]'"
        raise RoomierError("--seq_len", config.seq_len, "the batch of a class comes from its data", action)
    if not has_class and (config.input is not None or config.get("data") is not None):
        name = "--input" if config.input is not None else "--data"
        problem = "the batch of this model follows from its configuration"
        action = "Leave it out; --batch_size and --seq_len say how large it is"
        raise RoomierError(name, config.input or config.data.class_path, problem, action)
    for name in ("nodes", "batch_size", "seq_len"):
        if config[name] is not None and config[name] < 1:
            raise RoomierError(f"--{name}", config[name], "is not positive", "Give 1 or more")


def trainer_words(words: Sequence[str]) -> frozenset[str]:
    """The keywords of the Trainer that are among ``words`` themselves, not only in a YAML that these name."""
    options = (word.partition("=")[0] for word in words)
    return frozenset(option.split(".")[1] for option in options if option.startswith("--trainer."))


def heed_strategy(config: Namespace, given: Collection[str]) -> None:
    """Plan the strategy alone that ``--trainer.strategy`` names, as ``--strategy`` does: who types it means it.

    Args:
        given: from :func:`trainer_words`.

    Raises:
        RoomierError: the two name different ones.
    """
    if "strategy" not in given:
        return
    own = config.trainer.strategy
    name = own.get("name") if isinstance(own, dict) else own
    if config.strategy is not None and config.strategy != name:
        action = "Give one of the two, or neither: then all strategies are compared"
        raise RoomierError("--trainer.strategy", name, f"--strategy {config.strategy} was given as well", action)
    config.strategy = None if name == "auto" else name


def machine_asked(config: Namespace, given: Collection[str] = ()) -> Machine:
    """The machine that ``--hardware`` and ``--nodes`` name; else this one with the devices of the Trainer.

    Args:
        given: from :func:`trainer_words`: these must not say anything else than ``--hardware`` does.

    Raises:
        RoomierError: there is no such device, or two options name different ones.
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
            action = f"Name the hardware to plan for: --hardware a100-80gb:8. {error.action} with --trainer.accelerator"
            raise RoomierError("--trainer.accelerator", accelerator, error.problem, action) from error
        machine = this_machine(_num_devices(config.trainer.devices, device), num_nodes or 1, accelerator)
    if config.strategy == "single":
        machine = replace(machine, devices_per_node=1, num_nodes=1)
    return machine


def _num_nodes(config: Namespace, given: Collection[str]) -> int | None:
    """None where nobody says: one, or what the file of a machine says."""
    own, told = config.trainer.num_nodes, config.nodes
    is_meant = isinstance(own, int) and ("num_nodes" in given or config.hardware is None)
    if told is not None and "num_nodes" in given and own != told:
        raise RoomierError("--trainer.num_nodes", own, f"--nodes {told} was given as well", "Give one of the two")
    nodes: int | None = own if told is None and is_meant else told
    return nodes


def _num_devices(devices: Any, device: torch.device) -> int:
    """Of this machine; ``"auto"`` and -1 are all GPUs, and one where there is none."""
    if isinstance(devices, int) and devices > 0:
        return devices
    return torch.cuda.device_count() if device.type == "cuda" else 1


def _check_names_the_same(config: Namespace, machine: Machine, given: Collection[str]) -> None:
    trainer, hardware = config.trainer, f"--hardware {config.hardware}"
    kinds = {"gpu": ("cuda", "mps"), "auto": ("cuda", "mps", "cpu")}.get(trainer.accelerator, (trainer.accelerator,))
    action = "Leave one of the two out"
    if "accelerator" in given and machine.device.kind not in kinds:
        problem = f"{hardware} is {machine.device.kind}"
        raise RoomierError("--trainer.accelerator", trainer.accelerator, problem, action)
    own = trainer.devices
    if "devices" in given and isinstance(own, int) and own not in (-1, machine.devices_per_node):
        problem = f"{hardware} has {machine.devices_per_node} of them on each node"
        raise RoomierError("--trainer.devices", own, problem, action)


def copies_asked(config: Namespace) -> tuple[KeptWeights, ...]:
    """The copies of the weights that callbacks of the configuration keep. No other callback is made."""
    callbacks = config.trainer.callbacks or ()
    made: list[Any] = []
    for each in callbacks if isinstance(callbacks, (list, tuple)) else (callbacks,):
        module, _, name = str(each.class_path).rpartition(".")
        found = getattr(import_module(module), name)
        if hasattr(found, "held_weights") or name in ("WeightAveraging", "EMAWeightAveraging"):  # Lightning's as well
            arguments = each.get("init_args")
            made.append(found(**({} if arguments is None else arguments.as_dict())))
    return kept_by(adopted(made))


def plan_asked(config: Namespace, machine: Machine, *, optimizes_itself: bool) -> Plan:
    """What the Trainer's keywords ask for, on ``machine``: of its strategies all, or the one that is named.

    Args:
        optimizes_itself: the model makes its own optimizer; else it is AdamW where none is named.

    Raises:
        PlanError: it cannot work.
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
        return plan_of(keywords, Trainer.__init__, None)
    given = Plan.of(keywords["plan"])
    settled = Plan.from_dict({"parallel": {**ranks, "strategy": name}, "choice": _budget_of(config)})
    parallel = replace(settled.parallel, reduce_dtype=given.parallel.reduce_dtype)
    choice = given.choice if config.memory_budget is None else settled.choice
    optimizer = given.optimizer
    if optimizer.name is None and not optimizes_itself:
        optimizer = replace(optimizer, name="adamw")
    return replace(given, parallel=parallel, choice=choice, optimizer=optimizer)


def _budget_of(config: Namespace) -> dict[str, object]:
    given = config.memory_budget
    if given is None:
        return {}
    return {"memory_budget_bytes": parse_bytes("memory_budget", given) if isinstance(given, str) else given}
