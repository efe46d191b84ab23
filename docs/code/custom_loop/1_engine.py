import torch
from torch import nn
from torch.nn import functional as F

import roomier
from roomier import checkpoint
from roomier.plan import plan_from_flags

roomier.seed_everything(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = roomier.prepare(model, optimizer, plan=plan_from_flags(precision="bf16-mixed", gradient_clip_val=1.0))


def training_step(batch):
    x, y = batch
    return F.mse_loss(model(x), y)


x = torch.randn(240, 8)
micro_batches = list(zip(x.split(8), x.sum(dim=1, keepdim=True).split(8), strict=True))
for epoch in range(5):
    for start in range(0, len(micro_batches), 2):  # each step accumulates two micro-batches
        loss = engine.forward_backward(training_step, micro_batches[start : start + 2])
        engine.clip()
        engine.step()
    print(f"epoch {epoch}: loss {loss:.3f}")
    checkpoint.save("checkpoint", {"engine": engine.state(), "epoch": epoch})
