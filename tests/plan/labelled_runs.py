"""Short training runs under a Plan and in plain PyTorch, and the differences between two runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from roomier import Callback, Module, Trainer
from roomier.core.device.rng import seed_everything
from roomier.core.tree import map_tensors
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.optim.rounding import read
from tests.optim.test_rounding import split

NUM_STEPS, GLOBAL_BATCH, CONTEXT, VOCABULARY, WIDTH, NUM_LAYERS = 10, 8, 16, 64, 32, 2
LR, CLIP = 1e-2, 0.05
LORA_RANK, LORA_ALPHA = 4, 8
WARMUP = 3


class Language(Module):
    """A small GPT that learns sequences of tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = GPT(GPTConfig(VOCABULARY, CONTEXT, NUM_LAYERS, num_heads=2, width=WIDTH, dropout=dropout))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        logits = self.network(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss


class WithOptimizer(Language):
    """Module that creates its own optimizer."""

    def configure_optimizers(self) -> list[Optimizer]:
        return adamw(self.network)


def loader(batch_size: int) -> DataLoader[Tensor]:
    """The sequences of all steps, in order. On several ranks, the ranks share each batch."""
    first = torch.randint(VOCABULARY, (NUM_STEPS * GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(1))
    sequences: Any = (first + 3 * torch.arange(CONTEXT + 1)) % VOCABULARY
    return DataLoader(sequences, batch_size)


@dataclass
class Run:
    """Weights before and after a run, optimizer states after it, and the loss of each step of this rank.

    Attributes:
        states: by ``<parameter>/<state>``.
    """

    start: dict[str, Tensor]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    losses: Tensor


# ---- under a Plan ----------------------------------------------------------------------------------------------------


class Look(Callback):
    """Callback that copies weights and optimizer states. Sharded tensors are copied in full."""

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.start = self._state(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self.end = self._state(trainer)

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        assert trainer.engine is not None
        copied: dict[str, Any] = map_tensors(_full_copy, trainer.engine.state())
        return copied


def _full_copy(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_all(all_keywords: Sequence[Mapping[str, Any]], num_ranks: int, dropout: float) -> list[Run]:
    """Call :func:`train` with each of ``all_keywords``."""
    return [train(keywords, num_ranks, dropout) for keywords in all_keywords]


def train(keywords: Mapping[str, Any], num_ranks: int = 1, dropout: float = 0.0) -> Run:
    """Train with ``Trainer(**keywords)``. Call this function on each of ``num_ranks`` ranks."""
    accumulate = keywords.get("accumulate_grad_batches", 1)
    look = Look()
    seed_everything(0)
    module = Language(dropout) if keywords["optimizer"] is not None else WithOptimizer(dropout)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        **{"accelerator": "cpu", **keywords},
        **quiet,
        devices=num_ranks,
        max_steps=NUM_STEPS,
        callbacks=[look],
        enable_model_summary=False,
    )
    trainer.fit(module, loader(GLOBAL_BATCH // num_ranks // accumulate))
    states = {
        f"{name}/{key}": torch.as_tensor(value)
        for optimizer in look.end["optimizers"]
        for name, state in optimizer["state"].items()
        for key, value in state.items()
    }
    low_bits = {name: states.pop(f"{name}/low_bits", None) for name in look.end["module"]}
    weights = {name: read(each, low_bits[name]) for name, each in look.end["module"].items()}
    losses = torch.stack(module.losses).view(NUM_STEPS, -1).mean(1)
    return Run(look.start["module"], weights, states, losses)


# ---- in plain PyTorch ------------------------------------------------------------------------------------------------


def train_plain(recipe: str, start: Mapping[str, Tensor]) -> Run:
    """Train from the weights ``start`` in a loop without roomier.

    Args:
        recipe: a key of ``OPTIMIZERS`` or ``SCHEDULES``; or ``"clip by norm"``, ``"clip by value"`` or ``"lora"``, with
            AdamW.
    """
    module = Language()
    if recipe == "lora":
        add_lora(module.network)
    module.load_state_dict(dict(start))
    uses_adamw = recipe in ("adamw", "clip by norm", "clip by value", "lora", *SCHEDULES)
    optimizers = (adamw if uses_adamw else OPTIMIZERS[recipe])(module.network)
    schedules = [LambdaLR(each, SCHEDULES[recipe]) for each in optimizers if recipe in SCHEDULES]
    for batch in loader(GLOBAL_BATCH):
        module.zero_grad()
        module.training_step(batch).backward()
        if recipe == "clip by norm":
            nn.utils.clip_grad_norm_([each for group in optimizers[0].param_groups for each in group["params"]], CLIP)
        elif recipe == "clip by value":
            nn.utils.clip_grad_value_(module.parameters(), CLIP)
        for each in (*optimizers, *schedules):
            each.step()
    weights = dict(module.named_parameters())
    for masters in (each.masters for each in optimizers if isinstance(each, MasterWeights)):
        weights = {name: masters[weight] for name, weight in weights.items()}
    names = {weight: name for name, weight in weights.items()}
    states = {
        f"{names[weight]}/{key}": torch.as_tensor(value)
        for optimizer in optimizers
        for weight, state in optimizer.state.items()
        for key, value in state.items()
    }
    return Run(dict(start), {name: each.detach() for name, each in weights.items()}, states, torch.stack(module.losses))


def groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer. Matrices decay, but biases and norms do not decay."""
    trained = [each for each in network.parameters() if each.requires_grad]
    return [
        {"params": [each for each in trained if each.dim() >= 2], "weight_decay": weight_decay},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(network: nn.Module) -> list[Optimizer]:
    trained = [group for group in groups(network, 0.01) if group["params"]]
    return [torch.optim.AdamW(trained, LR, fused=True)]


def muon(network: nn.Module) -> list[Optimizer]:
    decaying, others = groups(network, 0.1)
    of_blocks = {each for each in network.get_submodule("blocks").parameters() if each.dim() >= 2}
    hidden = [each for each in decaying["params"] if each in of_blocks]
    decaying["params"] = [each for each in decaying["params"] if each not in of_blocks]
    return [
        torch.optim.Muon(hidden, LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([decaying, others], LR, fused=True),
    ]


class PlainLion(Optimizer):
    """Algorithm 2 of Chen et al. 2023, without weight decay."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                weight -= LR * momentum.lerp(weight.grad, 0.1).sign()
                momentum.lerp_(weight.grad, 0.01)


class MasterWeights(torch.optim.AdamW):
    """AdamW on float32 weights, which are rounded to the bfloat16 weights of the network after each step.

    Attributes:
        masters: the float32 master weight of each weight.
    """

    def __init__(self, network: nn.Module) -> None:
        network.bfloat16()
        self.masters = {each: nn.Parameter(each.detach().float()) for each in network.parameters()}
        of_masters = groups(network, 0.01)
        for group in of_masters:
            group["params"] = [self.masters[each] for each in group["params"]]
        super().__init__(of_masters, LR, foreach=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight, master in self.masters.items():
            assert weight.grad is not None
            master.grad = weight.grad.float()
        super().step()
        for weight, master in self.masters.items():
            weight.copy_(split(master.detach())[0])  # ties are rounded away from zero


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "adam": lambda network: [torch.optim.Adam(groups(network, 0.0), LR, fused=True)],
    "sgd": lambda network: [torch.optim.SGD(groups(network, 0.0), LR, fused=True)],
    "adafactor": lambda network: [torch.optim.Adafactor(groups(network, 0.0), LR)],
    "rmsprop": lambda network: [torch.optim.RMSprop(groups(network, 0.0), LR)],
    "adagrad": lambda network: [torch.optim.Adagrad(groups(network, 0.0), LR)],
    "nadam": lambda network: [torch.optim.NAdam(groups(network, 0.0), LR)],
    "radam": lambda network: [torch.optim.RAdam(groups(network, 0.0), LR)],
    "lion": lambda network: [PlainLion(network.parameters(), {"lr": LR})],
    "muon": muon,
    "master weights": lambda network: [MasterWeights(network)],
}


def _warmed_up(step: int, factor: float) -> float:
    return (step + 1) / WARMUP if step < WARMUP else factor


def _done(step: int) -> float:
    return (step - WARMUP) / (NUM_STEPS - WARMUP)


SCHEDULES: dict[str, Callable[[int], float]] = {
    "constant": lambda step: _warmed_up(step, 1.0),
    "linear": lambda step: _warmed_up(step, 1.0 - _done(step)),
    "cosine": lambda step: _warmed_up(step, 0.5 * (1.0 + math.cos(math.pi * _done(step)))),
}


class LoRALinear(nn.Linear):
    """A frozen linear layer with a trained low-rank adapter (Hu et al. 2021)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.lora_A.T * (LORA_ALPHA / LORA_RANK) @ self.lora_B.T


def add_lora(network: nn.Module) -> None:
    """Freeze the network, and add adapters to the linear layers of its blocks."""
    network.requires_grad_(False)
    for layer in network.get_submodule("blocks").modules():
        if type(layer) is nn.Linear:
            layer.__class__ = LoRALinear
            layer.lora_A = nn.Parameter(torch.zeros(LORA_RANK, layer.in_features))
            layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, LORA_RANK))


# ---- differences -----------------------------------------------------------------------------------------------------


def differing(run: Run, reference: Run) -> list[str]:
    """Return the names of the tensors whose bits differ, and of the tensors that only one of the runs has."""
    found = [] if torch.equal(run.losses, reference.losses) else ["losses"]
    for ours, theirs in ((run.weights, reference.weights), (run.states, reference.states)):
        found += sorted(ours.keys() ^ theirs.keys())
        found += [name for name in ours if name in theirs and not torch.equal(ours[name], theirs[name])]
    return found


def distance(run: Run, reference: Run) -> float:
    """Return the largest relative difference among the losses, the change of all weights, and each kind of state.

    Tensors that only one of the runs has, or that have different shapes, do not count.
    """
    found = [((run.losses - reference.losses).abs() / reference.losses).max().item()]
    found.append(_relative(run.weights, reference.weights, reference.start))
    for kind in {name.rpartition("/")[2] for name, each in reference.states.items() if each.dim()}:
        of_kind = {name: each for name, each in reference.states.items() if name.endswith(f"/{kind}")}
        found.append(_relative(run.states, of_kind, {}))
    return max(found)


def _relative(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """Return the norm of ``ours - theirs`` over the norm of ``theirs - start``."""
    names = [name for name, each in theirs.items() if name in ours and ours[name].shape == each.shape]
    if not names:
        return 0.0
    different = torch.cat([(ours[name].double() - theirs[name].double()).flatten() for name in names])
    moved = torch.cat([(theirs[name].double() - start.get(name, torch.zeros(()))).flatten() for name in names])
    return (different.norm() / moved.norm()).item()
