"""Muon, with AdamW for the other parameters, equals torch's two optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from roomier import Callback, Module, PlanError
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.optim.by_name import make_optimizer
from roomier.techniques.optim.muon import orthogonal


def network(width: int = 32) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=50, context=8, num_layers=2, num_heads=2, width=width, dropout=0.0))


def run(net: GPT, optimizers: list[torch.optim.Optimizer], num_steps: int = 10) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        tokens = torch.randint(50, (2, 9), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(tokens[:, :-1], tokens[:, 1:])[1].backward()
        for optimizer in optimizers:
            optimizer.step()


def hidden_names(net: nn.Module) -> set[str]:
    return {name for name, each in net.named_parameters() if name.startswith("blocks.") and each.dim() == 2}


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_equal_torchs_two_optimizers_bit_for_bit(adjust: str, nesterov: bool) -> None:
    ours, theirs = network(), network()
    settings = {"adjust_lr_fn": adjust, "nesterov": nesterov, "momentum": 0.9}
    optimizer = make_optimizer("muon", ours, lr=2e-3, weight_decay=0.05, options={**settings, "betas": (0.8, 0.9)})
    named = dict(theirs.named_parameters())
    hidden = [named[name] for name in named if name in hidden_names(theirs)]
    weights = [each for name, each in named.items() if name not in hidden_names(theirs) and each.dim() >= 2]
    others = [each for each in named.values() if each.dim() < 2]
    groups = [{"params": weights, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    reference = [
        torch.optim.Muon(hidden, lr=2e-3, weight_decay=0.05, **settings),
        torch.optim.AdamW(groups, lr=2e-3, betas=(0.8, 0.9), fused=True),
    ]
    run(ours, [optimizer])
    run(theirs, reference)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_muon_updates_hidden_matrices_and_adamw_the_rest() -> None:
    net = network()
    optimizer = make_optimizer("muon", net, lr=1e-3)
    names = {parameter: name for name, parameter in net.named_parameters()}
    held = {group["holds"]: {names[each] for each in group["params"]} for group in optimizer.param_groups}
    assert held["matrices of blocks"] == hidden_names(net)
    assert held["other weights"] == {"tokens.weight", "positions.weight", "head.weight"} & set(names.values())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    run(net, [optimizer], 1)
    assert {len(optimizer.state[parameter]) for parameter, name in names.items() if name in hidden_names(net)} == {1}


def test_adamw_can_have_a_separate_learning_rate() -> None:
    optimizer = make_optimizer("muon", network(), lr=0.02, options={"adamw_lr": 3e-4, "adjust_lr_fn": "original"})
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4, 3e-4]


class Language(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        loss: Tensor = self.net(batch[0][:, :-1], batch[0][:, 1:])[1]
        return loss


@pytest.fixture
def fit(make_trainer: Any) -> Any:
    tokens = torch.randint(50, (32, 9), generator=torch.Generator().manual_seed(1))

    def train(
        num_steps: int, ckpt_path: Path | None = None, callbacks: Any = (), **options: Any
    ) -> tuple[Language, Any]:
        module = Language()
        optimizer = {"name": "muon", "lr": 1e-3, **options}
        schedule = {"name": "linear", "warmup_steps": 2}
        trainer = make_trainer(
            max_steps=num_steps,
            optimizer=optimizer,
            lr_schedule=schedule,
            gradient_clip_val=1.0,
            callbacks=list(callbacks),
        )
        trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=4), ckpt_path=ckpt_path)
        return module, trainer

    return train


class SavesAt4(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.path)


def test_a_resume_is_bit_identical(fit: Any, tmp_path: Path) -> None:
    whole, _ = fit(8, callbacks=[SavesAt4(tmp_path / "saved")])
    resumed, _ = fit(8, tmp_path / "saved")
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_update_can_run_in_the_backward(fit: Any) -> None:
    plain, _ = fit(5)
    at_once, _ = fit(5, step_in_backward="exact")
    for one, other in zip(plain.parameters(), at_once.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_learning_rate_of_adamw_can_change_at_a_resume(fit: Any, tmp_path: Path) -> None:
    _, begun = fit(4)
    begun.save_checkpoint(tmp_path / "saved")
    _, resumed = fit(6, tmp_path / "saved", adamw_lr=5e-4)
    [optimizer] = resumed.optimizers
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-3, 5e-4, 5e-4]


def test_the_loss_falls() -> None:
    net = network()
    tokens = (torch.arange(9)[None] * 3 + torch.arange(4)[:, None]) % 50
    optimizer = make_optimizer("muon", net, lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = net(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_model_without_blocks_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"muon.*requires a trained matrix.*model_blocks"):
        make_optimizer("muon", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))


def test_options_that_torch_rejects_are_rejected() -> None:
    with pytest.raises(ValueError, match="Adjust learning rate function"):
        make_optimizer("muon", network(), options={"adjust_lr_fn": "none"})


@pytest.mark.parametrize("shape", [(20, 20), (12, 40), (40, 12)])
def test_singular_values_approach_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = matrix.clone()
    values = torch.linalg.svdvals(orthogonal(matrix, (3.4445, -4.7750, 2.0315), 5).float())
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert torch.equal(matrix, before)


def test_a_deep_copy_continues_the_same_way() -> None:
    net = network()
    optimizer = make_optimizer("muon", net, lr=1e-3)
    run(net, [optimizer], 3)
    other = copy.deepcopy(net)
    again = make_optimizer("muon", other, lr=1e-3)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(net, [optimizer], 3)
    run(other, [again], 3)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_shallow_copy_continues_the_same_way() -> None:
    net = network()
    optimizer = make_optimizer("muon", net, lr=1e-3)
    run(net, [optimizer], 3)
    other, again = copy.deepcopy((net, optimizer))
    run(net, [optimizer], 3)
    run(other, [again], 3)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
