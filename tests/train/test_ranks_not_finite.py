"""A loss or gradient is not finite on one of two ranks. Both ranks stop at the same step, or both ranks skip the
step."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import roomier
from roomier.callbacks import ModelCheckpoint
from roomier.core.errors import TrainingError
from tests.ranks.pool import RankFailed

pytestmark = pytest.mark.more

BAD_STEP = 2


class Spoiled(roomier.Module):
    """Module whose loss, or the gradient of whose first layer, is NaN on rank 1 in one step or in all later steps."""

    def __init__(self, what: str, last_bad_batch: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 1)
        self.what, self.last_bad_batch = what, last_bad_batch
        self.weights: list[list[Tensor]] = []

    def training_step(self, batch, batch_idx):
        hidden = self.first(batch)
        is_bad = self.global_rank == 1 and BAD_STEP <= batch_idx <= self.last_bad_batch
        if is_bad and self.what == "gradient":
            hidden.register_hook(lambda gradient: gradient * math.nan)
        loss = 1e-3 * self.last(hidden).float().square().mean()
        return loss * math.nan if is_bad and self.what == "loss" else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.weights.append([local(each).clone() for each in self.parameters()])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class SpoiledByHand(Spoiled):
    def __init__(self, what: str, last_bad_batch: float) -> None:
        super().__init__(what, last_bad_batch)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def local(parameter: Any) -> Tensor:
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()


def fit(
    strategy: str,
    what: str,
    root: Any,
    kind: type[Spoiled] = Spoiled,
    last_bad_batch: float = BAD_STEP,
    **keywords: Any,
) -> dict[str, Any]:
    module = kind(what, last_bad_batch)
    trainer = roomier.Trainer(
        **{"enable_checkpointing": False, "log_every_n_steps": 1, "max_steps": 6, **keywords},
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=strategy,
        devices=dist.get_world_size(),
        default_root_dir=root,
    )
    found: dict[str, Any] = {"error": None}
    try:
        trainer.fit(module, [torch.ones(2, 1)] * 100)
    except TrainingError as error:
        found["error"] = error.field, error.problem, error.action
    found["steps"] = trainer.global_step
    found["weights"] = module.weights
    scaler = trainer.fitted.engine.scaler
    found["scale"] = None if scaler is None else (scaler.factor, float(scaler.num_skipped))
    return found


STOPS: dict[str, tuple[str, dict[str, Any], int, str, str]] = {
    "a loss at a log step": ("loss", {}, 3, "loss", "is not finite on rank 1 at step 3"),
    "a loss, clipped": ("loss", {"gradient_clip_val": 1.0}, 3, "loss", "is not finite on rank 1 at step 3"),
    "a loss, accumulated": ("loss", {"accumulate_grad_batches": 2}, 2, "loss", "is not finite on rank 1 at step 2"),
    "a loss of a manual step": ("loss", {"kind": SpoiledByHand}, 3, "loss", "is not finite on rank 1 at step 3"),
    "a loss before a checkpoint": (
        "loss",
        {"log_every_n_steps": 50, "enable_checkpointing": True},
        3,
        "loss",
        "is not finite on rank 1 at step 3",
    ),
    "a loss that is found late": (
        "loss",
        {"log_every_n_steps": 5},
        5,
        "loss",
        "is not finite on all 2 ranks at step 5",
    ),
    "a gradient at a log step": ("gradient", {}, 4, "loss", "is not finite on all 2 ranks at step 4"),
    "a gradient before a checkpoint": (
        "gradient",
        {"log_every_n_steps": 50, "enable_checkpointing": True},
        3,
        "first.weight",
        "this parameter is not finite on all 2 ranks after step 3",
    ),
}


def stop(strategy: str, root: Any) -> dict[str, Any]:
    """Run several fits. Both ranks stop at the same place, so the next fit can begin."""
    found = {}
    for name, (what, keywords, *_) in STOPS.items():
        callbacks = [ModelCheckpoint(every_n_train_steps=1)] if "enable_checkpointing" in keywords else None
        found[name] = fit(strategy, what, root, callbacks=callbacks, **keywords)
    return found


STRATEGIES = [
    "ddp",
    "zero2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero1", "zero3")),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_ranks_stop_at_the_same_step_with_one_error(on_ranks, tmp_path, strategy: str) -> None:
    first, second = on_ranks(2, stop, strategy, tmp_path)
    for name, (_, _, steps, field, problem) in STOPS.items():
        assert first[name]["error"] == second[name]["error"], name
        assert (first[name]["steps"], second[name]["steps"]) == (steps, steps), name
        found_field, found_problem, action = first[name]["error"]
        assert (found_field, found_problem.startswith(problem)) == (field, True), (name, found_problem)
        assert ("checkpoint of step 2 is unchanged" in action) == ("checkpoint" in name), (name, action)
        assert ("To find the rank on which the first invalid loss occurs" in action) == ("all 2 ranks" in problem), (
            name,
            action,
        )


def skip(strategy: str, root: Any) -> list[dict[str, Any]]:
    return [
        fit(strategy, what, root, precision="16-mixed", **keywords)
        for what in ("loss", "gradient")
        for keywords in ({}, {"gradient_clip_val": 1.0})
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_a_loss_scale_both_ranks_skip_the_step(on_ranks, tmp_path, strategy: str) -> None:
    for of_rank in on_ranks(2, skip, strategy, tmp_path):
        for found in of_rank:
            assert (found["error"], found["steps"], found["scale"]) == (None, 6, (32768.0, 1.0))
            pairs = zip(found["weights"], found["weights"][1:], strict=False)
            same = [all(map(torch.equal, before, after)) for before, after in pairs]
            assert same == [False, True, False, False, False]  # the step after the second update is skipped


def give_up(strategy: str, root: Any) -> dict[str, Any]:
    return fit(strategy, "loss", root, last_bad_batch=math.inf, precision="16-mixed", max_steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_loss_scale_below_one_ends_both_ranks(on_ranks, tmp_path, strategy: str) -> None:
    first, second = on_ranks(2, give_up, strategy, tmp_path)
    assert first["error"] == second["error"]
    assert first["error"][1].startswith("is not finite on rank 1 at step 19")
    assert first["scale"] == second["scale"] == (0.5, 17.0)


def find_operation(strategy: str, root: Any) -> None:
    fit(strategy, "gradient", root, detect_anomaly=True)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_detect_anomaly_names_the_rank_and_the_batch(on_ranks, tmp_path, strategy: str) -> None:
    with pytest.raises(RankFailed) as caught:
        on_ranks(2, find_operation, strategy, tmp_path)
    assert caught.value.rank == 1
    report = caught.value.reports[1]
    assert "Backward0' returned nan values in its" in report
    assert f"the step on rank 1 used batch {BAD_STEP} of epoch 0" in report
