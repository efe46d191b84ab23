"""Resume with any strategy on any number of ranks, with the results of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from roomier import Trainer, checkpoint
from tests.covering import few
from tests.ranks.pool import RankPool
from tests.resume.conftest import differing
from tests.resume.reshard import GLOBAL_BATCH, LAYOUTS, NUM_STEPS, STOPS_AT, Classifier, Samples, train

# The cases change from one process to several ranks and back, between strategies, and between numbers of ranks.
COVERING = [
    (("single", 1), ("zero3", 2)),
    (("zero3", 2), ("single", 1)),
    (("zero2", 2), ("hsdp", 4)),
    (("hsdp", 4), ("ddp", 2)),
    (("ddp", 2), ("zero1", 2)),
    (("zero1", 2), ("zero2", 2)),
]
ALL = [(first, second) for first in LAYOUTS for second in LAYOUTS]


@pytest.fixture(scope="module")
def undisturbed(on_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run in one process that is never stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result: dict[str, Any] = on_ranks(1, train, folder, "single", 1, NUM_STEPS)[0]
    return result


@pytest.fixture(scope="module")
def saved(on_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the function ``saved(layout)``, which trains the first part of the run once with each layout."""
    parts: dict[tuple[str, int], dict[str, Any]] = {}

    def first_part(layout: tuple[str, int]) -> dict[str, Any]:
        if layout not in parts:
            strategy, num_ranks = layout
            folder = tmp_path_factory.mktemp(f"{strategy}-{num_ranks}")
            parts[layout] = on_ranks(num_ranks, train, folder, strategy, num_ranks, STOPS_AT)[0]
        return parts[layout]

    return first_part


def check(first: Any, second: Any, saved: Any, undisturbed: Any, on_ranks: RankPool, folder: Path) -> None:
    begun = saved(first)
    strategy, num_ranks = second
    ended = on_ranks(num_ranks, train, folder, strategy, num_ranks, NUM_STEPS, begun["best"])[0]
    assert begun["step"] == STOPS_AT
    assert ended["step"] == NUM_STEPS
    assert begun["ids"] + ended["ids"] == undisturbed["ids"], "each sample once, in the same steps"
    assert len(begun["losses"] + ended["losses"]) == NUM_STEPS
    for actual, expected in zip(begun["losses"] + ended["losses"], undisturbed["losses"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)
    assert ended["train_loss"][0] == pytest.approx(undisturbed["train_loss"][0], rel=1e-5), "sums over a resume"


@pytest.mark.parametrize(("first", "second"), few(COVERING, 2), ids=str)
def test_resume_with_another_layout(
    first: Any, second: Any, saved: Any, undisturbed: Any, on_ranks: RankPool, tmp_path: Path
) -> None:
    check(first, second, saved, undisturbed, on_ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [pair for pair in ALL if pair not in COVERING], ids=str)
def test_resume_with_every_pair_of_layouts(
    first: Any, second: Any, saved: Any, undisturbed: Any, on_ranks: RankPool, tmp_path: Path
) -> None:
    check(first, second, saved, undisturbed, on_ranks, tmp_path)


@pytest.mark.parametrize("layout", few(map(pytest.param, [("zero3", 2), ("zero1", 2), ("ddp", 2)])), ids=str)
def test_resume_with_the_same_layout_is_bit_identical(
    layout: tuple[str, int], saved: Any, on_ranks: RankPool, tmp_path: Path
) -> None:
    strategy, num_ranks = layout
    begun = saved(layout)
    calls = [
        (tmp_path / "cut", strategy, num_ranks, NUM_STEPS, begun["best"]),
        (tmp_path / "whole", strategy, num_ranks, NUM_STEPS),
    ]
    [ended, *_], [whole, *_] = on_ranks.each(num_ranks, train, calls)
    assert begun["losses"] + ended["losses"] == whole["losses"]
    ours, theirs = (checkpoint.load(each["best"]) for each in (ended, whole))
    for section in ("module", "optimizers", "random", "progress", "data"):
        assert list(differing(ours[section], theirs[section], section)) == []


def test_checkpoint_does_not_depend_on_the_layout(saved: Any) -> None:
    single, cut = (checkpoint.load(saved(layout)["best"]) for layout in (("single", 1), ("zero3", 2)))
    assert single["module"].keys() == cut["module"].keys()
    for name, tensor in single["module"].items():
        torch.testing.assert_close(cut["module"][name], tensor)
    [single_states], [cut_states] = (each["optimizers"] for each in (single, cut))
    assert single_states["state"].keys() == cut_states["state"].keys()
    for name, state in single_states["state"].items():
        torch.testing.assert_close(cut_states["state"][name], state)
    assert single["data"]["num_samples"] == cut["data"]["num_samples"] == STOPS_AT * GLOBAL_BATCH
    assert list(cut["random"]) == ["0", "1"]


def test_one_process_reads_the_weights_of_several_ranks(saved: Any) -> None:
    path = saved(("zero3", 2))["best"]
    module = Classifier.load_from_checkpoint(path)
    assert module.head.weight is module.embedding.weight
    stored = checkpoint.load(path, only=("module",))["module"]
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, stored[name]), name


def validate(folder: Path, strategy: str, num_ranks: int, path: str) -> float:
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=num_ranks,
        strategy={"name": "hsdp", "shard_size": 2} if strategy == "hsdp" else strategy,
        logger=False,
        enable_progress_bar=False,
    )
    [metrics] = trainer.validate(Classifier(), DataLoader(Samples(), batch_size=5), ckpt_path=path)
    return float(metrics["val_loss"])


@pytest.mark.more
def test_validation_with_another_layout(saved: Any, on_ranks: RankPool, tmp_path: Path) -> None:
    path = saved(("zero3", 2))["best"]
    losses = [
        loss
        for strategy, num_ranks in (("single", 1), ("hsdp", 4), ("ddp", 2))
        for loss in on_ranks(num_ranks, validate, tmp_path, strategy, num_ranks, path)
    ]
    assert losses == pytest.approx([losses[0]] * 7, rel=1e-6)
