"""Models for tests of materialization, and comparisons of their tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roomier.api.adapt import as_module
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.weights_file import WeightsFile
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan, plan_from_flags
from roomier.techniques.optim.configured import Configured

Make = Callable[[], nn.Module]


def ranks_here() -> Ranks:
    return Ranks(World(dist.get_rank(), dist.get_world_size())) if dist.is_initialized() else Ranks()


def plan_for(strategy: str, num_ranks: int, precision: str = "32-true") -> Plan:
    optimizer = {"name": "sgd", "lr": 0.1}
    if precision == "bf16-true":
        optimizer["weight_rounding"] = "nearest"
    wanted = {"name": "hsdp", "shard_size": 2} if strategy == "hsdp" else strategy
    return plan_from_flags(
        strategy=wanted, devices=num_ranks, accelerator="cpu", precision=precision, optimizer=optimizer
    )


def built(network: nn.Module, plan: Plan, ranks: Ranks, weights: Path | None = None) -> nn.Module:
    """Build an engine for ``network``, and return the network."""
    file = None if weights is None else WeightsFile(weights)
    build(plan, as_module(network), lambda _: Configured(), EagerEngine, ranks, file)
    return network


def whole_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return a full copy of every parameter and buffer by name. Tied tensors appear under each of their names."""
    named = dict(network.named_parameters(remove_duplicate=False)) | dict(network.named_buffers(remove_duplicate=False))
    return {name: whole(tensor.detach()).clone() for name, tensor in named.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(found: nn.Module, expected: nn.Module) -> list[str]:
    """Return the names of the tensors that differ in any bit, and of the tensors that should be tied but are not
    tied."""
    ours, theirs = whole_tensors(found), whole_tensors(expected)
    names = [name for name in theirs if name not in ours or not torch.equal(ours[name], theirs[name])]
    untied = {name for name, _ in found.named_parameters()} ^ {name for name, _ in expected.named_parameters()}
    return names + sorted(untied | (ours.keys() - theirs.keys()))


def make_gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=33, context=7, num_layers=2, num_heads=2, width=10))


def make_tied_gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=33, context=7, num_layers=2, num_heads=2, width=10, tied_head=True))


class Temperature(nn.Module):
    """Module with a single parameter, which has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.value, 1.0, 2.0)
        with torch.no_grad():
            self.value.log_()


class Layers(nn.Module):
    """Layers of torch with sizes that the number of ranks does not divide, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7, padding_idx=3)
        self.linear = nn.Linear(7, 13)
        self.convolution = nn.Conv2d(3, 5, 3)
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=6, vdim=6)
        self.recurrent = nn.LSTM(8, 7, 2, bidirectional=True)
        self.norm = nn.LayerNorm(7)
        self.batch_norm = nn.BatchNorm1d(7)
        self.slope = nn.PReLU(3)
        self.bilinear = nn.Bilinear(2, 3, 4)
        self.transformer = nn.TransformerEncoderLayer(8, 2, 16)
        self.temperature = Temperature()


class CustomStart(nn.Module):
    """Module whose constructors initialize weights in all common ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)  # deep copies
        self.raw = nn.Parameter(torch.randn(5, 3))
        self.listed = nn.ParameterList([nn.Parameter(torch.rand(3)) for _ in range(2)])
        self.orthogonal = nn.Linear(6, 6)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.truncated = nn.Linear(5, 9)
        nn.init.trunc_normal_(self.truncated.weight)
        self.eye = nn.Linear(4, 4)
        nn.init.eye_(self.eye.weight)
        self.dirac = nn.Conv1d(4, 4, 3)
        nn.init.dirac_(self.dirac.weight)
        self.sparse = nn.Linear(4, 6)
        nn.init.sparse_(self.sparse.weight, 0.5)
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(3, 5))
        self.copied = copy.deepcopy(self.truncated)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.orthogonal.weight
        self.truncated.weight.data.mul_(2)
        self.truncated.bias.data = torch.ones(9)
        with torch.no_grad():
            self.truncated.weight[2:4] *= 3
            self.orthogonal.weight.copy_(self.orthogonal.weight @ self.copied.weight[:6, :1])
            for parameter in self.parameters():  # reads each page again
                parameter.mul_(1.5)
        self.register_buffer("angles", torch.arange(5) ** 0.5, persistent=False)
        self.apply(self._restart)

    def _restart(self, module: nn.Module) -> None:
        if isinstance(module, nn.Bilinear):
            nn.init.kaiming_normal_(module.weight)
