"""Small Hugging Face models, created from their configurations."""

from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
transformers.PreTrainedModel  # noqa: B018 - imports the code of models once, instead of in each rank

VOCABULARY = 23
WIDTH = 16
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
_POSITIONS = {"max_position_embeddings": 16}
_DECODER = {"num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 0}
_MORE: dict[str, dict[str, int]] = {  # by model type
    "bert": _POSITIONS,
    "gpt2": {**_POSITIONS, "bos_token_id": 0, "eos_token_id": 0},
    "llama": _DECODER,
    "mixtral": _DECODER,
    "t5": {"d_kv": 8, "decoder_start_token_id": 0},
    "vit": {"image_size": 8, "patch_size": 4, "num_labels": 3},
}
_ENCODER_RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_RATES = {
    "bert": _ENCODER_RATES,
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
    "mixtral": ("attention_dropout",),
    "t5": ("dropout_rate",),
    "vit": _ENCODER_RATES,
}
_NAMES = {  # names of settings that differ from the names in the other models
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    "t5": {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "d_ff",
    },
}
_UNUSED = {"gpt2": {"intermediate_size"}, "vit": {"vocab_size"}}


def small(class_name: str, *, dropout: float = 0.0, **settings: Any) -> Any:
    """Return a new model with two layers of width 16.

    Args:
        class_name: class of ``transformers``, such as ``"BertForMaskedLM"``.
        dropout: rate of every dropout in the model.
        settings: other settings of the configuration. For every model, the names of sizes are the names that BERT uses.
    """
    kind = getattr(transformers, class_name)
    type_name = kind.config_class.model_type
    common = {name: value for name, value in _SIZES.items() if name not in _UNUSED.get(type_name, ())}
    given = {**common, **_MORE[type_name], **dict.fromkeys(_RATES[type_name], dropout), **settings}
    names = _NAMES.get(type_name, {})
    return kind(kind.config_class(**{names.get(name, name): value for name, value in given.items()}))
