import torch
from torch import nn

import roomier
from roomier import checkpoint
from roomier.plan import plan_from_flags

model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = roomier.prepare(model, optimizer, plan=plan_from_flags(precision="bf16-mixed", gradient_clip_val=1.0))
state = checkpoint.load("checkpoint")
engine.load(state["engine"])
print("continue with epoch", state["epoch"] + 1)
