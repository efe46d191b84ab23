import torch
from torch import nn

import roomier


class Net(roomier.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = (self.layers(inputs) - targets).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


roomier.seed_everything(0)
inputs = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
net = Net()
trainer = roomier.Trainer(devices=2, max_epochs=3, log_every_n_steps=8, enable_plan_table=False)
trainer.fit(net, loader)
print(f"{trainer.global_step} steps, loss from {net.losses[0]:.1f} to {net.losses[-1]:.2f}")
