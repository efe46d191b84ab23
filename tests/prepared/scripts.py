"""Scripts for Accelerate, as texts. A script for roomier differs in two lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

IMPORT = "from accelerate import Accelerator"
MAKE = "accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)"

CLASSIFIER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(3)
inputs = torch.randn(NUM_SAMPLES, 4)
labels = inputs.argmax(dim=1)
train_loader = DataLoader(TensorDataset(inputs, labels), batch_size=3, shuffle=True)
eval_loader = DataLoader(TensorDataset(inputs, labels), batch_size=4)
blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*blocks), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
num_batches = 2 * len(train_loader)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * num_batches))
loss_function = nn.CrossEntropyLoss()
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
rates, lengths, rows = [], [], []
for epoch in range(2):
    model.train()
    for x, y in train_loader:
        with accelerator.accumulate(model):
            loss = loss_function(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        lengths.append(len(x))
    model.eval()
    for x, y in eval_loader:
        with torch.no_grad():
            logits = model(x)
        logits, references = accelerator.gather_for_metrics((logits, y))
        rows.append(logits.detach().clone())
        assert len(logits) == len(references)
weights = accelerator.get_state_dict(model)
"""

ADVERSARIES = """
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(3)
loader = DataLoader(torch.randn(NUM_SAMPLES, 4), batch_size=3, shuffle=True)
generator = nn.Linear(2, 4)
critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
of_generator = torch.optim.AdamW(generator.parameters(), lr=0.05, eps=1e-3)
of_critic = torch.optim.AdamW(critic.parameters(), lr=0.05, eps=1e-3)
loader, generator, of_critic, critic, of_generator = accelerator.prepare(
    loader, generator, of_critic, critic, of_generator
)
rates, lengths, rows = [], [], []
for _ in range(3):
    for real in loader:
        with accelerator.accumulate(generator, critic):
            noise = real[:, :2] + accelerator.process_index
            loss = critic(generator(noise).detach()).mean() - critic(real).mean()
            accelerator.backward(loss)
            of_critic.step()
            of_critic.zero_grad()
            accelerator.backward(-critic(generator(noise)).mean())
            of_generator.step()
            of_generator.zero_grad()
            of_critic.zero_grad()
        lengths.append(len(real))
weights = {**accelerator.get_state_dict(generator), **accelerator.get_state_dict(critic)}
"""

LANGUAGE_MODEL = """
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
tokens = torch.randint(0, 50, (NUM_SAMPLES, 12))
loader = DataLoader([{"input_ids": each, "labels": each} for each in tokens], batch_size=2, shuffle=True)
sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
ids = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
model = GPT2LMHeadModel(GPT2Config(**sizes, **ids, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
scheduler = get_scheduler("linear", optimizer, 2, 20)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
rates, lengths, rows = [], [], []
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            assert outputs.logits.dtype == torch.float32
            accelerator.backward(outputs.loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
weights = accelerator.get_state_dict(model)
"""

SCRIPTS = {"classifier": CLASSIFIER, "adversaries": ADVERSARIES, "language_model": LANGUAGE_MODEL}


def for_roomier(script: str, make: str) -> str:
    """Replace two lines of ``script``, so that it runs with roomier."""
    assert script.count(IMPORT) == script.count(MAKE) == 1
    return script.replace(IMPORT, "from roomier import Accelerator").replace(MAKE, make)


def run(name: str, num_samples: int, make: str | None = None, precision: str = "no") -> dict[str, Any]:
    """Run a script with Accelerate, or with roomier if ``make`` is the line that creates roomier's Accelerator."""
    script = SCRIPTS[name]
    if make is None:
        forget_accelerate()
        text = script.replace("cpu=True", f"cpu=True, mixed_precision={precision!r}")
    else:
        text = for_roomier(script, make)
    names: dict[str, Any] = {"NUM_SAMPLES": num_samples}
    exec(compile(text, f"<{name}>", "exec"), names)
    return {key: names[key] for key in ("rates", "lengths", "rows", "weights")}


def forget_accelerate() -> None:
    """Accelerate has one state per process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two states, relative to the largest element."""
    assert one.keys() == other.keys()
    largest = max(float(each.abs().max()) for each in one.values())
    return max(float((one[key] - other[key]).abs().max()) for key in one) / largest


def rows_of(result: Mapping[str, Any]) -> Tensor:
    return torch.cat(result["rows"]) if result["rows"] else torch.empty(0)
