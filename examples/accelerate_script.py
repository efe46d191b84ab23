"""Accelerate script with two changed lines. Run ``torchrun --nproc-per-node 2 examples/accelerate_script.py``."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from roomier import Accelerator  # from accelerate import Accelerator

# accelerator = Accelerator(gradient_accumulation_steps=2)
accelerator = Accelerator(plan={"parallel": {"strategy": "zero2"}}, gradient_accumulation_steps=2)
torch.manual_seed(0)
inputs = torch.randn(241, 8)
samples = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
train_loader, eval_loader = DataLoader(samples, batch_size=8, shuffle=True), DataLoader(samples, batch_size=16)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=5 * len(train_loader))
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
for epoch in range(5):
    model.train()
    for x, y in train_loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    errors = []
    for x, y in eval_loader:
        with torch.no_grad():
            errors.append(accelerator.gather_for_metrics((model(x) - y).square()))
    accelerator.print(f"epoch {epoch}: error {torch.cat(errors).mean():.3f} of {len(torch.cat(errors))} samples")
accelerator.save_model(model, "weights")
