"""Functions that find a Hugging Face model in a module and convert its weights between files and memory.

transformers 5 stores some weights differently in memory than in files: for example, the experts of a layer are one
tensor in memory, or a layer has a different name. transformers converts these weights when it loads and saves a model.
This file applies the same rules to one group of tensors at a time, so that the full model is never in memory. The
conversions receive a model of transformers, so the package is already imported, by the user's code or by
``roomier.checkpoint.export.hugging_face``.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Conversion:
    """Conversion of a group of tensors. The conversion depends on no other tensors.

    Attributes:
        sources: names of the input tensors.
        targets: shapes of the output tensors, with their names as keys.
        run: function that converts a dict of sources to a dict of targets; None if the tensor is only renamed.
    """

    sources: tuple[str, ...]
    targets: dict[str, tuple[int, ...]]
    run: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None


def is_cache(value: object) -> bool:
    """Return whether ``value`` is a cache of keys and values of transformers."""
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def data_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration without the entries that refer to code.

    transformers imports the code to which such entries refer. If the code is not installed, transformers downloads the
    code from the hub.
    """
    return {
        key: data_of_config(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not (key == "auto_map" or "_implementation" in key)
    }


def find_pretrained(module: nn.Module) -> tuple[str, Any] | None:
    """Return the first Hugging Face model in ``module`` and the prefix of its weights, such as ``"model."`` or ``""``.

    Returns None if the module contains no such model.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return None
    for name, each in module.named_modules():
        if isinstance(each, modeling.PreTrainedModel):
            return f"{name}." if name else "", each
    return None


def conversions_from_files(model: Any, stored: Shapes, wanted: Shapes) -> list[Conversion]:
    """Return the conversions from the tensors in files to the tensors of ``model``, as in ``from_pretrained``.

    Args:
        stored: shape of each tensor in the files, by name.
        wanted: shape of each tensor of the model, by name.

    Returns:
        The conversions. If there is no rule for a name, the name is unchanged. Names that ``from_pretrained`` ignores
        are omitted. The list is empty if transformers has no rules (before version 5).
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
        run = partial(_converted, model, converter_of[sources[0][1]], target, sources)
        made = run({name: torch.empty(stored[name], device="meta") for name, _ in sources})
        shapes = {each: tuple(tensor.shape) for each, tensor in made.items()}
        found.append(Conversion(tuple(name for name, _ in sources), shapes, run))
    return found


def _converted(
    model: Any, rule: Any, target: str, sources: list[tuple[str, str]], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    own = copy.deepcopy(rule)  # a rule stores its inputs, so each call uses a copy
    for name, pattern in sources:
        own.add_tensor(target, name, pattern, tensors[name])
    return _whole(own.convert(target, model=model, config=model.config))


def conversions_to_files(model: Any, held: Shapes) -> list[Conversion]:
    """Return the conversions from the tensors of ``model`` to the tensors in files, as in ``save_pretrained``.

    Args:
        model: a model that was created from its configuration; it can be on ``meta``.
        held: shape of each tensor to write, by name.

    Returns:
        The conversions. If transformers has no rules (before version 5), each name is unchanged.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, revert_weight_conversion
    except ImportError:
        return [Conversion((name,), {name: shape}, None) for name, shape in held.items()]
    # These are the rules that save_pretrained uses for a model created from its configuration, computed once for
    # all tensors.
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
    several: list[tuple[set[str], set[str]]] = []  # Pairs (sources, targets) of the conversions with several sources.
    for name, tensor in without_memory.items():
        try:
            made = run({name: tensor})
        except Exception:  # the rule requires all of its source tensors
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
    """Return ``groups`` and the group of ``sources`` and ``targets``. Groups with a common target, or without targets,
    are merged."""
    apart = []
    for group in groups:
        if group[1] & targets or not (group[1] or targets):
            sources, targets = sources | group[0], targets | group[1]
        else:
            apart.append(group)
    return [*apart, (sources, targets)]


def _whole(made: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
