"""Packed batches: tensors and errors. ``tests/hugging_face/test_packed.py`` trains with them."""

from typing import Any

import pytest
import torch

from roomier.core.errors import DataError
from roomier.data import PackedCollate

SAMPLES: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "length": 3, "segments": [0, 0, 1], "text": "a b"},
    {"input_ids": torch.tensor([8, 9]), "attention_mask": [1, 1], "length": 2, "segments": [1, 1], "text": "cd"},
    {"input_ids": [], "attention_mask": [], "length": 0, "segments": [], "text": ""},
    {"input_ids": [4], "attention_mask": [1], "length": 1, "segments": [0], "text": "e"},
]


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: each.tolist() if isinstance(each, torch.Tensor) else each for key, each in batch.items()}


def test_samples_are_concatenated_with_positions_and_labels_of_each_sample() -> None:
    batch = PackedCollate(cumulative_lengths=True)(SAMPLES)
    assert lists(batch) == {
        "input_ids": [[5, 6, 7, 8, 9, 4]],
        "position_ids": [[0, 1, 2, 0, 1, 0]],
        "labels": [[-100, 6, 7, -100, 9, -100]],
        "segments": [[0, 0, 1, 1, 1, 0]],
        "cu_seq_lens_q": [0, 3, 5, 6],
        "cu_seq_lens_k": [0, 3, 5, 6],
        "max_length_q": 3,
        "max_length_k": 3,
        "use_cache": False,
    }
    assert batch["cu_seq_lens_q"].dtype is torch.int32
    assert all(batch[key].dtype is torch.int64 for key in ("input_ids", "position_ids", "labels"))


def test_labels_of_the_samples_are_used_and_targets_are_unchanged() -> None:
    own = [torch.tensor([1, 2, 3]), [4, -100]]
    samples = [{**sample, "labels": each} for sample, each in zip(SAMPLES[:2], own, strict=True)]
    assert PackedCollate()(samples)["labels"].tolist() == [[-100, 2, 3, -100, -100]]
    assert own[0].tolist() == [1, 2, 3]  # not changed in place
    shifted = PackedCollate(use_cache=None)(
        [{"input_ids": [5, 6], "targets": [6, 7]}, {"input_ids": [8], "targets": [9]}]
    )
    assert lists(shifted) == {"input_ids": [[5, 6, 8]], "position_ids": [[0, 1, 0]], "targets": [[6, 7, 9]]}
    both = PackedCollate()([{"input_ids": [5, 6], "labels": [5, 6], "targets": [6, 7]}])
    assert both["labels"].tolist() == [[-100, 6]]


@pytest.mark.parametrize(("length", "added"), [(6, 0), (9, 3)])
def test_a_fixed_length_is_filled_with_tokens_without_labels(length: int, added: int) -> None:
    batch = lists(PackedCollate(length, pad_token_id=2, cumulative_lengths=True)(SAMPLES))
    assert batch["input_ids"] == [[5, 6, 7, 8, 9, 4, *[2] * added]]
    assert batch["labels"] == [[-100, 6, 7, -100, 9, -100, *[-100] * added]]
    assert batch["position_ids"] == [[0, 1, 2, 0, 1, 0, *[0] * added]]
    assert batch["cu_seq_lens_q"] == [0, 3, 5, 6, *([length] if added else [])]


def test_batches_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    samples = [{"input_ids": each["input_ids"]} for each in SAMPLES if each["length"]]
    theirs = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(samples)
    ours = PackedCollate(cumulative_lengths=True, use_cache=None)(samples)
    assert ours.keys() == theirs.keys()
    for key, each in theirs.items():
        torch.testing.assert_close(ours[key], each, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("samples", "length", "message"),
    [
        (SAMPLES, 5, "length=5: is smaller than a batch, which has 6 tokens. Pass LengthGroupedBatchSampler"),
        ([[1, 2]], None, r"samples\[0\]=\[1, 2\]: must be a mapping with the key 'input_ids'"),
        ([{"input_ids": [[1]]}], None, r"samples\[0\]\['input_ids'\]=.* must be one-dimensional"),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], None, r"samples\[0\]=.* is padded. Tokenize without"),
        ([{"input_ids": [1, 2], "labels": 1}], None, r"samples\[0\]\['labels'\]=1: must have 2 elements"),
        ([{"input_ids": []}], None, "contain no tokens"),
    ],
)
def test_invalid_samples_are_rejected(samples: Any, length: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackedCollate(length)(samples)


@pytest.mark.parametrize("length", [0, -1, True, 2.5])
def test_an_invalid_length_is_rejected(length: Any) -> None:
    with pytest.raises(DataError, match=r"length=.* must be a positive integer"):
        PackedCollate(length)
