"""Training runs of ``roomier bench seed``, in the processes ``python -m roomier.bench.seed.worker SETTINGS``.

The Trainer runs as in a user's script and starts the other ranks.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from roomier.api.callback import Callback
from roomier.bench.seed.configurations import configurations_of
from roomier.bench.seed.models import MODELS, Sample, Training, minigpt
from roomier.callbacks.forecast import MemoryForecast
from roomier.core.device.resolve import resolve_device
from roomier.core.device.streams import synchronize
from roomier.trainer.trainer import Trainer

_TRACKED_STEP = 3  # with deferred updates, the first update runs in step 2
_NUM_WARMUP = _TRACKED_STEP + 1  # the step after the tracked step fills caches again


class StepTimes(Callback):
    """Callback that measures the time between the ends of consecutive optimizer steps after the warm-up.

    Attributes:
        durations_s: duration of each step in seconds.
        losses: loss of this rank in each step.
    """

    reads_parameters = False  # otherwise every step waits for the updates of offloaded states

    def __init__(self, device: torch.device) -> None:
        self.durations_s: list[float] = []
        self.losses: list[float] = []
        self._device = device
        self._last: tuple[int, float] | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure an optimizer step, if a step ends with this micro-batch."""
        step = trainer.global_step
        if self._last is not None and step == self._last[0]:
            return
        synchronize(self._device)
        now = time.perf_counter()
        if self._last is not None and step > _NUM_WARMUP:
            self.durations_s.append(now - self._last[1])
        self.losses.append(float(outputs["loss"].detach() if isinstance(outputs, Mapping) else outputs.detach()))
        self._last = (step, now)


class Repeated(Dataset[Sample]):
    """Dataset with ``length`` samples that repeats the given samples."""

    def __init__(self, samples: Sequence[Sample], length: int) -> None:
        self._samples = samples
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index % len(self._samples)]


def training_of(settings: Mapping[str, Any]) -> Training:
    """Return the model and the data that ``settings`` selects: a size in :data:`MODELS`, or a minGPT of any size."""
    own = settings["own_size"]
    if own is not None:
        return minigpt(own["n_layer"], own["n_head"], own["n_embd"], context=own["block_size"])
    return MODELS[settings["model"]].sizes[settings["size"]]


def train(settings: Mapping[str, Any], name: str, folder: str) -> dict[str, Any]:
    """Run the configuration ``name`` and return the measured values."""
    [configuration] = [each for each in configurations_of(settings["model"]) if each.name == name]
    training = training_of(settings)
    micro_batch = configuration.micro_batch(settings["batch_size"] or training.micro_batch)
    device = resolve_device(settings["accelerator"])
    keywords = configuration.keywords(device.type)
    if settings["precision"] is not None:
        keywords["precision"] = settings["precision"]
    if isinstance(keywords.get("offload"), dict) and "disk" in keywords["offload"].values():
        keywords["offload"] = {**keywords["offload"], "folder": folder}
    times, forecast = StepTimes(device), MemoryForecast(at_step=_TRACKED_STEP)
    num_steps = _NUM_WARMUP + settings["steps"]
    trainer = Trainer(
        **keywords,
        learning_rate=1e-4,
        accelerator=settings["accelerator"],
        devices=settings["ranks"],
        max_steps=num_steps,
        callbacks=[forecast, times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    torch.manual_seed(0)
    num_samples = micro_batch * num_steps * settings["ranks"] * keywords.get("accumulate_grad_batches", 1)
    data = DataLoader(Repeated(training.samples(), num_samples), batch_size=micro_batch, collate_fn=training.collate)
    trainer.fit(training.make_model(), data)
    record = forecast.record
    found: dict[str, Any] = {
        "step_s": statistics.median(times.durations_s),
        "step_s_all": times.durations_s,
        "losses": times.losses,
        "is_rank_0": trainer.is_global_zero,
    }
    if record is not None:
        seconds = record.forecast.time
        found |= {
            "forecast_bytes": record.forecast_bytes,
            "forecast_method": record.forecast.method,
            "forecast_step_s": None if seconds is None else seconds.total_s,
            "measured_bytes": record.measured_bytes,
            "measured_by_kind": {kind.value: count for kind, count in record.worst.peak.peak.items()},
            "num_parameters": record.num_parameters,
        }
    return found


def main(settings: dict[str, Any]) -> None:
    """Run each configuration in ``settings``. Rank 0 writes the values to the file ``settings["result"]``."""
    warnings.filterwarnings("ignore")
    for name in settings["configurations"]:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                found = train(settings, name, folder)
            except Exception:
                found = {"error": traceback.format_exc(limit=-3), "is_rank_0": True}
        gc.collect()
        if found.pop("is_rank_0"):
            with Path(settings["result"]).open("a") as file:
                file.write(json.dumps({"configuration": name, **found}) + "\n")
        if "error" in found:  # the other ranks cannot continue
            sys.exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
