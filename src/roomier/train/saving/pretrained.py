"""Description of a Hugging Face model, which is stored in its checkpoints."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from roomier.core.hugging_face import find_pretrained


def pretrained_config(module: nn.Module) -> dict[str, Any] | None:
    """Return a description of the Hugging Face model that ``module`` is or contains; None if it contains no such model.

    Returns:
        ``{"prefix": ..., "config": {...}, "generation_config": {...}}``. The names of the model's weights start with
        the prefix, such as ``"model."`` or ``""``. The generation config is None if the model does not generate text.
    """
    found = find_pretrained(module)
    if found is None:
        return None
    prefix, model = found
    config = json.loads(model.config.to_json_string(use_diff=False))
    # fully_shard creates a class for each module.
    own = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch."))
    config["architectures"] = [own.__name__]
    generation = getattr(model, "generation_config", None) if model.can_generate() else None
    return {
        "prefix": prefix,
        "config": config,
        "generation_config": None if generation is None else json.loads(generation.to_json_string()),
    }
