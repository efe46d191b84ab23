import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import roomier

roomier.seed_everything(0)
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
tokens = torch.randint(0, 256, (64, 32))
data = [{"input_ids": each, "labels": each} for each in tokens]

arguments = TrainingArguments("runs", learning_rate=1e-3, max_steps=8, gradient_accumulation_steps=2, use_cpu=True)
trainer = roomier.Trainer(args=arguments)
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
