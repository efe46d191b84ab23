import torch
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.models.gpt import GPT, GPTConfig

roomier.seed_everything(0)
tokens = torch.randint(0, 256, (64, 129))
data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
trainer = roomier.Trainer(
    optimizer="adamw",
    max_steps=5,
    callbacks=[roomier.callbacks.MemoryAnatomy()],
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(
    GPT(GPTConfig(vocab_size=256, context=128, num_layers=4, num_heads=4, width=128)), DataLoader(data, batch_size=8)
)
