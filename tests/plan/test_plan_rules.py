"""Invalid Plans are rejected. Each error contains the field, the value and an alternative."""

from collections.abc import Mapping

import pytest

from roomier.core.errors import PlanError
from roomier.plan import CombinedPlanError, OptimizerPlan, Options, ParallelPlan, Plan, PrecisionPlan
from roomier.plan.choices import CHOICES, REFUSED
from roomier.plan.levers import without_host_tiers
from roomier.plan.rules import each_error

ADAMW = {"name": "adamw"}
HALF = {"policy": "budget", "budget_fraction": 0.5}
ON_DISK = {"optimizer_states": "disk"}

WRONG_VALUES = [
    # values, field, value in the message, part of the advice
    ({"parallel": {"strategy": "horovod"}}, "parallel.strategy", "'horovod'", "'ddp'"),
    ({"parallel": {"strategy": "singel"}}, "parallel.strategy", "'singel'", "Did you mean 'single'?"),
    ({"parallel": {"strategy": "fdsp"}}, "parallel.strategy", "'fdsp'", "Did you mean 'fsdp'?"),
    ({"parallel": {"strategy": "qqq"}}, "parallel.strategy", "'qqq'", "Use one of: auto"),
    (
        {"parallel": {"strategy": "hsdp", "devices": 4, "shard_size": 3}},
        "parallel.shard_size",
        "3",
        "Use one of [1, 2, 4]",
    ),
    ({"parallel": {"strategy": "zero2", "shard_size": 2}}, "parallel.shard_size", "2", "Use strategy='hsdp'"),
    ({"parallel": {"strategy": "hsdp", "shard_size": 0}}, "parallel.shard_size", "0", "at least 1"),
    ({"parallel": {"strategy": "ddp", "accelerator": "mps"}}, "parallel.strategy", "'ddp'", "accelerator='cpu'"),
    (
        {"parallel": {"strategy": "zero1", "gradient_compression": "powersgd"}},
        "parallel.gradient_compression",
        "'powersgd'",
        "Use strategy='ddp', or replace gradient_compression by reduce_dtype='bf16'",
    ),
    (
        {"parallel": {"strategy": "ddp", "compression_rank": 2}},
        "parallel.compression_rank",
        "2",
        "set gradient_compression='powersgd'",
    ),
    (
        {"parallel": {"strategy": "ddp", "gradient_compression": "powersgd", "compression_warmup_steps": 2}},
        "parallel.compression_warmup_steps",
        "2",
        "Use at least 3",
    ),
    (
        {"parallel": {"strategy": "ddp", "gradient_compression": "powersgd", "reduce_dtype": "bf16"}},
        "parallel.reduce_dtype",
        "'bf16'",
        "Remove one of the two",
    ),
    (
        {
            "parallel": {"strategy": "ddp", "gradient_compression": "powersgd"},
            "precision": {"mode": "16-mixed"},
        },
        "parallel.gradient_compression",
        "'powersgd'",
        "Use precision='bf16-mixed'",
    ),
    ({"parallel": {"reduce_dtype": "16"}}, "parallel.reduce_dtype", "'16'", "Did you mean 'bf16'?"),
    ({"parallel": {"find_unused_parameters": 1}}, "parallel.find_unused_parameters", "1", "True or False"),
    (
        {
            "parallel": {"strategy": "zero2", "find_unused_parameters": True},
            "optimizer": {"name": "adamw", "lr": 1e-3, "step_in_backward": "exact"},
        },
        "optimizer.step_in_backward",
        "'exact'",
        "Set step_in_backward=False, or remove find_unused_parameters",
    ),
    ({"parallel": {"accelerator": "hpu"}}, "parallel.accelerator", "'hpu'", "Use accelerator='cuda'"),
    ({"parallel": {"accelerator": "cpuu"}}, "parallel.accelerator", "'cpuu'", "Did you mean 'cpu'?"),
    ({"parallel": {"devices": 2}}, "parallel.devices", "2", "Use strategy='ddp'"),
    ({"parallel": {"devices": 0}}, "parallel.devices", "0", "at least 1"),
    ({"parallel": {"devices": -1}}, "parallel.devices", "-1", "at least 1"),
    ({"parallel": {"devices": "2"}}, "parallel.devices", "'2'", "must be an integer"),
    ({"parallel": {"devices": True}}, "parallel.devices", "True", "must be an integer"),
    ({"parallel": {"num_nodes": 2}}, "parallel.num_nodes", "2", "Use strategy='ddp'"),
    ({"precision": {"mode": "16-true"}}, "precision.mode", "'16-true'", "Use precision='16-mixed'"),
    ({"precision": {"mode": "transformer-engine"}}, "precision.mode", "'transformer-engine'", "'bf16-mixed'"),
    ({"precision": {"mode": "fp8"}}, "precision.mode", "'fp8-mixed'", "(aliases: fp8)"),
    ({"precision": {"mode": "bf16-mixd"}}, "precision.mode", "'bf16-mixd'", "Did you mean 'bf16-mixed'?"),
    ({"precision": {"mode": 8}}, "precision.mode", "8", "must be a string"),
    ({"precision": {"mode": None}}, "precision.mode", "None", "must be a string"),
    ({"precision": {"matmul": "hihg"}}, "precision.matmul", "'hihg'", "Did you mean 'high'?"),
    (
        {"precision": {"mode": "64-true"}, "parallel": {"accelerator": "mps"}},
        "precision.mode",
        "'64-true'",
        "Use precision='32-true'",
    ),
    ({"batch": {"accumulate_grad_batches": 0}}, "batch.accumulate_grad_batches", "0", "Use 1"),
    ({"batch": {"accumulate_grad_batches": 4.0}}, "batch.accumulate_grad_batches", "4.0", "must be an integer"),
    ({"batch": {"gradient_clip_val": -1.0}}, "batch.gradient_clip_val", "-1.0", "Use None"),
    ({"batch": {"gradient_clip_val": 0}}, "batch.gradient_clip_val", "0.0", "Use None"),
    ({"batch": {"gradient_clip_val": float("inf")}}, "batch.gradient_clip_val", "inf", "finite"),
    ({"batch": {"gradient_clip_val": "1.0"}}, "batch.gradient_clip_val", "'1.0'", "must be a number or None"),
    ({"batch": {"gradient_clip_val": True}}, "batch.gradient_clip_val", "True", "must be a number or None"),
    (
        {"batch": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norms"}},
        "batch.gradient_clip_algorithm",
        "'norms'",
        "Did you mean 'norm'?",
    ),
    (
        {"batch": {"gradient_clip_algorithm": "value"}},
        "batch.gradient_clip_algorithm",
        "'value'",
        "Set gradient_clip_val",
    ),
    ({"optimizer": {"name": "adamwfp8"}}, "optimizer.name", "'adamwfp8'", "Use optimizer='adamw8bit'"),
    ({"optimizer": {"name": "shampoo"}}, "optimizer.name", "'shampoo'", "configure_optimizers"),
    ({"optimizer": {"name": "lbfgs"}}, "optimizer.name", "'lbfgs'", "several times per step"),
    ({"optimizer": {"name": "adamv"}}, "optimizer.name", "'adamv'", "Did you mean 'adam"),
    ({"optimizer": ADAMW | {"lr": 0}}, "optimizer.lr", "0.0", "Use a learning rate such as 3e-4"),
    ({"optimizer": ADAMW | {"lr": -3e-4}}, "optimizer.lr", "-0.0003", "above 0"),
    ({"optimizer": ADAMW | {"lr": float("nan")}}, "optimizer.lr", "nan", "above 0"),
    ({"optimizer": ADAMW | {"lr": "3e-4"}}, "optimizer.lr", "'3e-4'", "without quotes"),
    ({"optimizer": ADAMW | {"lr": 10**400}}, "optimizer.lr", "1000", "must be a number"),
    ({"optimizer": ADAMW | {"lr": Options()}}, "optimizer.lr", "{}", "must be a number"),
    ({"optimizer": ADAMW | {"weight_decay": -0.1}}, "optimizer.weight_decay", "-0.1", "Use 0.0"),
    ({"optimizer": ADAMW | {"warmup_steps": -1}}, "optimizer.warmup_steps", "-1", "Use 0"),
    (
        {"optimizer": ADAMW | {"schedule": "linear", "log_warmup": True}},
        "optimizer.log_warmup",
        "True",
        "Set warmup_steps",
    ),
    (
        {"optimizer": ADAMW | {"schedule": "constant", "decay_steps": 9}},
        "optimizer.decay_steps",
        "9",
        "'linear' or 'cosine'",
    ),
    (
        {"optimizer": ADAMW | {"schedule": "cosine", "decay_steps": 9, "warmup_steps": 10}},
        "optimizer.decay_steps",
        "9",
        "Increase decay_steps",
    ),
    ({"optimizer": ADAMW | {"warmup_steps": 5}}, "optimizer.warmup_steps", "5", "Set a schedule"),
    (
        {"optimizer": ADAMW | {"schedule": "cosine", "min_lr_ratio": 1.5}},
        "optimizer.min_lr_ratio",
        "1.5",
        "between 0 and 1",
    ),
    (
        {"optimizer": ADAMW | {"schedule": "constant", "min_lr_ratio": 0.1}},
        "optimizer.min_lr_ratio",
        "0.1",
        "'linear' or 'cosine'",
    ),
    ({"optimizer": ADAMW | {"schedule": "cosin"}}, "optimizer.schedule", "'cosin'", "Did you mean 'cosine'?"),
    ({"optimizer": ADAMW | {"schedule": "wsd"}}, "optimizer.schedule", "'wsd'", "Use lr_schedule='cosine'"),
    ({"optimizer": {"lr": 1e-3}}, "optimizer.lr", "0.001", "Set optimizer.name"),
    ({"optimizer": {"weight_decay": 0.0}}, "optimizer.weight_decay", "0.0", "Set optimizer.name"),
    ({"optimizer": {"schedule": "cosine"}}, "optimizer.schedule", "'cosine'", "Set optimizer.name"),
    ({"optimizer": {"options": {"eps": 1e-6}}}, "optimizer.options", "{'eps': 1e-06}", "Set optimizer.name"),
    ({"optimizer": ADAMW | {"options": {"lr": 1.0}}}, "optimizer.options.lr", "1.0", "Set optimizer.lr instead"),
    ({"optimizer": ADAMW | {"options": {"params": []}}}, "optimizer.options.params", "()", "Remove it"),
    ({"optimizer": ADAMW | {"options": {1: 2}}}, "optimizer.options", "1", "Use names of keyword arguments as keys"),
    ({"optimizer": ADAMW | {"options": [1, 2]}}, "optimizer.options", "[1, 2]", "must be a mapping"),
    ({"optimizer": ADAMW | {"options": {"eps": float("nan")}}}, "optimizer.options.eps", "nan", "Use numbers"),
    ({"optimizer": ADAMW | {"options": {"b": [0.9, {}]}}}, "optimizer.options.b", "(0.9, {})", "Use numbers"),
    ({"activation": {"policy": "ful"}}, "activation.policy", "'ful'", "Did you mean 'full'?"),
    ({"activation": {"every_n": 2}}, "activation.every_n", "2", "Set activation.policy to 'every_n'"),
    ({"activation": {"policy": "every_n", "every_n": 0}}, "activation.every_n", "0", "Use 2"),
    ({"activation": {"policy": "full", "budget_bytes": 2**30}}, "activation.budget_bytes", "1073741824", "'budget'"),
    ({"activation": {"policy": "budget"}}, "activation.policy", "None", "'6GiB'"),
    (
        {"activation": {"policy": "budget", "budget_bytes": 2**30, "budget_fraction": 0.5}},
        "activation.policy",
        "{'budget_bytes'",
        "'6GiB'",
    ),
    ({"activation": {"policy": "budget", "budget_bytes": 4}}, "activation.budget_bytes", "4", "'6GiB'"),
    ({"activation": {"policy": "budget", "budget_fraction": 1.5}}, "activation.budget_fraction", "1.5", "Use 0"),
    ({"offload": {"parameters": False}}, "offload.parameters", "False", "must be a string"),
    ({"offload": {"optimizer_states": "dsk"}}, "offload.optimizer_states", "'dsk'", "Did you mean 'disk'?"),
    ({"offload": ON_DISK | {"share": 1.5}}, "offload.share", "1.5", "between 0 and 1"),
    ({"offload": ON_DISK | {"share": -0.1}}, "offload.share", "-0.1", "between 0 and 1"),
    ({"offload": ON_DISK | {"share": float("nan")}}, "offload.share", "nan", "between 0 and 1"),
    ({"offload": ON_DISK | {"folder": ""}}, "offload.folder", "''", "Set a path, or None"),
    ({"offload": ON_DISK | {"folder": 5}}, "offload.folder", "5", "must be a string or None"),
    ({"offload": ON_DISK | {"update": "lazy"}}, "offload.update", "'lazy'", "deferred"),
    ({"offload": {"share": 0.5}}, "offload.share", "0.5", "set offload.optimizer_states to 'cpu' or 'disk'"),
    ({"offload": ON_DISK | {"buffers": 0}}, "offload.buffers", "0", "Use 3, or 1 for the least memory"),
    ({"offload": {"buffers": 1}}, "offload.buffers", "1", "set offload.optimizer_states to 'disk'"),
    ({"parallel": {"communication": "sequential"}}, "parallel.communication", "'sequential'", "Use strategy='zero3'"),
    ({"parallel": {"communication": "late"}}, "parallel.communication", "'late'", "overlapped, sequential"),
    ({"offload": {"update": "plain"}}, "offload.update", "'plain'", "set offload.optimizer_states to 'cpu' or 'disk'"),
    (
        {"offload": {"optimizer_states": "cpu", "folder": "/tmp"}},
        "offload.folder",
        "'/tmp'",
        "offload={'optimizer_states': 'disk'}",
    ),
    ({"compile": {"enabled": "yes"}}, "compile.enabled", "'yes'", "Pass True or False"),
    ({"loss": {"chunk_tokens": 8}}, "loss.chunk_tokens", "8", "Set loss.chunked to True"),
    ({"loss": {"chunked": True, "chunk_tokens": 0}}, "loss.chunk_tokens", "0", "Use None"),
    ({"attention": {"kernel": "flsh"}}, "attention.kernel", "'flsh'", "Did you mean 'flash'?"),
    ({"adapter": {"lora_alpha": 2.0}}, "adapter.lora_alpha", "2.0", "Set lora_rank"),
    ({"adapter": {"frozen_base": "nf4"}}, "adapter.frozen_base", "'nf4'", "Set lora_rank"),
    ({"adapter": {"lora_rank": 0}}, "adapter.lora_rank", "0", "Use a rank such as 8"),
    ({"optimizer": ADAMW | {"weight_rounding": "split"}}, "optimizer.weight_rounding", "'split'", "Remove it"),
    ({"optimizer": {"step_in_backward": "stale_norm"}}, "optimizer.step_in_backward", "'stale_norm'", "Use 'exact'"),
    # incompatible parts
    *(
        (
            {"offload": {"parameters": "cpu"}, "parallel": {"strategy": strategy, "devices": 2}},
            "offload.parameters",
            "'cpu'",
            "Use strategy='zero3'",
        )
        for strategy in ("ddp", "zero1", "zero2")
    ),
    (
        {"offload": {"parameters": "disk"}, "compile": {"enabled": True}},
        "offload.parameters",
        "'disk'",
        "Use compile=False, or offload={'optimizer_states': 'disk'}",
    ),
    *(
        (
            {"offload": {field: "disk"}, "optimizer": {"name": "onebit_adam"}, "parallel": {"strategy": "auto"}},
            f"offload.{field}",
            "'disk'",
            "Use optimizer='adamw'",
        )
        for field in ("optimizer_states", "parameters")
    ),
    (
        {"offload": ON_DISK | {"update": "speculative"}, "parallel": {"strategy": "ddp", "devices": 2}},
        "offload.update",
        "'speculative'",
        "Use 'deferred'",
    ),
    (
        {"offload": ON_DISK | {"update": "speculative"}, "precision": {"mode": "16-mixed"}},
        "offload.update",
        "'speculative'",
        "Use 'deferred'",
    ),
    (
        {"offload": ON_DISK, "optimizer": {"step_in_backward": "exact"}},
        "optimizer.step_in_backward",
        "'exact'",
        "'update': 'speculative'}, which also updates in backward",
    ),
    ({"activation": HALF, "compile": {"enabled": True}}, "activation.policy", "'budget'", "compile=False"),
    (
        {
            "activation": HALF,
            "optimizer": ADAMW | {"step_in_backward": "exact"},
            "batch": {"gradient_clip_val": 1.0},
        },
        "activation.policy",
        "'budget'",
        "remove one of the two",
    ),
    (
        {"precision": {"mode": "bf16-true"}, "optimizer": {"name": "sgd"}},
        "precision.mode",
        "'bf16-true'",
        "optimizer.weight_rounding='nearest'",
    ),
    (
        {"precision": {"mode": "bf16-true"}, "optimizer": {"weight_rounding": "split"}},
        "optimizer.weight_rounding",
        "'split'",
        "Set optimizer.name to one of",
    ),
    (
        {"batch": {"accumulate_grad_batches": 2}, "optimizer": {"step_in_backward": "exact"}},
        "optimizer.step_in_backward",
        "'exact'",
        "activation_checkpointing='full'",
    ),
    (
        {"parallel": {"strategy": "ddp"}, "optimizer": {"step_in_backward": "exact"}},
        "optimizer.step_in_backward",
        "'exact'",
        "strategy='zero2'",
    ),
    (
        {"precision": {"mode": "16-mixed"}, "optimizer": {"step_in_backward": "exact"}},
        "optimizer.step_in_backward",
        "'exact'",
        "precision='bf16-mixed'",
    ),
    (
        {
            "batch": {"gradient_clip_val": 1.0},
            "compile": {"enabled": True},
            "optimizer": {"step_in_backward": "stale_norm"},
        },
        "optimizer.step_in_backward",
        "'stale_norm'",
        "gradient_clip_algorithm='value'",
    ),
    (
        {"parallel": {"strategy": "zero3"}, "adapter": {"lora_rank": 8, "frozen_base": "nf4"}},
        "adapter.frozen_base",
        "'nf4'",
        "strategy='ddp'",
    ),
    (
        {"parallel": {"accelerator": "cpu"}, "attention": {"kernel": "efficient"}},
        "attention.kernel",
        "'efficient'",
        "Use 'auto'",
    ),
    # wrong structure
    ({"precison": {}}, "plan", "'precison'", "Did you mean 'precision'?"),
    ({"precision": {"mod": "32-true"}}, "precision", "'mod'", "Did you mean 'mode'?"),
    ({"precision": "bf16-mixed"}, "precision", "'bf16-mixed'", "{'precision': {'mode': ...}}"),
    ({"optimizer": ADAMW | {"betas": [0.9, 0.95]}}, "optimizer", "'betas'", "in options"),
    (["precision"], "plan", "['precision']", "Pass sections"),
    (None, "plan", "None", "Pass sections"),
]


@pytest.mark.parametrize(("values", "field", "received", "advice"), WRONG_VALUES)
def test_an_invalid_value_is_rejected_with_field_value_and_advice(
    values: object, field: str, received: str, advice: str
) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(values)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}={received}")
    assert advice in str(caught.value)
    assert len(each_error(caught.value)) == 1


REFUSED_WORDS = [(field, word) for field, words in REFUSED.items() for word in words]


@pytest.mark.parametrize(("field", "word"), REFUSED_WORDS)
def test_the_advice_for_each_rejected_word_works(field: str, word: str) -> None:
    section, name = field.split(".")
    with pytest.raises(PlanError) as caught:
        _plan_with(section, {name: word})
    first = each_error(caught.value)[0]
    assert (first.field, first.received) == (field, word)
    assert first.action.startswith("Use ")


BUILT_WORDS = [(field, word) for field, words in CHOICES.items() for word in words]


@pytest.mark.parametrize(("field", "word"), BUILT_WORDS)
def test_every_supported_word_is_accepted(field: str, word: str) -> None:
    section, name = field.split(".")
    assert getattr(getattr(_plan_with(section, {name: word}), section), name) == word


PIPELINE = {"strategy": "ddp", "devices": 2, "pipeline_parallel_size": 2}
STAGES = {"interleaved_1f1b": {"stages_per_rank": 2}}
OWN_STRATEGY = {"gradient_compression": "ddp", "communication": "zero3"}
"""Strategies of the fields of ``ParallelPlan`` that the strategy ``"single"`` rejects."""


def _plan_with(section: str, fields: Mapping[str, object]) -> Plan:
    needed: dict[str, Mapping[str, object]] = {
        "optimizer": ADAMW,
        "batch": {"gradient_clip_val": 1.0},
        "parallel": PIPELINE | STAGES.get(str(fields.get("schedule")), {})
        if "schedule" in fields
        else {"strategy": OWN_STRATEGY.get(next(iter(fields)), "single")},
        "activation": {"budget_bytes": 2**30} if fields.get("policy") == "budget" else {},
        "adapter": {"lora_rank": 8},
        "offload": ON_DISK if "update" in fields else {},
    }
    elsewhere: dict[str, Mapping[str, object]] = {
        "batch": {"seeding": "events"} if "schedule" in fields else {},
        "parallel": {"strategy": "ddp"} if fields.get("name") == "onebit_adam" else {},
        "precision": {"mode": "bf16-true"} if "weight_rounding" in fields else {},
    }
    if fields.get("step_in_backward") == "stale_norm":
        elsewhere["batch"] = {"gradient_clip_val": 1.0}
    return Plan.from_dict({**elsewhere, section: {**needed.get(section, {}), **fields}})


@pytest.mark.parametrize("parameters", CHOICES["offload.parameters"])
@pytest.mark.parametrize("states", CHOICES["offload.optimizer_states"])
def test_host_tiers_are_removed_only_on_a_cpu(capsys: pytest.CaptureFixture[str], states: str, parameters: str) -> None:
    used: dict[str, object] = {"share": 0.5} if states != "none" else {}
    if {states, parameters} != {"none"}:
        used["update"] = "plain"
    offload = {"optimizer_states": states, "parameters": parameters, "activations": "cpu", **used}
    plan = Plan.from_dict({"parallel": {"accelerator": "cpu"}, "offload": offload})
    assert without_host_tiers(plan, "cuda") is plan
    assert not capsys.readouterr().err
    runs = without_host_tiers(plan, "cpu").offload  # the rules of the Plan have accepted these settings
    assert (runs.optimizer_states, runs.parameters) == (
        states.replace("cpu", "none"),
        parameters.replace("cpu", "none"),
    )
    assert runs.activations == "cpu"
    assert ("on a CPU, these tensors" in capsys.readouterr().err) == ("cpu" in (states, parameters))


def test_a_budget_supports_offload() -> None:
    plan = Plan.from_dict({"activation": HALF, "offload": {"activations": "cpu"}})
    assert plan.activation.policy == "budget"
    assert plan.offload.activations == "cpu"


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(CombinedPlanError) as caught:
        Plan.from_dict(
            {
                "parallel": {"strategy": "dp", "num_nodes": 8, "shard_size": 3},
                "precision": {"mode": "bf17-mixed"},
                "batch": {"gradient_clip_val": -1.0},
                "optimizer": {"lr": 1e-3},
            }
        )
    error = caught.value
    fields = [finding.field for finding in error.errors]
    assert fields == [
        "parallel.strategy",
        "precision.mode",
        "batch.gradient_clip_val",
        "parallel.shard_size",
        "optimizer.lr",
    ]
    assert error.field == "parallel.strategy"
    assert str(error).splitlines() == ["The plan has 5 errors", *map(str, error.errors)]


def test_a_wrong_type_is_reported_together_with_invalid_values() -> None:
    with pytest.raises(CombinedPlanError) as caught:
        Plan(
            parallel=ParallelPlan(devices="two"),  # type: ignore[arg-type]
            precision=PrecisionPlan("bf17"),
            optimizer=OptimizerPlan("adamw", lr=-1.0),
        )
    assert [error.field for error in caught.value.errors] == ["parallel.devices", "precision.mode", "optimizer.lr"]


def test_unknown_keys_of_several_sections_are_reported_together() -> None:
    with pytest.raises(CombinedPlanError) as caught:
        Plan.from_dict({"paralel": {}, "batch": {"accumulate": 2}, "precision": 16})
    assert [error.received for error in caught.value.errors] == ["paralel", "accumulate", 16]


def test_a_part_of_another_type_is_rejected() -> None:
    with pytest.raises(PlanError, match=r"^precision='bf16-mixed': must be a PrecisionPlan\. Pass precision=Precision"):
        Plan(precision="bf16-mixed")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^parallel=PrecisionPlan.*must be a ParallelPlan"):
        Plan(PrecisionPlan())  # type: ignore[arg-type]


def test_a_large_integer_is_compared_without_overflow() -> None:
    assert Plan.from_dict({"batch": {"accumulate_grad_batches": 10**400}}).batch.accumulate_grad_batches == 10**400
