"""Arguments of the Trainer are converted to a Plan. Errors contain the name and the value of the argument."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from roomier.core.errors import PlanError
from roomier.plan import BatchPlan, OptimizerPlan, Plan, plan_from_flags
from roomier.plan.rules import each_error


def test_default_arguments_give_the_default_plan() -> None:
    assert plan_from_flags() == Plan()
    kinds = {parameter.kind for parameter in inspect.signature(plan_from_flags).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("keywords", "values"),
    [
        ({"precision": 16}, {"precision": {"mode": "16-mixed"}}),
        ({"precision": "bf16"}, {"precision": {"mode": "bf16-mixed"}}),
        ({"precision": "64"}, {"precision": {"mode": "64-true"}}),
        ({"precision": None}, {}),
        ({"matmul_precision": "high"}, {"precision": {"matmul": "high"}}),
        ({"devices": 1}, {}),
        ({"devices": 8}, {"parallel": {"strategy": "ddp", "devices": 8}}),
        ({"devices": "8", "strategy": None}, {"parallel": {"strategy": "ddp", "devices": 8}}),
        ({"num_nodes": 2}, {"parallel": {"strategy": "ddp", "num_nodes": 2}}),
        ({"devices": "1"}, {}),
        ({"devices": "auto", "accelerator": "gpu"}, {"parallel": {"accelerator": "gpu"}}),
        ({"strategy": "zero2", "devices": 4}, {"parallel": {"strategy": "zero2", "devices": 4}}),
        ({"strategy": "ddp_sharded"}, {"parallel": {"strategy": "zero2"}}),
        ({"strategy": "deepspeed_stage_3"}, {"parallel": {"strategy": "zero3"}}),
        ({"strategy": "FSDP"}, {"parallel": {"strategy": "zero3"}}),
        (
            {"strategy": "ddp_find_unused_parameters_true"},
            {"parallel": {"strategy": "ddp", "find_unused_parameters": True}},
        ),
        (
            {"strategy": {"name": "hsdp", "shard_size": 2, "reduce_dtype": "bfloat16"}, "devices": 4},
            {"parallel": {"strategy": "hsdp", "devices": 4, "shard_size": 2, "reduce_dtype": "bf16"}},
        ),
        ({"gradient_clip_val": 0}, {}),
        ({"gradient_clip_val": 0.0}, {}),
        ({"gradient_clip_algorithm": None}, {}),
        (
            {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 4},
            {"batch": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 4}},
        ),
        ({"optimizer": "AdamW"}, {"optimizer": {"name": "adamw"}}),
        ({"optimizer": "sgd", "learning_rate": 1}, {"optimizer": {"name": "sgd", "lr": 1.0}}),
        (
            {"optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]}},
            {"optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1, "options": {"betas": (0.9, 0.95)}}},
        ),
        (
            {"optimizer": {"name": "adamw", "options": {"eps": 1e-6}, "fused": True}},
            {"optimizer": {"name": "adamw", "options": {"eps": 1e-6, "fused": True}}},
        ),
        (
            {"optimizer": "adamw", "lr_schedule": "linear"},
            {"optimizer": {"name": "adamw", "schedule": "linear"}},
        ),
        (
            {"optimizer": "adamw", "lr_schedule": {"name": "cosine", "warmup_steps": 100, "min_lr_ratio": 0.1}},
            {"optimizer": {"name": "adamw", "schedule": "cosine", "warmup_steps": 100, "min_lr_ratio": 0.1}},
        ),
        ({"activation_checkpointing": False, "offload": False}, {}),
        ({"activation_checkpointing": "none", "offload": "none"}, {}),
        ({"offload": {"parameters": "none"}}, {}),
        ({"offload": True}, {"offload": {"optimizer_states": "cpu"}}),
        ({"offload": "NVMe"}, {"offload": {"optimizer_states": "disk"}}),
        ({"offload": {"parameters": "host"}}, {"offload": {"parameters": "cpu"}}),
        (
            {"offload": {"optimizer_states": "disk", "folder": Path("/scratch"), "share": 1, "update": "Plain"}},
            {"offload": {"optimizer_states": "disk", "folder": "/scratch", "update": "plain"}},
        ),
        (
            {"strategy": "zero2+offload"},
            {"parallel": {"strategy": "zero2"}, "offload": {"optimizer_states": "cpu"}},
        ),
        (
            {"strategy": {"name": "FSDP+Disk"}, "devices": 2, "offload": {"parameters": "disk"}},
            {
                "parallel": {"strategy": "zero3", "devices": 2},
                "offload": {"optimizer_states": "disk", "parameters": "disk"},
            },
        ),
        (
            {"strategy": "deepspeed_stage_2_offload"},
            {"parallel": {"strategy": "zero2"}, "offload": {"optimizer_states": "cpu"}},
        ),
        (
            {"strategy": "deepspeed_stage_3_offload"},
            {"parallel": {"strategy": "zero3"}, "offload": {"optimizer_states": "cpu", "parameters": "cpu"}},
        ),
        (
            {"strategy": "deepspeed_stage_3_offload_nvme"},
            {"parallel": {"strategy": "zero3"}, "offload": {"optimizer_states": "disk", "parameters": "disk"}},
        ),
        (
            {"strategy": "fsdp_cpu_offload"},
            {"parallel": {"strategy": "zero3"}, "offload": {"optimizer_states": "cpu", "parameters": "cpu"}},
        ),
        ({"activation_checkpointing": True}, {"activation": {"policy": "full"}}),
        ({"activation_checkpointing": "6GiB"}, {"activation": {"policy": "budget", "budget_bytes": 6 * 2**30}}),
        ({"activation_checkpointing": "1.5 GB"}, {"activation": {"policy": "budget", "budget_bytes": 1_500_000_000}}),
        ({"activation_checkpointing": 0.5}, {"activation": {"policy": "budget", "budget_fraction": 0.5}}),
        ({"activation_checkpointing": "50%"}, {"activation": {"policy": "budget", "budget_fraction": 0.5}}),
        ({"activation_checkpointing": "0.5"}, {"activation": {"policy": "budget", "budget_fraction": 0.5}}),
        ({"activation_checkpointing": 0}, {"activation": {"policy": "budget", "budget_fraction": 0.0}}),
        ({"activation_checkpointing": {"every_n": 3}}, {"activation": {"policy": "every_n", "every_n": 3}}),
        (
            {"activation_checkpointing": {"budget": "6GiB"}},
            {"activation": {"policy": "budget", "budget_bytes": 6 * 2**30}},
        ),
        (
            {"activation_checkpointing": {"policy": "budget", "budget": 0.25}},
            {"activation": {"policy": "budget", "budget_fraction": 0.25}},
        ),
        ({"step_in_backward": True}, {"optimizer": {"step_in_backward": "exact"}}),
        ({"chunked_loss": True}, {"loss": {"chunked": True}}),
        ({"chunked_loss": 512}, {"loss": {"chunked": True, "chunk_tokens": 512}}),
        ({"attention": "flash_attention"}, {"attention": {"kernel": "flash"}}),
        ({"lora": 8}, {"adapter": {"lora_rank": 8}}),
        (
            {"lora": {"rank": 8, "alpha": 16, "targets": ["query", "value"], "trained": "score", "base": "4bit"}},
            {
                "adapter": {
                    "lora_rank": 8,
                    "lora_alpha": 16,
                    "lora_targets": "query,value",
                    "lora_trained": "score",
                    "frozen_base": "nf4",
                }
            },
        ),
        ({"compile": True}, {"compile": {"enabled": True}}),
    ],
)
def test_arguments_are_converted(keywords: dict[str, Any], values: dict[str, Any]) -> None:
    assert plan_from_flags(**keywords) == Plan.from_dict(values)


@pytest.mark.parametrize(
    ("keywords", "start", "advice"),
    [
        (
            {"strategy": "pipeline_parallel"},
            "strategy='pipeline_parallel': is not the name of a strategy",
            "'pipeline_parallel_size': 2",
        ),
        ({"memory_budget": "lots"}, "memory_budget='lots'", "'6GiB'"),
        ({"memory_budget": 12}, "memory_budget=12", "'22GiB'"),
        ({"strategy": {"name": "ddp", "allow": ["bf16-mixed"]}}, "strategy.allow=['bf16-mixed']", "strategy='auto'"),
        ({"strategy": {"name": "auto", "allow": ["bf17"]}}, "strategy.allow=['bf17']: must be a precision", "bf16"),
        ({"strategy": "DP"}, "strategy='DP': is not supported", "Use strategy='ddp'"),
        (
            {"strategy": {"name": "zero2", "shrd_size": 2}},
            "strategy='shrd_size': is an unknown setting",
            "'shard_size'?",
        ),
        ({"strategy": {"name": "zero2", "shard_size": 2}}, "strategy.shard_size=2: is supported only with", "'hsdp'"),
        (
            {"strategy": "zero2+disk", "offload": {"optimizer_states": "cpu"}},
            "offload.optimizer_states='cpu': is already set by strategy",
            "Remove offload.optimizer_states or strategy",
        ),
        ({"strategy": "single+offlod"}, "strategy='single+offlod': '+offlod' is an unknown suffix", "'offload'?"),
        ({"strategy": 3}, "strategy=3: must be a string", "name"),
        ({"devices": 8, "strategy": "single"}, "devices=8: must be 1 with strategy", "strategy='ddp'"),
        ({"devices": "8", "strategy": "single"}, "devices='8': must be 1 with strategy", "strategy='ddp'"),
        ({"devices": "all"}, "devices='all': must be an integer", "an integer"),
        ({"devices": [0]}, "devices=[0]: must be an integer", "an integer"),
        ({"num_nodes": 2, "strategy": "single"}, "num_nodes=2: must be 1 with strategy", "strategy='ddp'"),
        ({"accelerator": "hpu"}, "accelerator='hpu': is not an accelerator of this", "Use accelerator='cuda'"),
        ({"precision": "16-true"}, "precision='16-true': cannot train", "Use precision='16-mixed'"),
        ({"precision": "fp16-true"}, "precision='fp16-true': cannot train", "Use precision='16-mixed'"),
        ({"precision": "bf17"}, "precision='bf17': is unknown", "Did you mean 'bf16'?"),
        ({"precision": 16.0}, "precision=16.0: must be a string", "name"),
        ({"matmul_precision": "lowest"}, "matmul_precision='lowest': is unknown", "highest"),
        ({"gradient_clip_val": -1}, "gradient_clip_val=-1: must be above 0", "Use None"),
        ({"gradient_clip_val": False}, "gradient_clip_val=False: must be a number", "number"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0: must be at least 1", "Use 1"),
        ({"memory_budget": "10KiB"}, "memory_budget='10KiB': must be at least 1.0 MiB", "22GiB"),
        ({"accumulate_grad_batches": {4: 2}}, "accumulate_grad_batches={4: 2}: must be an integer", "Pass an integer"),
        ({"optimizer": "adamwfp8"}, "optimizer='adamwfp8': is not implemented", "adamw8bit"),
        ({"optimizer": {"name": "soap"}}, "optimizer.name='soap': is not implemented", "adamw"),
        ({"optimizer": {"lr": 0.1}}, "optimizer.lr=0.1: has no effect without optimizer.name", "Set optimizer.name"),
        ({"optimizer": 5}, "optimizer=5: must be a string or None", "name"),
        ({"learning_rate": 0.1}, "learning_rate=0.1: has no effect without optimizer.name", "Set optimizer.name"),
        ({"optimizer": "sgd", "learning_rate": "0.1"}, "learning_rate='0.1': must be a number", "without quotes"),
        (
            {"optimizer": {"name": "sgd", "lr": 0.1}, "learning_rate": 0.2},
            "learning_rate=0.2: is already set by optimizer.lr",
            "Remove learning_rate or optimizer.lr",
        ),
        (
            {"optimizer": {"name": "sgd", "schedule": "linear"}, "lr_schedule": "cosine"},
            "lr_schedule='cosine': is already set by optimizer.schedule",
            "Remove ",
        ),
        ({"optimizer": "sgd", "lr_schedule": "cosin"}, "lr_schedule='cosin': is unknown", "Did you mean 'cosine'?"),
        (
            {"optimizer": "sgd", "lr_schedule": {"name": "cosine", "warmup": 5}},
            "lr_schedule='warmup': is an unknown setting of a schedule",
            "Did you mean 'warmup_steps'?",
        ),
        (
            {"optimizer": "sgd", "lr_schedule": {"name": "cosine", "warmup_steps": -5}},
            "lr_schedule.warmup_steps=-5: must be at least 0",
            "Use 0",
        ),
        (
            {"optimizer": "sgd", "lr_schedule": {"warmup_steps": 5}},
            "lr_schedule.warmup_steps=5: has no effect without a schedule",
            "'constant'",
        ),
        ({"activation_checkpointing": "ful"}, "activation_checkpointing='ful': is unknown", "'full'"),
        ({"activation_checkpointing": "6 parsecs"}, "activation_checkpointing='6 parsecs': is not a num", "'6GiB'"),
        (
            {"activation_checkpointing": 2},
            "activation_checkpointing=2: must be a fraction up to 1, or at least 1.0 MiB",
            "'6GiB'",
        ),
        (
            {"activation_checkpointing": {"every": 2}},
            "activation_checkpointing='every': is an unknown setting",
            "every_n",
        ),
        ({"activation_checkpointing": {}}, "activation_checkpointing={}: must contain a policy", "'6GiB'"),
        ({"activation_checkpointing": "50"}, "activation_checkpointing='50': must be a fraction", "'6GiB'"),
        ({"lora": {}}, "lora={}: must contain a rank", "{'rank': 8}"),
        ({"lora": {"alpha": 16}}, "lora={'alpha': 16}: must contain a rank", "{'rank': 8}"),
        ({"step_in_backward": 1}, "step_in_backward=1: must be a string", "quotes"),
        ({"chunked_loss": "yes"}, "chunked_loss='yes': must be True or False", "True"),
        ({"attention": "flash3"}, "attention='flash3': is unknown", "'flash'"),
        ({"lora": "8"}, "lora='8': must be an integer", "an integer"),
        ({"lora": {"r": 8}}, "lora='r': is an unknown setting", "'rank'"),
        ({"lora": {"rank": 8, "base": "fp4"}}, "lora.base='fp4': is not implemented", "'nf4'"),
        ({"offload": {"parameters": "dsk"}}, "offload.parameters='dsk': is unknown", "Did you mean 'disk'?"),
        ({"offload": {"share": "half"}}, "offload.share='half': must be a number", "without quotes"),
        ({"offload": {"optimizr": "cpu"}}, "offload='optimizr': is an unknown field", "'optimizer_states'?"),
        ({"offload": {"a.b": "cpu"}}, "offload='a.b': is an unknown field", "Use one of"),
        ({"compile": "max-autotune"}, "compile='max-autotune': must be True or False", "True or False"),
    ],
)
def test_an_invalid_argument_is_rejected_with_its_name(keywords: dict[str, Any], start: str, advice: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_flags(**keywords)
    assert str(caught.value).startswith(start)
    assert advice in str(caught.value)
    assert len(each_error(caught.value)) == 1


def test_errors_of_arguments_and_plan_are_reported_together() -> None:
    with pytest.raises(PlanError) as caught:
        plan_from_flags(
            strategy="dp", devices=0, optimizer={"name": "adamw", "lr": 1.0}, learning_rate=2.0, precision="fp8"
        )
    fields = [finding.field for finding in each_error(caught.value)]
    assert fields == ["learning_rate", "strategy", "devices", "precision"]


def test_the_plan_contains_normalized_values() -> None:
    plan = plan_from_flags(optimizer={"name": "Adam", "betas": [0.9, 0.99]}, gradient_clip_val=1)
    assert plan.optimizer == OptimizerPlan("adam", options={"betas": (0.9, 0.99)})
    assert plan.batch == BatchPlan(gradient_clip_val=1.0)
