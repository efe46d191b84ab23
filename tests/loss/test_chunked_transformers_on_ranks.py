"""Sharded models of Hugging Face with a chunked loss."""

import pytest

from tests.loss.test_chunked_on_ranks import Chunked
from tests.parallel.parity import distance, train_bare, train_on_ranks
from tests.parallel.test_transformers import GPT2, T5, FromConfig, Llama
from tests.ranks.pool import RankPool


@pytest.mark.parametrize("task", [GPT2, Llama, T5])
def test_a_model_trains_as_in_one_process(on_ranks: RankPool, task: type[FromConfig]) -> None:
    setup = Chunked("zero3", 2, accumulate=2, clip=1.0, num_steps=3)
    [trained, *_] = on_ranks(2, train_on_ranks, task, setup)
    apart = distance(trained, train_bare(task, setup))
    assert max(apart.losses, apart.norms, apart.weights) < 1e-5, apart
