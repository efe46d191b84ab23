"""One row of ``python -m benchmarks levers`` in a separate process: ``python -m benchmarks.lever_worker SETTINGS``.

Both Trainers run as in a user's script. A callback of each Trainer runs the measurement at the end of an optimizer
step.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from benchmarks.lever_rows import BATCH_SIZE, BERT_SIZES, ROWS, Sizes, keywords_of
from benchmarks.machine import PROC, resident_bytes, restart_peak
from roomier.api.callback import Callback
from roomier.core.device.resolve import resolve_device
from roomier.core.device.streams import synchronize
from roomier.models.gpt import SIZES
from roomier.planner.memory.tracker import MemoryTracker

_WARMUP_STEPS = 4  # a recompute budget runs measurements in the first steps
_NUM_BATCHES = 10**6


class Measurement:
    """Measurement of a run. The run calls :meth:`end_step` at the end of each optimizer step.

    Attributes:
        result: bytes and seconds. The peak is measured in a step that is not timed, because counting bytes takes time.
    """

    def __init__(self, num_steps: int) -> None:
        self.result: dict[str, Any] = {}
        self._num_steps = num_steps
        self._steps: Iterator[None] | None = None

    def end_step(self, network: nn.Module, optimizers: list[Optimizer]) -> bool:
        """Continue the measurement and return whether the measurement is complete."""
        if self._steps is None:
            self._steps = self._measure(network, optimizers)
        return next(self._steps, self) is self

    def _measure(self, network: nn.Module, optimizers: list[Optimizer]) -> Iterator[None]:
        device = next(network.parameters()).device
        for _ in range(_WARMUP_STEPS):
            yield
        if PROC.exists():
            restart_peak()
        yield
        self.result["peak_rss_bytes"] = resident_bytes() if PROC.exists() else None
        with MemoryTracker(network, optimizers, device) as tracker:
            yield  # in this step, the tracker determines the kind of each storage
            tracker.restart()
            yield
        self.result["peak_bytes"] = tracker.allocator_peak_bytes or tracker.peak().total()
        self.result["peak_by_kind"] = {kind.value: count for kind, count in tracker.peak().num_bytes.items()}
        yield
        durations: list[float] = []
        for _ in range(self._num_steps):
            start = time.perf_counter()
            yield
            synchronize(device)
            durations.append(time.perf_counter() - start)
        self.result["step_s"] = durations


def run_roomier(settings: dict[str, Any], measurement: Measurement, folder: str) -> None:
    """Train with roomier's Trainer until ``measurement`` is complete."""
    from roomier import Trainer  # late import: the Trainer must not be imported when the other framework is measured

    class AtStepEnd(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            is_step_end = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
            if is_step_end and measurement.end_step(module.network, trainer.optimizers):
                trainer.should_stop = True

    accelerator = settings["accelerator"]
    keywords = keywords_of(settings["lever"], resolve_device(accelerator).type)
    micro_batch = BATCH_SIZE // keywords.get("accumulate_grad_batches", 1)
    trainer = Trainer(
        **keywords,
        learning_rate=1e-5,
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        callbacks=[AtStepEnd()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    samples = make_samples(settings)
    batches = DataLoader(Repeated(samples, _NUM_BATCHES), batch_size=micro_batch)
    trainer.fit(make_model(settings), batches)


def run_transformers(settings: dict[str, Any], measurement: Measurement, folder: str) -> None:
    """Train with the Hugging Face Trainer until ``measurement`` is complete."""
    import transformers

    class AtStepEnd(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> Any:
            optimizer = facts["optimizer"]
            if measurement.end_step(facts["model"], [getattr(optimizer, "optimizer", optimizer)]):
                control.should_training_stop = True
            return control

    is_cpu = resolve_device(settings["accelerator"]).type == "cpu"
    fields = dict(ROWS[settings["lever"]].transformers or {})
    if fields.pop("precision", None) == "16":
        fields["bf16" if is_cpu else "fp16"] = True
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH_SIZE // fields.get("gradient_accumulation_steps", 1),
        max_steps=_NUM_BATCHES,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # no clipping: the guide does not measure clipping
        use_cpu=is_cpu,
        report_to="none",
        log_level="error",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        **fields,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # with several GPUs, the Trainer would use DataParallel
    trainer = transformers.Trainer(
        model=make_model(settings),
        args=arguments,
        train_dataset=Repeated(make_samples(settings), _NUM_BATCHES),
        callbacks=[AtStepEnd()],
    )
    trainer.train()


RUNNERS: dict[str, Callable[[dict[str, Any], Measurement, str], None]] = {
    "roomier": run_roomier,
    "transformers": run_transformers,
}


class Repeated(Dataset[dict[str, Tensor]]):
    """Dataset with ``length`` samples that repeats the given samples."""

    def __init__(self, samples: Sequence[dict[str, Tensor]], length: int) -> None:
        self._samples = samples
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[index % len(self._samples)]


def sizes_of(model: str) -> Sizes:
    """Return the sizes of the model with the name ``model``."""
    return BERT_SIZES[model] if model in BERT_SIZES else Sizes("gpt2", *SIZES[model])


def make_model(settings: dict[str, Any]) -> nn.Module:
    """Return the Hugging Face model with random weights, created from its configuration."""
    import transformers

    torch.manual_seed(0)
    sizes, seq_len = sizes_of(settings["model"]), settings["seq_len"]
    if sizes.family == "bert":
        config = transformers.BertConfig(
            hidden_size=sizes.width,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            intermediate_size=4 * sizes.width,
            max_position_embeddings=max(seq_len, 512),
        )
        return transformers.BertForSequenceClassification(config)
    gpt_config = transformers.GPT2Config(
        n_embd=sizes.width,
        n_layer=sizes.num_layers,
        n_head=sizes.num_heads,
        n_positions=max(seq_len, 1024),
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(gpt_config)


def make_samples(settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return random sequences for four steps."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(4 * BATCH_SIZE):
        tokens = torch.randint(100, 30_000, (settings["seq_len"],), generator=generator)
        is_bert = sizes_of(settings["model"]).family == "bert"
        labels = torch.randint(0, 2, (), generator=generator) if is_bert else tokens
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def main(settings: dict[str, Any]) -> None:
    """Run one row and write its values to ``settings["result"]``."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(settings["threads"])
    measurement = Measurement(settings["steps"])
    with TemporaryDirectory() as folder:
        RUNNERS[settings["framework"]](settings, measurement, folder)
        Path(settings["result"]).write_text(json.dumps(measurement.result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
