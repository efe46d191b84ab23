"""Train a mixture-of-experts model (four experts, two per token) with SDPA and a load-balancing loss."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from roomier import Trainer, seed_everything

seed_everything(0)
config = MixtralConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    attn_implementation="sdpa",
)
tokens = torch.arange(64 * 16).reshape(64, 16) % 64  # each row contains 16 consecutive token ids
samples = [{"input_ids": ids, "labels": ids} for ids in tokens]
trainer = Trainer(optimizer="adamw", learning_rate=1e-2, max_epochs=5)
loader = torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)
trainer.fit(MixtralForCausalLM(config).train(), loader, loader)
loss = float(trainer.callback_metrics["val_loss"])
print(f"val_loss {loss:.3f}")
assert loss < 1.0
