"""The configuration of a Hugging Face model, for a checkpoint.

transformers is never imported here: who has such a model has imported it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import nn


def pretrained_config(module: nn.Module) -> dict[str, Any] | None:
    """``{"prefix": ..., "config": {...}}`` of the Hugging Face model that ``module`` is or holds; None where there is
    none. The prefix is that of its weights' names: ``"model."``, say, or ``""``."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return None
    for name, each in module.named_modules():
        if isinstance(each, modeling.PreTrainedModel):
            config = json.loads(each.config.to_json_string(use_diff=False))
            # fully_shard makes a class of its own for each module.
            own = next(cls for cls in type(each).__mro__ if not cls.__module__.startswith("torch."))
            config["architectures"] = [own.__name__]
            return {"prefix": f"{name}." if name else "", "config": config}
    return None
