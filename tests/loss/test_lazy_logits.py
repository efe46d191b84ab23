"""Lazy logits give the same results as computed logits in all operations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.core.errors import TrainingError
from roomier.core.wrapped_forward import unwrap
from roomier.techniques.loss.chunked import apply_chunked_loss
from roomier.techniques.loss.lazy_logits import LazyLogits

CLASSES = 11


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, CLASSES))[0]


def lazily(head: nn.Linear, chunk_tokens: int | None = 4) -> nn.Linear:
    apply_chunked_loss(nn.Sequential(head), (), chunk_tokens)
    return head


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)


TARGETS = torch.randint(CLASSES, (2, 5), generator=torch.Generator().manual_seed(2))
MASK = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])

LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "view": lambda logits: F.cross_entropy(logits.view(-1, CLASSES), TARGETS.view(-1)),
    "reshape": lambda logits: F.cross_entropy(torch.reshape(logits, (10, -1)), TARGETS.view(-1)),
    "flatten": lambda logits: F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), ignore_index=3),
    "shifted": lambda logits: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), TARGETS[..., 1:].reshape(-1)
    ),
    "shifted in short": lambda logits: F.cross_entropy(logits[:, :-1].flatten(0, 1), TARGETS[:, 1:].flatten()),
    "in float32": lambda logits: F.cross_entropy(logits.float().view(-1, logits.shape[-1]), TARGETS.view(-1)),
    "converted": lambda logits: F.cross_entropy(logits.to(torch.float64).view(-1, CLASSES), TARGETS.view(-1)),
    "on its device": lambda logits: F.cross_entropy(logits.to(logits.device).view(-1, CLASSES), TARGETS.view(-1)),
    "masked": lambda logits: F.cross_entropy(logits[MASK], TARGETS[MASK]),
    "one row": lambda logits: F.cross_entropy(logits[0, None, 2], TARGETS[0, None, 2]),
    "last": lambda logits: F.cross_entropy(logits[:, -1, :], TARGETS[:, -1]),
    "module": lambda logits: nn.CrossEntropyLoss(label_smoothing=0.1)(logits.squeeze().view(10, -1), TARGETS.view(-1)),
    "sum": lambda logits: F.cross_entropy(logits.view(-1, CLASSES), TARGETS.view(-1), reduction="sum") / 7,
    "weighed by token": lambda logits: (
        F.cross_entropy(logits.view(-1, CLASSES), TARGETS.view(-1), reduction="none") * MASK.view(-1)
    ).sum(),
}
OTHERS: dict[str, Callable[[Any], Tensor]] = {
    "classes second": lambda logits: F.cross_entropy(logits.transpose(1, 2), TARGETS),
    "weights of classes": lambda logits: F.cross_entropy(
        logits.view(-1, CLASSES), TARGETS.view(-1), weight=torch.arange(1.0, CLASSES + 1)
    ),
    "probabilities": lambda logits: F.cross_entropy(logits[0], torch.full((5, CLASSES), 1 / CLASSES)),
    "classes in bytes": lambda logits: F.cross_entropy(logits.view(-1, CLASSES), TARGETS.view(-1).byte()),
    "nll": lambda logits: F.nll_loss(F.log_softmax(logits, -1).view(-1, CLASSES), TARGETS.view(-1)),
    "capped": lambda logits: F.cross_entropy((torch.tanh(logits / 3) * 3).view(-1, CLASSES), TARGETS.view(-1)),
    "fewer classes": lambda logits: F.cross_entropy(logits[..., :9].reshape(-1, 9), TARGETS.view(-1) % 9),
    "joined": lambda logits: torch.cat([logits, logits.float()], 1).square().mean(),
    "transposed": lambda logits: logits[0].T.square().mean(),
    "one more dimension": lambda logits: logits[..., None].square().mean(),
    "both": lambda logits: (
        F.cross_entropy(logits.view(-1, CLASSES), TARGETS.view(-1)) + logits.logsumexp(-1).square().mean()
    ),
    "part of a tuple": lambda logits: torch.stack(logits.unbind(1)).square().mean(),
}


def trained(head: nn.Linear, hidden: Tensor, loss: Callable[[Any], Tensor]) -> list[Tensor]:
    value = loss(head(hidden))
    return [value.detach(), *torch.autograd.grad(value, [hidden, head.weight, head.bias])]


@pytest.mark.parametrize("name", [*LOSSES, *OTHERS])
def test_a_loss_is_equal_to_the_loss_of_computed_logits(
    head: nn.Linear, hidden: Tensor, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = (LOSSES | OTHERS)[name]
    expected = trained(head, hidden, loss)
    for ours, theirs in zip(trained(lazily(head), hidden, loss), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert ("so all these logits must be stored in memory" in capsys.readouterr().err) == (name in OTHERS)


def mask_classes(logits: Any) -> Any:
    logits[..., 9:] = -20.0
    return logits


def cap_in_place(logits: Any) -> Any:
    logits.div_(3).tanh_()
    return logits


def write_to_a_view(logits: Any) -> Any:
    rows = logits.view(-1, CLASSES)
    rows.mul_(2)
    return logits


def write_to_a_row(logits: Any) -> Any:
    logits[:, 1].add_(1.0)
    logits[1] *= 2
    return logits


def write_out(logits: Any) -> Any:
    with torch.no_grad():
        logits.detach().mul_(0.5)
    return logits


@pytest.mark.parametrize("write", [mask_classes, cap_in_place, write_to_a_view, write_to_a_row, write_out])
def test_values_written_to_lazy_logits_are_read_later(
    head: nn.Linear, hidden: Tensor, write: Callable[[Any], Any]
) -> None:
    def loss(logits: Any) -> Tensor:
        return F.cross_entropy(write(logits).view(-1, CLASSES), TARGETS.view(-1))

    expected = trained(head, hidden, loss)
    for ours, theirs in zip(trained(lazily(head), hidden, loss), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_lazy_logits_have_the_attributes_of_logits(head: nn.Linear, hidden: Tensor) -> None:
    real, lazy = head(hidden), lazily(head)(hidden)
    assert isinstance(lazy, LazyLogits)
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.dim()) == (real.shape, real.dtype, real.device, 3)
    assert lazy.requires_grad
    assert not lazy.detach().requires_grad
    assert (len(lazy), lazy.size(-1), lazy.numel()) == (2, CLASSES, 110)
    assert repr(lazy.detach()) == repr(real.detach())
    assert lazy.argmax(-1).equal(real.argmax(-1))
    assert lazy.detach().numpy().tolist() == real.tolist() == lazy.tolist()
    assert lazy[0, 0].softmax(-1).equal(real[0, 0].softmax(-1))
    assert (lazy + 1).equal(1 + real)
    assert not isinstance(lazy + 1, LazyLogits)


def test_reading_without_gradients_first_does_not_change_gradients(head: nn.Linear, hidden: Tensor) -> None:
    def loss(logits: Any) -> Tensor:
        with torch.no_grad():
            accuracy = (logits.argmax(-1) == TARGETS).float().mean()
            unlearned = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
        assert not accuracy.requires_grad
        assert not unlearned.requires_grad
        return F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())

    expected = trained(head, hidden, loss)
    for ours, theirs in zip(trained(lazily(head), hidden, loss), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_each_operation_is_reported_one_time_and_few_rows_never(
    head: nn.Linear, hidden: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    lazily(head)
    for _ in range(2):
        head(hidden).softmax(-1)
        head(hidden)[:, -1].argmax(-1)
        with torch.no_grad():
            head(hidden).argmax(-1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "roomier: chunked loss: softmax reads the logits of 10 tokens, so all these logits must be stored in memory"
    ]


def test_reading_lazy_logits_after_an_update_raises(head: nn.Linear, hidden: Tensor) -> None:
    lazy = lazily(head)(hidden)
    F.cross_entropy(lazy.flatten(0, 1), TARGETS.flatten()).backward()
    assert lazy.argmax(-1).shape == (2, 5)  # computed before the update, so the value remains available
    late = head(hidden)
    torch.optim.SGD(head.parameters(), lr=0.1).step()
    assert lazy.argmax(-1).shape == (2, 5)
    with pytest.raises(TrainingError, match="after the weights"):
        late.argmax(-1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_gradient_that_would_be_lost_raises(head: nn.Linear, hidden: Tensor) -> None:
    """An ``autograd.Function`` receives the logits without ``__torch_function__``."""
    loss = Doubled.apply(lazily(head)(hidden)).sum()
    with pytest.raises(TrainingError, match="does not reach the model"):
        loss.backward()
    Doubled.apply(head(hidden).clone()).sum().backward()
    assert head.weight.grad is not None


class Halved(torch.autograd.Function):
    """Function that returns a view of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


def test_a_function_that_returns_a_view_raises(head: nn.Linear, hidden: Tensor) -> None:
    logits = Halved.apply(lazily(head)(hidden))
    with pytest.raises(TrainingError, match=r"autograd\.Function.*clone"):
        F.cross_entropy(logits.view(-1, CLASSES), TARGETS.view(-1))
    with pytest.raises(TrainingError, match=r"autograd\.Function.*clone"):
        logits.exp()


def test_a_backward_hook_of_the_layer_raises(head: nn.Linear, hidden: Tensor) -> None:
    lazily(head).register_full_backward_hook(lambda *gradients: None)
    with pytest.raises(TrainingError, match=r"autograd\.Function.*clone"):
        F.cross_entropy(head(hidden).view(-1, CLASSES), TARGETS.view(-1))


def test_a_hook_that_would_not_be_called_raises(head: nn.Linear, hidden: Tensor) -> None:
    logits = lazily(head)(hidden)
    with pytest.raises(TrainingError, match=r"chunked_loss.*hook.*clone"):
        logits.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(TrainingError, match=r"chunked_loss.*hook.*clone"):
        logits.retain_grad()
    computed = logits.clone()
    seen: list[Tensor] = []
    computed.register_hook(seen.append)
    F.cross_entropy(computed.view(-1, CLASSES), TARGETS.view(-1)).backward()
    assert len(seen) == 1


def test_under_autocast_lazy_logits_have_its_dtype(head: nn.Linear, hidden: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        real = head(hidden)
        expected = F.cross_entropy(real.float().flatten(0, 1), TARGETS.flatten())
        lazy = lazily(head)(hidden)
        assert lazy.dtype is real.dtype is torch.bfloat16
        assert lazy.float().dtype is torch.float32
        loss = F.cross_entropy(lazy.flatten(0, 1), TARGETS.flatten())
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert lazy.equal(real)  # also outside of autocast


def test_a_wrong_dtype_raises_the_error_of_torch(head: nn.Linear, hidden: Tensor) -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        lazily(head)(hidden.bfloat16())


def test_a_compiled_model_computes_logits(head: nn.Linear, hidden: Tensor) -> None:
    expected = head(hidden)
    compiled = torch.compile(lazily(head), backend="eager")
    torch.testing.assert_close(compiled(hidden), expected)


def test_the_forward_of_the_layer_is_restored(head: nn.Linear, hidden: Tensor) -> None:
    unwrap(lazily(head))
    assert type(head(hidden)) is Tensor
    assert "forward" not in head.__dict__
