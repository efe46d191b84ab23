from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.models.gpt import GPT, GPTConfig

roomier.seed_everything(0)
tokens = torch.randint(0, 256, (256, 129))
data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
trainer = roomier.Trainer(
    optimizer="adamw",
    max_steps=20,
    log_every_n_steps=10,
    callbacks=[roomier.callbacks.Throughput()],
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(
    GPT(GPTConfig(vocab_size=256, context=128, num_layers=2, num_heads=4, width=64)), DataLoader(data, batch_size=8)
)
print(Path("runs/version_1/metrics.csv").read_text())
