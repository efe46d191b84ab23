import torch
from torch import nn

import roomier


class Line(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(seed=0, batch_size=40, **keywords):
    roomier.seed_everything(seed)
    x = torch.randn(400, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    trainer = roomier.Trainer(max_epochs=2, enable_progress_bar=False, enable_model_summary=False, **keywords)
    model = Line()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True))
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])
