"""Tensors that are stored as signs and scales."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roomier.techniques.optim.onebit_adam import BLOCK, Pieces, SignCode

CPU = torch.device("cpu")


def random(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    numels=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    num_ranks=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_signs_are_kept_scales_are_means_and_the_error_is_bounded(
    numels: list[int], num_ranks: int, dtype: torch.dtype
) -> None:
    code = SignCode(numels, num_ranks, CPU)
    rows = code.empty()
    given_tensors = [random(numel, seed, dtype) for seed, numel in enumerate(numels)]
    coded = [code.encode(index, tensor, rows) for index, tensor in enumerate(given_tensors)]
    assert rows.shape == (num_ranks, code.row_bytes)
    for index, (tensor, result) in enumerate(zip(given_tensors, coded, strict=True)):
        assert torch.equal(code.decode(index, rows, dtype), result)
        assert torch.equal(torch.signbit(result), torch.signbit(tensor))
        assert (tensor - result).norm() <= tensor.norm() * (1 + 1e-6)
        for rank in range(num_ranks):
            inside = code.pieces[index].slice_of(rank)
            for block, part in zip(tensor[inside].split(BLOCK), result[inside].split(BLOCK), strict=True):
                if len(block):
                    torch.testing.assert_close(part.abs(), block.abs().mean().expand(len(block)))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_piece_has_the_same_code_alone_and_in_the_tensor(num_ranks: int) -> None:
    tensor = random(1000)
    code = SignCode([5, 1000], num_ranks, CPU)
    rows = code.empty()
    result = code.encode(1, tensor, rows)
    for rank, inside in enumerate(map(code.pieces[1].slice_of, range(num_ranks))):
        row = torch.zeros_like(rows[0])
        assert torch.equal(code.encode_piece(1, tensor[inside], row, rank), result[inside])
        assert torch.equal(row, rows[rank])
        sources = torch.stack([row, torch.zeros_like(row)])
        decoded = code.decode_sources(1, sources, rank, torch.float32)
        assert torch.equal(decoded[0], result[inside])
        assert not decoded[1].any()


def test_decoded_values_are_encoded_bit_for_bit() -> None:
    code = SignCode([777], 1, CPU)
    rows, again = code.empty(), code.empty()
    result = code.encode(0, random(777), rows)
    assert torch.equal(code.encode_piece(0, result, again[0], 0, takes_largest=True), result)
    assert torch.equal(again, rows)


def test_a_code_has_one_bit_per_element_and_one_scale_per_block() -> None:
    num_blocks = 10_000
    code = SignCode([num_blocks * BLOCK], 2, CPU)
    assert 2 * code.row_bytes == num_blocks * (BLOCK // 8 + 4)


@pytest.mark.parametrize(("numel", "num_ranks"), [(1, 4), (7, 4), (8, 4), (9, 4), (5, 1), (3, 5)])
def test_pieces_equal_the_shards_of_a_dtensor(numel: int, num_ranks: int) -> None:
    pieces, flat = Pieces(numel, num_ranks), torch.arange(numel)
    parts = [flat[pieces.slice_of(rank)] for rank in range(num_ranks)]
    chunks = [*flat.chunk(num_ranks), *[flat[:0]] * num_ranks][:num_ranks]
    assert [part.tolist() for part in parts] == [chunk.tolist() for chunk in chunks]
    rows = torch.full((num_ranks, pieces.size + 2), -1)
    pieces.to_rows(flat, rows)
    assert torch.equal(pieces.from_rows(rows), flat)
    assert int((rows == -1).sum()) == rows.numel() - numel
