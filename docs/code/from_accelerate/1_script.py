import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from roomier import Accelerator  # instead of: from accelerate import Accelerator

accelerator = Accelerator(plan={"precision": {"mode": "bf16-mixed"}}, gradient_accumulation_steps=2)
torch.manual_seed(0)
inputs = torch.randn(240, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.2f}")
accelerator.save_state("runs/accelerator")
