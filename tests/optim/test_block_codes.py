"""8-bit and 4-bit moments equal the definition of the codes, element by element."""

import math

import pytest
import torch
from torch import Tensor

from roomier.techniques.optim.block_codes import (
    MIN_BLOCK,
    can_be_coded,
    decode,
    dither,
    empty_codes,
    encode,
    num_blocks,
    regions,
    state_bytes,
)

BITS = pytest.mark.parametrize("bits", [8, 4])
COLUMNS = [80, 127, 147, 255, 384, 511, 768, 1009, 3001, 38529, 50257]


class Block:
    """Rows of one block, and their codes."""

    def __init__(self, bits: int, num_rows: int = 3, size: int = 128) -> None:
        self.bits = bits
        state = empty_codes(torch.zeros(num_rows, size), bits)
        self.tensors = list(state.values())
        self.codes, self.scales = (
            [each[:, None] for each in self.tensors[:-2]],
            [each[:, None] for each in self.tensors[-2:]],
        )

    def keep(self, root: Tensor, ratio: Tensor, step: int = 1) -> tuple[Tensor, Tensor]:
        shifts = dither(root.shape[1], step, root.device)[None]
        encode(self.codes, self.scales, root[:, None].clone(), ratio[:, None].clone(), shifts)
        return self.held()

    def held(self) -> tuple[Tensor, Tensor]:
        root, ratio = decode(self.codes, self.scales)
        return root[:, 0], ratio[:, 0]

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return the numbers ``k`` and ``d``."""
        if self.bits == 8:
            return self.tensors[0].long(), self.tensors[1].long()
        both = self.tensors[0].long()
        return both % 16, both // 16


def moments(num_rows: int = 3, size: int = 128) -> tuple[Tensor, Tensor]:
    """Return roots that span eight decades, and ratios of both signs."""
    generator = torch.Generator().manual_seed(0)
    root = 10 ** (8 * torch.rand(num_rows, size, generator=generator) - 9)
    return root, torch.randn(num_rows, size, generator=generator)


@BITS
def test_codes_equal_their_definition(bits: int) -> None:
    block = Block(bits)
    root, ratio = moments()
    held_root, held_ratio = block.keep(root, ratio, step=7)
    roots, ratios = block.numbers()
    levels, largest = 2**bits, 2 ** (bits - 1) - 1
    for row in range(3):
        top, widest = root[row].max().item(), ratio[row].abs().max().item()
        for column in range(128):
            shift = (7 * 0.6180339887498949 + column * 0.7548776662466927) % 1 * 31 / 32 + 1 / 64
            place = math.sqrt(root[row, column].item() / top) * levels - 1
            assert roots[row, column] == max(0, math.floor(place + shift))
            # Both use the same random sequence, from opposite ends.
            assert ratios[row, column] == math.floor(ratio[row, column].item() / widest * largest + 1 - shift)
            expected = top * ((roots[row, column].item() + 1) / levels) ** 2
            assert held_root[row, column].item() == pytest.approx(expected, rel=1e-6)
            expected = widest * ratios[row, column].item() / largest
            assert held_ratio[row, column].item() == pytest.approx(expected, rel=1e-6)


@BITS
def test_the_rounding_error_is_less_than_one_code(bits: int) -> None:
    root, ratio = moments()
    held_root, held_ratio = Block(bits).keep(root, ratio)
    step = root.amax(1, keepdim=True).sqrt() / 2**bits
    assert ((held_root.sqrt() - root.sqrt()).abs() <= step * 1.0001).all()
    step = ratio.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((held_ratio - ratio).abs() <= step * 1.0001).all()


@BITS
def test_rounded_values_do_not_change_when_rounded_again(bits: int) -> None:
    block = Block(bits)
    first = block.keep(*moments())
    codes = [each.clone() for each in block.tensors]
    for step in range(2, 200):
        block.keep(*block.held(), step)
        for now, before in zip(block.tensors[:-2], codes[:-2], strict=True):
            assert torch.equal(now, before)
    torch.testing.assert_close(block.held(), first, rtol=1e-4, atol=0)


@BITS
def test_the_largest_values_of_a_block_are_exact(bits: int) -> None:
    root, ratio = moments()
    for step in range(1, 100):
        held_root, held_ratio = Block(bits).keep(root, ratio, step)
        assert torch.equal(held_root.amax(1), root.amax(1))
        torch.testing.assert_close(held_ratio.abs().amax(1), ratio.abs().amax(1), rtol=2e-7, atol=0)


@BITS
def test_rounding_is_unbiased_over_steps(bits: int) -> None:
    """With rounding to the nearest code, the mean would differ by up to half a code."""
    root, ratio = moments()
    held = [Block(bits).keep(root, ratio, step) for step in range(1, 401)]
    code = ratio.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    mean_ratio = torch.stack([each for _, each in held]).mean(0)
    assert ((mean_ratio - ratio) / code).abs().max() < 0.03
    code = root.amax(1, keepdim=True).sqrt() / 2**bits
    mean_root = torch.stack([each.sqrt() for each, _ in held]).mean(0)
    above = root.sqrt() > code  # no code exists below the first code
    assert ((mean_root - root.sqrt()) / code).abs()[above].max() < 0.03


@BITS
def test_small_roots_are_not_rounded_to_zero_and_zero_ratios_stay_zero(bits: int) -> None:
    root, ratio = torch.zeros(1, 128), torch.zeros(1, 128)
    root[0, 0], ratio[0, 0] = 1e-3, 2.0
    for step in range(1, 50):
        held_root, held_ratio = Block(bits, 1).keep(root, ratio, step)
        assert (held_root > 0).all()
        assert torch.equal(held_ratio, ratio)


@BITS
def test_a_block_of_zeros_is_zero(bits: int) -> None:
    block = Block(bits)
    for held in (block.held(), block.keep(torch.zeros(3, 128), torch.zeros(3, 128))):
        assert not held[0].any()
        assert not held[1].any()


@BITS
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_remain_in_their_block(bits: int, value: float) -> None:
    root, ratio = moments()
    root[1, 5], ratio[1, 5] = value, math.nan
    held_root, held_ratio = Block(bits).keep(root, ratio)
    assert not held_root[1].isfinite().any()
    assert held_ratio[1].isnan().all()
    assert held_root[[0, 2]].isfinite().all()


@BITS
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_blocks_cover_each_row_once(bits: int, num_columns: int) -> None:
    row = torch.zeros(1, num_columns)
    scales = torch.zeros(1, num_blocks((1, num_columns), bits))
    for region in regions(num_columns, bits):
        blocks = region.cut(row)
        assert blocks.shape == (1, scales[:, region.scales].shape[1], region.size)
        assert region.size >= MIN_BLOCK or region.columns.start, "only the last block of a row can be narrow"
        blocks.add_(1)
        scales[:, region.scales] += 1
    assert (row == 1).all()
    assert (scales == 1).all()


@pytest.mark.parametrize(("bits", "limit"), [(8, 2.1), (4, 1.1)])
def test_bytes_of_an_element(bits: int, limit: float) -> None:
    for num_columns in [*range(80, 600), *COLUMNS]:
        shape = (60, num_columns)
        state = empty_codes(torch.zeros(shape), bits)
        num_bytes = sum(each.numel() * each.itemsize for each in state.values())
        assert num_bytes == state_bytes(shape, bits)
        assert num_bytes <= limit * 60 * num_columns + 1e-6, num_columns


def test_small_or_narrow_tensors_are_not_coded() -> None:
    assert can_be_coded((64, 64 + 16))
    assert can_be_coded((64, 3, 7, 7))
    assert not can_be_coded((64, 3, 5, 5))  # 75 columns
    assert not can_be_coded((40, 100))  # 4000 elements
    assert not can_be_coded((10000,))
    assert not can_be_coded(())
