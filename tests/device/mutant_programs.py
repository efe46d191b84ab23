"""Programs in which a missing synchronization of streams or ranks changes numbers."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import benchmarks.strategies
import roomier.planner.hardware.measure
import roomier.techniques.activation.profile
from roomier import Module, checkpoint
from roomier.checkpoint.agree import all_ranks
from roomier.core.device.transfer import BatchMover
from roomier.core.exchange import Exchange
from roomier.core.log import quiet
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.engine.staged import StagedEngine
from roomier.plan import ParallelPlan, plan_from_flags
from roomier.run.run import Vote
from roomier.techniques.activation.copies import Copies, Offload
from roomier.techniques.activation.disk_copies import DiskCopies
from roomier.techniques.optim.adamw import StepValues
from roomier.techniques.parallel.collectives import PairwiseAllGather
from roomier.techniques.parallel.powersgd import PowerSGD
from roomier.techniques.pipeline.schedule import Action
from roomier.techniques.tiers.scratch import Scratch
from tests.device.mutant_reads import quiet_trainer
from tests.device.mutant_scenario import DEVICE, device, pending
from tests.simulator.gpt import GPT, batches

_DELAY_S = 0.3


def batches_on_the_copy_stream() -> list[Any]:
    """The device still reads a batch when the host frees this batch and requests the next batch."""
    mover = BatchMover(device())
    total = torch.zeros(64, device=DEVICE)
    for number in range(4):
        batch = mover({"x": torch.full((64,), float(number)).pin_memory()})
        total = total * 2 + batch["x"]
        del batch
    return [total.cpu()]


def offloaded_blocks(copies: Copies | None = None) -> list[Any]:
    """Four blocks save activations, and backward reads them."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(4)).to(DEVICE)
    offload = Offload(device(), min_bytes=1, copies=copies)
    for step in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        for block in blocks:
            with offload.visit():
                x = block(x)
        x.square().sum().backward()
        with torch.no_grad():
            for parameter in blocks.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return [parameter.detach().cpu() for parameter in blocks.parameters()]


def blocks_on_disk() -> list[Any]:
    """Four blocks save activations on disk, and backward reads them."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    with quiet():
        copies = DiskCopies(device(), Scratch(folder))
    try:
        return offloaded_blocks(copies)
    finally:
        copies.close()
        shutil.rmtree(folder)


def blocking_offload() -> list[Any]:
    """The host reads a copy that a device without streams created."""
    return [Copies(device()).to_host(pending())]


def background_save() -> list[Any]:
    """Training modifies the weights while a thread writes them."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    saver = checkpoint.BackgroundSaver()
    weights = pending()
    loaded = []
    for step in range(2):
        saver.start(folder / str(step), {"module": {"w": weights}})
        weights.mul_(2)
        saver.wait()
        loaded.append(checkpoint.load(folder / str(step))["module"]["w"].clone())
    saver.close()
    shutil.rmtree(folder)
    return loaded


def update_numbers() -> list[Any]:
    """The numbers of an update are copied to the device without a wait of the host."""
    values = StepValues(3, 0.9, 0.99, 1e-8, 0.1, 0.01)
    return [values.numbers(device()).cpu()]


# ---- training --------------------------------------------------------------------------------------------------------


class Skipping(nn.Module):
    """Block in which one norm is not called. Norms and linear layers have different dtypes in mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.linear = nn.LayerNorm(32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.linear(self.norm1(x))
        return found


class Language(Module):
    """A small GPT. ``order`` is the order of its blocks, and ``detached_after`` the last block without gradients."""

    def __init__(self, order: Sequence[int], detached_after: int | None, skips: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = GPT(width=32, num_blocks=3)
        blocks = [Skipping() for _ in order] if skips else list(self.network.blocks)
        self.network.blocks = nn.ModuleList(blocks[index] for index in order)
        if detached_after is not None:
            self.network.blocks[detached_after].register_forward_hook(lambda _, inputs, output: output.detach())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch[0])
        return loss


def _loader(num_batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.cat(batches(num_batches))), batch_size=4)


def train(
    *,
    order: Sequence[int] = (0, 1, 2),
    detached_after: int | None = None,
    skips: bool = False,
    num_steps: int = 3,
    **flags: Any,
) -> list[Any]:
    """Train with the engine of a Plan, and return the weights."""
    module = Language(order, detached_after, skips)
    plan = plan_from_flags(accelerator=DEVICE, **{"optimizer": "adamw", "learning_rate": 3e-3, **flags})
    ranks = all_ranks()
    with quiet():
        engine, _ = build(plan, module, lambda blocks: configure(plan, module, lambda: 1.0, blocks), EagerEngine, ranks)
    size = plan.batch.accumulate_grad_batches
    for step in range(num_steps):
        own = batches(num_steps * size * ranks.world.size)[step * size + ranks.world.rank :: ranks.world.size][:size]
        engine.forward_backward(lambda batch, _: module.training_step(batch, 0), [[each] for each in own])
        engine.clip()
        engine.step()
    engine.settle()
    full = (each.full_tensor() if isinstance(each, DTensor) else each for each in module.parameters())
    return [each.detach().cpu() for each in full]


def fit() -> list[Any]:
    """Train with a loader that pins its batches."""
    module = Language((0, 1, 2), None, False)
    quiet_trainer(max_steps=3, devices=1).fit(module, _loader(3))
    return [each.detach().cpu() for each in module.parameters()]


# ---- collectives -----------------------------------------------------------------------------------------------------


class _Later:
    """Work of a process group that communicates as late as possible, when the host waits for the work."""

    def __init__(self, communicate: Callable[[], Any]) -> None:
        self._communicate = communicate

    def wait(self, *_: Any) -> None:
        self._communicate()


@contextmanager
def _late_communication() -> Iterator[None]:
    exchange, pairwise, reduce = (
        dist.batch_isend_irecv,
        roomier.techniques.parallel.collectives.exchange,
        dist.all_reduce,
    )

    def exchange_later(operations: list[Any]) -> list[Any]:
        return [_Later(lambda: [each.wait() for each in exchange(operations)])]

    def pairwise_later(*args: Any) -> list[Any]:
        return [_Later(lambda: [each.wait() for each in pairwise(*args)])]

    def reduce_later(tensor: Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
        return _Later(lambda: reduce(tensor, op)) if async_op else reduce(tensor, op)

    with (
        mock.patch.object(dist, "batch_isend_irecv", exchange_later),
        mock.patch.object(roomier.techniques.parallel.collectives, "exchange", pairwise_later),
        mock.patch.object(dist, "all_reduce", reduce_later),
    ):
        yield


def vote_on_the_host() -> list[Any]:
    """The outcome of a vote contains the wishes of all ranks."""
    vote = Vote(all_ranks())
    with _late_communication():
        vote.cast([dist.get_rank()])
        return [vote.cast([0]), *vote.settle([0])]


def exchange_on_the_host() -> list[Any]:
    """The host reads the data of the other rank."""
    rows = torch.full((2, 4), 10.0 + dist.get_rank())
    with _late_communication(), mock.patch.object(torch, "empty_like", torch.zeros_like):
        return [Exchange().all_to_all(rows)]


def pairwise_on_the_host() -> list[Any]:
    """The host reads the data of the other rank."""
    output, own = torch.zeros(8), torch.full((4,), 10.0 + dist.get_rank())
    with _late_communication():
        PairwiseAllGather()(output, own, dist.distributed_c10d._get_default_group()).wait()
    return [output]


def timed_pairwise_on_the_host() -> list[Any]:
    """A measurement of all-gathers includes the wait for the data of the other ranks."""
    waited = []

    class Gather:
        def __call__(self, *_: Any) -> Any:
            return SimpleNamespace(wait=lambda: waited.append(True))

    unit = SimpleNamespace(weights=[torch.empty(4, 2)], gathered_dtype=torch.float32)
    with mock.patch.object(benchmarks.strategies, "PairwiseAllGather", Gather), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames collectives
        benchmarks.strategies.time_collectives([unit], torch.device("cpu"))  # type: ignore[list-item]
    return [*waited]


def powersgd_on_the_host() -> list[Any]:
    """The hook returns after its bucket has been sent, so that buckets do not overlap."""
    registered: list[Any] = []
    PowerSGD(ParallelPlan()).register(SimpleNamespace(register_comm_hook=lambda *hook: registered.append(hook)))  # type: ignore[arg-type]
    ((state, hook),) = registered
    sent = []

    def observed(_: Any, bucket: Any) -> Any:
        found = hook(state, bucket)
        sent.append(found.done())
        return found

    observed.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    model = DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(None, observed)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(_DELAY_S)
    model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    return [*sent]


def collective(name: str) -> list[Any]:
    """Use the result of a collective of ``torch.distributed`` on the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames collectives
        return [(_result_of(name, pending() + dist.get_rank()) * 2).cpu()]


def _result_of(name: str, x: Tensor) -> Tensor:
    if name == "broadcast":
        dist.broadcast(x, 0)
    elif name == "all_reduce":
        dist.all_reduce(x)
    elif name == "all_gather":
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x)
        x = torch.cat(parts)
    elif name == "all_to_all_single":
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        x = received
    elif name == "all_gather_single":
        whole = torch.empty(128, device=DEVICE)
        dist.all_gather_into_tensor(whole, x)
        x = whole
    elif name == "reduce_scatter_single":
        part = torch.empty(32, device=DEVICE)
        dist.reduce_scatter_tensor(part, x)
        x = part
    elif name == "recv":
        if dist.get_rank() == 0:
            _work(dist.isend(x, 1)).wait()
        else:
            dist.recv(x, 0)
    else:
        raise ValueError(name)
    return x


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def sent_to_the_next_stage() -> list[Any]:
    """Change a tensor after a stage has sent it."""
    x = pending() + dist.get_rank()
    if dist.get_rank() == 0:
        engine = StagedEngine.__new__(StagedEngine)
        sends: list[Any] = []
        engine._column, engine._channels = [0, 1], [dist.group.WORLD]
        engine._send([x], Action(True, 0, 0), sends)
        engine._wait_for_sends(sends)
        x.add_(1)
    else:
        dist.recv(x, 0)
    return [x.cpu()]


def functional_collective() -> list[Any]:
    """Gather a DTensor."""
    mesh = init_device_mesh(DEVICE, (2,))
    sharded = DTensor.from_local(pending(), mesh, [Shard(0)])
    return [(sharded.full_tensor() * 2).cpu()]


def unsharded_unit() -> list[Any]:
    """Read the parameters of an unsharded unit outside of its forward."""
    torch.manual_seed(0)
    layer = fully_shard(nn.Linear(8, 8).to(DEVICE), mesh=init_device_mesh(DEVICE, (2,)))
    layer.unshard()
    return [layer.weight.detach().cpu()]
