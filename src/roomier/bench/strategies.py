"""``roomier bench strategies``: memory and step time of each strategy, compared with PyTorch DDP."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from roomier.bench.machine import circumstances
from roomier.bench.rank_processes import run_on_ranks
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.units import format_bytes, format_count
from roomier.models.gpt import SIZES, GPTConfig
from roomier.plan import Plan

PEER = "torch_ddp"
_WORKER = "roomier.bench.strategy_ranks"
STRATEGIES = (PEER, "single", "ddp", "zero1", "zero2", "zero3", "hsdp")
MODELS = ("mingpt", *SIZES)
_NUM_COPIES = 2  # replicas of the model with hsdp


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--model", default="mingpt", help="mingpt (34M parameters) or a size of minGPT, such as gpt2")
    parser.add_argument("--ranks", type=_at_least(1), default=2, help="processes on this machine (%(default)s)")
    parser.add_argument("--accelerator", default="cpu", help="as in Trainer(accelerator=...) (%(default)s)")
    parser.add_argument("--precision", default="bf16-mixed", help="as in Trainer(precision=...) (%(default)s)")
    parser.add_argument("--batch-size", type=_at_least(1), default=2, help="sequences per rank (%(default)s)")
    parser.add_argument("--seq-len", type=_at_least(1), default=128, help="tokens per sequence (%(default)s)")
    parser.add_argument("--steps", type=_at_least(1), default=3, help="steps per turn (%(default)s)")
    parser.add_argument("--repeats", type=_at_least(1), default=5, help="turns per strategy (%(default)s)")
    parser.add_argument("--strategies", default="", help=f"names separated by commas (all): {','.join(STRATEGIES)}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all values: peak bytes on the rank with the largest peak, and seconds per step."""
    facts = circumstances()
    settings = {
        "model": _known("--model", options.model, MODELS),
        "ranks": options.ranks,
        "accelerator": options.accelerator,
        "precision": options.precision,
        "batch_size": options.batch_size,
        "seq_len": options.seq_len,
        "steps": options.steps,
        "repeats": options.repeats,
        "strategies": possible_strategies(options.strategies, options.ranks),
    }
    return {"case": "strategies", **settings, **compare(settings), **facts}


def compare(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all strategies in ``settings``. The keys of ``settings`` are the names of the options."""
    for name in settings["strategies"]:
        plan_of(name, settings)  # reject impossible plans before a process starts
    return run_on_ranks(_WORKER, settings["ranks"], settings)


def config_of(settings: Mapping[str, Any]) -> GPTConfig:
    """Return the configuration of ``--model`` without dropout, so that all strategies have the same losses."""
    if settings["model"] == "mingpt":
        return GPTConfig(8192, settings["seq_len"], num_layers=8, num_heads=8, width=512, dropout=0.0)
    return GPTConfig.named(settings["model"], context=settings["seq_len"], dropout=0.0)


def plan_of(name: str, settings: Mapping[str, Any]) -> Plan:
    """Return the plan of a strategy. The plan of :data:`PEER` is the plan of ``ddp``."""
    strategy = "ddp" if name == PEER else name
    parallel: dict[str, Any] = {"strategy": strategy, "accelerator": settings["accelerator"]}
    if name == "hsdp":
        parallel["shard_size"] = settings["ranks"] // _NUM_COPIES
    return Plan.from_dict(
        {
            "parallel": {**parallel, "devices": settings["ranks"]},
            "precision": {"mode": settings["precision"]},
            "optimizer": {"name": "adamw"},
        }
    )


def possible_strategies(text: str, num_ranks: int) -> list[str]:
    """Return the strategies in ``text``, separated by commas, and :data:`PEER`. An empty text selects all strategies.

    On one rank, ``single`` is the only strategy, because the other strategies would run the same code.
    """
    has_copies = num_ranks >= 2 * _NUM_COPIES and num_ranks % _NUM_COPIES == 0
    impossible = {"single"} if has_copies else {"single", "hsdp"}
    possible = [PEER, "single"] if num_ranks == 1 else [each for each in STRATEGIES if each not in impossible]
    wanted = [_known("--strategies", each.strip(), possible) for each in text.split(",") if each.strip()] or possible
    return [each for each in possible if each == PEER or each in wanted]  # the baseline is always included


def _known(field: str, name: str, known: Any) -> str:
    if name not in known:
        raise RoomierError(field, name, "is unknown", did_you_mean(name, known))
    return name


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table with one line for each strategy."""
    peer = next(row for row in result["rows"] if row["strategy"] == PEER)
    collectives = ", ".join(
        f"{name.removesuffix('_s')} {value * 1e3:.0f} ms" for name, value in result["collectives"].items()
    )
    found = Table(
        title=f"{result['model']}, {format_count(result['num_parameters'])} parameters, {result['ranks']} ranks, "
        f"{result['precision']}",
        caption=f"bytes: maximum over the ranks; {result['repeats']} x {result['steps']} steps, interleaved, medians\n"
        f"collectives only: {collectives}\n{result['machine']['cpu']}, torch {result['torch']}",
    )
    found.add_column("")
    for name in ("model states", "ratio to DDP", "formula", "peak", "step", "ratio to DDP"):
        found.add_column(name, justify="right")
    for row in result["rows"]:
        found.add_row(
            row["strategy"],
            format_bytes(row["model_state_bytes"]),
            f"{row['model_state_bytes'] / peer['model_state_bytes']:.2f}",
            format_bytes(row["formula_bytes"]),
            format_bytes(row["peak_bytes"]),
            f"{row['step_s'] * 1e3:.0f} ms",
            f"{row['ratio_to_torch_ddp']:.2f}",
        )
    return found


def _at_least(minimum: int) -> Any:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {minimum}")
        return int(text)

    return count
