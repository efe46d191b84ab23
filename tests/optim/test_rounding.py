"""bfloat16 weights keep all bits of float32, and stochastic rounding is unbiased."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from roomier.techniques.optim.rounding import empty_low_bits, noise, noise_key, read, write


def of_bits(*bits: int) -> Tensor:
    return torch.tensor([struct.unpack("f", struct.pack("I", each))[0] for each in bits])


def bits_of(value: Tensor) -> list[int]:
    return [each & 0xFFFFFFFF for each in value.view(torch.int32).tolist()]


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.empty(value.shape, dtype=torch.bfloat16)
    low_bits = empty_low_bits(weight)
    write(weight, value, low_bits=low_bits)
    return weight, low_bits


def every_kind_of_number() -> Tensor:
    """Return numbers around ties, carries and limits, for both signs and many exponents and mantissas."""
    uppers = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x3FFF, 0x4000, 0x7EFF, 0x7F00, 0x7F7E, 0x7F7F]
    lowers = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]
    bits = [sign << 31 | upper << 16 | lower for sign in (0, 1) for upper in uppers for lower in lowers]
    return of_bits(*bits, 0x7F800000, 0xFF800000)


def test_a_split_number_is_restored_bit_for_bit() -> None:
    value = every_kind_of_number()
    assert bits_of(read(*split(value))) == bits_of(value)
    anything = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    value = anything.to(torch.int32).view(torch.float32)
    value = value[~value.isnan()]
    assert torch.equal(read(*split(value)).view(torch.int32), value.view(torch.int32))


def test_split_rounds_to_the_nearest_and_ties_away_from_zero() -> None:
    value = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(split(value)[0], value.bfloat16())
    ties = of_bits(0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000)
    assert [each >> 16 for each in bits_of(split(ties)[0].float())] == [0x3F81, 0x3F82, 0xBF81, 0xBF82]
    assert split(of_bits(0x7F7FFFFF))[0].item() == float("inf")  # equal to a cast, and the number can be restored


def test_nan_stays_nan() -> None:
    """In CUDA's NaN, all bits are set, and a carry would turn the NaN into -0."""
    codes = of_bits(0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001)
    weight, low_bits = split(codes)
    assert weight.isnan().all()
    assert read(weight, low_bits).isnan().all()
    write(weight, codes, key=noise_key(0, 1, 2))
    assert weight.isnan().all()


def test_a_weight_is_exact_before_the_first_update() -> None:
    weight = torch.randn(3, 4).bfloat16()
    low_bits = empty_low_bits(weight)
    assert low_bits.dtype is torch.int16
    assert low_bits.shape == weight.shape
    assert torch.equal(read(weight, low_bits), weight.float())


def test_small_updates_accumulate() -> None:
    weight, master = torch.ones(4, dtype=torch.bfloat16), torch.ones(4)
    low_bits = empty_low_bits(weight)
    for _ in range(1000):
        write(weight, read(weight, low_bits).add_(1e-5), low_bits=low_bits)
        master.add_(1e-5)
    assert torch.equal(read(weight, low_bits), master)
    assert torch.equal(weight, master.bfloat16())
    assert weight[0] > 1


def test_parts_of_a_tensor_are_written_in_place() -> None:
    """An optimizer writes a tensor chunk by chunk."""
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    low_bits = empty_low_bits(weight)
    for part in (slice(start, start + 300) for start in range(0, 1000, 300)):
        write(weight[part], value[part], low_bits=low_bits[part])
    assert torch.equal(read(weight, low_bits), value)


def test_float32_weights_are_not_copied() -> None:
    weight = torch.ones(3)
    value = read(weight)
    assert value.data_ptr() == weight.data_ptr()
    write(weight, value.add_(1))
    assert weight.tolist() == [2, 2, 2]
    write(weight, torch.zeros(3))
    assert weight.tolist() == [0, 0, 0]


def test_nearest_rounding_equals_a_cast() -> None:
    value = every_kind_of_number()
    weight = torch.empty(value.shape, dtype=torch.bfloat16)
    write(weight, value)
    assert torch.equal(weight, value.bfloat16())


def rounded(value: Tensor, step: int, first: int = 0) -> Tensor:
    weight = torch.empty(value.shape, dtype=torch.bfloat16)
    write(weight, value, key=noise_key(0, step, 0), first=first)
    return weight


def test_stochastic_rounding_selects_one_of_the_two_neighbors() -> None:
    value = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    below = (value.view(torch.int32) >> 16 << 16).view(torch.float32)  # towards zero
    above = ((value.view(torch.int32) >> 16) + 1 << 16).view(torch.float32)
    result = rounded(value, 1).float()
    assert ((result == below) | (result == above)).all()
    assert torch.equal(rounded(below, 1).float(), below)  # values that bfloat16 can represent are unchanged


@pytest.mark.parametrize("share", [0.0039, 0.25, 0.5, 0.77])
def test_stochastic_rounding_is_unbiased(share: float) -> None:
    """2^18 draws over positions and over steps have a standard error of at most 0.001."""
    bits = 0x3F800000 + round(share * 0x10000)
    value = of_bits(bits).expand(2**18)
    expected = (bits - 0x3F800000) / 0x10000
    by_place = (rounded(value, 3) != 1).double().mean().item()
    by_step = torch.stack([rounded(value[:256], step) != 1 for step in range(2**10)]).double().mean().item()
    assert by_place == pytest.approx(expected, abs=0.004)
    assert by_step == pytest.approx(expected, abs=0.004)


def test_noise_is_uniform_and_independent_between_positions_steps_and_parameters() -> None:
    draws = [noise(noise_key(0, step, index), 0, 2**16).double() for step, index in ((1, 0), (2, 0), (1, 1))]
    for each in draws:
        counts = torch.histc(each, 64, -(2**15), 2**15)
        assert ((counts - 1024) ** 2 / 1024).sum() < 110  # chi-square with 63 degrees of freedom: p < 0.0003
    draws.append(draws[0].roll(1))
    correlation = torch.corrcoef(torch.stack(draws))
    assert (correlation - torch.eye(4, dtype=torch.float64)).abs().max() < 0.02


def test_noise_does_not_depend_on_the_sharding() -> None:
    value = torch.randn(1001, generator=torch.Generator().manual_seed(1))
    whole = rounded(value, 7)
    parts = [rounded(part, 7, first) for first, part in ((0, value[:333]), (333, value[333:334]), (334, value[334:]))]
    assert torch.equal(torch.cat(parts), whole)


def test_positions_beyond_32_bits_have_noise() -> None:
    far = noise(5, 2**33 + 1, 1000)
    assert far.shape == (1000,)
    assert far.double().std() > 15_000
