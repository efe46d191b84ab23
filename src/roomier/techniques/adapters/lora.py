"""Low-rank adapters on linear layers.

``from_pretrained`` ignores names that the model does not have, such as ``lora_A``, and initializes missing weights,
such as quantized weights, with random values. The result would be a model without the trained parameters, and no error
would be raised.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core.errors import PlanError, RoomierError, did_you_mean
from roomier.core.log import notice
from roomier.plan import Plan
from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.layers import (
    Adapted,
    InFewBits,
    add_adapter,
    is_adaptable,
    is_adapter,
    is_transposed,
    plain_class,
    put_in_few_bits,
    rank_of,
    remove_adapter,
)

_FIELD = "lora.targets"


def apply_lora(network: nn.Module, blocks: Sequence[nn.Module], plan: AdapterPlan) -> None:
    """Freeze ``network`` and add adapters to linear layers, in place.

    Modules in ``plan.lora_trained`` are not frozen. Existing adapters stay.

    Args:
        network: model to adapt.
        blocks: repeated layers of the model; see :func:`roomier.api.blocks.find_blocks`.
        plan: settings of the adapters.

    Raises:
        RoomierError: no layer or module matches a given name, or existing adapters have a different rank or scale.
    """
    rank = plan.lora_rank
    assert rank is not None
    alpha = rank if plan.lora_alpha is None else plan.lora_alpha
    targets = target_layers(network, blocks, plan.lora_targets)
    trained = _trained(network, plan.lora_trained, targets)
    for name, layer in {**adapted_layers(network), **targets}.items():
        _check(name, layer, rank, alpha / rank)
    _calls_layers_always(network)
    for name, each in network.named_parameters():
        each.requires_grad_(is_adapter(name) or each in trained)
        if not each.requires_grad:
            each.grad = None  # a gradient of an earlier fit, which no optimizer would free
    for layer in targets.values():
        if isinstance(layer, Adapted):
            layer.lora_dropout = plan.lora_dropout
        else:
            add_adapter(layer, rank, alpha / rank, plan.lora_dropout)
    watch_saves(network)


def quantise_base(network: nn.Module, plan: AdapterPlan) -> None:
    """Quantize the frozen weights of adapted layers to the format of ``plan``, in place.

    A weight that another layer shares, such as a tied output layer, is not quantized.

    Raises:
        RoomierError: weights are already quantized in a different format, or a weight is not finite.
    """
    num_owners = Counter(each for part in network.modules() for each in part.parameters(recurse=False))
    for name, layer in adapted_layers(network).items():
        if isinstance(layer, InFewBits):
            if layer.weight_format != plan.frozen_base:
                problem = f"differs from {name}, whose weight is in {layer.weight_format} from an earlier run"
                action = f"Use {layer.weight_format!r}, or build a new model"
                raise RoomierError("lora.base", plan.frozen_base, problem, action)
            continue
        weight = _parameter_of(layer)
        if num_owners[weight] > 1:
            continue
        _check_codable(name, layer, weight, plan.frozen_base)
        put_in_few_bits(layer, plan.frozen_base)


def merge_lora(network: nn.Module) -> nn.Module:
    """Merge the adapters of ``network`` into its weights, in place, and return ``network`` as a plain model.

    Quantized weights are decoded, so they equal the original weights only up to the quantization error. Frozen
    parameters stay frozen. Call ``network.requires_grad_()`` to train the frozen parameters.

    Raises:
        RoomierError: the network has no adapters, is sharded across ranks, or shares an adapted weight with another
            layer.

    Example:
        >>> trainer = roomier.Trainer(lora={"rank": 8})
        >>> trainer.fit(module, loader)
        >>> merge_lora(module.net)
    """
    layers = adapted_layers(network)
    if not layers:
        action = "Pass the network that was trained with lora=..."
        raise RoomierError("network", type(network).__name__, "has no adapters", action)
    for name, layer in layers.items():
        _check_whole(name, layer.lora_A)
    num_owners = Counter(each for part in network.modules() for each in part.parameters(recurse=False))
    for name, layer in layers.items():
        if not isinstance(layer, InFewBits) and num_owners[_parameter_of(layer)] > 1:
            problem = "has adapters, but another layer has the same weight, so merging would also change that layer"
            raise RoomierError("network", name, problem, "Use separate weights before training")
    for layer in layers.values():
        remove_adapter(layer)
    unwatch_saves(network)
    return network


def adapter_state(network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the adapters, and of all other trained parameters, keyed by name.

    For a model of several gigabytes, these tensors require only a few megabytes.
    ``network.load_state_dict(state, strict=False)`` restores these tensors in the same model with adapters.

    Example:
        >>> torch.save(adapter_state(module.net), "adapter.pt")
    """
    return {name: each.detach() for name, each in network.named_parameters() if is_adapter(name) or each.requires_grad}


def _trained(network: nn.Module, names: str, targets: dict[str, nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of the modules that are trained without an adapter."""
    found: set[nn.Parameter] = set()
    for pattern in filter(None, (each.strip() for each in names.split(","))):
        matching = {name: each for name, each in network.named_modules() if name and matches(name, pattern)}
        parameters = {each for module in matching.values() for each in module.parameters()}
        if not parameters:
            action = _nearest((name for name, each in network.named_modules() if name), pattern)
            raise RoomierError(
                "lora.trained", pattern, "must be the end of the name of a module with parameters", action
            )
        adapted = next((name for name, each in targets.items() if set(each.parameters()) & parameters), None)
        if adapted is not None:
            problem = f"includes {adapted}, which receives an adapter, so its weights are frozen"
            raise RoomierError("lora.trained", pattern, problem, "Remove it from lora.trained or from lora.targets")
        _notice_tied(network, pattern, matching)
        found |= parameters
    return found


def _notice_tied(network: nn.Module, pattern: str, matching: dict[str, nn.Module]) -> None:
    inside = {f"{module}.{name}": each for module, part in matching.items() for name, each in part.named_parameters()}
    own = {each: name for name, each in inside.items()}
    for name, each in network.named_parameters(remove_duplicate=False):
        if each in own and name not in inside:
            notice(f"lora.trained={pattern!r}: {own[each]} is tied to {name}, so both are trained as one weight")


def adaptable_in_blocks(network: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the layers that receive adapters by default, keyed by name, in the order of the network."""
    in_blocks = {part for block in blocks for part in block.modules()}
    return {name: each for name, each in _adaptable(network).items() if each in in_blocks}


def _adaptable(network: nn.Module) -> dict[str, nn.Module]:
    reading = _read_by_others(network)
    return {name: each for name, each in network.named_modules() if is_adaptable(each) and each not in reading}


def adapted_layers(network: nn.Module) -> dict[str, Adapted]:
    """Return the layers that have adapters, keyed by name, in the order of the network."""
    return {name: each for name, each in network.named_modules() if isinstance(each, Adapted)}


def target_layers(network: nn.Module, blocks: Sequence[nn.Module], targets: str) -> dict[str, nn.Module]:
    """Return the layers that ``lora_targets`` selects, keyed by name, in the order of the network.

    Args:
        network: model to adapt.
        blocks: repeated layers of the model; see :func:`roomier.api.blocks.find_blocks`.
        targets: ``"blocks"``, or names and patterns separated by commas.

    Raises:
        RoomierError: a name matches no layer, or ``targets`` selects no layer.
    """
    layers = _adaptable(network)
    if targets == "blocks":
        found = adaptable_in_blocks(network, blocks)
        if not found:
            problem = f"is not possible, because {type(network).__name__} has no blocks with linear layers"
            raise RoomierError(_FIELD, targets, problem, f"Pass names of layers; {_some(layers)}")
        return found
    wanted: set[str] = set()
    for pattern in filter(None, (each.strip() for each in targets.split(","))):
        matching = {name for name in layers if matches(name, pattern)}
        if not matching:
            raise RoomierError(_FIELD, pattern, _why_none(network, pattern), _nearest(layers, pattern))
        wanted |= matching
    if not wanted:
        raise RoomierError(_FIELD, targets, "contains no layer name", f"Pass names of layers; {_some(layers)}")
    return {name: each for name, each in layers.items() if name in wanted}


def matches(name: str, pattern: str) -> bool:
    """Return True if ``pattern``, which is an item of ``lora_targets`` or ``lora_trained``, selects the layer
    ``name``."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _why_none(network: nn.Module, pattern: str) -> str:
    named = dict(network.named_modules())
    others = [name for name in named if name and matches(name, pattern)]
    if not others:
        return "must be the end of the name of a layer"
    if named[others[0]] in _read_by_others(network):
        return f"matches {others[0]}, which is never called, because the attention module reads its weight directly"
    return f"matches {others[0]} of type {type(named[others[0]]).__name__}, which is not a linear layer"


def _nearest(layers: Iterable[str], pattern: str) -> str:
    return did_you_mean(pattern.rpartition(".")[2], {name.rpartition(".")[2] for name in layers})


def _some(layers: Iterable[str]) -> str:
    names = sorted({name.rpartition(".")[2] for name in layers})
    return f"available are {', '.join(names[:8])}" if names else "the model has no linear layers to adapt"


def _read_by_others(network: nn.Module) -> set[nn.Module]:
    # These layers are never called, because nn.MultiheadAttention itself multiplies by the weight of its ``out_proj``.
    readers = (each for each in network.modules() if isinstance(each, nn.MultiheadAttention))
    return {part for reader in readers for part in reader.modules()}


def _calls_layers_always(network: nn.Module) -> None:
    # In evaluation, nn.TransformerEncoderLayer would use a fused kernel, which ignores the adapters. The value 0 marks
    # the activation as unsupported by this kernel.
    for each in network.modules():
        if isinstance(each, nn.TransformerEncoderLayer):
            each.activation_relu_or_gelu = 0


def _check(name: str, layer: nn.Module, rank: int, scale: float) -> None:
    if isinstance(layer, Adapted):
        if rank_of(layer) != rank or layer.lora_scale != scale:
            problem = (
                f"does not match {name}, which has an adapter of rank {rank_of(layer)} and scale {layer.lora_scale:g}"
            )
            action = (
                "Continue training with the same rank and alpha, or call merge_lora(model) first (from "
                "roomier.adapters import merge_lora)"
            )
            raise RoomierError("lora", {"rank": rank, "alpha": scale * rank}, problem, action)
        return
    if not isinstance(layer.weight, nn.Parameter):
        problem = "has a weight that is not a parameter, but is computed from parameters (weight norm, spectral norm)"
        action = "Remove it from lora.targets, or remove the parametrization first (torch.nn.utils.parametrize)"
        raise RoomierError(_FIELD, name, problem, action)
    weight = _parameter_of(layer)
    _check_whole(name, weight)
    if is_transposed(layer) and rank >= min(weight.shape):
        problem = f"must be less than {min(weight.shape)} for {name}, which has shape {list(weight.shape)}"
        raise RoomierError("lora.rank", rank, problem, "Use a smaller rank")


def _check_whole(name: str, weight: Tensor) -> None:
    if hasattr(weight, "placements"):
        problem = "was sharded across ranks by an earlier run, and sharding cannot be undone"
        raise RoomierError("lora", name, problem, "Save a checkpoint and load it into a new model")


def _check_codable(name: str, layer: nn.Module, weight: Tensor, code_format: str) -> None:
    plain = plain_class(layer)
    if isinstance(layer, nn.Linear) and plain.forward is not nn.Linear.forward:
        problem = f"is not supported for {name}, because {plain.__name__} does not use the forward method of nn.Linear"
        raise RoomierError("lora.base", code_format, problem, "Remove it from lora.targets, or use base='as_is'")
    if not weight.is_meta and not torch.isfinite(weight).all():
        problem = f"requires finite weights, but the weight of {name} is not finite"
        raise RoomierError("lora.base", code_format, problem, "Check the weights of the model")


def _parameter_of(layer: nn.Module) -> nn.Parameter:
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    return weight


_NAME = "save_pretrained"


class SavesPlainModels:
    """Substitute for ``model.save_pretrained`` while the model has adapters.

    The substitute is an object instead of a closure, so that a copied or unpickled model has a separate substitute.

    Args:
        model: Hugging Face model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original ``save_pretrained``.

        Raises:
            RoomierError: the model has adapters, and no ``state_dict`` was passed.
        """
        kind: Any = type(self.model)
        if kwargs.get("state_dict") is None and any(isinstance(each, Adapted) for each in self.model.modules()):
            problem = "has adapters, which from_pretrained would not load from the saved files"
            action = (
                "Use one of three ways: merge the adapters with merge_lora(model) (from roomier.adapters import "
                "merge_lora), save only the adapters with export_adapter(model, folder) (from roomier.adapters import "
                "export_adapter), or export a checkpoint with `roomier export`"
            )
            raise RoomierError(_NAME, kind.__name__, problem, action)
        return kind.save_pretrained(self.model, *args, **kwargs)


def watch_saves(network: nn.Module) -> None:
    """Make the Hugging Face models in ``network`` reject calls of ``save_pretrained`` while they have adapters."""
    for part in network.modules():
        if callable(getattr(type(part), _NAME, None)) and _NAME not in vars(part):
            vars(part)[_NAME] = SavesPlainModels(part)


def unwatch_saves(network: nn.Module) -> None:
    """Restore the original ``save_pretrained``."""
    for part in network.modules():
        if isinstance(vars(part).get(_NAME), SavesPlainModels):
            del vars(part)[_NAME]


_IMPORT = "from roomier.adapters import merge_lora"


def adapters_of(network: nn.Module, blocks: Sequence[nn.Module]) -> AdapterPlan | None:
    """Return the settings that would create the adapters of ``network`` on a plain model; None if ``network`` has no
    adapters."""
    layers = adapted_layers(network)
    if not layers:
        return None
    layer = next(iter(layers.values()))  # all adapters have the same rank and scale
    in_blocks = adaptable_in_blocks(network, blocks)
    formats = {each.weight_format for each in layers.values() if isinstance(each, InFewBits)}
    return AdapterPlan(
        lora_rank=rank_of(layer),
        lora_alpha=None if layer.lora_scale == 1 else layer.lora_scale * rank_of(layer),
        lora_dropout=layer.lora_dropout,
        lora_targets="blocks" if layers.keys() == in_blocks.keys() else ",".join(layers),
        lora_trained=",".join(fully_trained_modules(network)),
        frozen_base=next(iter(formats), "as_is"),
    )


def fully_trained_modules(network: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules that have no adapters and whose parameters are all trained, keyed by name."""
    found: dict[str, nn.Module] = {}
    for name, module in network.named_modules():
        parameters = dict(module.named_parameters())
        is_trained = bool(parameters) and all(each.requires_grad for each in parameters.values())
        # A quantized layer can have no parameters except its adapter.
        has_no_adapter = not any(map(is_adapter, parameters))
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and is_trained and has_no_adapter and not is_inside:
            found[name] = module
    return found


def as_keyword(adapters: AdapterPlan) -> dict[str, object]:
    """Return the value of ``Trainer(lora=...)`` that creates ``adapters``."""
    plain = dataclasses.asdict(AdapterPlan())
    given = {name: value for name, value in dataclasses.asdict(adapters).items() if value != plain[name]}
    lists = {name: value.split(",") for name, value in given.items() if name in ("lora_targets", "lora_trained")}
    return {name.removeprefix("lora_").removeprefix("frozen_"): value for name, value in {**given, **lists}.items()}


def name_adapters(plan: Plan, network: nn.Module, blocks: Sequence[nn.Module]) -> Plan:
    """Return ``plan`` with the adapters and the quantization that ``network`` retains from an earlier run.

    The result is the same before and after the adapters of ``plan`` are added. The settings of retained adapters are
    required to load a checkpoint, and the table of settings that a run prints contains them.

    Raises:
        PlanError: the settings of the adapters are not supported with the other settings of ``plan``.
    """
    found = adapters_of(network, blocks)
    if found is None:
        return plan
    if plan.adapter.lora_rank is not None:
        found = _with_named(plan.adapter, found, network, blocks)
    try:
        return replace(plan, adapter=found)
    except PlanError as error:
        problem = f"the model has this setting from an earlier run, but it {error.problem}"
        action = f"{error.action}, or call merge_lora(model) first ({_IMPORT})"
        raise PlanError(error.field, error.received, problem, action) from error


def _with_named(named: AdapterPlan, found: AdapterPlan, network: nn.Module, blocks: Sequence[nn.Module]) -> AdapterPlan:
    """Return ``named``, extended by the quantization and the adapters that ``network`` retains from an earlier run."""
    base = found.frozen_base if named.frozen_base == "as_is" else named.frozen_base
    targets, adapted = target_layers(network, blocks, named.lora_targets), adapted_layers(network)
    if adapted.keys() <= targets.keys():
        return replace(named, frozen_base=base)
    layers = [name for name, _ in network.named_modules() if name in adapted or name in targets]
    return replace(named, frozen_base=base, lora_targets=",".join(layers))


def report_unnamed_adapters(plan: Plan, network: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Print a notice about adapters and quantization that ``network`` has but ``plan`` does not contain.

    Raises:
        PlanError: the settings of the adapters are not supported with the other settings of ``plan``.
    """
    named = name_adapters(plan, network, blocks).adapter
    if named == plan.adapter:
        return
    base = named.frozen_base
    if plan.adapter.lora_rank is not None:
        if base != plan.adapter.frozen_base:
            notice(
                f"the model has frozen weights in {base} from an earlier run. These weights remain quantized (lora "
                f"base: {base})"
            )
        if named.lora_targets != plan.adapter.lora_targets:
            targets = target_layers(network, blocks, plan.adapter.lora_targets)
            others = [name for name in adapted_layers(network) if name not in targets]
            notice(
                f"{len(others)} layers that lora.targets does not include have adapters from an earlier run. These "
                f"adapters remain and are trained (first layer: {others[0]})"
            )
        return
    num_layers = len(adapted_layers(network))
    trains_alone = all(is_adapter(name) for name, each in network.named_parameters() if each.requires_grad)
    notice(
        f"the model has adapters that this Plan does not contain: rank {named.lora_rank} on {num_layers} layers"
        f"{'' if base == 'as_is' else f', frozen weights in {base}'}. The adapters remain, and "
        f"{'no other parameters are trained' if trains_alone else 'other unfrozen parameters are also trained'}. To "
        f"get a plain model, call merge_lora(model) first ({_IMPORT})"
    )
