import torch

from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.memory.predict import predict

with torch.device("meta"):  # shapes without memory
    model = GPT(GPTConfig.named("gpt2-xl"))

print("ranks   ddp  zero1  zero2  zero3   (GiB of model states on each rank)")
for devices in (2, 4, 8, 16):
    row = []
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        plan = plan_from_flags(
            strategy=strategy,
            devices=devices,
            precision="bf16-mixed",
            optimizer="adamw",
            accumulate_grad_batches=4,
        )
        row.append(predict(model, plan).peak.total() / 2**30)
    print(f"{devices:5}  {row[0]:4.1f}   {row[1]:4.1f}   {row[2]:4.1f}   {row[3]:4.1f}")
