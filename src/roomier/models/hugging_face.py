"""A Hugging Face model in a module, and how the names of its weights in files become those in the model.

transformers 5 holds some weights otherwise than files do: the experts of a layer are one tensor, a layer has a newer
name. It converts on the way in and out; here the same rules are asked for, tensor by tensor, so that a model is never
whole in memory. transformers is not imported for that: who has such a model has imported it.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Conversion:
    """Some tensors that are made of others, and of no others.

    Attributes:
        sources: the names of what it is made of.
        targets: name -> shape of what is made.
        run: ``sources`` by name -> ``targets`` by name. None where one is the other, under another name.
    """

    sources: tuple[str, ...]
    targets: dict[str, tuple[int, ...]]
    run: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None


def data_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration without the entries that name code: transformers imports what they name, from the
    hub if it is not installed."""
    return {
        key: data_of_config(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not (key == "auto_map" or "_implementation" in key)
    }


def find_pretrained(module: nn.Module) -> tuple[str, Any] | None:
    """The first Hugging Face model that ``module`` is or holds, and the prefix of its weights' names: ``"model."``,
    say, or ``""``. None where there is none."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return None
    for name, each in module.named_modules():
        if isinstance(each, modeling.PreTrainedModel):
            return f"{name}." if name else "", each
    return None


def conversions_from_files(model: Any, stored: Shapes, wanted: Shapes) -> list[Conversion]:
    """How the tensors of files become those of ``model``, by the rules of its ``from_pretrained``.

    Args:
        stored: name -> shape in the files. wanted: name -> shape in the model.

    Returns:
        For each name in ``stored`` that the rules leave as it is, or do not know, a renaming to itself; names that
        ``from_pretrained`` is to ignore are left out. Empty where transformers has no such rules (before version 5).
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return []
    rules = get_model_conversion_mapping(model)
    renamings = [each for each in rules if isinstance(each, WeightRenaming)]
    converters = [each for each in rules if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    ignored = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    found: list[Conversion] = []
    grouped: dict[str, list[tuple[str, str]]] = {}
    known = dict(wanted)
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if renamed not in wanted and name in wanted:
            renamed, pattern = name, None
        if pattern is not None:
            grouped.setdefault(renamed, []).append((name, pattern))
        elif renamed in wanted or not any(each.search(renamed) for each in ignored):
            found.append(Conversion((name,), {renamed: stored[name]}, None))
    for target, sources in grouped.items():
        run = _converter(model, converter_of[sources[0][1]], target, sources)
        made = run({name: torch.empty(stored[name], device="meta") for name, _ in sources})
        shapes = {each: tuple(tensor.shape) for each, tensor in made.items()}
        found.append(Conversion(tuple(name for name, _ in sources), shapes, run))
    return found


def _converter(
    model: Any, rule: Any, target: str, sources: list[tuple[str, str]]
) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = copy.deepcopy(rule)  # it collects what it is given
        for name, pattern in sources:
            own.add_tensor(target, name, pattern, tensors[name])
        return _whole(own.convert(target, model=model, config=model.config))

    return run


def conversions_to_files(model: Any, held: Shapes) -> list[Conversion]:
    """How the tensors of ``model`` become those of files, as its ``save_pretrained`` writes them.

    Args:
        model: one made from its configuration, also on ``meta``. held: name -> shape of what is to be written.

    Returns:
        Renamings to themselves where transformers has no rules (before version 5).
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, revert_weight_conversion
    except ImportError:
        return [Conversion((name,), {name: shape}, None) for name, shape in held.items()]
    # As save_pretrained has it for a model from its configuration; asked for once, and not for each tensor.
    rules = [
        each for each in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(each, PrefixChange)
    ]
    if not rules:
        return [Conversion((name,), {name: shape}, None) for name, shape in held.items()]
    model._weight_conversions = rules

    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _whole(revert_weight_conversion(model, dict(tensors)))

    without_memory = {name: torch.empty(shape, device="meta") for name, shape in held.items()}
    all_shapes = {name: tuple(each.shape) for name, each in run(without_memory).items()}
    found: list[Conversion] = []
    several: list[tuple[set[str], set[str]]] = []  # (sources, targets) of what is not made of one alone
    for name, tensor in without_memory.items():
        try:
            made = run({name: tensor})
        except Exception:  # a rule that asks for all of its tensors
            made = {}
        shapes = {each: tuple(other.shape) for each, other in made.items()}
        if not shapes or any(all_shapes.get(each) != shape for each, shape in shapes.items()):
            several = _joined(several, {name}, set(shapes))
        elif len(made) == 1 and next(iter(made.values())) is tensor:
            found.append(Conversion((name,), shapes, None))
        else:
            found.append(Conversion((name,), shapes, run))
    for sources, _ in several:
        made = run({name: without_memory[name] for name in held if name in sources})
        shapes = {each: tuple(other.shape) for each, other in made.items()}
        found.append(Conversion(tuple(name for name in held if name in sources), shapes, run))
    return found


def _joined(
    groups: list[tuple[set[str], set[str]]], sources: set[str], targets: set[str]
) -> list[tuple[set[str], set[str]]]:
    """``groups`` and one more, those that have a target in common, or none at all, as one."""
    apart = []
    for group in groups:
        if group[1] & targets or not (group[1] or targets):
            sources, targets = sources | group[0], targets | group[1]
        else:
            apart.append(group)
    return [*apart, (sources, targets)]


def _whole(made: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
