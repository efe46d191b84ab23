"""The chunked loss and its gradients equal ``F.cross_entropy(F.linear(...))`` and its gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from roomier.core.errors import TrainingError
from roomier.techniques.loss.cross_entropy import CHUNK_BYTES, LossOfLinear, linear_cross_entropy

TOKENS, WIDTH, CLASSES = 23, 6, 11


def inputs(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> list[Tensor | None]:
    """Return hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    made = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return made if bias else [*made[:2], None]


def targets() -> Tensor:
    """Return targets. One chunk of 5 tokens has no targets."""
    made = torch.randint(CLASSES, (TOKENS,), generator=torch.Generator().manual_seed(1))
    made[5:10] = -100
    made[20] = -100
    return made


def plain(given: list[Tensor | None], target: Tensor, how: LossOfLinear) -> Tensor:
    options = {"reduction": how.reduction, "ignore_index": how.ignore_index, "label_smoothing": how.label_smoothing}
    return F.cross_entropy(F.linear(*given), target, **options)


def gradients(loss: Tensor, given: list[Tensor | None]) -> list[Tensor | None]:
    wanted = [each for each in given if each is not None and each.requires_grad]
    weights = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
    found = iter(torch.autograd.grad(loss, wanted, weights))
    return [next(found) if each is not None and each.requires_grad else None for each in given]


def furthest(ours: list[Tensor | None], theirs: list[Tensor | None]) -> float:
    assert [each is None for each in ours] == [each is None for each in theirs]
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True) if b is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_are_equal_to_torch(dtype: torch.dtype) -> None:
    tolerance = 1e-6 if dtype is torch.float32 else 1e-14
    for reduction, smoothing, bias, chunk in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.3), (True, False), (1, 5, TOKENS, 100, None)
    ):
        how = LossOfLinear((dtype,), chunk, reduction, label_smoothing=smoothing)
        ours, theirs = inputs(dtype, bias=bias), inputs(dtype, bias=bias)
        loss, expected = linear_cross_entropy(*ours, targets(), how), plain(theirs, targets(), how)
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        assert furthest(gradients(loss, ours), gradients(expected, theirs)) < tolerance, (how, bias)


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (1, 2)])
def test_frozen_tensors_receive_no_gradient(frozen: tuple[int, ...]) -> None:
    how = LossOfLinear((torch.float32,), 5)
    ours, theirs = inputs(), inputs()
    for index in frozen:
        ours[index].requires_grad_(False)
        theirs[index].requires_grad_(False)
    loss = linear_cross_entropy(*ours, targets(), how)
    assert furthest(gradients(loss, ours), gradients(plain(theirs, targets(), how), theirs)) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_second_backward_gives_the_same_gradients(reduction: str) -> None:
    given = inputs()
    loss = linear_cross_entropy(*given, targets(), LossOfLinear((torch.float32,), 5, reduction)).sum()
    (3 * loss).backward(retain_graph=True)
    first = [each.grad.clone() for each in given]
    (3 * loss).backward()
    for each, before in zip(given, first, strict=True):
        torch.testing.assert_close(each.grad, 2 * before, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_create_graph_raises() -> None:
    given = inputs()
    loss = linear_cross_entropy(*given, targets(), LossOfLinear((torch.float32,), 5))
    with pytest.raises(TrainingError, match="differentiated"):
        torch.autograd.grad(loss, given[:1], create_graph=True)


def test_without_targets_the_mean_is_nan_and_gradients_are_zeros() -> None:
    given = inputs()
    loss = linear_cross_entropy(*given, torch.full((TOKENS,), -100), LossOfLinear((torch.float32,), 5))
    assert loss.isnan()
    loss.backward()
    assert all(not each.grad.any() for each in given)


def test_a_target_that_is_not_a_class_raises() -> None:
    for wrong in (-1, CLASSES):
        target = targets()
        target[0] = wrong
        with pytest.raises(RuntimeError, match="index"):
            linear_cross_entropy(*inputs(), target, LossOfLinear((torch.float32,), 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_error_is_as_small_as_in_torch(dtype: torch.dtype) -> None:
    """As under autocast, matmuls run in 16 bits and the loss in float32."""
    how = LossOfLinear((dtype, torch.float32), 5)
    exact, ours, theirs = inputs(torch.float64), inputs(), inputs()
    truth = gradients(plain(exact, targets(), how), exact)
    with torch.autocast("cpu", dtype):
        expected = plain(theirs, targets(), how)
    loss = linear_cross_entropy(*ours, targets(), how)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    apart, allowed = furthest(gradients(loss, ours), truth), furthest(gradients(expected, theirs), truth)
    assert apart < 1.5 * allowed < 0.05


@pytest.mark.more
def test_small_gradients_do_not_underflow_in_float16() -> None:
    """The forward does not have the loss scale, so small probabilities could underflow."""
    hidden = torch.full((2048, 1), 0.5, requires_grad=True)
    weight = torch.zeros(20_000, 1, requires_grad=True)
    target = torch.zeros(2048, dtype=torch.long)
    linear_cross_entropy(hidden, weight, None, target, LossOfLinear((torch.float16, torch.float32))).backward()
    torch.testing.assert_close(weight.grad[1:], torch.full((19_999, 1), 0.5 / 20_000), rtol=2e-3, atol=0)
    torch.testing.assert_close(weight.grad[0], torch.full((1,), -0.5), rtol=2e-3, atol=0)


def test_large_hidden_states_do_not_overflow_in_float16() -> None:
    """All tokens have one class. A sum that overflows within a chunk cannot be restored by a loss scale."""
    hidden = torch.full((512, 1), 200.0, requires_grad=True)
    weight = torch.zeros(3, 1, requires_grad=True)
    target = torch.zeros(512, dtype=torch.long)
    linear_cross_entropy(hidden, weight, None, target, LossOfLinear((torch.float16, torch.float32))).backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[-400 / 3], [200 / 3], [200 / 3]]), rtol=2e-3, atol=0)
    assert torch.isfinite(hidden.grad).all()


def test_gradients_are_not_computed_if_they_are_not_required() -> None:
    given = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(*given, targets(), LossOfLinear((torch.float32,), 5))
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(given, targets(), LossOfLinear((torch.float32,))).detach())


def test_a_chunk_has_64_mib_by_default() -> None:
    how = LossOfLinear((torch.bfloat16,))
    assert how.chunk_size(65536) * 65536 * 4 == CHUNK_BYTES == 64 * 2**20
    assert how.chunk_size(2**40) == 1
    assert LossOfLinear((torch.bfloat16,), 12).chunk_size(65536) == 12
