import lightning.pytorch as pl
import torch
from torch import nn

import roomier


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        x, label = batch
        loss = nn.functional.cross_entropy(self.net(x), label)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def weights_after_a_fit(kind):
    roomier.seed_everything(0)
    x = torch.randn(500, 4)
    data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(dim=1))
    model = Classifier()
    loader = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)
    trainer = kind(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(model, loader)
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


equal = torch.equal(weights_after_a_fit(pl.Trainer), weights_after_a_fit(roomier.Trainer))
print("the weights are", "bit-identical" if equal else "different")
