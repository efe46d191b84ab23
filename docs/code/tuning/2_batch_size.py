import torch
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.models.gpt import GPT, GPTConfig

roomier.seed_everything(0)
tokens = torch.randint(0, 256, (512, 129))
data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
model = GPT(GPTConfig(vocab_size=256, context=128, num_layers=2, num_heads=4, width=64))

trainer = roomier.Trainer(
    optimizer="adamw",
    auto_scale_batch_size=True,
    memory_budget="60MiB",  # on a GPU, the default is the memory of the device
    max_steps=2,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(data, batch_size=64))
