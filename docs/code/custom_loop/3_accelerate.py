import torch
from torch import nn
from torch.nn import functional as F

from roomier import Accelerator

torch.manual_seed(0)
x = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
accelerator = Accelerator(plan={"precision": {"mode": "bf16-mixed"}}, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 16, shuffle=True))
for epoch in range(5):
    for inputs, target in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(inputs), target)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss:.3f}")
accelerator.save_state("accelerator")
