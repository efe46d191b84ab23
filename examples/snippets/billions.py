"""Find the strategies with which 12.8 billion parameters fit on eight 40 GB GPUs. The script requires no GPU."""

import torch

from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.hardware.spec import machine_of
from roomier.planner.workload import Workload

with torch.device("meta"):  # allocates no memory
    model = GPT(GPTConfig(vocab_size=10_000, context=128, num_layers=16, num_heads=16, width=8192))
tokens = torch.empty(1, 128, dtype=torch.long, device="meta")
workload = Workload.of(model, {"input_ids": tokens, "targets": tokens})

machine = machine_of("a100-40gb:8")
answers = {}
for strategy in ("ddp", "zero2", "zero3"):
    for precision in ("32-true", "16-mixed"):
        flags = {"strategy": strategy, "precision": precision, "devices": 8, "accelerator": "cuda"}
        forecast = confirm(
            workload, plan_from_flags(optimizer="adamw", activation_checkpointing="full", **flags), machine
        )
        answers[strategy, precision] = fits = forecast.fits(machine.device.memory_bytes)
        print(f"{strategy}, {precision}: {forecast.peak_bytes / 2**30:.1f} GiB, {'fits' if fits else 'does not fit'}")
assert answers["zero3", "16-mixed"]
assert not answers["ddp", "16-mixed"]
