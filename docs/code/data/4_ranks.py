import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import roomier


class Shows(roomier.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        samples = self.all_gather(batch[0])
        if self.trainer.is_global_zero:
            print("step", batch_idx, "ranks", [each.flatten().int().tolist() for each in samples], flush=True)
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


roomier.seed_everything(0)
trainer = roomier.Trainer(
    devices=2,
    max_epochs=1,
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(Shows(), DataLoader(TensorDataset(torch.arange(13.0).unsqueeze(1)), batch_size=3))
