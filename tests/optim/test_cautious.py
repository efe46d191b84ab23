"""``optimizer={"name": "adamw", "cautious": True}`` equals the algorithm of the paper in every mode of the updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier import PlanError
from roomier.techniques.optim.adamw import BlockwiseAdamW
from tests.parallel.parity import whole_weights
from tests.ranks.pool import RankPool

NUM_STEPS, NUM_ROWS = 6, 4
LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.99), 1e-3, 0.1


class Net(roomier.Module):
    """Model without gradients that are exactly 0, because their sign would depend on rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)))

    def training_step(self, batch: Tensor) -> Tensor:
        batch = batch.to(self.layers[0][0].bias.dtype)
        loss: Tensor = (self.layers(batch) - batch.roll(1, 1)).square().mean()
        return loss


def rows() -> Tensor:
    return torch.randn(NUM_STEPS * NUM_ROWS, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def bare() -> dict[str, Tensor]:
    """Train with Algorithm 2 of arXiv 2411.16085, and weight decay of matrices before the update."""
    module = Net().double()
    means = {each: (torch.zeros_like(each), torch.zeros_like(each)) for each in module.parameters()}
    for step, batch in enumerate(rows().split(NUM_ROWS), start=1):
        module.zero_grad()
        module.training_step(batch).backward()
        with torch.no_grad():
            for each, (mean, square) in means.items():
                assert each.grad is not None
                mean.mul_(BETAS[0]).add_(each.grad, alpha=1 - BETAS[0])
                square.mul_(BETAS[1]).addcmul_(each.grad, each.grad, value=1 - BETAS[1])
                update = mean / (1 - BETAS[0] ** step) / ((square / (1 - BETAS[1] ** step)).sqrt() + EPS)
                mask = update * each.grad > 0
                each.mul_(1 - LR * DECAY * (each.dim() > 1))
                each.sub_(update * mask * (mask.numel() / (mask.sum() + 1)), alpha=LR)
    return dict(module.named_parameters())


def fit(num_ranks: int = 1, options: dict[str, Any] | None = None) -> dict[str, Tensor]:
    module = Net()
    trainer = roomier.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=num_ranks,
        optimizer={"name": "adamw", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "cautious": True},
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"precision": "64-true", **(options or {})},
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=NUM_ROWS // num_ranks))
    assert trainer.global_step == NUM_STEPS
    return whole_weights(module)


def check_same(found: dict[str, Tensor]) -> None:
    # In float64, the order of sums changes no sign of a gradient. The factor numel / (count + 1) is a float32.
    torch.testing.assert_close(found, bare(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_in_backward": True},
        {"offload": {"optimizer_states": "disk", "update": "deferred"}},
        {"offload": {"optimizer_states": "disk", "update": "speculative"}},
        {"offload": {"parameters": "disk"}},
    ],
    ids=str,
)
def test_every_mode_equals_the_algorithm(options: dict[str, Any]) -> None:
    check_same(fit(1, options))


@pytest.mark.more
def test_shards_count_the_elements_of_the_parameter(on_ranks: RankPool) -> None:
    options: list[dict[str, Any]] = [{"strategy": name} for name in ("ddp", "zero1", "zero2", "zero3")]
    options += [
        {"strategy": "zero2", "step_in_backward": True, "gradient_clip_val": 1e6},
        {"strategy": "zero3", "offload": {"optimizer_states": "disk", "update": "deferred"}},
        {"strategy": "zero3", "offload": {"optimizer_states": "disk", "parameters": "disk"}},
    ]
    for by_rank in on_ranks.each(2, fit, [(2, each) for each in options]):
        check_same(by_rank[0])


def test_bfloat16_weights_learn_as_float32_weights() -> None:
    exact, rounded = fit(1, {"precision": "32-true"}), fit(1, {"precision": "bf16-true"})
    for name, each in rounded.items():
        torch.testing.assert_close(each.float(), exact[name], rtol=0, atol=4 * NUM_STEPS * LR, msg=name)


def test_copies_stay_cautious_and_groups_do_not_change() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = BlockwiseAdamW([parameter], state_bits=32, cautious=True)
    assert "cautious" not in optimizer.param_groups[0]  # checkpoints contain the groups
    copy = BlockwiseAdamW([torch.nn.Parameter(torch.ones(2))])
    copy.__setstate__(optimizer.__getstate__())  # type: ignore[no-untyped-call]
    assert copy.defaults["cautious"] is True


def test_quantized_moments_are_rejected() -> None:
    with pytest.raises(PlanError, match="cautious=True: is not supported with quantized moments"):
        BlockwiseAdamW([torch.nn.Parameter(torch.ones(64, 128))], cautious=True)
