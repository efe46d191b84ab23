"""Workloads for Hugging Face configurations, which contain the shapes of the model and of a batch with the inputs that
the model expects."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from roomier.api.adapt import as_module
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.untrusted import read_json
from roomier.planner.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_TOKENS = 2048
"""Default sequence length. If the model's maximum is smaller, the maximum is used."""
_DEFAULT_LABEL_TOKENS = 128  # length of a transcript in tokens
_DEFAULT_IMAGE_SIZE = 224

# Classes that are tried in this order if a configuration does not name a class. AutoModelForCausalLM is last, because
# it may select only a part of a model, such as the decoder of an encoder-decoder model.
_AUTO_CLASSES = (
    "AutoModelForPreTraining",
    "AutoModelForMaskedLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageClassification",
    "AutoModelForCausalLM",
)


def read_config(path: str | Path) -> PreTrainedConfig:
    """Read the configuration from a ``config.json`` file or from a model folder. Custom code in the folder is not
    executed.

    Raises:
        RoomierError: the file cannot be read, or transformers does not support its ``model_type``.
    """
    from transformers import CONFIG_MAPPING

    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        values = read_json(file, object_hook=_special_float, parse_constant=float)
    except OSError as error:
        action = "Pass the path of a config.json, or a model folder that contains one"
        raise RoomierError("hf", str(path), f"cannot be read: {error.strerror}", action) from None
    except ValueError as error:
        raise RoomierError("hf", str(path), f"is not JSON: {error}", "Pass the config.json of a model") from None
    kind = values.pop("model_type", None) if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        problem = "has no model_type" if kind is None else f"has model_type {kind!r}, which transformers does not know"
        action = 'Add "model_type", such as "llama"' if kind is None else did_you_mean(str(kind), CONFIG_MAPPING)
        raise RoomierError("hf", str(path), problem, action)
    try:
        return CONFIG_MAPPING[kind](**values)
    except Exception as error:
        problem = f"is not a valid configuration for {kind}: {' '.join(str(error).split())}"
        raise RoomierError("hf", str(path), problem, "Correct config.json") from error


def _special_float(values: dict[str, Any]) -> Any:
    """Convert a dict such as ``{"__float__": "Infinity"}``, with which transformers represents non-finite numbers in
    JSON, to a float. Return other dicts unchanged."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def workload_of_config(config: PreTrainedConfig, batch_size: int, num_tokens: int | None = None) -> Workload:
    """Return a workload with a model that is constructed from ``config``, and a batch for it. All tensors are on the
    meta device.

    Args:
        config: transformers configuration.
        batch_size: number of samples in the batch.
        num_tokens: sequence length in tokens, or length of the transcript for a speech model. None uses the maximum
            sequence length of the model, but at most ``DEFAULT_TOKENS``. Images have the size that the configuration
            specifies.

    Raises:
        RoomierError: no model class that computes a loss is known for ``config``, the batch format of the class is not
            supported, or ``num_tokens`` exceeds the maximum length of the model.
    """
    kind = model_class(config)
    make_batch = _batch_of(kind)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # missing in older files
    with torch.device("meta"):
        network = kind(config)
        batch = make_batch(config, batch_size, num_tokens)
    return Workload(as_module(network.train()), batch, batch_size)


def model_class(config: PreTrainedConfig) -> type[nn.Module]:
    """Return the class in ``architectures`` of ``config`` if it computes a loss, otherwise a class for the model type.

    Raises:
        RoomierError: no class that computes a loss is known.
    """
    import transformers

    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    for each in named:
        if each is not None and each.__name__.endswith("ForPreTraining") and "labels" not in _inputs(each):
            if _inputs(each)[:2] != ["pixel_values", "noise"]:
                problem = f"computes its loss from {', '.join(_inputs(each)[:3])}, so its batch format is unknown"
                action = f"Pass --model transformers.{each.__name__} and --input for each of its inputs"
                raise RoomierError("hf", each.__name__, problem, action)
            return cast(type[nn.Module], each)  # masked autoencoders, which sample a mask
    of_kind = [getattr(transformers, auto)._model_mapping.get(type(config), None) for auto in _AUTO_CLASSES]
    for found in (*named, *of_kind):
        kind = found[0] if isinstance(found, (list, tuple)) else found
        # Base models compute no loss. Classes for pretraining are also registered under other names.
        name = "" if kind is None else kind.__name__
        if ("For" in name or "LMHead" in name) and not name.endswith("ForPreTraining"):
            return kind  # type: ignore[no-any-return]
    action = 'Set "architectures" in config.json to a class that computes a loss, or pass --model and --input'
    raise RoomierError("hf", config.model_type, "has no known class in transformers that computes a loss", action)


def _inputs(kind: type[nn.Module]) -> list[str]:
    return [name for name in inspect.signature(kind.forward).parameters if name not in ("self", "kwargs")]


# Functions that create the keyword arguments of forward, given the configuration, the number of samples and the length.
# Tensors are on the current default device.

_MakeBatch = Callable[[Any, int, int | None], dict[str, Any]]


def _batch_of(kind: type[nn.Module]) -> _MakeBatch:
    name, inputs = kind.__name__, getattr(kind, "main_input_name", "input_ids")
    if inputs == "input_ids":
        found = {
            "ForSequenceClassification": _classified_text,
            "ForTokenClassification": _text,
            "ForQuestionAnswering": _answered_text,
            "ForCausalLM": _text,
            "LMHeadModel": _text,
            "ForMaskedLM": _text,
            "ForConditionalGeneration": _text,
        }
    else:
        found = {
            "ForImageClassification": _classified_images,
            "ForPreTraining": _images,
            "ForConditionalGeneration": _transcribed_speech,
        }
    for ending, make in found.items():
        if name.endswith(ending) and not (make is _transcribed_speech and inputs != "input_features"):
            return make
    action = "Pass --model transformers." + name + " and --input 'name=float32[8,3,224,224]' for each of its inputs"
    raise RoomierError("hf", name, f"is not supported, because its batch format is unknown (it reads {inputs})", action)


def _text(config: Any, batch_size: int, num_tokens: int | None) -> dict[str, Tensor]:
    tokens = _ids(batch_size, _length(config, num_tokens))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _classified_text(config: Any, batch_size: int, num_tokens: int | None) -> dict[str, Tensor]:
    return {"input_ids": _ids(batch_size, _length(config, num_tokens)), "labels": _ids(batch_size)}


def _answered_text(config: Any, batch_size: int, num_tokens: int | None) -> dict[str, Tensor]:
    tokens = _ids(batch_size, _length(config, num_tokens))
    return {"input_ids": tokens, "start_positions": _ids(batch_size), "end_positions": _ids(batch_size)}


def _classified_images(config: Any, batch_size: int, num_tokens: int | None) -> dict[str, Tensor]:
    size = getattr(config, "image_size", None) or _DEFAULT_IMAGE_SIZE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.empty(batch_size, channels, height, width), "labels": _ids(batch_size)}


def _images(config: Any, batch_size: int, num_tokens: int | None) -> dict[str, Tensor]:
    return {"pixel_values": _classified_images(config, batch_size, num_tokens)["pixel_values"]}


def _transcribed_speech(config: Any, batch_size: int, num_tokens: int | None) -> dict[str, Tensor]:
    num_bins = getattr(config, "num_mel_bins", None) or config.input_feat_per_channel
    # Whisper requires 30 seconds of input, whose number of frames its encoder halves. Other models accept any number of
    # frames.
    num_frames = 2 * getattr(config, "max_source_positions", 1500)
    longest = config.max_target_positions
    num_labels = _checked(num_tokens, longest) if num_tokens else min(longest, _DEFAULT_LABEL_TOKENS)
    features = torch.empty(batch_size, num_bins, num_frames)
    if config.model_type == "speech_to_text":
        features = torch.empty(batch_size, num_frames // 2, num_bins)
    return {"input_features": features, "labels": _ids(batch_size, num_labels)}


def _ids(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.long)


def longest_of(config: Any) -> int | None:
    """Return the maximum sequence length of the model in tokens; None if there is no limit."""
    text = config.get_text_config()
    return getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)


def _length(config: Any, num_tokens: int | None) -> int:
    longest = longest_of(config)
    if num_tokens is None:
        return min(longest or DEFAULT_TOKENS, DEFAULT_TOKENS)
    return _checked(num_tokens, longest)


def _checked(num_tokens: int, longest: int | None) -> int:
    if longest is not None and num_tokens > longest:
        problem = f"must be at most {longest}, the number of positions of the model"
        action = "Shorten the sequences, or increase the number of positions in config.json"
        raise RoomierError("seq_len", num_tokens, problem, action)
    return num_tokens
