"""Small models whose blocks can run on slices of a sequence, and models whose blocks cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roomier.models.gpt import GPT, GPTConfig

VOCABULARY, WIDTH, LAYERS, MAX_LENGTH = 32, 32, 2, 40
Batch = dict[str, Tensor]


def tokens(num_samples: int, length: int, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (num_samples, length), generator=generator)
    ignored = torch.rand(num_samples, length, generator=generator) < 0.3
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}


def padded(num_samples: int, length: int, seed: int = 1) -> Batch:
    batch = tokens(num_samples, length, seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[::2, -3:] = 0
    return {**batch, "labels": batch["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


def padded_left(num_samples: int, length: int, seed: int = 1) -> Batch:
    """Return samples in which the first queries attend to no token. torch's kernels differ for such queries."""
    return {name: each.flip(1) for name, each in padded(num_samples, length, seed).items()}


class Own(nn.Module):
    """A decoder of blocks that receive only a hidden state, of shape (B, T, D).

    Args:
        recomputes: True if the model recomputes its blocks itself.
        is_halved: True if a second forward pass has half of the tokens.
    """

    def __init__(self, block: Callable[[], nn.Module], recomputes: bool = False, is_halved: bool = False) -> None:
        super().__init__()
        self.recomputes, self.is_halved = recomputes, is_halved
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(LAYERS)])
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def hidden(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, labels = self.hidden(input_ids), labels.roll(1, 1)
        loss = F.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)
        if not self.is_halved:
            return loss
        others = self.hidden(input_ids[:, ::2])
        return loss + others.pow(2).sum() / (labels != -100).sum()


class Skipping(Own):
    """A classifier that skips its last block in each third forward pass."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True))
        self.num_passes = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.num_passes += 1
        x = self.embedding(input_ids)
        for layer in self.layers[: -1 if self.num_passes % 3 == 0 else None]:
            x = layer(x)
        return F.cross_entropy(self.out(x.mean(1)), input_ids[:, 0])


class Encoder(nn.Module):
    """torch's own encoder layers with hidden states of shape (T, B, D), and frozen embeddings."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.embedding.weight.requires_grad_(False)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout) for _ in range(LAYERS)])
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(
            self.out(x).transpose(0, 1).flatten(0, 1), labels.roll(1, 1).flatten(), ignore_index=-100
        )


class Pair(nn.Module):
    """A block that returns its hidden state and its residual, receives a padding mask, and computes the full mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, residual: Tensor, distances: Tensor, pads: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + residual
        heads = self.qkv(self.norm(residual)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mask = distances[None, None] + pads[:, None, None]
        y = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2)), residual


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Pair() for _ in range(LAYERS)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        places = torch.arange(input_ids.shape[1], dtype=x.dtype)
        distances, pads = -(places[:, None] - places).abs() / 4, (input_ids == 3).to(x.dtype) * -9
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual, distances, pads)
        logits = (x + residual) @ self.embedding.weight.T  # tied weights
        return F.cross_entropy(logits.flatten(0, 1), labels.roll(1, 1).flatten(), ignore_index=-100)


def own(dropout: float = 0.0, **options: Any) -> Own:
    return Own(lambda: nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout, batch_first=True), **options)


class Block(nn.Module):
    """Attention with an operation ``other`` on the input, of shape (B, T, D)."""

    def __init__(self, other: str = "") -> None:
        super().__init__()
        self.qkv, self.linear = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(before := x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.other == "mask" else None
        if self.other == "by hand":
            y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + y.transpose(1, 2).flatten(2)
        if self.other == "convolution":
            return x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        if self.other == "detached mean":
            return x + self.linear(x).detach().mean(1, keepdim=True)
        if self.other == "statistics":
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.other == "in place":
            before += self.linear(x)
        if self.other == "positions":
            return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return x + self.linear(x)


def of_blocks(*others: str) -> nn.Module:
    kinds = cycle(others)
    return Own(lambda: Block(next(kinds)))


@dataclass
class State:
    """A hidden state in a class that torch does not know."""

    x: Tensor


class InState(Block):
    def forward(self, state: Any) -> Any:
        if isinstance(state, State):
            return State(super().forward(state.x))
        return {"x": super().forward(state["x"]), "places": state["places"]}


class Packed(Own):
    """A decoder whose blocks receive and return a dict or a :class:`State`."""

    def __init__(self, is_dict: bool) -> None:
        super().__init__(InState)
        self.is_dict = is_dict

    def hidden(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        state: Any = {"x": x, "places": torch.arange(x.shape[1])} if self.is_dict else State(x)
        for layer in self.layers:
            state = layer(state)
        found: Tensor = state["x"] if self.is_dict else state.x
        return found


class Later(nn.Module):
    """Two blocks with layers after them.

    Args:
        reads: function of the network, the last block's output and the last hidden state, which is added to the loss.
    """

    def __init__(self, *layers: nn.Module, reads: Callable[[Any, Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.norm, self.later = nn.LayerNorm(WIDTH), nn.ModuleList(layers)
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.reads = reads

    def get_output_embeddings(self) -> nn.Module:
        return self.out

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        y = self.norm(x)
        for layer in self.later:
            y = layer(y)
        loss = F.cross_entropy(self.out(y).flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss if self.reads is None else loss + self.reads(self, x, y)


def hugging_face(name: str, **options: Any) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "max_position_embeddings": MAX_LENGTH,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, options.pop("config"))(**{**sizes, **options})
    network: nn.Module = getattr(transformers, name)(config)
    return network


def gpt(dropout: float = 0.0) -> nn.Module:
    return GPT(GPTConfig(VOCABULARY, MAX_LENGTH, LAYERS, 4, WIDTH, dropout, tied_head=True))


def llama(num_kv_heads: int, **options: Any) -> nn.Module:
    return hugging_face("LlamaForCausalLM", config="LlamaConfig", num_key_value_heads=num_kv_heads, **options)


def mixtral(**options: Any) -> nn.Module:
    return hugging_face(
        "MixtralForCausalLM",
        config="MixtralConfig",
        num_key_value_heads=4,
        num_local_experts=4,
        experts_implementation="eager",
        **options,
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "encoder": Encoder,
    "recomputed": lambda: own(recomputes=True),
    "gpt dropout": lambda: gpt(0.2),
    "gpt2 dropout": lambda: hugging_face("GPT2LMHeadModel", config="GPT2Config", attn_pdrop=0.2),
    "encoder dropout": lambda: Encoder(0.2),
    "recomputed dropout": lambda: own(0.2, recomputes=True),
    "skipping": Skipping,
    "two lengths": lambda: own(is_halved=True),
    "two lengths recomputed": lambda: own(is_halved=True, recomputes=True),
    "later": lambda: Later(nn.Linear(WIDTH, WIDTH), nn.GELU()),
    "pairs": Paired,
    "llama 8": lambda: llama(8),
    "llama 2": lambda: llama(2),
    "llama 1": lambda: llama(1, tie_word_embeddings=True),
    "llama padded": lambda: llama(2),
    "mixtral": mixtral,
    "mixtral router": lambda: mixtral(output_router_logits=True, router_aux_loss_coef=1.0),
    "qwen3": lambda: hugging_face("Qwen3ForCausalLM", config="Qwen3Config", num_key_value_heads=2, head_dim=4),
    "gemma3": lambda: hugging_face(
        "Gemma3ForCausalLM",
        config="Gemma3TextConfig",
        num_key_value_heads=4,
        head_dim=4,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": lambda: hugging_face(
        "GPT2LMHeadModel", config="GPT2Config", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "bert padded": lambda: hugging_face(
        "BertForMaskedLM", config="BertConfig", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "falcon padded left": lambda: hugging_face(
        "FalconForCausalLM",
        config="FalconConfig",
        alibi=True,
        new_decoder_architecture=False,
        multi_query=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    "falcon": lambda: hugging_face(
        "FalconForCausalLM",
        config="FalconConfig",
        alibi=True,
        new_decoder_architecture=True,
        num_kv_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
}
OWN = (
    "encoder",
    "encoder dropout",
    "pairs",
    "later",
    "recomputed",
    "recomputed dropout",
    "skipping",
    "two lengths",
    "two lengths recomputed",
)
CASTS = NETWORKS.keys() - {*OWN, "gpt", "gpt dropout"}
"""Models of Hugging Face, some of which compute norms, positions or their loss in float32."""


def batch_of(name: str, num_samples: int, length: int, seed: int) -> Batch:
    make = padded_left if "left" in name else padded if "padded" in name else tokens
    return make(num_samples, length, seed)


def loss_of(name: str, network: nn.Module, batch: Batch) -> Tensor:
    if name in OWN:
        loss: Tensor = network(batch["input_ids"], batch["labels"])
    elif name in ("gpt", "gpt dropout"):
        loss = network(batch["input_ids"], batch["labels"])[1]
    elif "padded" in name or "router" in name:
        loss = network(**batch).loss
    else:
        logits, labels = network(batch["input_ids"]).logits, batch["labels"]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return loss
