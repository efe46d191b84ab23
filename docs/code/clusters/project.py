import torch
from torch.utils.data import DataLoader

import roomier
from roomier.models.gpt import GPT, GPTConfig


class Language(roomier.Module):
    def __init__(self, width: int = 1024, num_layers: int = 24) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(vocab_size=50304, context=1024, width=width, num_layers=num_layers, num_heads=16))

    def training_step(self, batch, batch_idx):
        return self.gpt(batch[:, :-1], batch[:, 1:])[1]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


class Tokens(roomier.DataModule):
    def train_dataloader(self):
        return DataLoader(torch.randint(50304, (64, 1025)), batch_size=8)
