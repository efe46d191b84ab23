"""DeepSpeed configurations are converted to Plans, and an answer is printed for each key of a configuration."""

import inspect
import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import strategies
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision

import roomier
from roomier.core.errors import PlanError, RoomierError
from roomier.plan.migrate.deepspeed.config import answers_to_config
from tests.migrate.deepspeed_configs import ADAM_AUTO, AUTO, CONFIGS, DEVICES, ON_NVME, STAGE_2
from tests.migrate.spelling import QUIET, changed_fields

REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, "must be train_micro_batch_size_per_gpu (4) x"),
    (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        "gradient_accumulation_steps (2) x ranks (4)",
    ),
    ({"train_batch_size": -1}, "must be a positive integer"),
    ({"train_batch_size": 6}, "must be train_micro_batch_size_per_gpu (1.5)"),
    ({"zero_optimization": {"stage": 4}}, "must be 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": "3"}}, "must be 0, 1, 2 or 3"),
    ({"zero_optimization": 3}, "must be a section"),
    ({"fp16": {"enabled": "true"}}, "must be true or false"),
    ({"optimizer": "AdamW", "fp16": {"enabled": True}}, "must be a section with type and params"),
    ({"zero_optimization": {"stag": 3}}, "'zero_optimization.stage'"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}, "must be 'cpu', 'nvme' or 'none'"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "'reduce_dtype': 'bf16'"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "sends quantized values"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, "'base': 'int8'"),
    ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "'update': 'deferred'"),
    ({"train_micro_batch_size_pr_gpu": 2, "fp16": {"enabled": False}}, "Did you mean 'train_micro_batch_size_per_gpu'"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "cannot be combined with bf16.enabled"),
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "lose small updates"),
    ({"amp": {"enabled": True}}, "precision='16-mixed'"),
    ({"communication_data_type": "fp16"}, "Use 'bf16'"),
    ({"gradient_allreduce_op": "sum"}, "multiply the learning rate"),
    ({"tensor_parallel": {"autotp_size": 4}}, "Stage 3 shards the parameters"),
    ({"pipeline": {"stages": 4}}, "Stage 3 shards the parameters"),
    ({"expert_parallel": {"enabled": True}}, "Stage 3 shards the parameters of all experts"),
    ({"sequence_parallel_size": 2.5}, "must be an integer"),
    ({"elasticity": {"enabled": True, "max_train_batch_size": 2000}}, "different number of ranks"),
    ({"autotuning": {"enabled": True}}, "roomier plan"),
    ({"curriculum_learning": {"enabled": True}}, "with a sampler"),
    ({"data_efficiency": {"enabled": True}}, "with a sampler"),
    ({"progressive_layer_drop": {"enabled": True}}, "is not part of current versions"),
    ({"sparse_attention": {"mode": "fixed"}}, "use an attention mask"),
    ({"compression_training": {"layer_reduction": {}}}, "compress the trained model"),
    ({"hybrid_engine": {"enabled": True}}, "Remove it"),
    ({"nebula": {"enabled": True}}, "async_save=True"),
    ({"compile": {"deepcompile": True}, "fp16": {"enabled": False}}, "use the argument compile"),
    ({"optimizer": {"type": "Lamb", "params": {}}}, "roomier has no LAMB"),
    ({"optimizer": {"type": "OneBitLamb"}}, "configure_optimizers"),
    ({"optimizer": {"type": "ZeroOneAdam"}}, "onebit_adam"),
    ({"optimizer": {"type": "MuAdam"}}, "by width"),
    ({"optimizer": {"type": "Adamm"}}, "Did you mean 'adam'"),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "Set gradient_clipping"),
    ({"optimizer": {"type": "Lion", "params": {"bias_correction": False}}}, "only for Adam and AdamW"),
    ({"zero_optimization": {"stage": 2, "foo": 1}}, "Correct the name, or remove the key"),
    ({"fp16": {"enabled": True}, "overlap_com": True}, "Did you mean 'zero_optimization.overlap_comm'?"),
    ({"zero_optimisation": {"stage": 2}, "fp16": {"enabled": True}}, "Did you mean 'zero_optimization'?"),
    ({"optimizer": {"type": "Muon", "params": {"muon_lr": 0.1}}}, "one learning rate"),
    ({"scheduler": {"type": "WarmupLR"}}, "requires an optimizer in the configuration"),
    ({"optimizer": ADAM_AUTO, "scheduler": {"type": "OneCycle"}}, "configure_optimizers"),
    ({"optimizer": ADAM_AUTO, "scheduler": {"type": "LRRangeTest"}}, "auto_lr_find=True"),
    (
        {"optimizer": ADAM_AUTO, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5}}},
        "the warm-up starts at 0",
    ),
    (
        {"optimizer": ADAM_AUTO, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2}}},
        "Set optimizer.params.lr to 0.01",
    ),
    ({"zero_optimization": {"stage": AUTO}}, "is not supported here, because Hugging Face does not replace it"),
]


def leaves(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the last names of all keys of ``config``, and for disabled sections the name of the section."""
    for name, value in config.items():
        whole = name in ("hybrid_engine", "amp", "elasticity", "curriculum_learning", "pipeline", "betas")
        if isinstance(value, Mapping) and not whole:
            yield from leaves(value)
        else:
            yield name


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_becomes_a_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, keywords, expected = CONFIGS[name]
    trainer = roomier.Trainer(strategy=config, devices=DEVICES, **keywords, **QUIET)
    strategy, fields = expected[""], {key: value for key, value in expected.items() if key}
    wanted = {"parallel.strategy": strategy, "parallel.devices": DEVICES, **fields}
    if wanted.get("batch.accumulate_grad_batches") == 1:
        del wanted["batch.accumulate_grad_batches"]
    assert changed_fields(trainer.plan) == wanted
    table = capsys.readouterr().err
    assert [each for each in leaves(config) if each not in table] == []  # no key is silent


def test_enough_configurations_become_plans() -> None:
    assert len(CONFIGS) >= 25


@pytest.mark.parametrize(("config", "text"), REJECTED, ids=[text[:40] for _, text in REJECTED])
def test_a_setting_without_equivalent_is_rejected(config: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        roomier.Trainer(deepspeed=config, devices=DEVICES, **QUIET)
    assert text in str(caught.value)


def test_each_field_of_deepspeed_has_an_answer() -> None:
    """The file lists the keys of DeepSpeed 0.19, as ``section.key = default``. No key is unknown."""
    lines = (Path(__file__).parent / "deepspeed_fields.txt").read_text().splitlines()
    fields = [line.split(" = ") for line in lines if line and not line.startswith("#")]
    assert len(fields) >= 246
    for key, default in fields:
        config: Any = json.loads(default)
        for name in reversed(key.split(".")):
            config = {name: config}
        if "scheduler" in config or "optimizer" in config:
            config = {"optimizer": {"type": "AdamW"} | config.get("optimizer", {}), **config}
            config["scheduler"] = {"type": "WarmupCosineLR"} | config.get("scheduler", {})
            config["optimizer"].setdefault("type", "AdamW")
        answers = answers_to_config(config, "config", DEVICES, {})
        section = key.split(".")[0]
        assert not [str(each) for each in answers.errors if "is not a" in each.problem], key
        reported = [each.setting for each in answers.given] + [each.field for each in answers.errors]
        assert any(section in each for each in reported), key


@pytest.mark.parametrize("value", ["x", 3, -1, [1], {"x": 1}, None, True, 0.5], ids=str)
def test_a_value_of_a_wrong_type_is_an_error_or_in_the_table(value: Any) -> None:
    """No value of a key raises a Python error, and no value is dropped."""
    lines = (Path(__file__).parent / "deepspeed_fields.txt").read_text().splitlines()
    keys = {line.split(" = ")[0] for line in lines if not line.startswith("#")}
    keys |= {key.rpartition(".")[0] for key in keys if "." in key}
    for key in sorted(keys):
        config: Any = value
        for name in reversed(key.split(".")):
            config = {name: config}
        answers = answers_to_config(config, "config", DEVICES, {})
        reported = [each.setting for each in answers.given] + [each.field for each in answers.errors]
        is_empty = value is None  # as if the key were missing
        section = key.split(".")[0]
        assert is_empty or any(section in each for each in reported), (key, value)


@pytest.mark.parametrize("argument", ["strategy", "deepspeed", "plan"])
@pytest.mark.parametrize("form", ["path", "string", "dict"])
def test_each_argument_accepts_a_configuration(argument: str, form: str, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    value: Any = {"path": path, "string": str(path), "dict": config}[form]
    plan = roomier.Trainer(**{argument: value}, devices=2, **QUIET).plan
    assert (plan.parallel.strategy, plan.batch.gradient_clip_val) == ("zero2", 0.5)


def test_a_plan_in_a_json_file_is_not_a_configuration(tmp_path: Path) -> None:
    plan = roomier.Plan.from_dict({"optimizer": {"name": "adamw"}})
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert roomier.Trainer(plan=tmp_path / "plan.json", **QUIET).plan == plan
    for argument in ("strategy", "deepspeed", "plan"):
        with pytest.raises(RoomierError, match=f"{argument}=.*cannot be read"):
            roomier.Trainer(**{argument: str(tmp_path / "missing.json")}, **QUIET)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(RoomierError, match="must contain a JSON object"):
        roomier.Trainer(strategy=str(tmp_path / "list.json"), **QUIET)
    (tmp_path / "double.json").write_text('{"fp16": 1, "fp16": 1}')
    with pytest.raises(RoomierError, match=r"strategy=.*contains 'fp16', which is a duplicate key"):
        roomier.Trainer(strategy=str(tmp_path / "double.json"), **QUIET)


def test_an_argument_and_a_setting_must_agree() -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    with pytest.raises(PlanError, match=r"precision='16-mixed': differs from 'bf16-mixed'.*\(bf16.enabled\)"):
        roomier.Trainer(deepspeed=config, precision="16-mixed", devices=2, **QUIET)
    plan = roomier.Trainer(deepspeed=config, precision="bf16-mixed", offload={"folder": "/x"}, devices=2, **QUIET).plan
    assert (plan.offload.optimizer_states, plan.offload.folder) == ("disk", "/x")
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    with pytest.raises(PlanError, match=r"learning_rate.*is already set by optimizer\.lr"):
        roomier.Trainer(deepspeed=adam, learning_rate=1e-4, **QUIET)


AUTO_ADAMW = {
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_num_steps", "total_num_steps", "warmup_max_lr"), "auto"),
    },
}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"optimizer": "adamw"}, {"lr": 5e-5, "weight_decay": 0.0, "options": {"betas": (0.9, 0.999), "eps": 1e-8}}),
        ({"optimizer": "adamw", "learning_rate": 1e-3}, {"lr": 1e-3}),
        ({"optimizer": {"name": "AdamW", "lr": 0.1, "weight_decay": 0.3}}, {"lr": 0.1, "weight_decay": 0.3}),
        ({"optimizer": {"name": "adamw", "betas": [0.8, 0.9]}}, {"options": {"betas": (0.8, 0.9), "eps": 1e-8}}),
        ({"lr_schedule": "linear"}, {"warmup_steps": 1, "decay_steps": None}),
        (
            {"lr_schedule": {"name": "linear", "warmup_steps": 7, "decay_steps": 9}},
            {"warmup_steps": 7, "decay_steps": 9},
        ),
    ],
)
def test_arguments_of_the_trainer_replace_auto(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    optimizer = roomier.Trainer(deepspeed=AUTO_ADAMW, devices=2, **arguments, **QUIET).plan.optimizer
    assert (optimizer.name, optimizer.schedule) == ("adamw", "linear")
    assert {name: getattr(optimizer, name) for name in expected} == expected


def test_a_strategy_with_settings_and_a_stage_are_combined() -> None:
    strategy = {"name": "sharded", "communication": "sequential"}  # an alias of zero2
    plan = roomier.Trainer(deepspeed={"zero_optimization": {"stage": 2}}, strategy=strategy, devices=2, **QUIET).plan
    assert (plan.parallel.strategy, plan.parallel.communication) == ("zero2", "sequential")


def test_all_keys_are_answered_if_some_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "train_batch_size": 3,
        "gradient_cliping": 1.0,
        "zero_optimization": {"stage": 5, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Lamb"},
        "scheduler": {"type": "OneCycle"},
    }
    with pytest.raises(roomier.plan.CombinedPlanError) as caught:
        roomier.Trainer(deepspeed=config, precision="16-mixed", devices=2, **QUIET)
    rejected = ["train_batch_size", "stage", "optimizer.type", "scheduler.type", "gradient_cliping", "precision"]
    fields = [error.field for error in caught.value.errors]
    assert len(fields) == len(rejected)
    assert all(field.endswith(name) for field, name in zip(fields, rejected, strict=True))
    assert str(caught.value).startswith("DeepSpeed configuration has 6 errors\n")
    table = capsys.readouterr().err
    assert "zero_optimization.offload_optimizer.device='cpu'  offload.optimizer_states='cpu'" in table
    assert "overlap_comm=True" in table


def test_the_clipping_that_applies_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    roomier.Trainer(deepspeed={"zero_optimization": {"stage": 1}}, **QUIET)
    assert "later versions of DeepSpeed clip to 1.0" in capsys.readouterr().err
    roomier.Trainer(deepspeed={"zero_optimization": {"stage": 1}}, gradient_clip_val=1.0, **QUIET)
    assert "later versions of DeepSpeed clip to 1.0" not in capsys.readouterr().err


class DeepSpeedStrategy:
    """Replacement for Lightning's class, which cannot be created without the deepspeed package."""

    def __init__(self, config: Any, **settings: Any) -> None:
        self.config = config
        vars(self).update(settings)


def test_the_strategy_of_lightning(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {**STAGE_2, "stage": 3, "offload_optimizer": ON_NVME, "offload_param": ON_NVME},
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True},
        "aio": {"block_size": 1, "queue_depth": 8, "single_submit": False, "overlap_events": True, "thread_count": 1},
    }
    strategy = DeepSpeedStrategy(config, loss_scale=128.0, remote_device="cpu", exclude_frozen_parameters=True)
    plan = roomier.Trainer(strategy=strategy, devices=2, gradient_clip_val=1.0, **QUIET).plan
    assert changed_fields(plan) == {
        "parallel.strategy": "zero3",
        "parallel.devices": 2,
        "batch.gradient_clip_val": 1.0,
        "activation.policy": "full",
        "offload.optimizer_states": "disk",
        "offload.parameters": "disk",
        "offload.activations": "cpu",
        "offload.folder": "/local_nvme",
    }
    table = capsys.readouterr().err
    assert all(name in table for name in ("loss_scale", "remote_device", "exclude_frozen_parameters", *leaves(config)))


CHANGED: dict[str, tuple[Any, str]] = {
    # parameter: (value other than the default, name in the table)
    "accelerator": (pl.accelerators.CUDAAccelerator(), "accelerator='cuda'"),
    "zero_optimization": (False, "strategy='ddp'"),
    "stage": (3, "strategy='zero3'"),
    "remote_device": ("cpu", "remote_device='cpu'"),
    "offload_optimizer": (True, "offload.optimizer_states='cpu'"),
    "offload_parameters": (True, "offload_param.device='cpu'"),
    "offload_params_device": ("nvme", "offload.parameters='disk'"),
    "offload_optimizer_device": ("nvme", "offload.optimizer_states='disk'"),
    "nvme_path": ("/fast", "offload.folder='/fast'"),
    "params_buffer_count": (7, "offload_param.buffer_count=7"),
    "params_buffer_size": (7, "offload_param.buffer_size=7"),
    "max_in_cpu": (7, "offload_param.max_in_cpu=7"),
    "optimizer_buffer_count": (7, "offload_optimizer.buffer_count=7"),
    "block_size": (7, "aio.block_size=7"),
    "queue_depth": (7, "aio.queue_depth=7"),
    "single_submit": (True, "aio.single_submit=True"),
    "overlap_events": (False, "aio.overlap_events=False"),
    "thread_count": (7, "aio.thread_count=7"),
    "pin_memory": (True, "offload_optimizer.pin_memory=True"),
    "sub_group_size": (7, "sub_group_size=7"),
    "contiguous_gradients": (False, "contiguous_gradients=False"),
    "overlap_comm": (False, "overlap_comm=False"),
    "allgather_partitions": (False, "allgather_partitions=False"),
    "reduce_scatter": (False, "reduce_scatter=False"),
    "allgather_bucket_size": (7, "allgather_bucket_size=7"),
    "reduce_bucket_size": (7, "reduce_bucket_size=7"),
    "zero_allow_untested_optimizer": (False, "zero_allow_untested_optimizer=False"),
    "logging_batch_size_per_gpu": (7, "train_micro_batch_size_per_gpu=7"),
    "parallel_devices": ([torch.device("cuda", 0)] * 2, "devices=2"),
    "cluster_environment": (LightningEnvironment(), "cluster_environment="),
    "loss_scale": (128.0, "loss_scale=128.0"),
    "initial_scale_power": (7, "initial_scale_power=7"),
    "loss_scale_window": (7, "loss_scale_window=7"),
    "hysteresis": (7, "hysteresis=7"),
    "min_loss_scale": (7, "min_loss_scale=7"),
    "partition_activations": (True, "activation_checkpointing='full'"),
    "cpu_checkpointing": (True, "offload.activations='cpu'"),
    "contiguous_memory_optimization": (True, "contiguous_memory_optimization=True"),
    "synchronize_checkpoint_boundary": (True, "synchronize_checkpoint_boundary=True"),
    "load_full_weights": (True, "load_full_weights=True"),
    "precision_plugin": (DeepSpeedPrecision("bf16-mixed"), "precision='bf16-mixed'"),
    "process_group_backend": ("nccl", "process_group_backend='nccl'"),
    "timeout": (timedelta(minutes=5), "hang_timeout="),
    "exclude_frozen_parameters": (True, "exclude_frozen_parameters=True"),
}
ON_LIGHTNINGS_ATTRIBUTE = {
    "accelerator": "_accelerator",
    "parallel_devices": "_parallel_devices",
    "precision_plugin": "_precision_plugin",
    "process_group_backend": "_process_group_backend",
    "timeout": "_timeout",
}
NEEDS = {  # other parameters of Lightning that a parameter requires to take effect
    "offload_params_device": {"stage": 3, "offload_parameters": True},
    "offload_optimizer_device": {"offload_optimizer": True},
    "nvme_path": {"offload_optimizer": True, "offload_optimizer_device": "nvme"},
}
BUFFERS = ("params_buffer_count", "params_buffer_size", "max_in_cpu", "optimizer_buffer_count", "pin_memory")


@pytest.mark.parametrize("name", CHANGED)
def test_each_parameter_of_lightnings_strategy_has_an_answer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    value, expected = CHANGED[name]
    parameters = inspect.signature(strategies.DeepSpeedStrategy.__init__).parameters
    given = {each: parameter.default for each, parameter in parameters.items() if each not in ("self", "config")}
    offloads = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
    given |= NEEDS.get(name, offloads if name in BUFFERS else {})
    given[name] = value
    of_config = inspect.signature(strategies.DeepSpeedStrategy._create_default_config).parameters
    zero = ("stage", "contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter")
    zero += ("allgather_bucket_size", "reduce_bucket_size", "sub_group_size")
    keywords = {each: given[each] for each in (*of_config, *zero) if each in given}
    config = strategies.DeepSpeedStrategy._create_default_config(None, **keywords)
    attributes = {ON_LIGHTNINGS_ATTRIBUTE.get(each, each): setting for each, setting in given.items()}
    attributes = {each: setting for each, setting in attributes.items() if each not in keywords}
    roomier.Trainer(strategy=DeepSpeedStrategy(config, **attributes), **QUIET)
    assert expected in capsys.readouterr().err


def test_each_parameter_of_lightnings_strategy_has_a_row() -> None:
    names = set(inspect.signature(strategies.DeepSpeedStrategy.__init__).parameters)
    assert names - CHANGED.keys() == {"self", "config", "logging_level"}  # logging_level is not stored


def test_the_plugin_of_accelerate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from accelerate import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(
        zero_stage=3,
        gradient_accumulation_steps=4,
        gradient_clipping=1.0,
        offload_optimizer_device="nvme",
        offload_optimizer_nvme_path="/scratch",
        zero3_init_flag=True,
        zero3_save_16bit_model=True,
    )
    plan = roomier.Trainer(strategy=plugin, devices=2, **QUIET).plan
    assert changed_fields(plan) == {
        "parallel.strategy": "zero3",
        "parallel.devices": 2,
        "batch.accumulate_grad_batches": 4,
        "batch.gradient_clip_val": 1.0,
        "offload.optimizer_states": "disk",
        "offload.folder": "/scratch",
    }
    table = capsys.readouterr().err
    assert "zero3_init_flag" in table
    assert "stage3_gather_16bit_weights_on_model_save" in table


@pytest.mark.parametrize("argument", ["weights", "ckpt_path"])
@pytest.mark.parametrize(
    "names", [("zero_to_fp32.py", "latest"), ("zero_to_fp32.py", "state/mp_rank_00_model_states.pt")]
)
def test_a_checkpoint_of_deepspeed_is_rejected_with_its_conversion(
    argument: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with pytest.raises(RoomierError, match="is a DeepSpeed checkpoint") as caught:
        roomier.Trainer(max_steps=1, **QUIET).fit(torch.nn.Linear(1, 1), [torch.ones(1)], **{argument: tmp_path})
    command = f"`python {tmp_path / 'zero_to_fp32.py'} {tmp_path} {tmp_path / 'fp32'} --safe_serialization`"
    assert command in str(caught.value)


def test_a_universal_checkpoint_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "zero" / "layer.weight").mkdir(parents=True)
    (tmp_path / "zero" / "layer.weight" / "fp32.pt").write_text("")
    with pytest.raises(RoomierError, match="is a universal DeepSpeed checkpoint"):
        roomier.Trainer(max_steps=1, **QUIET).fit(torch.nn.Linear(1, 1), [torch.ones(1)], weights=tmp_path)


def test_a_plugin_that_a_user_created() -> None:
    plugin = SimpleNamespace(stage=3)
    with pytest.raises(RoomierError):
        roomier.Trainer(deepspeed=plugin, **QUIET)
