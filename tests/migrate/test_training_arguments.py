"""Each field of transformers' TrainingArguments and each argument of its Trainer has an answer."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import roomier
from roomier.core.errors import RoomierError
from roomier.plan.migrate.training_arguments import (
    CONVERTED,
    ELSEWHERE,
    FIELDS,
    OF_TRAINER,
    SAME,
    UNSUPPORTED,
    WITHOUT_EFFECT,
)
from tests.migrate.spelling import QUIET, Spelling, changed_fields, check

transformers = pytest.importorskip("transformers")
OF_ADAMW = {"optimizer.name": "adamw"}
ROWS = [
    Spelling({"bf16": True}, {"precision.mode": "bf16-mixed"}),
    Spelling({"fp16": True}, {"precision.mode": "16-mixed"}),
    Spelling({"fp16": False, "bf16": False}),
    Spelling({"tf32": True}, {"precision.matmul": "high"}),
    Spelling({"gradient_checkpointing": True}, {"activation.policy": "full"}),
    Spelling(
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"activation.policy": "full"},
        ("gradient_checkpointing_kwargs",),
    ),
    Spelling({"gradient_accumulation_steps": 4}, {"batch.accumulate_grad_batches": 4}),
    Spelling({"max_grad_norm": 1.0}, {"batch.gradient_clip_val": 1.0}),
    Spelling({"max_grad_norm": 0.0}),
    Spelling({"num_train_epochs": 3.0}, options={"max_epochs": 3}),
    Spelling({"num_train_epochs": 0.5}, error="Use max_steps"),
    Spelling({"logging_steps": 10}, options={"log_every_n_steps": 10}),
    Spelling({"logging_steps": 0.1}, error="Use a number of steps"),
    Spelling({"optim": "adamw_torch", "learning_rate": 1e-3}, {**OF_ADAMW, "optimizer.lr": 1e-3}),
    Spelling(
        {"optim": "adamw_torch_fused", "weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
        {
            **OF_ADAMW,
            "optimizer.weight_decay": 0.1,
            "optimizer.options.betas": [0.9, 0.95],
            "optimizer.options.eps": 1e-6,
        },
    ),
    Spelling({"optimizer": "adamw", "weight_decay": 0.1}, {**OF_ADAMW, "optimizer.weight_decay": 0.1}),
    Spelling({"weight_decay": 0.1}, error="requires a named optimizer"),
    Spelling({"optim": "adafactor"}, {"optimizer.name": "adafactor"}, remarks=("relative to the size of each weight",)),
    Spelling(
        {"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 10},
        {"optimizer.name": "sgd", "optimizer.schedule": "cosine", "optimizer.warmup_steps": 10},
        remarks=("in transformers the first rate is 0",),
    ),
    Spelling({"optim": "sgd", "lr_scheduler_type": "polynomial"}, error="is not a schedule that roomier supports"),
    Spelling({"lr_scheduler_type": "linear", "warmup_ratio": 0.1}, error="the warm-up is a number of steps"),
    Spelling({"torch_compile": True}, {"compile.enabled": True}),
    Spelling(
        {"torch_compile": True, "torch_compile_backend": "eager"}, {"compile.enabled": True, "compile.backend": "eager"}
    ),
    Spelling(
        {"torch_compile_mode": "max-autotune", "torch_compile": True},
        {"compile.enabled": True, "compile.mode": "max-autotune"},
    ),
    Spelling({"use_cpu": True}, {"parallel.accelerator": "cpu"}),
    Spelling(
        {"fsdp": "full_shard auto_wrap", "devices": 2}, {"parallel.strategy": "zero3", "parallel.devices": 2}, ("fsdp",)
    ),
    Spelling(
        {"fsdp": "shard_grad_op", "fsdp_config": {"activation_checkpointing": True, "min_num_params": 5}, "devices": 2},
        {"parallel.strategy": "zero2", "parallel.devices": 2, "activation.policy": "full"},
        ("fsdp_config.min_num_params",),
    ),
    Spelling({"fsdp": "full_shard", "strategy": "ddp", "devices": 2}, error="differs from"),
    Spelling({"auto_find_batch_size": True}, remarks=("before the fit",)),
    Spelling({"ddp_timeout": 600}, options={"hang_timeout_s": 600}),
    Spelling({"ddp_bucket_cap_mb": 25, "log_level": "info"}, ignored=("ddp_bucket_cap_mb", "log_level")),
    Spelling({"train_dataset": []}, error="Pass a DataLoader to fit"),
    Spelling({"data_collator": print}, error="collate_fn"),
    Spelling({"compute_metrics": print}, error="validation_step"),
    Spelling({"neftune_noise_alpha": 5.0}, error="forward hook of the embedding"),
    Spelling({"group_by_length": True}, error="LengthGroupedBatchSampler"),
    Spelling({"train_sampling_strategy": "group_by_length"}, error="LengthGroupedBatchSampler"),
    Spelling({"push_to_hub": True}, error="--push-to-hub USER/MODEL"),
    Spelling({"dataloader_num_workers": 4}, error="Pass it to your DataLoader"),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_field_is_converted_or_answered(row: Spelling, capsys: pytest.CaptureFixture[str]) -> None:
    check(row, capsys)


def test_every_field_has_an_answer() -> None:
    fields = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    assert fields <= FIELDS | set(SAME)
    assert (
        set(inspect.signature(transformers.Trainer.__init__).parameters) - {"self", "args", "callbacks"}
        <= OF_TRAINER.keys()
    )
    known = set(inspect.signature(roomier.Trainer.__init__).parameters)
    rejected = ELSEWHERE | UNSUPPORTED
    assert not CONVERTED.keys() & (rejected | WITHOUT_EFFECT).keys()
    for name, text in rejected.items():
        assert name not in known
        with pytest.raises(RoomierError) as caught:
            roomier.Trainer(**QUIET, **{name: "value"})
        assert caught.value.action == text.rstrip(".")


EXACT = {
    **{f"adamw_torch{kernel}": "adamw" for kernel in ("", "_fused", "_xla", "_npu_fused")},
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw8bit"),
    "adamw_torch_4bit": "adamw4bit",
    "lion_32bit": "lion",
    "rmsprop_bnb_32bit": "rmsprop",
    **{name: name for name in ("sgd", "adagrad", "adafactor", "rmsprop")},
}


@pytest.mark.parametrize("name", [each.value for each in transformers.training_args.OptimizerNames])
def test_every_optimizer_name_is_converted_or_answered(name: str) -> None:
    if name in EXACT:
        for keyword in ("optim", "optimizer"):
            assert roomier.Trainer(**QUIET, **{keyword: name}).plan.optimizer.name == EXACT[name]
        return
    with pytest.raises(RoomierError) as caught:
        roomier.Trainer(**QUIET, optimizer=name)
    words = str(caught.value)
    assert "Use optimizer=" in words or "Use lora=" in words
    assert "Did you mean" not in words


def test_an_object_has_the_same_settings_as_in_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "weight_decay": 0.1, "per_device_train_batch_size": 3}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=7, use_cpu=True, **settings)
    trainer = roomier.Trainer(args=arguments, **QUIET)
    assert changed_fields(trainer.plan) == {
        "parallel.accelerator": "cpu",
        "batch.accumulate_grad_batches": 2,
        "batch.gradient_clip_val": 1.0,
        "optimizer.name": "adamw",
        "optimizer.lr": 5e-5,
        "optimizer.weight_decay": 0.1,
        "optimizer.schedule": "linear",
    }
    assert (trainer.max_steps, trainer.log_every_n_steps, trainer.limit_val_batches) == (7, 500, 0)
    assert trainer.default_root_dir == str(tmp_path)
    assert "per_device_train_batch_size=3: no effect: Pass batch_size to your DataLoader" in capsys.readouterr().err


def test_an_object_trains_as_the_transformers_trainer(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, attn_pdrop=0.0)
    config.resid_pdrop = config.embd_pdrop = 0.0
    ids = torch.randint(0, 32, (12, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": each, "labels": each} for each in ids]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        use_cpu=True,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        weight_decay=0.1,
        train_sampling_strategy="sequential",
        save_strategy="no",
        disable_tqdm=True,
    )
    weights = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).train()
        if is_ours:
            loader = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
            roomier.Trainer(args=arguments, enable_model_summary=False, **QUIET).fit(model, loader)
        else:
            transformers.Trainer(model, arguments, train_dataset=rows).train()
        weights.append({name: each.detach().clone() for name, each in model.named_parameters()})
    for name, value in weights[0].items():
        # Four steps of AdamW with a rate of 1e-2, whose gradients differ by rounding.
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=2e-4, msg=name)


def test_an_object_that_compiles_sets_the_backend() -> None:
    arguments = transformers.TrainingArguments(torch_compile=True, report_to=[], use_cpu=True)
    plan = roomier.Trainer(args=arguments, **QUIET).plan
    assert (plan.compile.enabled, plan.compile.backend) == (True, "inductor")
