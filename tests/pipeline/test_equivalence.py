"""Tests that the stages of a pipeline train as one process does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.context.fitting import Case, fit, is_equal, train_bare
from tests.parallel.parity import Trained, distance
from tests.ranks.pool import RankPool


def staged(network: str, num_ranks: int = 2, size: int = 2, **options: object) -> Case:
    options = {"accumulate": 4, **options}
    return Case(network, "ddp", num_ranks, size, dimension="pipeline_parallel_size", **options)  # type: ignore[arg-type]


def check(on_ranks: RankPool, *cases: Case) -> None:
    for case, results in zip(cases, on_ranks.each(cases[0].num_ranks, fit, [(case,) for case in cases]), strict=True):
        weights = {name: each for of_rank in results for name, each in of_rank.weights.items() if not each.is_meta}
        apart = distance(Trained(results[0].losses, results[0].norms, weights), train_bare(case))
        assert is_equal(case, apart), (case, apart)


MODELS = ["gpt", "encoder", "pairs", "llama 8", "llama padded", "mixtral", "qwen3", "gpt2", "bert padded", "falcon"]


def test_a_fit_matches_one_process(on_ranks: RankPool) -> None:
    check(
        on_ranks,
        staged("gpt", 4),
        staged("gpt", 4, 4, accumulate=6, levers={"activation_checkpointing": "full"}),
        staged("mixtral", 4, 2, is_sum=True),
        staged("gpt", 4, 2, accumulate=3, of_strategy={"split": ["network.blocks.1"]}),
        staged("gpt2", 4, 2, precision="32-true", accumulate=1),
    )


def sharded(strategy: str, network: str = "gpt", **options: object) -> Case:
    return replace(staged(network, 4, **options), strategy=strategy)


def test_a_fit_with_sharded_stages_matches_one_process(on_ranks: RankPool) -> None:
    check(
        on_ranks,
        sharded("zero1"),
        sharded("zero2", of_strategy={"schedule": "gpipe"}),
        sharded("zero3", accumulate=5),
        sharded("zero3", "mixtral", is_sum=True, of_strategy={"find_unused_parameters": True}),
    )


def interleaved(network: str, num_ranks: int, size: int, per_rank: int, **options: object) -> Case:
    of_strategy = {"schedule": "interleaved_1f1b", "stages_per_rank": per_rank}
    return staged(network, num_ranks, size, of_strategy=of_strategy, **options)


def test_a_fit_with_interleaved_stages_matches_one_process(on_ranks: RankPool) -> None:
    check(on_ranks, interleaved("gpt", 2, 2, 3, accumulate=5), interleaved("gpt2", 2, 2, 2, accumulate=1))
    check(on_ranks, interleaved("gpt", 4, 2, 2, levers={"activation_checkpointing": "full"}))


@pytest.mark.more
def test_interleaved_stages_with_any_number_of_micro_batches(on_ranks: RankPool) -> None:
    check(on_ranks, *[interleaved("gpt", 2, 2, 2, accumulate=each, num_steps=2) for each in range(1, 9)])
    check(on_ranks, *[interleaved("gpt", 3, 3, 2, accumulate=each, num_steps=2) for each in range(1, 9)])
    check(on_ranks, interleaved("mixtral", 4, 2, 2, is_sum=True), interleaved("qwen3", 4, 2, 2, accumulate=3))


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_interleaved_stages_are_sharded(on_ranks: RankPool, strategy: str) -> None:
    cases = [
        interleaved("gpt", 4, 2, 2, accumulate=3),
        interleaved("llama 1", 4, 2, 2, levers={"activation_checkpointing": "full"}),
        interleaved("gpt2", 4, 2, 2, accumulate=1),
    ]
    check(on_ranks, *[replace(each, strategy=strategy) for each in cases])


@pytest.mark.more
def test_each_model_with_sharded_stages(on_ranks: RankPool) -> None:
    strategies, schedules = ["zero1", "zero2", "zero3"], ["gpipe", "1f1b"]
    check(
        on_ranks,
        *[
            sharded(
                strategies[index % 3], model, accumulate=1 + index % 4, of_strategy={"schedule": schedules[index % 2]}
            )
            for index, model in enumerate(MODELS)
            if "mixtral" not in model  # ranks use different experts
        ],
        sharded("zero1", of_strategy={"schedule": "gpipe"}),
        sharded("zero2"),
        sharded("zero3", levers={"activation_checkpointing": "full"}, of_strategy={"schedule": "gpipe"}),
    )


@pytest.mark.more
def test_each_model(on_ranks: RankPool) -> None:
    check(on_ranks, *[staged(model, accumulate=1 + index % 5) for index, model in enumerate(MODELS)])


@pytest.mark.parametrize(
    ("network", "of_strategy"),
    [
        ("encoder dropout", {"schedule": "gpipe"}),
        ("mixtral router", {"schedule": "1f1b"}),
        ("encoder dropout", {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    ],
)
def test_a_fit_has_the_bits_of_one_process(on_ranks: RankPool, network: str, of_strategy: dict[str, object]) -> None:
    levers = {"gradient_clip_val": None, "seeding": "events"}
    case = staged(network, accumulate=5, of_strategy=of_strategy, levers=levers)
    results = on_ranks(2, fit, case)
    one = fit(replace(case, strategy="single", num_ranks=1, size=1, of_strategy={}))
    assert results[0].losses == one.losses
    for of_rank in results:
        for name, each in of_rank.weights.items():
            assert each.is_meta or torch.equal(each, one.weights[name]), name
