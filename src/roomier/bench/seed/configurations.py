"""The settings with which the articles train each model, and the published values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roomier.bench.lever_rows import ROWS

EIGHT_A100 = "a100-40gb:8"


@dataclass(frozen=True)
class Published:
    """Values that an article states.

    Attributes:
        hardware: machine of the article, as accepted by ``machine_of``.
        memory_mib: memory of one device in MiB.
        meter: ``"allocated"`` (``max_memory_allocated``) or ``"occupied"`` (memory of the device in use).
        epoch_s: duration of an epoch.
        samples_per_s: samples per second.
    """

    hardware: str
    memory_mib: float
    meter: str
    epoch_s: float | None = None
    samples_per_s: float | None = None


@dataclass(frozen=True)
class Configuration:
    """Settings of a training run.

    Attributes:
        name: name of the row.
        flags: arguments of the Trainer. The precision ``"16"`` means fp16 on a GPU and bf16 on a CPU. The tier
            ``"lower"`` means host memory on a GPU and the disk on a CPU.
        published: values reported in the article; None if the article reports none.
    """

    name: str
    flags: Mapping[str, Any]
    published: Published | None = None

    def keywords(self, kind: str) -> dict[str, Any]:
        """Return the arguments of the Trainer on a device of ``kind``, such as ``"cpu"``."""
        keywords = dict(self.flags)
        if keywords.get("precision") == "16":
            keywords["precision"] = "bf16-mixed" if kind == "cpu" else "16-mixed"
        if keywords.get("offload") == "lower":
            keywords["offload"] = {"optimizer_states": "disk" if kind == "cpu" else "cpu"}
        return keywords

    def micro_batch(self, batch_size: int) -> int:
        """Return the number of samples per micro-batch if a rank processes ``batch_size`` samples in a step.

        Only rows from the Hugging Face guide accumulate gradients. In these rows, a micro-batch is one sample.
        """
        num_micro_batches: int = self.flags.get("accumulate_grad_batches", 1)
        return max(1, batch_size // num_micro_batches)


_FULL = {"activation_checkpointing": "full"}
_LOWER = {"offload": "lower"}


def _mingpt() -> list[Configuration]:
    base = {"precision": "16", "optimizer": "adamw", "gradient_clip_val": 1.0}

    def row(name: str, flags: Mapping[str, Any], memory_mib: float = 0, epoch_s: float = 0) -> Configuration:
        published = Published(EIGHT_A100, memory_mib, "allocated", epoch_s) if memory_mib else None
        return Configuration(name, {**base, **flags}, published)

    return [
        row("ddp", {"strategy": "ddp"}, 36148.55, 43.69),
        row("zero2", {"strategy": "zero2"}),
        row("zero3", {"strategy": "zero3"}, 7796.98, 45.05),
        row("zero3, offload", {"strategy": "zero3", **_LOWER}, 4976.98, 248.39),
        row("zero3, offload, recompute", {"strategy": "zero3", **_LOWER, **_FULL}, 2192.98, 256.91),
    ]


def _sharded() -> list[Configuration]:
    half = {"precision": "16"}
    rows: dict[str, dict[str, Any]] = {
        "ddp": {"strategy": "ddp"},
        "ddp, 16-bit": {"strategy": "ddp", **half},
        "zero2": {"strategy": "zero2"},
        "zero2, 16-bit": {"strategy": "zero2", **half},
        "zero3, 16-bit": {"strategy": "zero3", **half},
        "zero3, 16-bit, recompute": {"strategy": "zero3", **half, **_FULL},
        "zero3, 16-bit, offload": {"strategy": "zero3", **half, **_LOWER},
        "zero3, 16-bit, offload, recompute": {"strategy": "zero3", **half, **_LOWER, **_FULL},
    }
    return [Configuration(name, {"optimizer": "adam", **flags}) for name, flags in rows.items()]


def _guide() -> list[Configuration]:
    """Return the rows of Hugging Face's guide, which :mod:`roomier.bench.lever_rows` lists, and sharded strategies."""
    rows = []
    for name, lever in ROWS.items():
        if lever.published is not None:
            samples_per_s, memory_mib = lever.published
            published = Published("v100-16gb:1", memory_mib, "occupied", 512 / samples_per_s, samples_per_s)
            rows.append(Configuration(name, {"optimizer": "adamw", **lever.roomier}, published))
    strategies = ("zero2", "zero3")  # the guide uses one device
    return [*rows, *(Configuration(name, {"optimizer": "adamw", "strategy": name}) for name in strategies)]


def configurations_of(model: str) -> list[Configuration]:
    """Return the settings for a model of :data:`roomier.bench.seed.models.MODELS`."""
    return {"minigpt": _mingpt, "bert-large": _guide}.get(model, _sharded)()
