"""Optimizers selected by a string, and their parameter groups.

[Note: no bias correction]
DeepSpeed and Apex have Adam without bias correction (``bias_correction=False``). torch's kernels always correct the
bias, but the corrections ``1 - beta**step`` are exactly 1 for a large step count. The states therefore start with a
step count of 2**24, which a float32 counter does not exceed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from roomier.api.blocks import find_blocks
from roomier.core import torch_private
from roomier.core.device.capability import capabilities_of
from roomier.core.errors import PlanError, did_you_mean
from roomier.core.sharded import is_sharded
from roomier.plan.choices import OPTIMIZERS
from roomier.techniques.optim.adafactor import Adafactor
from roomier.techniques.optim.adamw import BlockwiseAdamW
from roomier.techniques.optim.block_codes import can_be_coded
from roomier.techniques.optim.lion import Lion
from roomier.techniques.optim.local import ShardOptimizer

_FUSED = {"adamw", "adam", "sgd"}
_STATE_BITS = {"adamw8bit": 8, "adamw4bit": 4}
_SET_BY_NAME = {"params", "state_bits", "weight_rounding"}


def make_optimizer(
    name: str,
    network: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    options: Mapping[str, Any] | None = None,
    weight_rounding: str | None = None,
    blocks: Sequence[nn.Module] | None = None,
) -> Optimizer:
    """Create the optimizer ``name`` for the parameters of ``network`` that require gradients.

    Weight decay applies to weights with two or more dimensions. Weight decay does not apply to biases and the scales of
    norms. AdamW, Adam and SGD (SGD only for unsharded parameters) use torch's fused kernels if the device has them.
    Fused kernels read each tensor only once. If a loss scale is used, steps with fused kernels do not wait for the
    device. Low-bit states are used only for large matrices. Embeddings (and tied output layers), biases, norms and
    small tensors have float32 states. ``"muon"`` updates the matrices of blocks, and AdamW updates all other
    parameters.

    Args:
        name: key in ``roomier.plan.choices.OPTIMIZERS``.
        network: model whose parameters the optimizer updates.
        lr: learning rate; None selects the default of the optimizer.
        weight_decay: weight decay for the weights to which it applies; None selects the default of the optimizer.
        options: additional keyword arguments of the class (``betas``, ``eps``, ``momentum``, ...). For ``"adam"`` and
            ``"adamw"``, ``bias_correction=False`` is also accepted, as in DeepSpeed. For ``"adamw"``, ``cautious=True``
            is accepted; see :class:`roomier.techniques.optim.adamw.BlockwiseAdamW`.
        weight_rounding: storage of weights that are or will be bfloat16: ``"split"``, ``"stochastic"`` or
            ``"nearest"``; None selects ``"split"``. Optimizers other than AdamW and Lion always round to nearest.
        blocks: the blocks of ``network``, whose matrices ``"muon"`` updates. None searches for blocks.

    Raises:
        PlanError: no parameter requires a gradient, the class does not accept one of ``options``, or Muon finds no
            matrix.

    Example:
        >>> optimizer = make_optimizer("adamw", model, lr=3e-4, options={"betas": (0.9, 0.95)})
    """
    trained = trained_parameters(network, blocks)
    if weight_rounding is None and any(parameter.dtype is torch.bfloat16 for parameter, _ in trained):
        weight_rounding = "split"  # the model has bfloat16 weights
    uses_blocks = name == "adamw" and (weight_rounding in ("split", "stochastic") or "cautious" in (options or {}))
    kind: type[Optimizer] = BlockwiseAdamW if uses_blocks else OPTIMIZERS[name].load()
    if kind is torch.optim.Adafactor and any(is_sharded(parameter) for parameter, _ in trained):
        kind = Adafactor
    if not trained:
        raise PlanError("optimizer", name, "no parameter requires a gradient", "Unfreeze at least one parameter")
    options = dict(options or {})
    if kind in _UNCORRECTED and isinstance(options.get("bias_correction"), bool):
        kind = kind if options.pop("bias_correction") else _UNCORRECTED[kind]
    arguments = inspect.signature(kind).parameters
    known = set(arguments) - _SET_BY_NAME
    for key in options:
        if key not in known:
            raise PlanError("optimizer", key, f"is not an option of {kind.__name__}", did_you_mean(key, known))
    if lr is not None:
        options["lr"] = lr
    if kind in (Lion, BlockwiseAdamW) and weight_rounding is not None:
        options["weight_rounding"] = weight_rounding
    elif name in _FUSED and "fused" in arguments and not {"fused", "foreach", "differentiable"} & set(options):
        options["fused"] = all(_has_fused(name, each) for each, _ in trained if not each.is_meta)
    if name == "muon" and not any(trait.is_hidden for _, trait in trained):
        problem = "requires a trained matrix in a block (a layer that repeats), but the model has none"
        raise PlanError("optimizer", name, problem, "Declare model_blocks() on the model, or use optimizer='adamw'")
    if "weight_decay" not in arguments:
        problem = f"is {OPTIMIZERS[name].made_by}, whose constructor has no argument weight_decay"
        raise PlanError("optimizer", name, problem, "Add the argument, because biases and norms have no weight decay")
    decay = arguments["weight_decay"].default if weight_decay is None else weight_decay
    return kind(_groups(name, kind, trained, decay), **options)


def keeps_updates(optimizer: Optimizer) -> bool:
    """Return True if bfloat16 weights do not lose the small updates of ``optimizer``, as far as roomier can
    determine."""
    if isinstance(optimizer, (BlockwiseAdamW, Lion)):
        return True
    return not any(each.dtype is torch.bfloat16 for group in optimizer.param_groups for each in group["params"])


def _groups(
    name: str, kind: type[Optimizer], trained: Sequence[tuple[nn.Parameter, Trait]], decay: float
) -> list[dict[str, Any]]:
    """Return parameter groups. Groups with weight decay are first in the list. The model summary prints the entry
    ``"holds"`` of each group."""
    groups: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any]
    for parameter, trait in sorted(trained, key=lambda each: _rank(name, each[1])):
        if not trait.decays:
            holds, settings = "biases, norms", {"weight_decay": 0.0}
        else:
            holds, settings = "weights", {"weight_decay": decay}
        if kind is BlockwiseAdamW:
            is_coded = name in _STATE_BITS and trait.is_large_matrix
            settings["state_bits"] = _STATE_BITS[name] if is_coded else 32
            if name in _STATE_BITS and trait.decays:
                holds = "large matrices" if is_coded else "embeddings, small weights"
        elif name == "muon" and trait.decays:
            holds = "matrices of blocks" if trait.is_hidden else "other weights"
            settings["is_hidden"] = trait.is_hidden
        groups.setdefault(holds, {"params": [], **settings, "holds": holds})["params"].append(parameter)
    return list(groups.values())


def _rank(name: str, trait: Trait) -> int:
    if not trait.decays:
        return 2
    is_first = trait.is_hidden if name == "muon" else trait.is_large_matrix
    return int(name in ("muon", *_STATE_BITS) and not is_first)


def _has_fused(name: str, parameter: nn.Parameter) -> bool:
    if name == "sgd" and is_sharded(parameter):  # for sharded parameters, torch 2.13 has only Adam's fused kernels
        return False
    return parameter.is_floating_point() and name in capabilities_of(parameter.device).fused_optimizers


LARGE_STEP = 2.0**24  # see [Note: no bias correction]


class UncorrectedAdam(ShardOptimizer, Adam):
    """:class:`torch.optim.Adam` without bias correction. The first updates are smaller than Adam's."""

    def _update_all(self) -> None:
        for group, parameter in self._trained():
            if not self.state[parameter]:
                self.state[parameter] = _empty_state(parameter, group)
        torch_private.step_without_hooks(self, Adam)


class UncorrectedAdamW(UncorrectedAdam, AdamW):
    """:class:`torch.optim.AdamW` without bias correction. The first updates are smaller than AdamW's."""


_UNCORRECTED: dict[type[Optimizer], type[Optimizer]] = {AdamW: UncorrectedAdamW, Adam: UncorrectedAdam}


def _empty_state(parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    on_device = group["fused"] or group["capturable"]  # the kernels then read the step count on the device
    state = {"step": torch.tensor(LARGE_STEP, device=parameter.device if on_device else None)}
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
        state[name] = torch.zeros_like(parameter, requires_grad=False)
    return state


_NORMS = (nn.LayerNorm, nn.RMSNorm)  # the scales of other norms have one dimension
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Trait:
    """Classification of one parameter.

    Attributes:
        decays: whether weight decay applies to the parameter. Weight decay does not apply to biases and the scales of
            norms.
        is_large_matrix: whether the parameter is a large weight that is neither an embedding nor tied to one. Such a
            parameter can have low-bit states.
        is_hidden: whether the parameter is a matrix of a block.
    """

    decays: bool
    is_large_matrix: bool
    is_hidden: bool


def trained_parameters(
    network: nn.Module, blocks: Sequence[nn.Module] | None = None
) -> list[tuple[nn.Parameter, Trait]]:
    """Return the parameters that require gradients and their traits, in the order of the network. Tied parameters
    appear once.

    Args:
        blocks: the blocks of ``network``. None searches for blocks.
    """
    norms = {p for part in network.modules() if isinstance(part, _NORMS) for p in part.parameters(recurse=False)}
    looked_up = {p for part in network.modules() if isinstance(part, _LOOKUPS) for p in part.parameters(recurse=False)}
    of_blocks = {p for block in (find_blocks(network) if blocks is None else blocks) for p in block.parameters()}
    found = []
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        # T5's relative_attention_bias and Swin's relative_position_bias_table are tables of biases.
        decays = parameter.dim() >= 2 and parameter not in norms and "bias" not in name
        is_matrix = decays and parameter not in looked_up
        trait = Trait(
            decays=decays,
            is_large_matrix=is_matrix and can_be_coded(parameter.shape),
            is_hidden=is_matrix and parameter.dim() == 2 and parameter in of_blocks,
        )
        found.append((parameter, trait))
    return found
