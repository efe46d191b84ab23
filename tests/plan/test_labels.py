"""Every label of a choice is verified with training runs of the plan with and without the choice.

The runs of an exact choice have the same bits. The runs of a near choice differ within a bound on rounding errors. The
runs of an approximate choice differ by more than this bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from roomier.core.errors import PlanError
from roomier.plan import Kind, plan_from_flags
from roomier.plan.choices import CHOICES, SWITCHES
from roomier.plan.parts import FIELDS
from roomier.plan.table import rows
from tests.covering import few
from tests.plan.labelled_runs import (
    CLIP,
    CONTEXT,
    GLOBAL_BATCH,
    LORA_ALPHA,
    LORA_RANK,
    LR,
    NUM_LAYERS,
    WARMUP,
    WIDTH,
    Run,
    differing,
    distance,
    train,
    train_all,
    train_plain,
)
from tests.ranks.pool import RankPool

# ---- what is compared ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A choice, and the training run with which it is compared.

    Attributes:
        option: the keywords of the Trainer that select the choice.
        without: the keywords of the plan without the choice.
        plain: the recipe of a plain PyTorch loop with equal training, which is used in place of ``without``.
        rounds_to: dtype to which the choice rounds intermediate results.
        strategy: strategy with which an exact choice is also compared on 2 ranks.
        num_ranks: number of ranks of the plan with the choice.
        alone: True if the plan without the choice runs on one rank, with the same global batch.
    """

    option: Mapping[str, Any]
    without: Mapping[str, Any] = field(default_factory=dict)
    plain: str | None = None
    rounds_to: torch.dtype = torch.float32
    strategy: str | None = None
    num_ranks: int = 1
    alone: bool = False


DEFAULT = Compared({}, plain="adamw")
CUDA = {"accelerator": "cuda"}
CLIPS = {"gradient_clip_val": CLIP}
LORA = {"lora": {"rank": LORA_RANK, "alpha": LORA_ALPHA}}
BF16_TRUE = {"precision": "bf16-true"}
DDP = {"strategy": "ddp"}


def recompute(policy: Any, strategy: str) -> Compared:
    return Compared({"activation_checkpointing": policy}, strategy=strategy)


def by_name(name: str) -> Compared:
    return Compared({"optimizer": {"name": name, "lr": LR}}, plain=name)


def sharded(strategy: Any, num_ranks: int = 2) -> Compared:
    return Compared({"strategy": strategy}, num_ranks=num_ranks, alone=True)


def sent(num_ranks: int = 2, rounds_to: torch.dtype = torch.float32, **settings: Any) -> Compared:
    return Compared({"strategy": {"name": "ddp", **settings}}, DDP, rounds_to=rounds_to, num_ranks=num_ranks)


def scheduled(name: str) -> Compared:
    return Compared({"lr_schedule": {"name": name, "warmup_steps": WARMUP}}, plain=name)


def frozen_base(base: str) -> Compared:
    return Compared({"lora": {**LORA["lora"], "base": base}}, LORA)


def rounded(way: str) -> Compared:
    return Compared({**BF16_TRUE, "optimizer": {"weight_rounding": way}}, BF16_TRUE)


def updated(mode: str, strategy: str) -> Compared:
    return Compared({"offload": {"optimizer_states": "disk", "update": mode}, **CLIPS}, CLIPS, strategy=strategy)


TABLE: dict[str, Compared] = {
    "parallel.strategy=single": DEFAULT,
    "parallel.strategy=ddp": sharded("ddp"),
    "parallel.strategy=zero1": sharded("zero1"),
    "parallel.strategy=zero2": sharded("zero2"),
    "parallel.strategy=zero3": sharded("zero3"),
    "parallel.strategy=hsdp": sharded({"name": "hsdp", "shard_size": 2}, num_ranks=4),
    "parallel.strategy=auto": sharded("auto", num_ranks=4),
    "parallel.reduce_dtype=32": DEFAULT,
    "parallel.reduce_dtype=bf16": sent(reduce_dtype="bf16", rounds_to=torch.bfloat16),
    "parallel.gradient_compression=none": DEFAULT,
    "parallel.gradient_compression=powersgd": sent(gradient_compression="powersgd", compression_warmup_steps=3),
    "parallel.communication=overlapped": DEFAULT,
    "parallel.communication=sequential": Compared(
        {"strategy": {"name": "zero3", "communication": "sequential"}},
        {"strategy": "zero3"},
        strategy="zero3",
        num_ranks=2,
    ),
    "parallel.find_unused_parameters": sent(find_unused_parameters=True),
    "precision.mode=32-true": DEFAULT,
    "precision.mode=bf16-mixed": Compared({"precision": "bf16-mixed"}, rounds_to=torch.bfloat16),
    "precision.mode=16-mixed": Compared({"precision": "16-mixed"}, rounds_to=torch.float16),
    "precision.mode=bf16-true": Compared({"optimizer": None, **BF16_TRUE}, {"optimizer": None}),
    "precision.mode=64-true": Compared({"precision": "64-true"}),
    "precision.matmul=highest": DEFAULT,
    "precision.matmul=high": Compared({"matmul_precision": "high"}, rounds_to=torch.bfloat16),
    "precision.matmul=medium": Compared({"matmul_precision": "medium"}, rounds_to=torch.bfloat16),
    "batch.accumulate_grad_batches": Compared({"accumulate_grad_batches": 2}),
    "batch.seeding=stream": DEFAULT,
    "batch.seeding=events": Compared({"seeding": "events"}),
    "batch.gradient_clip_algorithm=norm": Compared(CLIPS, plain="clip by norm"),
    "batch.gradient_clip_algorithm=value": Compared(
        {**CLIPS, "gradient_clip_algorithm": "value"}, plain="clip by value"
    ),
    "optimizer.name=adamw": DEFAULT,
    "optimizer.name=adam": by_name("adam"),
    "optimizer.name=sgd": by_name("sgd"),
    "optimizer.name=adafactor": by_name("adafactor"),
    "optimizer.name=rmsprop": by_name("rmsprop"),
    "optimizer.name=adagrad": by_name("adagrad"),
    "optimizer.name=nadam": by_name("nadam"),
    "optimizer.name=radam": by_name("radam"),
    "optimizer.name=lion": by_name("lion"),
    "optimizer.name=muon": by_name("muon"),
    "optimizer.name=adamw8bit": Compared({"optimizer": {"name": "adamw8bit", "lr": LR}}),
    "optimizer.name=adamw4bit": Compared({"optimizer": {"name": "adamw4bit", "lr": LR}}),
    "optimizer.name=onebit_adam": Compared(
        {**DDP, "optimizer": {"name": "onebit_adam", "lr": LR, "freeze_step": 3}}, DDP, num_ranks=2
    ),
    "optimizer.schedule=constant": scheduled("constant"),
    "optimizer.schedule=linear": scheduled("linear"),
    "optimizer.schedule=cosine": scheduled("cosine"),
    "optimizer.weight_rounding=split": Compared(BF16_TRUE, BF16_TRUE, plain="master weights"),
    "optimizer.weight_rounding=stochastic": rounded("stochastic"),
    "optimizer.weight_rounding=nearest": rounded("nearest"),
    "optimizer.step_in_backward=none": DEFAULT,
    "optimizer.step_in_backward=exact": Compared({"step_in_backward": True, **CLIPS}, CLIPS, strategy="zero3"),
    "optimizer.step_in_backward=stale_norm": Compared({"step_in_backward": "stale_norm", **CLIPS}, CLIPS),
    "activation.policy=none": DEFAULT,
    "activation.policy=full": recompute("full", "zero3"),
    "activation.policy=every_n": recompute("every_n", "ddp"),
    "activation.policy=selective": recompute("selective", "ddp"),
    "activation.policy=budget": recompute(0.5, "zero3"),
    "offload.optimizer_states=none": DEFAULT,
    "offload.optimizer_states=cpu": Compared({**CUDA, "offload": {"optimizer_states": "cpu"}}, CUDA),
    "offload.optimizer_states=disk": Compared({"offload": {"optimizer_states": "disk"}}, strategy="zero2"),
    "offload.parameters=none": DEFAULT,
    "offload.parameters=cpu": Compared({**CUDA, "offload": {"parameters": "cpu"}}, CUDA),
    "offload.parameters=disk": Compared({"offload": {"parameters": "disk"}}, strategy="zero3"),
    "offload.activations=none": DEFAULT,
    "offload.activations=cpu": Compared({"offload": {"activations": "cpu"}}, strategy="ddp"),
    "offload.activations=disk": Compared({"offload": {"activations": "disk"}}, strategy="ddp"),
    "offload.update=auto": updated("auto", "zero3"),
    "offload.update=plain": updated("plain", "ddp"),
    "offload.update=deferred": updated("deferred", "zero2"),
    "offload.update=speculative": updated("speculative", "zero3"),
    "loss.chunked": Compared({"chunked_loss": 5}),
    "attention.kernel=auto": DEFAULT,
    "attention.kernel=flash": Compared({"attention": "flash"}),
    "attention.kernel=efficient": Compared({**CUDA, "attention": "efficient"}, CUDA),
    "attention.kernel=cudnn": Compared(
        {**CUDA, "precision": "bf16-mixed", "attention": "cudnn"},
        {**CUDA, "precision": "bf16-mixed"},
        rounds_to=torch.bfloat16,
    ),
    "attention.kernel=math": Compared({"attention": "math"}),
    "adapter.lora_rank": Compared(LORA, plain="lora"),
    "adapter.frozen_base=as_is": Compared(LORA, plain="lora"),
    "adapter.frozen_base=int8": frozen_base("int8"),
    "adapter.frozen_base=nf4": frozen_base("nf4"),
    "compile.enabled": Compared({"compile": True}),
    "choice.memory_budget_bytes": Compared({"memory_budget": "8GiB"}),
}
MARKS = {
    "compile.enabled": [
        pytest.mark.slow,
        # Warnings of the compiler. As errors, these warnings would stop the compiler.
        pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
        pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    ]
}

SETTINGS = {
    "parallel": {
        *("devices", "num_nodes", "shard_size", "context_parallel_size", "pipeline_parallel_size"),
        *("stages_per_rank", "split", "compression_rank", "compression_warmup_steps"),
    },
    "batch": {"gradient_clip_val"},
    "optimizer": {"lr", "weight_decay", "options", "warmup_steps", "log_warmup", "min_lr_ratio", "decay_steps"},
    "activation": {"every_n", "budget_bytes", "budget_fraction"},
    "offload": {"folder", "share", "buffers"},
    "loss": {"chunk_tokens"},
    "adapter": {"lora_alpha", "lora_dropout", "lora_targets", "lora_trained"},
    "compile": {"backend", "mode"},
    "choice": {"allowed"},
}
"""Fields without a label: the numbers of a labelled choice, the number of ranks, and what auto may choose."""


def labels() -> dict[str, Kind]:
    """The label of each choice, by the field and the value."""
    words = {f"{field}={word}": choice.kind for field, choices in CHOICES.items() for word, choice in choices.items()}
    switches = {field: choice.kind for field, choice in SWITCHES.items()}
    return {name: kind for name, kind in (words | switches).items() if kind is not None}


LABELS = labels()


def test_every_labelled_choice_is_compared() -> None:
    assert TABLE.keys() == LABELS.keys()


def test_every_field_of_a_plan_has_labels_or_is_a_setting_of_a_labelled_choice() -> None:
    fields = {f"{section}.{name}" for section, names in FIELDS.items() for name in names}
    settings = {f"{section}.{name}" for section, names in SETTINGS.items() for name in names}
    assert fields == CHOICES.keys() | SWITCHES.keys() | settings
    assert not settings & (CHOICES.keys() | SWITCHES.keys())


def test_the_printed_table_has_the_label_of_each_choice() -> None:
    order = list(Kind)
    for name, compared in TABLE.items():
        if compared is DEFAULT:
            continue
        with_it, without = (
            plan_from_flags(**keywords_of(asked, Kind.EXACT), devices=compared.num_ranks if "strategy" in asked else 1)
            for asked in (compared.option, compared.without)
        )
        added = set(rows(with_it)) - set(rows(without))
        kinds = [row.kind for row in added if row.kind is not None]
        assert max(kinds, key=order.index, default=Kind.EXACT) is LABELS[name], (name, added)


# ---- the bounds ------------------------------------------------------------------------------------------------------

EPS = 0.1
"""eps of Adam in near runs, larger than their gradients."""
NUM_ADDITIONS = 2 * (GLOBAL_BATCH * CONTEXT + NUM_LAYERS * (3 * WIDTH + 2 * CONTEXT + 4 * WIDTH))
"""Additions in float32 one after the other from a weight to its gradient: the sums of matrix products and attention in
forward and backward, and the sum over the tokens of the batch."""
NUM_ROUNDINGS = 2 * (6 * NUM_LAYERS + 1)
"""Roundings to 16 bits from a weight to its gradient: one for each matrix product in forward and backward."""


def bound(dtype: torch.dtype) -> float:
    """Return the largest expected relative difference between two runs that compute the same formulas.

    The errors of n roundings add up to sqrt(n) * eps / 2 in the norm of a gradient, and both runs round. If eps of Adam
    is large, updates are proportional to gradients and do not amplify the difference. The second moment of Adam is the
    square of the gradient, which doubles the relative difference.
    """
    found = math.sqrt(NUM_ADDITIONS) * torch.finfo(torch.float32).eps
    if dtype is not torch.float32:
        found += math.sqrt(NUM_ROUNDINGS) * torch.finfo(dtype).eps
    return 2 * found


# ---- the runs --------------------------------------------------------------------------------------------------------


def keywords_of(asked: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Return ``asked`` with AdamW, unless it names an optimizer. Runs of exact choices use the default eps."""
    given = asked.get("optimizer", {})
    if given is None:
        return dict(asked)
    eps = {} if kind is Kind.EXACT or given.get("name", "adamw") == "onebit_adam" else {"eps": EPS}
    return {**asked, "optimizer": {"name": "adamw", "lr": LR, **eps, **given}}


def judge(kind: Kind, run: Run, reference: Run, dtype: torch.dtype = torch.float32) -> str:
    """Return how the difference between two runs contradicts the label; empty if there is no contradiction."""
    if kind is Kind.EXACT:
        found = differing(run, reference)
        return f"the bits of {len(found)} tensors differ, such as {found[0]}" if found else ""
    apart = distance(run, reference)
    if kind is Kind.NEAR:
        return "" if apart < bound(dtype) else f"the runs differ by {apart:.1e}, more than {bound(dtype):.1e}"
    return "" if apart > bound(torch.float32) else f"the runs differ by {apart:.1e}, which rounding explains"


def one_rank(compared: Compared, kind: Kind) -> str:
    """Return how a choice contradicts its label on one rank."""
    dropout = 0.1 if kind is Kind.EXACT and compared.plain is None else 0.0
    run = train(keywords_of(compared.option, kind), dropout=dropout)
    if compared.plain is not None:
        return judge(kind, run, train_plain(compared.plain, run.start))
    return judge(kind, run, train(keywords_of(compared.without, kind), dropout=dropout), compared.rounds_to)


ON_ONE_RANK = [name for name, compared in TABLE.items() if compared.num_ranks == 1 and compared is not DEFAULT]


# tests/optim also compares the optimizers with plain PyTorch.
OTHERS = {"optimizer.name=adamw", "optimizer.name=muon", "optimizer.name=adamw8bit"}
MARKS["choice.memory_budget_bytes"] = [pytest.mark.more]
MARKS |= {name: [pytest.mark.more] for name in ON_ONE_RANK if name.startswith("optimizer.name=") and name not in OTHERS}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in ON_ONE_RANK])
def test_a_choice_on_one_rank(name: str) -> None:
    compared = TABLE[name]
    if compared.option.get("accelerator") == "cuda" and not torch.cuda.is_available():
        pytest.skip("the kernel needs a CUDA device")
    assert one_rank(compared, LABELS[name]) == ""


def test_the_default_plan_and_plain_pytorch() -> None:
    """Each choice that is compared with plain PyTorch here is a choice of the default plan with AdamW."""
    plan = plan_from_flags(**keywords_of({}, Kind.EXACT))
    for name in (name for name, compared in TABLE.items() if compared is DEFAULT):
        field, _, word = name.partition("=")
        section, _, attribute = field.partition(".")
        assert getattr(getattr(plan, section), attribute) == word
        assert LABELS[name] is Kind.EXACT
    assert one_rank(DEFAULT, Kind.EXACT) == ""


def test_the_optimizer_of_the_module_is_exact() -> None:
    run = train({"optimizer": None})
    assert judge(Kind.EXACT, run, train_plain("adamw", run.start)) == ""


def test_bfloat16_weights_that_lose_no_update_are_near() -> None:
    keywords = keywords_of(BF16_TRUE, Kind.NEAR)
    assert [row.kind for row in rows(plan_from_flags(**keywords)) if row.part == "precision"] == [Kind.NEAR]
    assert judge(Kind.NEAR, train(keywords), train(keywords_of({}, Kind.NEAR)), torch.bfloat16) == ""


def contradictions(
    on_ranks: RankPool, names: Sequence[str], num_ranks: int, dropout: float = 0.0, **common: Any
) -> dict[str, str]:
    """Return how choices contradict their labels under a plan with the keywords ``common``."""
    asked = [(LABELS[name], each) for name in names for each in (TABLE[name].without, TABLE[name].option)]
    all_keywords = [keywords_of({**common, **each}, kind) for kind, each in asked]
    distinct = [each for index, each in enumerate(all_keywords) if each not in all_keywords[:index]]
    found = {}
    for rank, runs in enumerate(on_ranks(num_ranks, train_all, distinct, num_ranks, dropout, timeout_s=500)):
        references, options = ([runs[distinct.index(each)] for each in all_keywords[first::2]] for first in (0, 1))
        for name, run, reference in zip(names, options, references, strict=True):
            found[f"{name} on rank {rank}"] = judge(LABELS[name], run, reference, TABLE[name].rounds_to)
    return {name: problem for name, problem in found.items() if problem}


def is_supported(name: str, **common: Any) -> bool:
    """Return True if a plan with the keywords ``common`` supports the choice ``name``."""
    try:
        plan_from_flags(**keywords_of({**common, **TABLE[name].option}, LABELS[name]))
    except PlanError:
        return False
    return True


EXACT_ON_RANKS = [name for name, compared in TABLE.items() if compared.strategy is not None]


@pytest.mark.more
@pytest.mark.parametrize(("strategy", "part"), few([("zero3", 0), ("zero3", 1), ("ddp", 0), ("ddp", 1)]))
def test_exact_choices_on_two_ranks(on_ranks: RankPool, strategy: str, part: int) -> None:
    names = [name for name in EXACT_ON_RANKS if TABLE[name].strategy == strategy][part::2]
    assert {LABELS[name] for name in names} == {Kind.EXACT}
    assert contradictions(on_ranks, names, 2, dropout=0.1, strategy=strategy) == {}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3", {"name": "hsdp", "shard_size": 2}], ids=str)
def test_exact_choices_on_four_ranks(on_ranks: RankPool, strategy: Any, precision: str) -> None:
    names = [name for name in EXACT_ON_RANKS if is_supported(name, devices=4, strategy=strategy, precision=precision)]
    rejected = {name for name in EXACT_ON_RANKS if name not in names}
    not_with_ddp = {"optimizer.step_in_backward=exact", "offload.parameters=disk", "offload.update=speculative"}
    assert rejected == (not_with_ddp if strategy == "ddp" else set())
    assert contradictions(on_ranks, names, 4, dropout=0.1, strategy=strategy, precision=precision) == {}


@pytest.mark.slow
def test_choices_that_are_not_exact_on_two_ranks(on_ranks: RankPool) -> None:
    within = [name for name in ON_ONE_RANK if LABELS[name] is not Kind.EXACT and name not in MARKS]
    within = [name for name in within if "accelerator" not in TABLE[name].option]
    in_backward = [name for name in within if "step_in_backward" in name]  # not with ddp
    assert contradictions(on_ranks, [name for name in within if name not in in_backward], 2, **DDP) == {}
    assert contradictions(on_ranks, in_backward, 2, strategy="zero2") == {}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_choices_for_several_ranks(on_ranks: RankPool, num_ranks: int) -> None:
    compared = {
        name: each for name, each in TABLE.items() if each.num_ranks == num_ranks and name not in EXACT_ON_RANKS
    }
    exact = [name for name in compared if LABELS[name] is Kind.EXACT]
    assert not exact, f"set Compared.strategy of {exact}, so that test_exact_choices_on_two_ranks compares their bits"
    asked = [DDP, *(each.option for each in compared.values())]
    all_keywords = [keywords_of(each, Kind.NEAR) for each in asked]
    runs_of_ranks = on_ranks(num_ranks, train_all, all_keywords, num_ranks, 0.0, timeout_s=500)
    alone = train(keywords_of({}, Kind.NEAR))
    for runs in zip(*runs_of_ranks, strict=True):
        losses = torch.stack([run.losses for run in runs]).mean(0)
        for run in runs:
            run.losses = losses
    found = {
        f"{name} on rank {rank}": judge(LABELS[name], run, alone if each.alone else ddp, each.rounds_to)
        for rank, (ddp, *runs) in enumerate(runs_of_ranks)
        for (name, each), run in zip(compared.items(), runs, strict=True)
    }
    assert {name: problem for name, problem in found.items() if problem} == {}


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.1)])
def test_the_bounds_reject_wrong_updates(dtype: torch.dtype, error: float) -> None:
    """If all updates are too large by ``error``, as after a wrong weight of the loss, the run is not near."""
    wrong = keywords_of({"optimizer": {"lr": (1 + error) * LR}}, Kind.NEAR)
    assert judge(Kind.NEAR, train(wrong), train(keywords_of({}, Kind.NEAR)), dtype) != ""
