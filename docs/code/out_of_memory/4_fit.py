import torch
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.models.gpt import GPT, GPTConfig

roomier.seed_everything(0)
tokens = torch.randint(0, 256, (64, 129))
data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
model = GPT(GPTConfig(vocab_size=256, context=128, num_layers=4, num_heads=4, width=128))

trainer = roomier.Trainer(
    optimizer={"name": "adamw", "lr": 1e-3},
    activation_checkpointing="full",
    callbacks=[roomier.callbacks.MemoryForecast()],
    max_steps=6,
)
trainer.fit(model, DataLoader(data, batch_size=8))
