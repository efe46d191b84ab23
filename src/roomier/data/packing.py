"""Collate function that concatenates samples of different lengths instead of padding them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roomier.api.loss_terms import IGNORE_INDEX, TARGET_KEYS
from roomier.core.errors import DataError


class PackedCollate:
    """Collate function for a causal language model that concatenates the samples of a batch into one row.

    The batch contains no padding. The model must limit attention to the tokens of one sample. Hugging Face's models
    limit attention in this way if they receive ``position_ids`` that restart at each sample, no ``attention_mask``, and
    ``use_cache=False``. With a key-value cache, which is the default of these models, each token would attend to all
    previous samples. For other models, pass ``cumulative_lengths=True`` and use these lengths in an attention kernel
    for sequences of different lengths, such as ``torch.nn.attention.varlen.varlen_attn``.

    With ``T`` tokens in ``N`` samples, a batch is a dict of int64 tensors:

    - ``input_ids``, shape ``(1, T)``.
    - ``labels``, shape ``(1, T)``: the labels of the samples, or ``input_ids`` if the samples contain neither
      ``labels`` nor ``targets``. The label of the first token of each sample is -100, because a model that shifts the
      labels would predict this token from the previous sample.
    - ``position_ids``, shape ``(1, T)``: position of each token in its sample, counted from 0.
    - Each other key with one value per token in every sample, shape ``(1, T)``.
    - With ``cumulative_lengths``: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 tensors of shape ``(N + 1,)``, and
      ``max_length_q`` and ``max_length_k``, which are integers. Hugging Face's models use these names.
    - ``use_cache``: value of the argument ``use_cache``, unless this argument is None.

    ``attention_mask`` and all other keys are omitted.

    The Trainer weights micro-batches by their number of labels other than -100. Except for rounding, the loss and the
    gradients equal the loss and the gradients of padded batches with the same samples.

    Args:
        length: number of tokens in each batch. Shorter batches are filled with ``pad_token_id``, with labels of -100
            and positions of 0. None for batches of different lengths.
        pad_token_id: id of the token that fills batches of a fixed length.
        cumulative_lengths: True to add the cumulative lengths of the samples to the batch.
        use_cache: value of the key ``use_cache``, which must be False for Hugging Face's models. None omits the key,
            for a model that is called with ``**batch`` and does not accept this key.

    Raises:
        DataError: ``length`` is not positive. In a call, the error is raised if a sample is not a mapping with a
            sequence ``input_ids``, is padded, or has labels of a different length, or if the batch has more than
            ``length`` tokens.

    Example:
        >>> PackedCollate()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        {'input_ids': tensor([[5, 6, 7, 8, 9]]), 'position_ids': tensor([[0, 1, 2, 0, 1]]), ...}
    """

    def __init__(
        self,
        length: int | None = None,
        *,
        pad_token_id: int = 0,
        cumulative_lengths: bool = False,
        use_cache: bool | None = False,
    ) -> None:
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise DataError("length", length, "must be a positive integer", "Pass a number of tokens, or None")
        self.length = length
        self.pad_token_id = pad_token_id
        self.cumulative_lengths = cumulative_lengths
        self.use_cache = use_cache

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch that contains ``samples``."""
        documents = [_document(sample, number) for number, sample in enumerate(samples)]
        documents = [each for each in documents if len(each["input_ids"])]
        if not documents:
            raise DataError("samples", samples, "contain no tokens", "Remove samples without tokens from the dataset")
        shared = set[str].intersection(*(set(each) for each in documents))
        rows = {key: torch.cat([each[key] for each in documents]) for key in documents[0] if key in shared}
        lengths = [len(each["input_ids"]) for each in documents]
        if self.length is not None:
            num_missing = self.length - sum(lengths)
            if num_missing < 0:
                action = "Pass LengthGroupedBatchSampler(lengths, max_tokens=length) to the DataLoader, or raise length"
                problem = f"is smaller than a batch, which has {sum(lengths)} tokens"
                raise DataError("length", self.length, problem, action)
            rows = {key: torch.cat([row, row.new_full((num_missing,), self._filler(key))]) for key, row in rows.items()}
            lengths += [num_missing] if num_missing else []
        batch: dict[str, Any] = {key: row[None] for key, row in rows.items()}
        if self.cumulative_lengths:
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            longest = max(lengths)
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        return batch if self.use_cache is None else {**batch, "use_cache": self.use_cache}

    def _filler(self, key: str) -> int:
        return self.pad_token_id if key == "input_ids" else IGNORE_INDEX if key in TARGET_KEYS else 0


def _document(sample: Any, number: int) -> dict[str, Tensor]:
    """Return the values of ``sample`` that have one element per token, after adding ``position_ids`` and missing
    labels."""
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        action = "Return {'input_ids': [...]} from the dataset"
        raise DataError(f"samples[{number}]", sample, "must be a mapping with the key 'input_ids'", action)
    tokens = _row(sample["input_ids"])
    if tokens is None:
        action = "Return one list of tokens for each sample"
        raise DataError(f"samples[{number}]['input_ids']", sample["input_ids"], "must be one-dimensional", action)
    mask = sample.get("attention_mask")
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        action = "Tokenize without padding: tokenizer(texts, padding=False)"
        raise DataError(f"samples[{number}]", sample, "is padded", action)
    found = {"input_ids": tokens, "position_ids": torch.arange(len(tokens))}
    for key, value in sample.items():
        row = None if key in (*found, "attention_mask") else _row(value)
        if row is not None and len(row) == len(tokens):
            found[key] = row
        elif key in ("labels", "targets"):
            action = (
                "Return one element per token, either in labels, which the model shifts, or in targets, which are "
                "already shifted"
            )
            raise DataError(f"samples[{number}]['{key}']", value, f"must have {len(tokens)} elements", action)
    if "labels" in found or "targets" not in found:
        labels = found.get("labels", tokens).clone()
        labels[:1] = IGNORE_INDEX
        found["labels"] = labels
    return found


def _row(value: Any) -> Tensor | None:
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        return None
    try:
        row = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # for example, a list of texts
        return None
    if row.dim() != 1:
        return None
    return row.to(torch.int64) if not len(row) or not row.is_floating_point() else row
