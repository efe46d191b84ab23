"""Norms and biases do not decay, as in the Trainer of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roomier.techniques.optim.by_name import make_optimizer
from tests.covering import few
from tests.hugging_face.models import KINDS, transformers

# The two libraries differ here. In roomier, parameters with fewer than two dimensions never decay, as in CLIP's
# training.
NO_WEIGHTS = {"clip": {"logit_scale", "vision_model.embeddings.class_embedding"}}


def decaying(optimizer: torch.optim.Optimizer, network: nn.Module) -> set[str]:
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups = [group for group in optimizer.param_groups if group["weight_decay"]]
    return {names[id(parameter)] for group in groups for parameter in group["params"]}


def test_norms_biases_and_tables_of_biases_do_not_decay() -> None:
    model = KINDS["t5"].model()
    matrices = {name for name, each in model.named_parameters() if each.dim() >= 2}
    plain = {name for name in matrices if "relative_attention_bias" not in name}
    assert decaying(make_optimizer("adamw8bit", model, weight_decay=0.1), model) == plain
    assert 0 < len(plain) < len(matrices)


@pytest.mark.slow  # importing the Trainer of transformers takes seconds
@pytest.mark.parametrize("name", few(KINDS, 3))
def test_same_parameters_decay_as_in_the_trainer_of_transformers(name: str) -> None:
    model = KINDS[name].model()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    theirs = set(transformers.Trainer.get_decay_parameter_names(None, model)) & trained
    for optimizer in ("adamw", "adamw8bit", "lion"):
        ours = decaying(make_optimizer(optimizer, model, weight_decay=0.1), model)
        assert theirs - ours == NO_WEIGHTS.get(name, set())
        assert ours <= theirs
