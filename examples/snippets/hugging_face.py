"""Train a Hugging Face model with the memory options of Hugging Face's guide, each a keyword of the Trainer."""

import torch
from transformers import BertConfig, BertForSequenceClassification

from roomier import Trainer, seed_everything

seed_everything(0)
config = BertConfig(
    vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
)
labels = torch.arange(128) % 2
tokens = torch.where(labels[:, None] == 1, torch.randint(0, 128, (128, 16)), torch.randint(128, 256, (128, 16)))
samples = [{"input_ids": ids, "labels": label} for ids, label in zip(tokens, labels, strict=True)]

trainer = Trainer(
    precision="bf16-mixed",
    accumulate_grad_batches=4,  # 4 micro-batches of 4 samples give a batch of 16
    activation_checkpointing="full",
    optimizer="adafactor",  # alternative: "adamw8bit" with learning_rate=1e-2
    learning_rate=1e-1,
    max_epochs=4,
)
loader = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True)
model = BertForSequenceClassification(config).train()
trainer.fit(model, loader, torch.utils.data.DataLoader(samples[:32], batch_size=4))
loss = float(trainer.callback_metrics["val_loss"])
print(f"val_loss {loss:.3f}")
assert loss < 0.4
