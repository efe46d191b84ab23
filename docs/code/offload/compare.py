from pathlib import Path

import torch

import roomier
from roomier.models.gpt import GPT, GPTConfig


def weights(**keywords):
    roomier.seed_everything(0)
    tokens = torch.randint(0, 256, (64, 65))
    data = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    model = GPT(GPTConfig(vocab_size=256, context=64, num_layers=4, num_heads=2, width=64))
    trainer = roomier.Trainer(optimizer="adamw", learning_rate=1e-3, max_steps=8, gradient_clip_val=1.0, **keywords)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    return [weight.detach().clone() for weight in model.parameters()]


Path("scratch").mkdir()
plain = weights()
for update in ("plain", "deferred", "speculative"):
    offload = {"optimizer_states": "disk", "folder": "scratch", "update": update}
    equal = all(map(torch.equal, plain, weights(offload=offload)))
    print(update, "is", "bit-identical" if equal else "different")
