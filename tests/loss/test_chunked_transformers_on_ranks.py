"""Sharded models of Hugging Face with a chunked loss."""

import pytest

from tests.loss.test_chunked_on_ranks import Chunked
from tests.parallel.parity import distance, train_bare, train_on_ranks
from tests.parallel.test_transformers import GPT2, T5, FromConfig, Llama
from tests.ranks.pool import RankPool

pytestmark = pytest.mark.more


def test_models_train_as_in_one_process(on_ranks: RankPool) -> None:
    tasks: list[type[FromConfig]] = [GPT2, Llama, T5]
    setup = Chunked("zero3", 2, accumulate=2, clip=1.0, num_steps=3)
    results = on_ranks.each(2, train_on_ranks, [(task, setup) for task in tasks])
    for task, [trained, *_] in zip(tasks, results, strict=True):
        apart = distance(trained, train_bare(task, setup))
        assert max(apart.losses, apart.norms, apart.weights) < 1e-5, (task.__name__, apart)
