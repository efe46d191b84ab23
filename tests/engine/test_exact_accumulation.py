"""The accumulated gradient is equal to the gradient of the full batch, for all sizes of micro-batches."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import roomier
from roomier.plan import plan_from_flags

WIDTH = 5
NUM_CLASSES = 7


class TokenMean(roomier.Module):
    """Task with dict batches and the label -100 for ignored tokens."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, NUM_CLASSES)

    def training_step(self, batch):
        return F.cross_entropy(self.net(batch["x"]), batch["labels"])

    @staticmethod
    def make(size, generator):
        labels = torch.randint(NUM_CLASSES, (size,), generator=generator)
        labels[torch.rand(size, generator=generator) < 0.4] = -100
        return {"x": torch.randn(size, WIDTH, generator=generator), "labels": labels}

    @staticmethod
    def join(batches):
        return {key: torch.cat([batch[key] for batch in batches]) for key in ("x", "labels")}


class Classifier(TokenMean):
    """Task with tuple batches and one label per sample."""

    def training_step(self, batch):
        x, label = batch
        return F.cross_entropy(self.net(x), label)

    @staticmethod
    def make(size, generator):
        return torch.randn(size, WIDTH, generator=generator), torch.randint(NUM_CLASSES, (size,), generator=generator)

    @staticmethod
    def join(batches):
        return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


class Regression(Classifier):
    """Task with tuple batches and floating-point targets."""

    def training_step(self, batch):
        x, target = batch
        return F.mse_loss(self.net(x), target)

    @staticmethod
    def make(size, generator):
        return torch.randn(size, WIDTH, generator=generator), torch.randn(size, NUM_CLASSES, generator=generator)


class Summed(Regression):
    """Module with loss_reduction 'sum'."""

    loss_reduction = "sum"

    def training_step(self, batch):
        x, target = batch
        return F.mse_loss(self.net(x), target, reduction="sum")


class OwnCount(TokenMean):
    """Task whose loss is a mean over the entries of a mask, which num_loss_terms counts."""

    def training_step(self, batch):
        wrong = F.mse_loss(self.net(batch["x"]), batch["goal"], reduction="none").mean(-1)
        return (wrong * batch["mask"]).sum() / batch["mask"].sum()

    def num_loss_terms(self, batch):
        return int(batch["mask"].sum())

    @staticmethod
    def make(size, generator):
        mask = (torch.rand(size, generator=generator) < 0.5).float()
        mask[0] = 1.0
        x, goal = Regression.make(size, generator)
        return {"x": x, "goal": goal, "mask": mask}

    @staticmethod
    def join(batches):
        return {key: torch.cat([batch[key] for batch in batches]) for key in ("x", "goal", "mask")}


CLASS_WEIGHTS = torch.arange(1.0, NUM_CLASSES + 1, dtype=torch.float64)


class ClassWeighted(Classifier):
    """Task whose loss is a mean over the class weights of the targets, like torch's ``cross_entropy(weight=...)``."""

    def training_step(self, batch):
        x, label = batch
        return F.cross_entropy(self.net(x), label, weight=CLASS_WEIGHTS)

    def num_loss_terms(self, batch):
        return CLASS_WEIGHTS[batch[1]].sum()


KINDS = (TokenMean, Classifier, Regression, Summed, OwnCount, ClassWeighted)


def gradient_of(kind, batches):
    torch.manual_seed(0)
    module = kind()
    # so that the test is not affected by the rounding of fp32
    plan = plan_from_flags(accelerator="cpu", precision="64-true")
    engine = roomier.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), plan=plan)
    loss = engine.forward_backward(module.training_step, batches)
    return loss, [parameter.grad.clone() for parameter in module.parameters()]


EXAMPLES = given(
    kind=st.sampled_from(KINDS),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)


@settings(max_examples=25, deadline=None)
@EXAMPLES
def test_the_gradient_of_micro_batches_is_the_gradient_of_the_batch(kind, sizes, seed):
    check_gradient(kind, sizes, seed)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@EXAMPLES
def test_the_gradient_of_micro_batches_is_the_gradient_of_the_batch_many_examples(kind, sizes, seed):
    check_gradient(kind, sizes, seed)


def check_gradient(kind, sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    batches = [kind.make(size, generator) for size in sizes]
    if kind is TokenMean:
        batches[0]["labels"][0] = 1  # a step without loss terms would raise an error
        if len(batches) == 1 or not (batches[0]["labels"] != -100).any():
            return
    loss, parts = gradient_of(kind, batches)
    whole_loss, whole = gradient_of(kind, [kind.join(batches)])
    torch.testing.assert_close(loss, whole_loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [TokenMean, Classifier, Regression, OwnCount, ClassWeighted])
def test_a_mean_of_means_has_a_different_gradient(kind):
    """Equal weights for all micro-batches would result in a different gradient."""
    generator = torch.Generator().manual_seed(3)
    batches = [kind.make(size, generator) for size in (1, 9)]
    if kind is TokenMean:
        batches[0]["labels"][0] = 1
    _, whole = gradient_of(kind, [kind.join(batches)])
    naive = [torch.stack(each).mean(0) for each in zip(*(gradient_of(kind, [b])[1] for b in batches), strict=True)]
    assert (naive[0] - whole[0]).norm() > 0.1 * whole[0].norm()


def test_a_micro_batch_without_terms_does_not_contribute():
    """The loss of such a micro-batch is 0/0, and the step is computed from the other micro-batches."""
    generator = torch.Generator().manual_seed(0)
    full, empty = TokenMean.make(6, generator), TokenMean.make(6, generator)
    full["labels"][0] = 1
    empty["labels"][:] = -100
    alone_loss, alone = gradient_of(TokenMean, [full])
    for window in ([full, empty], [empty, full]):
        loss, gradient = gradient_of(TokenMean, window)
        assert torch.equal(loss, alone_loss)
        assert all(torch.equal(a, b) for a, b in zip(gradient, alone, strict=True))


def test_the_number_of_terms_can_be_a_tensor():
    """A micro-batch without terms can have a tensor as its count."""

    class Counts(TokenMean):
        def num_loss_terms(self, batch):
            return (batch["labels"] != -100).sum()

    generator = torch.Generator().manual_seed(0)
    full, empty = Counts.make(6, generator), Counts.make(6, generator)
    full["labels"][0] = 1
    empty["labels"][:] = -100
    for window in ([full, empty], [full, Counts.make(9, generator)]):
        expected_loss, expected = gradient_of(TokenMean, window)
        loss, gradient = gradient_of(Counts, window)
        assert torch.equal(loss, expected_loss)
        assert all(torch.equal(a, b) for a, b in zip(gradient, expected, strict=True))


def test_a_step_without_terms_raises():
    batch = TokenMean.make(3, torch.Generator().manual_seed(0))
    batch["labels"][:] = -100
    with pytest.raises(roomier.TrainingError, match=r"num_loss_terms.*no micro-batch.*ignored"):
        gradient_of(TokenMean, [batch, batch])


def test_the_output_of_a_micro_batch_is_freed_before_the_next():
    module = Classifier()
    engine = roomier.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    outputs, num_alive = [], []

    def step(batch):
        num_alive.append(sum(output() is not None for output in outputs))
        logits = module.net(batch[0])
        outputs.append(weakref.ref(logits))
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits}

    generator = torch.Generator().manual_seed(0)
    engine.forward_backward(step, [Classifier.make(3, generator) for _ in range(3)])
    assert num_alive == [0, 0, 0]


def test_a_step_that_returns_none_is_skipped():
    module = Classifier()
    engine = roomier.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert engine.forward_backward(lambda batch: None, [1, 2]) is None
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("kind", [TokenMean, Regression, Summed])
@pytest.mark.parametrize("left_out", [(0,), (1,), (0, 2), (1, 2)])
def test_the_loss_averages_over_the_other_micro_batches_if_one_is_skipped(kind, left_out):
    """The gradient is equal to the gradient of a batch without the skipped micro-batch."""
    generator = torch.Generator().manual_seed(0)
    batches = [kind.make(size, generator) for size in (3, 8, 5)]
    kept = [batch for index, batch in enumerate(batches) if index not in left_out]
    expected_loss, expected = gradient_of(kind, kept)

    torch.manual_seed(0)
    module = kind()
    plan = plan_from_flags(accelerator="cpu", precision="64-true")
    engine = roomier.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), plan=plan)
    indices = iter(range(3))
    loss = engine.forward_backward(
        lambda batch: None if next(indices) in left_out else module.training_step(batch), batches
    )
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close([p.grad for p in module.parameters()], expected, rtol=1e-10, atol=1e-12)
