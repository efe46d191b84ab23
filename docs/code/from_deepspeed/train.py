import torch

import roomier
from roomier.models.gpt import GPT, GPTConfig

tokens = torch.randint(0, 256, (256, 33))
data = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
model = GPT(GPTConfig(vocab_size=256, context=32, num_layers=2, num_heads=2, width=64))

trainer = roomier.Trainer(strategy="ds_config.json", devices=1, max_steps=4)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
