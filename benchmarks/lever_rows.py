"""The rows of ``python -m benchmarks levers``: their names, and their arguments for roomier and for the Hugging Face
Trainer.

The first nine rows reproduce the table of Hugging Face's guide "Efficient Training on a Single GPU" (transformers 4.30,
one V100, bert-large, 4 sequences of 512 tokens per step). The other rows are not in the guide and are measured only
with roomier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BATCH_SIZE = 4
"""Sequences per optimizer step in every row."""

_ACCUMULATED = {"accumulate_grad_batches": BATCH_SIZE}
_ACCUMULATED_PEER = {"gradient_accumulation_steps": BATCH_SIZE}
_ALL = {**_ACCUMULATED, "activation_checkpointing": "full", "precision": "16"}
_ALL_PEER = {**_ACCUMULATED_PEER, "gradient_checkpointing": True, "precision": "16"}


@dataclass(frozen=True)
class Row:
    """One memory technique or a combination of techniques.

    Attributes:
        roomier: arguments of roomier's Trainer. The precision ``"16"`` means fp16 on a GPU and bf16 on a CPU.
        transformers: fields of TrainingArguments, and ``precision`` with the same values. None if the row is not
            measured with transformers.
        needs: package that transformers requires for this technique.
        published: values in the guide: samples per second, and memory in MB.
        only_causal: True if the technique applies only to language models with a large output layer.
    """

    roomier: Mapping[str, Any]
    transformers: Mapping[str, Any] | None = None
    needs: str | None = None
    published: tuple[float, int] | None = None
    only_causal: bool = False


FRAMEWORKS = ("roomier", "transformers")


def keywords_of(lever: str, device_type: str) -> dict[str, Any]:
    """Return the arguments of roomier's Trainer for a row, including the optimizer."""
    keywords = {"optimizer": "adamw", **ROWS[lever].roomier}
    if keywords.get("precision") == "16":
        keywords["precision"] = "bf16-mixed" if device_type == "cpu" else "16-mixed"
    return keywords


ROWS: dict[str, Row] = {
    "vanilla": Row({}, {}, published=(8.86, 14949)),
    "accumulation": Row(_ACCUMULATED, _ACCUMULATED_PEER, published=(7.75, 8681)),
    "checkpointing": Row(
        {**_ACCUMULATED, "activation_checkpointing": "full"},
        {**_ACCUMULATED_PEER, "gradient_checkpointing": True},
        published=(5.99, 6775),
    ),
    "mixed": Row({"precision": "16"}, {"precision": "16"}, published=(18.64, 13939)),
    "all": Row(_ALL, _ALL_PEER, published=(10.09, 7275)),
    "adafactor": Row({"optimizer": "adafactor"}, {"optim": "adafactor"}, published=(7.96, 12295)),
    "adafactor+all": Row(
        {**_ALL, "optimizer": "adafactor"}, {**_ALL_PEER, "optim": "adafactor"}, published=(9.06, 4847)
    ),
    "adam8bit": Row(
        {"optimizer": "adamw8bit"}, {"optim": "adamw_bnb_8bit"}, needs="bitsandbytes", published=(9.15, 13085)
    ),
    "adam8bit+all": Row(
        {**_ALL, "optimizer": "adamw8bit"},
        {**_ALL_PEER, "optim": "adamw_bnb_8bit"},
        needs="bitsandbytes",
        published=(10.35, 5363),
    ),
    "adam4bit": Row({"optimizer": "adamw4bit"}),
    "selective": Row({"activation_checkpointing": "selective"}),
    "budget 0.5": Row({"activation_checkpointing": 0.5}),
    "step in backward": Row({"step_in_backward": True}),
    "chunked loss": Row({"chunked_loss": True}, only_causal=True),
    "offload": Row({"offload": {"activations": "cpu"}}),
    "most": Row(
        {
            "activation_checkpointing": "full",
            "precision": "bf16-mixed",  # step_in_backward does not support the loss scale of fp16
            "optimizer": "adamw8bit",
            "step_in_backward": True,
        }
    ),
}
"""Mapping from names to rows, in the order of the table."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model in the table.

    Attributes:
        family: ``"bert"`` (classifies a sequence) or ``"gpt2"`` (predicts the next token).
        num_layers: number of Transformer layers.
        num_heads: attention heads per layer.
        width: hidden size.
    """

    family: str
    num_layers: int
    num_heads: int
    width: int


BERT_SIZES: dict[str, Sizes] = {
    name: Sizes("bert", num_layers, num_heads, width)
    for name, num_layers, num_heads, width in (
        ("bert-large", 24, 16, 1024),
        ("bert-base", 12, 12, 768),
        ("bert-medium", 8, 8, 512),
        ("bert-small", 4, 8, 512),
        ("bert-mini", 4, 4, 256),
        ("bert-tiny", 2, 2, 128),
    )
}
"""The two sizes of BERT (Devlin et al. 2018) and smaller sizes (Turc et al. 2019)."""
