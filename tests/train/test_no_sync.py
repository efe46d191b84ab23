"""A step never waits for the device: between log steps, no value of a tensor is read on the host."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roomier
from roomier.callbacks import LearningRateMonitor, Throughput

READS = ("item", "__float__", "__int__", "__bool__", "__index__", "tolist", "numpy", "cpu", "__format__", "__repr__")
NUM_STEPS, LOG_INTERVAL = 12, 5


class Logs(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["x"]), batch["labels"])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("by_labels", loss, on_step=False, on_epoch=True, batch_size=(batch["labels"] >= 0).sum())
        return loss


def batches(count):
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(4, 3, generator=generator),
            "labels": torch.randint(2, (4,), generator=generator),
        }
        for _ in range(count)
    ]


@pytest.fixture
def reads(monkeypatch):
    """The optimizer step of each read of a tensor's value, with the name of the function."""
    found = []
    clock = {"step": 0}

    def counting(name):
        original = getattr(torch.Tensor, name)

        def read(self, *args, **kwargs):
            found.append((clock["step"], name))
            return original(self, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    return found, clock


class Clock(roomier.Callback):
    """Callback that records the current step. It is the first callback, so that reads in hooks of other callbacks are
    assigned to the correct step."""

    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.clock["step"] = trainer.global_step + 1

    def on_train_end(self, trainer, pl_module):
        self.clock["step"] = 0


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"gradient_clip_val": 0.5},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"precision": "16-mixed", "gradient_clip_val": 0.5},
        {"lr_schedule": {"name": "cosine", "warmup_steps": 3}},
        {"logger": True, "enable_progress_bar": True, "enable_checkpointing": True},
        {"logger": True, "callbacks": [LearningRateMonitor(), Throughput()]},
    ],
    ids=lambda keywords: " ".join(keywords) or "plain",
)
def test_no_value_is_read_between_log_steps(make_trainer, reads, keywords):
    found, clock = reads
    keywords = {"logger": True, **keywords}
    keywords["callbacks"] = [Clock(clock), *keywords.get("callbacks", [])]
    trainer = make_trainer(
        max_steps=NUM_STEPS, log_every_n_steps=LOG_INTERVAL, optimizer="adamw", learning_rate=1e-3, **keywords
    )
    trainer.fit(Logs(), batches(NUM_STEPS * keywords.get("accumulate_grad_batches", 1)))
    assert trainer.global_step == NUM_STEPS
    # Labels are counted on the host, before their batch is moved to the device.
    counts_labels = "accumulate_grad_batches" in keywords
    waits = [(step, name) for step, name in found if step and not (counts_labels and name == "__int__")]
    # The last step ends the epoch, whose values are read.
    assert {step for step, _ in waits} <= {5, 10, NUM_STEPS}, waits
    assert {5, 10} <= {step for step, _ in waits}  # reads are detected
