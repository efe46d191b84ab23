"""Adapters that a model retains from an earlier run, even if the Plan of the current run does not contain them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from roomier.core.errors import PlanError
from roomier.core.log import notice
from roomier.plan import Plan
from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.layers import Adapted, InFewBits, is_adapter, rank_of
from roomier.techniques.adapters.lora import adaptable_in_blocks, adapted_layers, target_layers

_IMPORT = "from roomier.adapters import merge_lora"


def adapters_of(network: nn.Module, blocks: Sequence[nn.Module]) -> AdapterPlan | None:
    """Return the settings that would create the adapters of ``network`` on a plain model; None if ``network`` has no
    adapters."""
    layers = {name: each for name, each in network.named_modules() if isinstance(each, Adapted)}
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
    plain = AdapterPlan()
    fields = {each.name: getattr(adapters, each.name) for each in dataclasses.fields(adapters)}
    given = {name: value for name, value in fields.items() if value != getattr(plain, name)}
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
    num_layers = sum(isinstance(each, Adapted) for each in network.modules())
    trains_alone = all(is_adapter(name) for name, each in network.named_parameters() if each.requires_grad)
    notice(
        f"the model has adapters that this Plan does not contain: rank {named.lora_rank} on {num_layers} layers"
        f"{'' if base == 'as_is' else f', frozen weights in {base}'}. The adapters remain, and "
        f"{'no other parameters are trained' if trains_alone else 'other unfrozen parameters are also trained'}. To "
        f"get a plain model, call merge_lora(model) first ({_IMPORT})"
    )
