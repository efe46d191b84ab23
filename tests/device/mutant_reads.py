"""Programs in which the host reads a copy from the device."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models.deepspeech import DeepSpeech, DeepSpeechConfig
from roomier import Module, Trainer
from roomier.callbacks import prediction_writer
from roomier.callbacks.early_stopping import EarlyStopping
from roomier.callbacks.spike_guard import SpikeGuard
from roomier.callbacks.weight_averaging import WeightAveraging
from roomier.checkpoint.export import adapter, compared, onnx
from roomier.checkpoint.tensor_file import bytes_of
from roomier.core.device import rng
from roomier.core.mesh import Mesh
from roomier.core.ranks import Ranks
from roomier.core.wire import encode
from roomier.launch import pickled
from roomier.loggers.pixels import pixels_of
from roomier.plan.parts import AdapterPlan
from roomier.planner import workload
from roomier.planner.fake import known_values, shapes
from roomier.run import visuals
from roomier.techniques.adapters.lora import apply_lora
from roomier.train import evaluate
from roomier.train.saving import save
from roomier.trainer import in_notebook
from roomier.trainer.lightning.views import PredictLoop
from roomier.trainer.lightning.views import Strategy as LightningStrategy
from tests.device.mutant_scenario import DEVICE, pending
from tests.simulator import simulated


def quiet_trainer(**keywords: Any) -> Trainer:
    quiet = {
        "accelerator": DEVICE,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**quiet, "optimizer": {"name": "adamw", "lr": 3e-3}, **keywords})


def state_of_early_stopping() -> list[Any]:
    callback = EarlyStopping("loss")
    callback.load_state_dict({"wait_count": 0, "stopped_epoch": 0, "best_score": pending()[0], "patience": 1})
    return [callback.best_score]


def written_predictions() -> list[Any]:
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    prediction_writer._save(pending(), folder / "x.pt")
    found = torch.load(folder / "x.pt")
    shutil.rmtree(folder)
    return [found]


def figures_of_the_spike_guard() -> list[Any]:
    guard = SpikeGuard()
    guard._pending = [(None, 1, pending()[0], None)]  # type: ignore[list-item]
    return [figures["loss"] for *_, figures in guard._read(SimpleNamespace(ranks=Ranks(), world_size=1))]


class _OfTwo:
    """``Ranks`` with two ranks, of which only rank 0 exists. Values are encoded as for real ranks."""

    is_alone, data, mesh = False, Ranks(), Mesh()

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
        _average=SimpleNamespace(averages={"statistic": pending()}, take=lambda values: None), _use_buffers=True
    )
    module = SimpleNamespace(named_buffers=lambda: [("statistic", None)])
    WeightAveraging._share_buffers(callback, SimpleNamespace(ranks=ranks, engine=SimpleNamespace(module=module)))
    return [*ranks.sent]


def shared_buffers_of_evaluation() -> list[Any]:
    ranks = _OfTwo()
    module = SimpleNamespace(named_buffers=lambda: [("statistic", pending())])
    evaluate.take_statistics_of_rank_zero(SimpleNamespace(ranks=ranks, engine=SimpleNamespace(module=module)))
    return [*ranks.sent]


def reduced_by_the_strategy() -> list[Any]:
    ranks = _OfTwo()
    LightningStrategy.reduce(SimpleNamespace(_trainer=SimpleNamespace(ranks=ranks)), pending(), reduce_op="sum")
    return [*ranks.sent]


def kept_predictions() -> list[Any]:
    loop = SimpleNamespace(epoch_batch_indices=[[]], _predictions=[[]])
    PredictLoop.add(loop, 0, 0, [0], pending(), is_kept=True)
    return loop._predictions[0]


class Doubled(Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return batch[0] * self.scale


def streamed_predictions() -> list[Any]:
    data = TensorDataset(torch.arange(16.0).view(4, 4))
    trainer = quiet_trainer(devices=2, strategy="ddp")
    return list(trainer.predict_stream(Doubled(), DataLoader(data, batch_size=1)))


def kept_metric_state() -> list[Any]:
    return [save._kept_on_host(pending())]


def bytes_of_a_tensor() -> list[Any]:
    return [bytes(each) for each in bytes_of(pending())]


def counted_histogram() -> list[Any]:
    values = pending()
    (found,) = visuals.histograms(Ranks(), {"values": values}, lambda look: look(values, values), 4).values()
    return [found.counts, found.edges]


def pixels_of_an_image() -> list[Any]:
    return [pixels.tobytes() for pixels in pixels_of(pending().view(8, 8).to(torch.uint8), "image")]


def content_of_a_pickled_tensor() -> list[Any]:
    content = io.BytesIO()
    pickled.write_by_value(pending(), content)
    return [content.getvalue()]


def metric_for_a_notebook() -> list[Any]:
    return [in_notebook._on_host(pending())]


def message_to_ranks() -> list[Any]:
    return [encode(pending())]


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
    a, b = adapter._as_in_peft(pending(), pending() + 1, is_in_out=False)
    return [a, b]


def exported_modules() -> list[Any]:
    """Export the adapters of a network that also has a module whose weights are all trained."""
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
    """The inputs of a model are passed to a replacement for onnxruntime."""

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
        return [*run(SimpleNamespace(tensors=lambda: [pending()]))]
    finally:
        del sys.modules["onnxruntime"]
        if before is not None:
            sys.modules["onnxruntime"] = before


def known_values_of_planner() -> list[Any]:
    """A forecast reads small integers from a batch, such as lengths."""
    lengths = pending().long()
    return [workload._shape_of(lengths)]


def known_values_of_copies() -> list[Any]:
    lengths, made = pending().long(), torch.empty(64, dtype=torch.long, device="meta")
    shapes._keep_value(lengths, made)
    return [known_values.value_of(made)]


def compared_outputs() -> list[Any]:
    return [compared._difference([pending()], [pending() + 1])]


def lengths_of_speech() -> list[Any]:
    """Packed sequences and CTC require lengths in host memory. The simulated device has no kernel for LSTM cells."""
    torch.manual_seed(0)
    model = DeepSpeech(DeepSpeechConfig(num_bands=41, num_letters=6, num_layers=1, width=22, channels=2))
    model.layers = nn.ModuleList()  # width = channels * bands after two convolutions
    model.to(DEVICE).eval()
    num_frames, num_letters = torch.tensor([9, 6], device=DEVICE), torch.tensor([3, 2], device=DEVICE)
    letters = torch.tensor([[1, 2, 3], [4, 5, 0]], device=DEVICE)
    spectrogram = torch.rand(2, 9, 41).to(DEVICE)
    return [each.detach().cpu() for each in model(spectrogram, num_frames, letters, num_letters)]
