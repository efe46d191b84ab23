from pathlib import Path

import torch
from torch.utils.data import DataLoader

import roomier
from roomier.data import TokenDataset, write_tokens
from roomier.models.gpt import GPT, GPTConfig

SOURCES = sorted(Path(torch.nn.__file__).parent.glob("modules/*.py"))  # 40 files with 1 MB of Python


class Code(roomier.DataModule):
    def __init__(self, context: int = 64, batch_size: int = 32):
        super().__init__()
        self.context, self.batch_size = context, batch_size

    def prepare_data(self):
        texts = [list(path.read_bytes()) for path in SOURCES]
        write_tokens("train.bin", texts[3:], vocab_size=256)
        write_tokens("val.bin", texts[:3], vocab_size=256)

    def train_dataloader(self):
        return DataLoader(TokenDataset("train.bin", self.context), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TokenDataset("val.bin", self.context), self.batch_size)


class Model(roomier.Module):
    def __init__(self, width: int = 64, learning_rate: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT(GPTConfig(vocab_size=256, context=64, num_layers=2, num_heads=4, width=width))

    def training_step(self, batch, batch_idx):
        _, loss = self.gpt(**batch)
        return loss

    def validation_step(self, batch, batch_idx):
        _, loss = self.gpt(**batch)
        self.log("val_loss", loss, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
