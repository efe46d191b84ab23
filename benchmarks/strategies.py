"""``python -m benchmarks strategies``: memory and step time of each strategy, compared with PyTorch DDP.

Each rank is a process ``python -m benchmarks.strategies FOLDER SETTINGS``. Memory and time are measured separately,
because the memory tracker slows down the steps. On the CPU, both measurements use the same models and optimizers. If
the models of all strategies do not fit into memory at the same time, they are recreated for each turn. The collectives
of a step are also measured without computation, on buffers with the sizes of the model's weights.

``--context N`` also measures zero2 with N ranks that share each sequence. All strategies compute the same tokens per
step, so a group of N ranks computes N times as many sequences as one rank of the other strategies. For example:
``python -m benchmarks strategies --context 2 --model gpt-mini-bytes --seq-len 1024 --batch-size 1 --strategies zero2``.

``--stages N`` also measures a pipeline of N stages. A group of N ranks computes N times as many micro-batches as one
rank of the other strategies, so the number of tokens per step is also equal. The row contains the time in which each
stage computes, without the time in which it waits for another stage. For example:
``python -m benchmarks strategies --stages 2 --micro-batches 4 --model gpt2 --seq-len 256 --batch-size 1 --strategies
ddp --precision 32-true``.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.console import RenderableType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine import circumstances
from benchmarks.options import at_least, chosen, known, table_of
from benchmarks.rank_processes import on_this_rank, run_on_ranks
from benchmarks.training import Steps, Trained, ignore
from roomier.api.blocks import find_blocks
from roomier.core.device.memory import free_and_total_bytes, release_cached
from roomier.core.device.resolve import resolve_device
from roomier.core.device.streams import synchronize
from roomier.core.ranks import Ranks
from roomier.core.tree import to_device
from roomier.core.units import format_bytes, format_count
from roomier.models.gpt import GPT, SIZES, GPTConfig
from roomier.plan import Plan
from roomier.planner.memory.kinds import MODEL_STATES, Kind
from roomier.planner.memory.model_states import ModelStates
from roomier.planner.memory.predict import predict
from roomier.planner.memory.tracker import MemoryTracker
from roomier.planner.memory.weights import Unit, units_with_weights
from roomier.techniques.parallel.collectives import PairwiseAllGather, PairwiseReduceScatter, Reductions
from roomier.techniques.precision.policy import precision_of

_BUCKET_BYTES = 25 * 2**20  # default of torch's DDP


def time_collectives(units: list[Unit], device: torch.device) -> dict[str, float]:
    """Return the seconds that each kind of collective takes in one step. Every rank must call this function.

    Returns:
        ``all_reduce_s``: all-reduce of all gradients in the dtype of the weights, in the buckets of DDP.
        ``all_gather_s`` and ``reduce_scatter_s``: one collective per unit, as in the sharded strategies. On the CPU,
        ``gloo_all_gather_s`` and ``gloo_reduce_scatter_s``: the same collectives with gloo's algorithms.
    """
    with torch.device(device):
        gradients = torch.zeros(sum(math.prod(each.shape) for unit in units for each in unit.weights))
        wholes = [_padded(unit) for unit in units]
    buckets = torch.split(gradients, _BUCKET_BYTES // gradients.itemsize)
    group = dist.group.WORLD
    assert group is not None
    own = [each.chunk(group.size())[group.rank()].clone() for each in wholes]

    def all_gather() -> None:
        for whole, part in zip(wholes, own, strict=True):
            dist.all_gather_into_tensor(whole, part)

    def reduce_scatter() -> None:
        for whole, part in zip(wholes, own, strict=True):
            dist.reduce_scatter_tensor(part, whole)

    found = {"all_reduce_s": _seconds(lambda: [dist.all_reduce(each) for each in buckets], device)}
    backends = _seconds(all_gather, device), _seconds(reduce_scatter, device)
    if device.type != "cpu":
        return {**found, "all_gather_s": backends[0], "reduce_scatter_s": backends[1]}
    gather, scatter = PairwiseAllGather(), PairwiseReduceScatter(Reductions(), may_wait=False)

    def scatter_pairwise() -> None:
        for whole, part in zip(wholes, own, strict=True):
            scatter(part, whole, group, dist.ReduceOp.SUM)

    return {
        **found,
        "all_gather_s": _seconds(
            lambda: [gather(*each, group).wait() for each in zip(wholes, own, strict=True)], device
        ),
        "reduce_scatter_s": _seconds(scatter_pairwise, device),
        "gloo_all_gather_s": backends[0],
        "gloo_reduce_scatter_s": backends[1],
    }


def _padded(unit: Unit) -> Tensor:
    num_ranks = dist.get_world_size()
    num_elements = sum(
        math.ceil(each.shape[0] / num_ranks) * num_ranks * math.prod(each.shape[1:]) for each in unit.weights
    )
    return torch.zeros(num_elements, dtype=unit.gathered_dtype)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


PEER = "torch_ddp"
STRATEGIES = (PEER, "single", "ddp", "zero1", "zero2", "zero3", "hsdp")
SHARED = "zero2+context"
"""zero2 with groups of ranks that share each sequence."""
STAGED = "ddp+stages"
"""Pipeline whose remaining ranks are data-parallel."""
_BYTES = "gpt-mini-bytes"
MODELS = ("mingpt", _BYTES, *SIZES)
_NUM_COPIES = 2  # replicas of the model with hsdp


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--model", default="mingpt", help=f"mingpt (34M parameters), {_BYTES} or a size of minGPT")
    parser.add_argument("--ranks", type=at_least(1), default=2, help="processes on this machine (%(default)s)")
    parser.add_argument("--accelerator", default="cpu", help="as in Trainer(accelerator=...) (%(default)s)")
    parser.add_argument("--precision", default="bf16-mixed", help="as in Trainer(precision=...) (%(default)s)")
    parser.add_argument("--batch-size", type=at_least(1), default=2, help="sequences per rank (%(default)s)")
    parser.add_argument("--seq-len", type=at_least(1), default=128, help="tokens per sequence (%(default)s)")
    parser.add_argument("--steps", type=at_least(1), default=3, help="steps per turn (%(default)s)")
    parser.add_argument("--repeats", type=at_least(1), default=5, help="turns per strategy (%(default)s)")
    parser.add_argument(
        "--context", type=at_least(1), default=1, help=f"ranks that share each sequence in a row {SHARED} (1: no row)"
    )
    parser.add_argument("--stages", type=at_least(1), default=1, help=f"stages in a row {STAGED} (1: no row)")
    parser.add_argument(
        "--micro-batches", type=at_least(1), default=1, help="batches of a rank that a step accumulates (%(default)s)"
    )
    parser.add_argument("--strategies", default="", help=f"names separated by commas (all): {','.join(STRATEGIES)}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all values: peak bytes on the rank with the largest peak, and seconds per step."""
    facts = circumstances()
    known("--model", options.model, MODELS)
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "strategies")}
    settings["strategies"] = possible_strategies(options.strategies, options.ranks)
    if options.context > 1:
        settings["strategies"].append(SHARED)
    if options.stages > 1:
        settings["strategies"].append(STAGED)
    return {"case": "strategies", **settings, **compare(settings), **facts}


def compare(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all strategies in ``settings``. The keys of ``settings`` are the names of the options."""
    for name in settings["strategies"]:
        plan_of(name, settings)  # reject impossible plans before a process starts
    return run_on_ranks("benchmarks.strategies", settings["ranks"], settings)


def config_of(settings: Mapping[str, Any]) -> GPTConfig:
    """Return the configuration of ``--model`` without dropout, so that all strategies have the same losses."""
    if settings["model"] == "mingpt":
        return GPTConfig(8192, settings["seq_len"], num_layers=8, num_heads=8, width=512, dropout=0.0)
    if settings["model"] == _BYTES:
        return GPTConfig.named("gpt-mini", vocab_size=256, context=settings["seq_len"], dropout=0.0)
    return GPTConfig.named(settings["model"], context=settings["seq_len"], dropout=0.0)


def plan_of(name: str, settings: Mapping[str, Any]) -> Plan:
    """Return the plan of a strategy. The plan of :data:`PEER` is the plan of ``ddp``."""
    strategy = {PEER: "ddp", STAGED: "ddp", SHARED: "zero2"}.get(name, name)
    parallel: dict[str, Any] = {"strategy": strategy, "accelerator": settings["accelerator"]}
    if name == "hsdp":
        parallel["shard_size"] = settings["ranks"] // _NUM_COPIES
    if name == SHARED:
        parallel["context_parallel_size"] = settings["context"]
    if name == STAGED:
        parallel["pipeline_parallel_size"] = settings["stages"]
    return Plan.from_dict(
        {
            "parallel": {**parallel, "devices": settings["ranks"]},
            "precision": {"mode": settings["precision"]},
            "batch": {
                "seeding": "events" if name in (SHARED, STAGED) else "stream",
                "accumulate_grad_batches": settings.get("micro_batches", 1) * parallel.get("pipeline_parallel_size", 1),
            },
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
    wanted = chosen("--strategies", text, possible)
    return [each for each in possible if each == PEER or each in wanted]  # the baseline is always included


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table with one line for each strategy."""
    peer = next(row for row in result["rows"] if row["strategy"] == PEER)
    collectives = ", ".join(
        f"{name.removesuffix('_s')} {value * 1e3:.0f} ms" for name, value in result["collectives"].items()
    )
    title = (
        f"{result['model']}, {format_count(result['num_parameters'])} parameters, {result['ranks']} ranks, "
        f"{result['precision']}"
    )
    caption = (
        "bytes are maxima over the ranks; "
        f"step times are medians of {result['repeats']} x {result['steps']} interleaved steps\n"
        f"time of the collectives alone: {collectives}"
    )
    numbers = ("model states", "ratio to DDP", "formula", "peak", "step", "ratio to DDP")
    for row in result["rows"]:
        if "ratio_to_slots" in row:
            caption += (
                f"\nthe passes of the stages take {row['ratio_to_slots']:.2f} times {row['num_slots']} slots, one for "
                "each micro-batch and each boundary between stages, and each as long as the slowest pass"
            )
    found = table_of(result, title, caption, ("",), numbers)
    for row in result["rows"]:
        found.add_row(
            row["strategy"],
            format_bytes(row["model_state_bytes"]),
            f"{row['model_state_bytes'] / peer['model_state_bytes']:.2f}",
            format_bytes(row["formula_bytes"]) if row["formula_bytes"] else "",
            format_bytes(row["peak_bytes"]),
            f"{row['step_s'] * 1e3:.0f} ms",
            f"{row['ratio_to_torch_ddp']:.2f}",
        )
    return found


Batch = tuple[Tensor, Tensor]
_WARMUP_STEPS = 3


class PlainLoop:
    """The training step from the PyTorch tutorials, with DDP, autocast and a fused optimizer."""

    def __init__(self, config: GPTConfig, plan: Plan, batches: Sequence[Batch]) -> None:
        device = resolve_device(plan.parallel.accelerator)
        precision = precision_of(plan.precision.mode, device)
        network = precision.convert_module(GPT(config)).to(device)
        self.network = DistributedDataParallel(network, gradient_as_bucket_view=True)
        self._device = device
        self._batches = batches
        weights = list(self.network.parameters())
        groups = [
            {"params": [each for each in weights if each.dim() >= 2], "weight_decay": 0.01},
            {"params": [each for each in weights if each.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, fused=True)
        self._context = precision.forward_context()

    def step(self, enter: Callable[[str], None] = ignore) -> Tensor:
        """Run one step, call ``enter`` at the start of each phase, and return the loss."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        for each in self._batches:
            with nullcontext() if each is self._batches[-1] else self.network.no_sync():
                enter("forward")
                batch = to_device(each, self._device)
                with self._context():
                    loss: Tensor = self.network(*batch)[1] / len(self._batches)
                enter("backward")
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        enter("update")
        self.optimizer.step()
        return total

    def tracked(self) -> AbstractContextManager[MemoryTracker]:
        """Track the memory of the steps in this context."""
        return MemoryTracker(self.network, [self.optimizer], self._device)


Loop = PlainLoop | Steps


class Strategy:
    """Strategy whose memory and step time form one row of the result.

    Args:
        name: name of the strategy, or :data:`benchmarks.strategies.PEER`.
        settings: settings of the benchmark.
        ranks: ranks of the run.
        device: device of this rank.
        keeps: True if the loop stays in memory between its turns.
    """

    def __init__(self, name: str, settings: dict[str, Any], ranks: Ranks, device: torch.device, *, keeps: bool) -> None:
        self.name = name
        self.step_s: list[float] = []
        self.loss = float("nan")
        self._config = config_of(settings)
        self._plan = plan_of(name, settings)
        self._ranks = ranks
        self._device = device
        self._keeps = keeps
        self._loop: Loop | None = None
        self._waited_s = 0.0
        self.passes_s: list[float] = []
        self.busy_s: list[float] = []
        mesh = self._plan.parallel.mesh_on(ranks.world)
        shape = (settings.get("micro_batches", 1), settings["batch_size"], settings["seq_len"] + 1)
        first = mesh.data.rank * mesh.num_peers
        drawn = [
            torch.randint(self._config.vocab_size, shape, generator=torch.Generator().manual_seed(rank))
            for rank in range(first, first + mesh.num_peers)
        ]
        tokens = torch.cat(drawn, dim=0 if name == STAGED else 1)
        self._batches = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]

    def formula(self, rank: int = 0) -> ModelStates:
        """Return the size of the model states of ``rank``, computed with a formula."""
        with torch.device("meta"):
            network = GPT(self._config)
        return predict(network, self._plan, rank=rank)

    def slots(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the time of a micro-batch on the slowest stage, and the number of such times that a step takes at
        least."""
        num_slots = len(self._batches) + settings["stages"] - 1
        busy_s = max(self._ranks.gather(statistics.median(self.busy_s)))
        slot_s = busy_s / len(self._batches)
        passes_s = max(self._ranks.gather(statistics.median(self.passes_s)))
        return {"slot_s": slot_s, "num_slots": num_slots, "ratio_to_slots": passes_s / (num_slots * slot_s)}

    def measure_memory(self) -> dict[str, Any]:
        """Return the memory of a step in bytes. The values are from the rank with the largest model states, except
        ``peak_bytes``, which is the maximum over the ranks."""
        is_cpu = self._device.type == "cpu"
        # an allocator also counts the strategies that stay in memory
        with self._running(keeps=self._keeps and is_cpu) as loop:
            with loop.tracked() as tracker:
                loop.step(tracker.enter)
                tracker.restart()
                loop.step(tracker.enter)
            states, whole, rest = tracker.peak(MODEL_STATES), tracker.peak(), tracker.now()
        found: dict[str, Any] = {
            "model_state_bytes": states.total(MODEL_STATES),
            "peak_bytes": whole.total(),
            "allocator_peak_bytes": tracker.allocator_peak_bytes,
            "reserved_peak_bytes": tracker.reserved_peak_bytes,
            "model_states": {kind.value: states.num_bytes[kind] for kind in MODEL_STATES},
            "peak": {kind.value: whole.num_bytes[kind] for kind in Kind},
            "between_steps_bytes": rest.total(MODEL_STATES),
            "formula_bytes": None if self.name == STAGED else self.formula(self._ranks.world.rank).peak.total(),
        }
        by_rank = self._ranks.gather(found)
        worst = max(by_rank, key=lambda each: each["model_state_bytes"])
        return {**worst, "peak_bytes": max(each["peak_bytes"] for each in by_rank)}

    def time_turn(self, num_steps: int) -> None:
        """Record one turn: the median time of its steps, on the slowest rank."""
        with self._running(keeps=self._keeps) as loop:
            loop.step()  # not timed; fills the caches of the processor
            dist.barrier()
            durations = []
            loss = torch.tensor(0.0)
            synchronize(self._device)
            for _ in range(num_steps):
                starts: dict[str, float] = {}
                self._waited_s, start = 0.0, time.perf_counter()
                loss = loop.step(lambda phase, at=starts: at.update({phase: time.perf_counter()}))  # type: ignore[misc]
                synchronize(self._device)
                durations.append(time.perf_counter() - start)
                self.passes_s.append(starts["update"] - start)
                self.busy_s.append(self.passes_s[-1] - self._waited_s)
        self.step_s.append(max(self._ranks.gather(statistics.median(durations))))
        self.loss = statistics.mean(self._ranks.gather(float(loss)))

    @contextmanager
    def _running(self, *, keeps: bool) -> Iterator[Loop]:
        loop = self._loop
        if loop is None:
            gc.collect()  # frees objects of the previous strategy
            release_cached(self._device)
            torch.manual_seed(0)
            loop = (
                PlainLoop(self._config, self._plan, self._batches)
                if self.name == PEER
                else Steps(self._plan, Trained(GPT(self._config)), self._batches, self._ranks)
            )
            if self.name == STAGED:
                assert isinstance(loop, Steps)
                for name in ("_receive", "_wait_for_sends"):
                    setattr(loop.engine, name, self._timed(getattr(loop.engine, name)))
            for _ in range(_WARMUP_STEPS):
                loop.step()
        self._loop = loop if keeps else None
        yield loop
        gc.collect()  # so that no strategy spends time on the garbage collection of the previous strategy

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = wait(*args)
            self._waited_s += time.perf_counter() - start
            return result

        return run


def run(settings: dict[str, Any], ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Measure memory, time and collectives of all strategies."""
    device = resolve_device(settings["accelerator"])
    names: list[str] = settings["strategies"]
    # The full model is an upper bound for one stage.
    num_bytes = sum(Strategy(name, settings, ranks, device, keeps=False).formula().peak.total() for name in names)
    memory_info = free_and_total_bytes(device)
    if memory_info is None:  # the ranks share the memory of the host
        keeps = num_bytes * ranks.world.size < psutil.virtual_memory().available / 2
    else:
        keeps = num_bytes < memory_info[0] / 2
    keeps = ranks.from_zero(keeps)
    strategies = [Strategy(name, settings, ranks, device, keeps=keeps) for name in names]
    memory = {each.name: each.measure_memory() for each in strategies}
    with torch.device("meta"):
        network: nn.Module = GPT(config_of(settings))
    precision = precision_of(settings["precision"], device)
    units = units_with_weights(network, find_blocks(network), precision.autocast_dtype, precision.weight_dtype)
    collectives: list[dict[str, float]] = []
    for index in range(settings["repeats"]):
        for each in reversed(strategies) if index % 2 else strategies:
            each.time_turn(settings["steps"])
        collectives.append(time_collectives(units, device))
    slots = {each.name: each.slots(settings) for each in strategies if each.name == STAGED}
    base = statistics.median(strategies[0].step_s)
    return {
        "num_parameters": sum(each.numel() for each in network.parameters()),
        "rows": [
            {
                "strategy": each.name,
                "ranks": ranks.world.size,
                "step_s": statistics.median(each.step_s),
                "step_s_all": each.step_s,
                "ratio_to_torch_ddp": statistics.median(each.step_s) / base,
                "loss": each.loss,
                **memory[each.name],
                **slots.get(each.name, {}),
            }
            for each in strategies
        ],
        "collectives": {
            name: statistics.median(max(ranks.gather(each[name])) for each in collectives) for name in collectives[0]
        },
    }


if __name__ == "__main__":
    on_this_rank(run, always_group=True)
