"""Eight small Hugging Face models, which are built from their configurations, and random batches for each model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.hugging_face.small import VOCABULARY, WIDTH, small, transformers

LENGTH = 8
Batch = dict[str, Any]
_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


@dataclass(frozen=True)
class Kind:
    """A model and its training batches.

    Attributes:
        make_model: function that creates the model, with or without dropout.
        make_batch: function of the number of samples and a generator. The samples of the returned batch have unequal
            numbers of targets.
        count: function that returns the number of terms over which the model averages the loss of a batch.
    """

    make_model: Callable[[bool], Any]
    make_batch: Callable[[int, torch.Generator], Batch]
    count: Callable[[Batch], int]

    def model(self, *, seed: int = 0, dropout: bool = True) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.make_model(dropout).train()

    def batches(self, num_batches: int, num_samples: int = 2, *, seed: int = 0) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [self.make_batch(num_samples, generator) for _ in range(num_batches)]


def _bert(dropout: bool) -> Any:
    return small("BertForMaskedLM", dropout=0.1 * dropout, max_position_embeddings=LENGTH, pad_token_id=2)


def _gpt2(dropout: bool) -> Any:
    return small("GPT2LMHeadModel", dropout=0.1 * dropout, **_TOKENS)


def _llama(dropout: bool) -> Any:
    return small("LlamaForCausalLM", dropout=0.1 * dropout, **_TOKENS)


def _mixtral(dropout: bool) -> Any:
    # The loss has a term that distributes tokens over the experts.
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
    return small("MixtralForCausalLM", dropout=0.1 * dropout, output_router_logits=True, **experts, **_TOKENS)


def _t5(dropout: bool) -> Any:
    return small("T5ForConditionalGeneration", dropout=0.1 * dropout)


def _vit(dropout: bool) -> Any:
    return small("ViTForImageClassification", dropout=0.1 * dropout)


def _whisper(dropout: bool) -> Any:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=4,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=8,
        max_target_positions=LENGTH,
        decoder_start_token_id=0,
        dropout=0.1 * dropout,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_TOKENS,
    )
    return transformers.WhisperForConditionalGeneration(config)


def _clip(dropout: bool) -> Any:
    both = {**_SIZES, "attention_dropout": 0.1 * dropout}
    text = {**both, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, **_TOKENS}
    image = {**both, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=8))


def _tokens(num_samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (num_samples, LENGTH), generator=generator)


def _some_left_out(tokens: Tensor, generator: torch.Generator) -> Tensor:
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.4, -100)
    labels[:, -1] = tokens[:, -1]  # each sample has at least one term
    return labels


def _text(num_samples: int, generator: torch.Generator) -> Batch:
    tokens = _tokens(num_samples, generator)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": _some_left_out(tokens, generator),
    }


def _images(num_samples: int, generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(num_samples, 3, 8, 8, generator=generator),
        "labels": torch.randint(3, (num_samples,), generator=generator),
    }


def _sounds(num_samples: int, generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(num_samples, 4, 16, generator=generator),
        "labels": _some_left_out(_tokens(num_samples, generator), generator),
    }


def _pairs(num_samples: int, generator: torch.Generator) -> Batch:
    tokens = _tokens(num_samples, generator)
    tokens[:, -1] = _TOKENS["eos_token_id"]  # CLIP reads the features of a text from this position
    return {
        "input_ids": tokens,
        "pixel_values": torch.randn(num_samples, 3, 8, 8, generator=generator),
        "return_loss": True,
    }


def _all_labels(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


def _labels_but_first(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def _samples(batch: Batch) -> int:
    return len(batch["pixel_values"])


KINDS = {
    "bert": Kind(_bert, _text, _all_labels),
    "gpt2": Kind(_gpt2, _text, _labels_but_first),
    "llama": Kind(_llama, _text, _labels_but_first),
    "mixtral": Kind(_mixtral, _text, _labels_but_first),
    "t5": Kind(_t5, _text, _all_labels),
    "vit": Kind(_vit, _images, _samples),
    "whisper": Kind(_whisper, _sounds, _all_labels),
    "clip": Kind(_clip, _pairs, _samples),
}


def logits(model: Any, batch: Batch) -> Tensor:
    """Return the output of ``model`` in evaluation mode for ``batch``, without its loss."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        output = model(**batch)
    model.train(was_training)
    found = getattr(output, "logits", None)
    return output.logits_per_image if found is None else found
