import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import roomier


class Regression(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


torch.manual_seed(0)
x = torch.randn(400, 8)
loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=20)
model = Regression()
trainer = roomier.Trainer(max_epochs=3, gradient_clip_val=1.0)
trainer.fit(model, loader)
torch.save(model.net.state_dict(), "module.pt")
