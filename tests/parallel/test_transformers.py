"""Tests that Hugging Face models, created from a config, train under every strategy without changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier.api.blocks import find_blocks
from tests.parallel.parity import Batch, Setup, Task, distance, train_bare, train_on_ranks
from tests.ranks.pool import RankPool

transformers = pytest.importorskip("transformers")

transformers.PreTrainedModel  # noqa: B018 - imports the code of models one time, instead of in each rank

VOCABULARY = 23
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
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return transformers.GPT2LMHeadModel(config).train()


class Llama(FromConfig):
    def make_network(self) -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.LlamaForCausalLM(config).train()


class Bert(FromConfig):
    is_causal = False

    def make_network(self) -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=16,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return transformers.BertForMaskedLM(config).train()


class T5(FromConfig):
    """T5, whose encoder and decoder share an embedding."""

    is_causal = False

    def make_network(self) -> nn.Module:
        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )
        return transformers.T5ForConditionalGeneration(config).train()


class ViT(FromConfig):
    def make_network(self) -> nn.Module:
        config = transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return transformers.ViTForImageClassification(config).train()

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
    """Uses a single step, because later steps amplify rounding errors. See ``test_equivalence.py``."""
    setup = Setup("zero3", 2, precision="bf16-mixed", num_steps=1)
    # The embeddings of ViT are a unit with direct parameters, which are all-gathered in bf16.
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
