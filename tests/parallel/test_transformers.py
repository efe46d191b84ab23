"""Tests that Hugging Face models, created from a config, train under every strategy without changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier.api.blocks import find_blocks
from tests.hugging_face.small import VOCABULARY, small
from tests.parallel.parity import Batch, Setup, Task, distance, train_bare, train_on_ranks
from tests.ranks.pool import RankPool

pytestmark = pytest.mark.more

LENGTH = 8


class FromConfig(Task):
    """A language model whose inputs and labels are tokens. Some labels are ignored."""

    is_causal = True

    def make_batch(self, num_samples: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(VOCABULARY, (num_samples, LENGTH), generator=generator)
        labels = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.3, -100)
        labels[:, -1] = tokens[:, -1]  # each sample has a loss term
        return {"input_ids": tokens, "labels": labels}

    def loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.network(**batch).loss
        return loss

    def count_terms(self, batch: Batch) -> int:
        labels = batch["labels"][:, 1:] if self.is_causal else batch["labels"]
        return int((labels != -100).sum())

    def num_loss_terms(self, batch: Any) -> int:
        return self.count_terms(batch)


class GPT2(FromConfig):
    """GPT-2, whose head and token embedding are tied."""

    def make_network(self) -> nn.Module:
        return small("GPT2LMHeadModel").train()


class Llama(FromConfig):
    def make_network(self) -> nn.Module:
        return small("LlamaForCausalLM").train()


class Bert(FromConfig):
    is_causal = False

    def make_network(self) -> nn.Module:
        return small("BertForMaskedLM", intermediate_size=32).train()


class T5(FromConfig):
    """T5, whose encoder and decoder share an embedding."""

    is_causal = False

    def make_network(self) -> nn.Module:
        return small("T5ForConditionalGeneration", intermediate_size=32).train()


class ViT(FromConfig):
    def make_network(self) -> nn.Module:
        return small("ViTForImageClassification", intermediate_size=32).train()

    def make_batch(self, num_samples: int, generator: torch.Generator) -> Batch:
        return {
            "pixel_values": torch.randn(num_samples, 3, 8, 8, generator=generator),
            "labels": torch.randint(3, (num_samples,), generator=generator),
        }

    def count_terms(self, batch: Batch) -> int:
        return len(batch["labels"])


TASKS = [GPT2, Llama, Bert, T5, ViT]


def check_models(on_ranks: RankPool, tasks: list[type[FromConfig]], strategy: str) -> None:
    setup = Setup(strategy, 2, accumulate=2, clip=1.0, num_steps=4)
    results = on_ranks.each(2, train_on_ranks, [(task, setup) for task in tasks])
    for task, [trained, *_] in zip(tasks, results, strict=True):
        apart = distance(trained, train_bare(task, setup))
        assert max(apart.losses, apart.norms, apart.weights) < 1e-5, (task.__name__, apart)


@pytest.mark.parametrize(("tasks", "strategy"), [(TASKS[::2], "zero2"), (TASKS[1::2], "zero3")])
def test_models_match_one_process(on_ranks: RankPool, tasks: list[type[FromConfig]], strategy: str) -> None:
    check_models(on_ranks, tasks, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_every_model_matches_one_process(on_ranks: RankPool, strategy: str) -> None:
    check_models(on_ranks, TASKS, strategy)


def test_models_in_bf16_match_one_process(on_ranks: RankPool) -> None:
    """The test uses a single step, because later steps amplify rounding errors. See ``test_equivalence.py``."""
    setup = Setup("zero3", 2, precision="bf16-mixed", num_steps=1)
    # The embeddings of ViT are a unit that directly contains parameters, which are all-gathered in bf16.
    tolerances = {GPT2: 1e-5, Llama: 1e-5, ViT: 1e-3}
    results = on_ranks.each(2, train_on_ranks, [(task, setup) for task in tolerances])
    for (task, tolerance), [trained, *_] in zip(tolerances.items(), results, strict=True):
        apart = distance(trained, train_bare(task, setup, in_parts=True))
        assert apart.losses < tolerance, (task.__name__, apart)
        assert apart.weights < 2**-8, (task.__name__, apart)


@pytest.mark.parametrize(("task", "num_blocks"), [(GPT2, 2), (Llama, 2), (Bert, 2), (T5, 4), (ViT, 2)])
def test_blocks_are_the_layers(task: Callable[[], FromConfig], num_blocks: int) -> None:
    blocks = find_blocks(task().network)
    # Bert also lists its embeddings in _no_split_modules.
    layers = [block for block in blocks if "Embeddings" not in type(block).__name__]
    assert len(layers) == num_blocks, [type(block).__name__ for block in blocks]
    assert len({type(block) for block in layers}) == 1
