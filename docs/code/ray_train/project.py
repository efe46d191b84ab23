import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import roomier

QUIET = {"enable_progress_bar": False, "enable_plan_table": False, "enable_model_summary": False, "logger": False}


class Classifier(roomier.Module):
    def __init__(self, width: int, lr: float):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    def training_step(self, batch, batch_idx):
        x, label = batch
        return F.cross_entropy(self.net(x), label)

    def validation_step(self, batch, batch_idx):
        x, label = batch
        self.log("val_loss", F.cross_entropy(self.net(x), label))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def loaders():
    x = torch.randn(600, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(dim=1))
    parts = torch.utils.data.Subset(data, range(500)), torch.utils.data.Subset(data, range(500, 600))
    return DataLoader(parts[0], batch_size=25, shuffle=True), DataLoader(parts[1], batch_size=50)
