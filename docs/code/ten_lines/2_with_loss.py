import torch
from torch import nn

import roomier


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, label):
        return nn.functional.cross_entropy(self.layer(x), label)


roomier.seed_everything(0)
x = torch.randn(256, 4)
data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(dim=1))
trainer = roomier.Trainer(max_epochs=5, optimizer="adamw", learning_rate=1e-2)
trainer.fit(WithLoss(), torch.utils.data.DataLoader(data, batch_size=32, shuffle=True))
