import torch

import roomier


class Line(roomier.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


roomier.seed_everything(0)
x = torch.linspace(-1, 1, 256)[:, None]
data = torch.utils.data.TensorDataset(x, 3 * x + 1)
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
roomier.Trainer(max_epochs=10, gradient_clip_val=1.0).fit(Line(), loader)
