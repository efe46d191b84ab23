from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import roomier
from roomier.data import TokenDataset, write_tokens

sources = sorted(Path(torch.nn.__file__).parent.glob("modules/*.py"))[:3]
write_tokens("train.bin", [list(path.read_bytes()) for path in sources], vocab_size=256)
data = TokenDataset("train.bin", 64, labels="same")

roomier.seed_everything(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("base"))
trainer = roomier.Trainer(
    lora={"rank": 8, "trained": ["embed_tokens", "lm_head"]},
    optimizer={"name": "adamw", "lr": 1e-2},
    lr_schedule={"name": "cosine", "warmup_steps": 10},
    max_steps=100,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True), weights="base")
