import torch
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.callbacks import MemoryForecast
from roomier.models.gpt import GPT, GPTConfig

tokens = torch.randint(0, 2048, (64, 65))
data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=16)
keywords = {"optimizer": {"name": "adamw", "lr": 1e-3}}
for added in (
    {},
    {"activation_checkpointing": "full"},
    {"chunked_loss": True},
    {"optimizer": {"name": "adamw8bit", "lr": 1e-3}},
    {"step_in_backward": True},
):
    keywords |= added
    memory = MemoryForecast()
    trainer = roomier.Trainer(
        **keywords,
        max_steps=3,
        callbacks=[memory],
        logger=False,
        enable_checkpointing=False,
        enable_plan_table=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    print("add", added, flush=True)
    trainer.fit(GPT(GPTConfig(vocab_size=2048, context=64, num_layers=4, num_heads=4, width=128)), data)
