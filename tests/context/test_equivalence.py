"""Tests that ranks that share sequences train as one process does.

Losses, norms and weights after clipped steps are compared. The tolerance is 1e-10 in float64, 1e-7 for models that
compute in float32, and 1e-5 in precision 32-true.
"""

from dataclasses import replace

import pytest
import torch

from roomier.callbacks import MemoryForecast
from roomier.core.errors import RoomierError
from roomier.techniques.context import dry_pass, exchange, region
from roomier.techniques.loss import cross_entropy
from tests.context.fitting import Case, fit, is_equal, train_bare
from tests.parallel.parity import Trained, distance
from tests.ranks.pool import RankPool

MODELS = ["gpt", "encoder", "pairs", "llama 8", "llama 2", "llama 1", "llama padded", "mixtral", "qwen3", "gemma3"]
MODELS += ["gpt2", "bert padded", "falcon", "falcon padded left"]
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "hsdp"]


def check(on_ranks: RankPool, *cases: Case) -> None:
    """Fit each case, and compare the losses and weights with a plain loop in one process."""
    for case, results in zip(cases, on_ranks.each(cases[0].num_ranks, fit, [(case,) for case in cases]), strict=True):
        apart = distance(results[0], train_bare(case))
        assert is_equal(case, apart), (case, apart)


def on_four(index: int, model: str, size: int) -> Case:
    strategy = STRATEGIES[index % len(STRATEGIES)]
    return Case(
        model,
        strategy,
        4,
        size,
        length=18 + index % 3,
        accumulate=1 + index % 2,
        shard_size=size if strategy == "hsdp" else None,
        precision="32-true" if index % 6 == 5 else "64-true",
    )


def test_a_fit_matches_one_process(on_ranks: RankPool) -> None:
    check(
        on_ranks,
        Case("gpt", "zero3"),
        Case("encoder", "ddp", is_sum=True),
        Case("recomputed", "zero2", num_steps=2),
    )


def error_of(case: Case) -> str:
    with pytest.raises(RoomierError) as caught:
        fit(case)
    return str(caught.value)


@pytest.mark.more
def test_a_skipped_last_block(on_ranks: RankPool) -> None:
    errors = on_ranks(2, error_of, Case("skipping", accumulate=1))
    assert all("a forward pass skipped the last block" in each for each in errors)


@pytest.mark.more
def test_passes_of_two_lengths(on_ranks: RankPool) -> None:
    check(on_ranks, Case("two lengths", "ddp", num_steps=3))
    errors = on_ranks(2, error_of, Case("two lengths recomputed"))
    assert all("recomputes its blocks, and a step has sequences of 2 lengths" in each for each in errors)


@pytest.mark.more
def test_each_model(on_ranks: RankPool) -> None:
    check(on_ranks, *[on_four(index, model, 2 + 2 * (index % 2)) for index, model in enumerate(MODELS)])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shift", range(len(STRATEGIES)))
def test_each_model_with_each_strategy_and_size(on_ranks: RankPool, size: int, shift: int) -> None:
    check(on_ranks, *[on_four(index + shift, model, size) for index, model in enumerate(MODELS)])


@pytest.mark.slow
def test_eight_ranks(on_ranks: RankPool) -> None:
    check(on_ranks, Case("llama 8", "zero3", 8, 8), Case("llama 1", "hsdp", 8, 4, shard_size=4))


LEVERS = [
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": 0.5},
    {"chunked_loss": True},
    {"step_in_backward": True, "accumulate_grad_batches": 1},
    {"offload": {"optimizer_states": "disk"}},
    {"offload": {"activations": "disk"}},
    {"offload": {"parameters": "disk"}},
]


@pytest.mark.more
def test_memory_techniques(on_ranks: RankPool) -> None:
    check(
        on_ranks,
        *[
            Case("gpt", "zero3", levers=levers, accumulate=levers.get("accumulate_grad_batches", 2))
            for levers in LEVERS
        ],
    )


def fit_and_count_rows(case: Case) -> tuple[Trained, int]:
    """Return the number of rows of the output layer that this rank computed, in addition to the results."""
    num_rows, in_chunks = [0], cross_entropy._in_chunks

    def counted(hidden, *args, **kwargs):  # type: ignore[no-untyped-def]
        num_rows[0] += len(hidden)
        return in_chunks(hidden, *args, **kwargs)

    cross_entropy._in_chunks = counted
    try:
        return fit(case), num_rows[0]
    finally:
        cross_entropy._in_chunks = in_chunks


@pytest.mark.more
def test_each_rank_computes_its_share_of_a_chunked_loss(on_ranks: RankPool) -> None:
    for is_sum in False, True:
        case = Case("gpt", "zero3", num_steps=3, is_sum=is_sum, levers={"chunked_loss": 5})
        results = on_ranks(2, fit_and_count_rows, case)
        apart = distance(results[0][0], train_bare(case))
        assert is_equal(case, apart), (case, apart)
        num_rows = case.num_steps * case.step_samples * case.length
        assert [rows for _, rows in results] == [num_rows // 2, num_rows // 2]


@pytest.mark.more
def test_a_lightning_module(on_ranks: RankPool) -> None:
    check(on_ranks, Case("gpt", "zero1", is_lightning=True), Case("llama 2", "zero3", is_lightning=True))


@pytest.mark.more
def test_adapters(on_ranks: RankPool) -> None:
    case = Case("gpt", "zero2", levers={"lora": 4, "activation_checkpointing": "full"})
    [ours, _] = on_ranks(2, fit, case)
    [one] = on_ranks(1, fit, replace(case, strategy="single", num_ranks=1, size=1))
    assert is_equal(case, distance(ours, one))


def memory_of(case: Case) -> tuple[int, int]:
    """Return the forecast and the measured peak of a step in bytes."""
    callback = MemoryForecast()
    fit(replace(case, callbacks=(callback,)))
    assert callback.record is not None
    return callback.record.forecast_bytes, callback.record.measured_bytes


@pytest.mark.more
def test_a_dry_run_predicts_the_peak(on_ranks: RankPool) -> None:
    """With full recomputation and a chunked loss, most of the peak is outside of the blocks."""
    cases = [
        Case("gpt", "zero2", length=40),
        Case("gpt", "zero3", length=40, levers={"activation_checkpointing": "full", "chunked_loss": True}),
    ]
    for case in cases:  # on a busy machine, a reduction can end late, so that its buffers exist longer
        runs = (on_ranks(2, memory_of, case)[0] for _ in range(4))
        assert any(forecast == pytest.approx(measured, rel=0.01) for forecast, measured in runs)


@pytest.mark.more
def test_a_skipped_window_has_no_effect(on_ranks: RankPool) -> None:
    """The second micro-batch of the second window, and everything after it, is skipped."""
    check(on_ranks, Case("gpt", num_ranks=2, accumulate=3, num_steps=3, is_sum=True, skipped_from=4))


# ---- mutants -------------------------------------------------------------------------------------------------------


def slice_masks() -> None:
    dry_pass.RecordedCall.masks = property(lambda self: set(), lambda self, value: None)  # type: ignore[assignment]


def gather_without_reduction() -> None:
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        group, dim, length = ctx.arguments
        return gradient.split(group.lengths(length), dim)[group.rank], None, None, None

    exchange._Gather.backward = staticmethod(backward)


def weigh_by_data_ranks() -> None:
    from roomier.engine import eager

    right = eager.term_weights
    eager.term_weights = lambda *args: tuple(2 * each for each in right(*args))


def permute_heads() -> None:
    def repeated(self, query, key):  # type: ignore[no-untyped-def]
        return key.repeat(1, query.shape[1] // key.shape[1], 1, 1)

    exchange.ContextGroup._repeated = repeated  # type: ignore[method-assign]


def allow_escapes() -> None:
    region._check_escapes = lambda *args: None


MUTANTS = {
    slice_masks: "pairs",
    gather_without_reduction: "gpt",
    weigh_by_data_ranks: "gpt",
    permute_heads: "llama 2",
    allow_escapes: "mixtral router",
}


def fit_mutated(name: str, case: Case) -> Trained | str:
    {mutate.__name__: mutate for mutate in MUTANTS}[name]()
    torch.manual_seed(0)
    try:
        return fit(case)
    except RoomierError as error:
        return str(error)


@pytest.mark.more
@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_the_check_detects_a_mutant(on_ranks: RankPool, mutate: object) -> None:
    case = Case(MUTANTS[mutate], num_ranks=2, num_steps=3, accumulate=1, levers={"gradient_clip_val": None})  # type: ignore[index]
    found = on_ranks(2, fit_mutated, mutate.__name__, case)[0]  # type: ignore[attr-defined]
    assert isinstance(found, str) or not is_equal(case, distance(found, train_bare(case)))
