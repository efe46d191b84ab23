"""One rank of ``roomier bench strategies``, which runs as ``python -m roomier.bench.strategy_ranks FOLDER SETTINGS``.

Memory and time are measured separately, because the memory tracker slows down the steps. On the CPU, both measurements
use the same models and optimizers. If the models of all strategies do not fit into memory at the same time, they are
recreated for each turn.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from roomier.api.blocks import find_blocks
from roomier.api.module import Module
from roomier.bench.raw_collectives import time_collectives
from roomier.bench.strategies import PEER, config_of, plan_of
from roomier.core.device.memory import free_and_total_bytes, release_cached
from roomier.core.device.resolve import group_backend, num_devices, resolve_device
from roomier.core.device.streams import synchronize
from roomier.core.ranks import Ranks
from roomier.core.tree import to_device
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.planner.memory.kinds import MODEL_STATES, Kind
from roomier.planner.memory.model_states import ModelStates
from roomier.planner.memory.predict import predict
from roomier.planner.memory.tracker import MemoryTracker, tracking
from roomier.planner.memory.weights import units_with_weights
from roomier.techniques.precision.policy import precision_of

Batch = tuple[Tensor, Tensor]
_WARMUP_STEPS = 3


class TrainedGPT(Module):
    """The GPT as a Module."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.network = GPT(config)

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        loss: Tensor = self.network(*batch)[1]
        return loss


class PlainLoop:
    """The training step from the PyTorch tutorials, with DDP, autocast and a fused optimizer."""

    def __init__(self, config: GPTConfig, plan: Plan, ranks: Ranks) -> None:
        device = resolve_device(plan.parallel.accelerator)
        precision = precision_of(plan.precision.mode, device)
        network = precision.convert_module(GPT(config)).to(device)
        self.network = DistributedDataParallel(network, gradient_as_bucket_view=True)
        self._device = device
        weights = list(self.network.parameters())
        groups = [
            {"params": [each for each in weights if each.dim() >= 2], "weight_decay": 0.01},
            {"params": [each for each in weights if each.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, fused=True)
        self._context = precision.forward_context()

    def step(self, batch: Batch, enter: Callable[[str], None]) -> Tensor:
        """Run one step, call ``enter`` at the start of each phase, and return the loss."""
        enter("forward")
        batch = to_device(batch, self._device)
        self.optimizer.zero_grad()
        with self._context():
            loss: Tensor = self.network(*batch)[1]
        enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        enter("update")
        self.optimizer.step()
        return loss.detach()

    @contextmanager
    def tracked(self) -> Iterator[MemoryTracker]:
        """Track the memory of the steps in this context."""
        with MemoryTracker(self.network, [self.optimizer], self._device) as tracker:
            yield tracker


class EngineLoop:
    """The training step in a roomier engine."""

    def __init__(self, config: GPTConfig, plan: Plan, ranks: Ranks) -> None:
        self.module = TrainedGPT(config)
        self.engine, _ = build(
            plan, self.module, lambda blocks: configure(plan, self.module, lambda: 1.0, blocks), EagerEngine, ranks
        )
        self._num_ranks = ranks.world.size

    def step(self, batch: Batch, enter: Callable[[str], None]) -> Tensor:
        """Run one step, call ``enter`` at the start of each phase, and return the loss."""
        enter("forward")
        loss = self.engine.forward_backward(lambda batch, _: self.module.training_step(batch), [batch])
        enter("update")
        self.engine.step()
        assert loss is not None
        return loss * self._num_ranks

    @contextmanager
    def tracked(self) -> Iterator[MemoryTracker]:
        """Track the memory of the steps in this context."""
        with tracking(self.engine) as tracker:
            yield tracker


Loop = PlainLoop | EngineLoop


class Strategy:
    """Strategy whose memory and step time form one row of the result.

    Args:
        name: name of the strategy, or :data:`roomier.bench.strategies.PEER`.
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
        generator = torch.Generator().manual_seed(ranks.world.rank)
        tokens = torch.randint(
            self._config.vocab_size, (settings["batch_size"], settings["seq_len"] + 1), generator=generator
        )
        self._batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def formula(self, rank: int = 0) -> ModelStates:
        """Return the size of the model states of ``rank``, computed with a formula."""
        with torch.device("meta"):
            network = GPT(self._config)
        return predict(network, self._plan, rank=rank)

    def measure_memory(self) -> dict[str, Any]:
        """Return the memory of a step in bytes. The values are from the rank with the largest model states, except
        ``peak_bytes``, which is the maximum over the ranks."""
        is_cpu = self._device.type == "cpu"
        # an allocator also counts the strategies that stay in memory
        with self._running(keeps=self._keeps and is_cpu) as loop:
            with loop.tracked() as tracker:
                loop.step(self._batch, tracker.enter)
                tracker.restart()
                loop.step(self._batch, tracker.enter)
            states, whole, rest = tracker.peak(MODEL_STATES), tracker.peak(), tracker.now()
        found: dict[str, Any] = {
            "model_state_bytes": states.total(MODEL_STATES),
            "peak_bytes": whole.total(),
            "allocator_peak_bytes": tracker.allocator_peak_bytes,
            "reserved_peak_bytes": tracker.reserved_peak_bytes,
            "model_states": {kind.value: states.num_bytes[kind] for kind in MODEL_STATES},
            "peak": {kind.value: whole.num_bytes[kind] for kind in Kind},
            "between_steps_bytes": rest.total(MODEL_STATES),
            "formula_bytes": self.formula(self._ranks.world.rank).peak.total(),
        }
        by_rank = self._ranks.gather(found)
        worst = max(by_rank, key=lambda each: each["model_state_bytes"])
        return {**worst, "peak_bytes": max(each["peak_bytes"] for each in by_rank)}

    def time_turn(self, num_steps: int) -> None:
        """Record one turn: the median time of its steps, on the slowest rank."""
        with self._running(keeps=self._keeps) as loop:
            loop.step(self._batch, _ignore)  # not timed; fills the caches of the processor
            dist.barrier()
            durations = []
            loss = torch.tensor(0.0)
            synchronize(self._device)
            for _ in range(num_steps):
                start = time.perf_counter()
                loss = loop.step(self._batch, _ignore)
                synchronize(self._device)
                durations.append(time.perf_counter() - start)
        self.step_s.append(max(self._ranks.gather(statistics.median(durations))))
        self.loss = statistics.mean(self._ranks.gather(float(loss)))

    @contextmanager
    def _running(self, *, keeps: bool) -> Iterator[Loop]:
        loop = self._loop
        if loop is None:
            gc.collect()  # frees objects of the previous strategy
            release_cached(self._device)
            torch.manual_seed(0)
            loop = (PlainLoop if self.name == PEER else EngineLoop)(self._config, self._plan, self._ranks)
            for _ in range(_WARMUP_STEPS):
                loop.step(self._batch, _ignore)
        self._loop = loop if keeps else None
        yield loop
        gc.collect()  # so that no strategy spends time on the garbage collection of the previous strategy


def run(settings: dict[str, Any], ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Measure memory, time and collectives of all strategies."""
    names: list[str] = settings["strategies"]
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
            }
            for each in strategies
        ],
        "collectives": {
            name: statistics.median(max(ranks.gather(each[name])) for each in collectives) for name in collectives[0]
        },
    }


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Run the benchmark on this rank. Rank 0 writes ``result.json``."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), settings["ranks"]
    if num_devices(resolve_device(settings["accelerator"])) > 1:
        torch.accelerator.set_device_index(rank)
    device = resolve_device(settings["accelerator"])
    backend, rendezvous = group_backend(device.type), f"file://{folder}/rendezvous"
    dist.init_process_group(backend or "gloo", init_method=rendezvous, rank=rank, world_size=size)
    result = run(settings, Ranks(World(rank, size, rank, 0, size)), device)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _ignore(phase: str) -> None:
    pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
