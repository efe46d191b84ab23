import torch
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.models.gpt import GPT, GPTConfig

roomier.seed_everything(0)
tokens = torch.randint(0, 256, (64, 129))
data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=8)
trainer = roomier.Trainer(
    optimizer="adamw",
    activation_checkpointing=0.5,
    max_steps=10,
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(GPT(GPTConfig(vocab_size=256, context=128, num_layers=4, num_heads=4, width=128)), data)
