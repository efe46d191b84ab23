"""Small programs in which a missing synchronization changes numbers, host waits or the result of the race check."""

from __future__ import annotations

import gc
import hashlib
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import roomier.activation.profile
import roomier.bench.gpu.copies as copies_part
import roomier.bench.gpu.mfu as mfu_part
import roomier.bench.raw_collectives
import roomier.hardware.measure
import roomier.hardware.rank_worker
from roomier import Module, Trainer, checkpoint
from roomier.activation.offload import Copies, Offload
from roomier.adapters.lora import apply_lora
from roomier.bench.lever_worker import Measurement
from roomier.bench.strategy_ranks import Strategy
from roomier.callbacks import prediction_writer
from roomier.callbacks.early_stopping import EarlyStopping
from roomier.callbacks.spike_guard import SpikeGuard
from roomier.callbacks.throughput import Throughput
from roomier.callbacks.weight_averaging import WeightAveraging
from roomier.checkpoint.agree import all_ranks
from roomier.checkpoint.tensor_file import bytes_of
from roomier.core.exchange import Exchange
from roomier.core.log import quiet
from roomier.core.ranks import Ranks
from roomier.core.vote import Vote
from roomier.core.wire import encode
from roomier.device import capability, rng
from roomier.device.streams import synchronize, timed_event
from roomier.device.transfer import BatchMover
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.export import adapter, compared, onnx
from roomier.optim.adamw import StepValues
from roomier.parallel.collectives import PairwiseAllGather
from roomier.parallel.powersgd import PowerSGD
from roomier.plan import plan_from_flags
from roomier.plan.parts import AdapterPlan
from roomier.planner import workload
from roomier.planner.fake import known_values, shapes
from roomier.train import evaluate
from roomier.train.saving import save
from roomier.trainer.lightning.predicted import PredictLoop
from roomier.trainer.lightning.strategy import Strategy as LightningStrategy
from tests.device.synchronizations import recorded, removed
from tests.simulator import simulated
from tests.simulator.gpt import GPT, batches

DEVICE = simulated.DEVICE
_DELAY_S = 0.3  # rank 1 begins later, so data that rank 0 does not wait for has not arrived


def _device() -> torch.device:
    return torch.device(DEVICE, torch.accelerator.current_device_index())


def _pending() -> Tensor:
    """Return a tensor of the device whose values are not computed yet."""
    with simulated.allowed_host_waits():
        start = torch.arange(1.0, 65.0).to(DEVICE)
        torch.accelerator.synchronize()
    return start * 2


# ---- copies on other streams -----------------------------------------------------------------------------------------


def batches_on_the_copy_stream() -> list[Any]:
    """The device still reads a batch when the host frees it and requests the next batch."""
    mover = BatchMover(_device())
    total = torch.zeros(64, device=DEVICE)
    for number in range(4):
        batch = mover({"x": torch.full((64,), float(number)).pin_memory()})
        total = total * 2 + batch["x"]
        del batch
    return [total.cpu()]


def offloaded_blocks() -> list[Any]:
    """Four blocks save activations, and backward reads them."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(4)).to(DEVICE)
    offload = Offload(_device(), min_bytes=1)
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


def blocking_offload() -> list[Any]:
    """The host reads a copy that was made by a device without streams."""
    return [Copies(_device()).to_host(_pending())]


def background_save() -> list[Any]:
    """Training modifies the weights while a thread writes them."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    saver = checkpoint.BackgroundSaver()
    weights = _pending()
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
    return [values.numbers(_device()).cpu()]


# ---- training --------------------------------------------------------------------------------------------------------


class Skipping(nn.Module):
    """A block of which one norm is not called. Norms and linear layers have different dtypes in mixed precision."""

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


def _trainer(**keywords: Any) -> Trainer:
    quiet = {
        "accelerator": DEVICE,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**quiet, "optimizer": {"name": "adamw", "lr": 3e-3}, **keywords})


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
    _trainer(max_steps=3, devices=1).fit(module, _loader(3))
    return [each.detach().cpu() for each in module.parameters()]


# ---- copies that the host reads --------------------------------------------------------------------------------------


def state_of_early_stopping() -> list[Any]:
    callback = EarlyStopping("loss")
    callback.load_state_dict({"wait_count": 0, "stopped_epoch": 0, "best_score": _pending()[0], "patience": 1})
    return [callback.best_score]


def written_predictions() -> list[Any]:
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    prediction_writer._save(_pending(), folder / "x.pt")
    found = torch.load(folder / "x.pt")
    shutil.rmtree(folder)
    return [found]


def figures_of_the_spike_guard() -> list[Any]:
    guard = SpikeGuard()
    guard._pending = [(None, 1, _pending()[0], None)]  # type: ignore[list-item]
    return [figures["loss"] for *_, figures in guard._read(SimpleNamespace(ranks=Ranks(), world_size=1))]


class _OfTwo:
    """``Ranks`` of which only rank 0 exists. Values are encoded as for real ranks."""

    is_alone = False

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def from_zero(self, value: Any) -> Any:
        self.sent.append(encode(value))
        return value

    def gather(self, value: Any, **_: Any) -> list[Any]:
        return [self.from_zero(value)]


def shared_buffers_of_averages() -> list[Any]:
    ranks = _OfTwo()
    callback = SimpleNamespace(
        _average=SimpleNamespace(averages={"statistic": _pending()}, take=lambda values: None), _use_buffers=True
    )
    module = SimpleNamespace(named_buffers=lambda: [("statistic", None)])
    WeightAveraging._share_buffers(callback, SimpleNamespace(ranks=ranks, engine=SimpleNamespace(module=module)))
    return [*ranks.sent]


def shared_buffers_of_evaluation() -> list[Any]:
    ranks = _OfTwo()
    module = SimpleNamespace(buffers=lambda: [_pending()])
    evaluate.take_statistics_of_rank_zero(SimpleNamespace(ranks=ranks, engine=SimpleNamespace(module=module)))
    return [*ranks.sent]


def gathered_outputs() -> list[Any]:
    ranks = _OfTwo()
    evaluate._of_all_ranks(SimpleNamespace(ranks=ranks), {0: _pending()})
    return [*ranks.sent]


def reduced_by_the_strategy() -> list[Any]:
    ranks = _OfTwo()
    LightningStrategy.reduce(SimpleNamespace(_trainer=SimpleNamespace(ranks=ranks)), _pending(), reduce_op="sum")
    return [*ranks.sent]


def kept_predictions() -> list[Any]:
    loop = SimpleNamespace(epoch_batch_indices=[[]], _predictions=[[]])
    PredictLoop.add(loop, 0, 0, [0], _pending(), is_kept=True)
    return loop._predictions[0]


class Doubled(Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return batch[0] * self.scale


def streamed_predictions() -> list[Any]:
    data = TensorDataset(torch.arange(16.0).view(4, 4))
    trainer = _trainer(devices=2, strategy="ddp")
    return list(trainer.predict_stream(Doubled(), DataLoader(data, batch_size=1)))


def kept_metric_state() -> list[Any]:
    return [save._kept_on_host(_pending())]


def bytes_of_a_tensor() -> list[Any]:
    return [bytes(each) for each in bytes_of(_pending())]


def message_to_ranks() -> list[Any]:
    return [encode(_pending())]


def restored_random_state() -> list[Any]:
    """Restore states that are on the device."""
    before = rng.rng_state()
    with simulated.allowed_host_waits():
        states = before["torch"].to(DEVICE), before[DEVICE]["0"].to(DEVICE)
        torch.accelerator.synchronize()
    on_host, on_device = (each + 0 for each in states)
    rng.set_rng_state({**before, "torch": on_host, DEVICE: {"0": on_device}})
    return [torch.get_rng_state(), rng.generator_state(torch.device(DEVICE, 0))]


def checked_random_state() -> list[Any]:
    """Check a state that is on the device."""
    with simulated.allowed_host_waits():
        state = torch.get_rng_state().to(DEVICE)
        torch.accelerator.synchronize()
    rng.check_generator_state(state + 0, "torch")
    return []


def exported_adapter() -> list[Any]:
    a, b = adapter._as_in_peft(_pending(), _pending() + 1, is_in_out=False)
    return [a, b]


def exported_modules() -> list[Any]:
    """Export an adapter of a network with a module that is trained completely."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    network = nn.ModuleDict({"a": nn.Linear(8, 8), "head": nn.Linear(8, 2)})
    apply_lora(network, [], AdapterPlan(lora_rank=2, lora_targets="a", lora_trained="head"))
    network.to(DEVICE)
    with torch.no_grad():
        network["head"].weight.mul_(2)
    adapter.export_adapter(network, folder / "out")
    found = load_file(folder / "out" / "adapter_model.safetensors")
    shutil.rmtree(folder)
    return [found[name] for name in sorted(found) if "head" in name]


def inputs_of_onnx() -> list[Any]:
    """The inputs of a model are passed to onnxruntime, which is replaced here."""

    class Session:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def get_inputs(self) -> list[Any]:
            return [SimpleNamespace(name="x")]

        def run(self, _: None, tensors: dict[str, Any]) -> list[Any]:
            return [each.copy() for each in tensors.values()]

    runtime = SimpleNamespace(SessionOptions=SimpleNamespace, InferenceSession=Session)
    before = sys.modules.get("onnxruntime")
    sys.modules["onnxruntime"] = runtime  # type: ignore[assignment]
    try:
        run = onnx._session(nn.Identity(), Path("x.onnx"))
        return [*run(SimpleNamespace(tensors=lambda: [_pending()]))]
    finally:
        del sys.modules["onnxruntime"]
        if before is not None:
            sys.modules["onnxruntime"] = before


def known_values_of_planner() -> list[Any]:
    """A forecast reads small whole numbers of a batch, such as lengths."""
    lengths = _pending().long()
    return [workload._shape_of(lengths)]


def known_values_of_copies() -> list[Any]:
    lengths, made = _pending().long(), torch.empty(64, dtype=torch.long, device="meta")
    shapes._keep_value(lengths, made)
    return [known_values.value_of(made)]


def compared_outputs() -> list[Any]:
    return [compared._difference([_pending()], [_pending() + 1])]


# ---- measurements: the host waits before the clock is read -----------------------------------------------------------


def measured_seconds() -> list[Any]:
    roomier.hardware.measure.seconds_of(_pending, _device())
    return []


def measured_host_copies() -> list[Any]:
    roomier.hardware.measure.host_copy_rate(_device(), 0.0, 4096)
    return []


def measured_ranks() -> list[Any]:
    roomier.hardware.rank_worker._repeated(_pending, _device())
    return []


def measured_collectives() -> list[Any]:
    roomier.bench.raw_collectives._seconds(_pending, _device())
    return []


def measured_offload() -> list[Any]:
    Copies(_device())._finished_ns()
    return []


def measured_bandwidth() -> list[Any]:
    setting = SimpleNamespace(device=_device(), accelerator=DEVICE)
    row = copies_part._row("host to device pinned", 4096, setting)  # type: ignore[arg-type]
    return [row["kind"]]


def measured_turn() -> list[Any]:
    mfu_part._turn_s(lambda: None, 2, _device())
    return []


def measured_lever() -> list[Any]:
    network = nn.Linear(2, 2).to(DEVICE)
    measurement = Measurement(2)
    while not measurement.end_step(network, []):
        pass
    return []


def measured_strategy() -> list[Any]:
    @contextmanager
    def running(keeps: bool) -> Iterator[Any]:
        yield SimpleNamespace(step=lambda *_: torch.tensor(0.0))

    holder = SimpleNamespace(
        _running=running, _keeps=False, _batch=None, _device=_device(), step_s=[], _ranks=Ranks(), loss=0.0
    )
    Strategy.time_turn(holder, 2)  # type: ignore[arg-type]
    return []


def recorded_profile() -> list[Any]:
    recorder = roomier.activation.profile.Recorder([], _device())
    recorder.start()
    recorder.stop()
    return []


def logged_throughput() -> list[Any]:
    callback = Throughput()
    callback._device, callback._began_s = _device(), time.monotonic()
    callback._log(SimpleNamespace(ranks=Ranks(), world_size=1, log_metrics=lambda rates: None))
    return []


def measured_events() -> list[Any]:
    start, end = timed_event(_device()), timed_event(_device())
    synchronize(_device())
    return [start.elapsed_time(end) >= 0]


def tried_capabilities() -> list[Any]:
    capability._tried.cache_clear()
    return [capability.capabilities_of(_device()).has_pinned_memory]


# ---- collectives -----------------------------------------------------------------------------------------------------


class _Later:
    """Work of a process group that communicates when the host waits for it, as late as possible."""

    def __init__(self, communicate: Callable[[], Any]) -> None:
        self._communicate = communicate

    def wait(self, *_: Any) -> None:
        self._communicate()


@contextmanager
def _late_communication() -> Iterator[None]:
    exchange, reduce = dist.batch_isend_irecv, dist.all_reduce

    def exchange_later(operations: list[Any]) -> list[Any]:
        return [_Later(lambda: [each.wait() for each in exchange(operations)])]

    def reduce_later(tensor: Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
        return _Later(lambda: reduce(tensor, op)) if async_op else reduce(tensor, op)

    with (
        mock.patch.object(dist, "batch_isend_irecv", exchange_later),
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
    with mock.patch.object(roomier.bench.raw_collectives, "PairwiseAllGather", Gather), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames collectives
        roomier.bench.raw_collectives.time_collectives([unit], torch.device("cpu"))  # type: ignore[list-item]
    return [*waited]


def powersgd_on_the_host() -> list[Any]:
    """A bucket has been sent when the hook returns, so that buckets do not overlap."""
    registered: list[Any] = []
    PowerSGD(None, None).register(SimpleNamespace(register_comm_hook=lambda *hook: registered.append(hook)))  # type: ignore[arg-type]
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
    x = _pending() + dist.get_rank()
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
    else:
        raise ValueError(name)
    return [(x * 2).cpu()]


def functional_collective() -> list[Any]:
    """Gather a DTensor."""
    mesh = init_device_mesh(DEVICE, (2,))
    sharded = DTensor.from_local(_pending(), mesh, [Shard(0)])
    return [(sharded.full_tensor() * 2).cpu()]


# ---- observation -----------------------------------------------------------------------------------------------------


def digest(values: list[Any]) -> str:
    """Return a hash of tensors on the host, bytes and numbers. No value of the device is read."""
    found = hashlib.sha256()
    for value in values:
        found.update(_bytes(value))
    return found.hexdigest()


def _bytes(value: Any) -> bytes:
    if isinstance(value, Tensor):
        assert value.device.type == "cpu"
        content: np.ndarray[Any, Any] = value.detach().reshape(-1).view(torch.uint8).numpy()
        return content.tobytes()
    return value if isinstance(value, bytes) else repr(value).encode()


@dataclass(frozen=True)
class Scenario:
    """A program that is sensitive to a synchronization.

    Attributes:
        run: function that returns tensors on the host, bytes and numbers.
        keywords: arguments of ``run``.
        num_ranks: number of ranks that run the program.
        without: capabilities that the device does not have.
        compares_waits: whether a different number of host waits is a defect, as in measurements of time.
    """

    run: Callable[..., list[Any]]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    compares_waits: bool = False


@dataclass(frozen=True)
class _Observed:
    digest: str
    waits: dict[str, int]
    races: list[str]


def _observe(scenario: Scenario, *, is_mutated: bool = False) -> _Observed:
    _finish()
    torch.manual_seed(0)
    try:
        found = digest(scenario.run(**scenario.keywords))
    except Exception as error:  # such as the error for a loss that is not finite
        if not is_mutated:
            raise
        found = f"error: {type(error).__name__}"
    waits, races = simulated.host_waits(), simulated.races()
    _finish()
    return _Observed(found, waits, races)


def _finish() -> None:
    """Finish all work, so that one program does not race with the next one."""
    gc.collect()
    with simulated.allowed_host_waits():
        torch.accelerator.synchronize()
    simulated.clear()


def defects(rows: Sequence[tuple[Scenario, str]]) -> list[list[str]]:
    """Run programs without one of their synchronizations each, and return how the missing synchronizations are detected.

    The result of a mutant contains ``"numbers"``, ``"race"``, ``"waits"`` or ``"error"``. The list ends with the first
    mutant that raises an error, because this process cannot be used again.

    Raises:
        AssertionError: a program has a race, or different results in two runs, without a mutation.
    """
    found: list[list[str]] = []
    scenario = None
    for each, mutant in rows:
        if each is not scenario:
            scenario, expected = each, _expected(each)
        found.append(_defects_without(mutant, scenario, expected))
        if any(kind.startswith("error") for kind in found[-1]):
            break
    return found


def _expected(scenario: Scenario) -> _Observed:
    _observe(scenario)  # the first run has more host waits
    found, again = _observe(scenario), _observe(scenario)
    assert found.races == []
    assert again.digest == found.digest
    assert not scenario.compares_waits or again.waits == found.waits
    return found


def _defects_without(mutant: str, scenario: Scenario, expected: _Observed) -> list[str]:
    with removed(mutant):
        found = _observe(scenario, is_mutated=True)
    is_error = found.digest.startswith("error")
    return [
        *([found.digest] if is_error else ["numbers"] if found.digest != expected.digest else []),
        *(["race"] if found.races else []),
        *(["waits"] if scenario.compares_waits and found.waits != expected.waits else []),
    ]


def called(scenario: Scenario, keys: Sequence[str]) -> set[str]:
    """Return the synchronizations of ``keys`` that ``scenario`` calls."""
    with recorded(keys) as found:
        _observe(scenario)
    return found
