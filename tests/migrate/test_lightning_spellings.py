"""Each spelling of Lightning's Trainer and each parameter of its strategies has an answer: a Plan, a notice that the
setting has no effect, or an error that names the equivalent."""

import inspect
import re
import signal
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import accelerators, strategies
from lightning.pytorch.plugins import environments, io, precision
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

import roomier
from roomier.plan.migrate.lightning_strategies import REJECTED, WITHOUT_EFFECT
from tests.migrate.spelling import QUIET, Made, Spelling, check


def ddp(**keywords: Any) -> dict[str, Any]:
    return _strategy(strategies.DDPStrategy, keywords)


def fsdp(**keywords: Any) -> dict[str, Any]:
    return _strategy(strategies.FSDPStrategy, keywords)


def _strategy(kind: type, keywords: dict[str, Any]) -> dict[str, Any]:
    return {"strategy": Made(f"{kind.__name__}({keywords})", partial(kind, **keywords)), "devices": 4}


def _plugin(*plugins: Any) -> Made:
    return Made(str([each.__name__ for each in plugins]), lambda: [each() for each in plugins])


DDP = {"parallel.strategy": "ddp", "parallel.devices": 4}
ZERO3 = {"parallel.strategy": "zero3", "parallel.devices": 4}
HOST_STATES = {"offload.optimizer_states": "cpu"}
UNUSED = "parallel.find_unused_parameters"
CLIP_VALUE = {"batch.gradient_clip_val": 1.0, "batch.gradient_clip_algorithm": "value"}
HOST = {"offload.optimizer_states": "cpu", "offload.parameters": "cpu"}
TEN_MINUTES = timedelta(minutes=10)
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.float32)


OUTSIDE_LSF = environments.LSFEnvironment.__new__(environments.LSFEnvironment)


class OwnStrategy(strategies.DDPStrategy):
    pass


class OwnFiles(io.TorchCheckpointIO):
    pass


OF_DDP = [
    Spelling(ddp(), DDP),
    Spelling(ddp(find_unused_parameters=True), {**DDP, "parallel.find_unused_parameters": True}),
    Spelling(ddp(find_unused_parameters=False), DDP),
    Spelling(ddp(static_graph=True), DDP, ("static_graph",)),
    Spelling(ddp(gradient_as_bucket_view=True), DDP, ("gradient_as_bucket_view",)),
    Spelling(ddp(bucket_cap_mb=50), DDP, ("bucket_cap_mb",)),
    Spelling(ddp(broadcast_buffers=False), DDP, ("broadcast_buffers",)),
    Spelling(ddp(init_sync=False), DDP, ("init_sync",)),
    Spelling(ddp(process_group_backend="gloo"), DDP, ("process_group_backend",)),
    Spelling(ddp(start_method="spawn"), DDP, ("start_method",)),
    Spelling(ddp(timeout=TEN_MINUTES), DDP, options={"hang_timeout_s": 600.0}),
    Spelling(ddp(timeout=timedelta(hours=2)), DDP, ("timeout",)),
    Spelling(ddp(accelerator=accelerators.CPUAccelerator()), {**DDP, "parallel.accelerator": "cpu"}),
    Spelling(ddp(parallel_devices=[torch.device("cpu")] * 4), DDP, remarks=("each rank uses the device",)),
    Spelling(ddp(cluster_environment=environments.LightningEnvironment()), DDP, ("cluster_environment",)),
    Spelling(ddp(cluster_environment=environments.SLURMEnvironment()), DDP, ("cluster_environment",)),
    Spelling(
        ddp(cluster_environment=environments.SLURMEnvironment(auto_requeue=False)), error="ROOMIER_REQUEUE=0 in the job"
    ),
    Spelling(
        ddp(cluster_environment=environments.SLURMEnvironment(requeue_signal=signal.SIGHUP)), error="--signal=TERM@120"
    ),
    Spelling(
        ddp(cluster_environment=environments.LSFEnvironment.__new__(environments.LSFEnvironment)), error="torchrun"
    ),
    Spelling(ddp(checkpoint_io=io.TorchCheckpointIO()), DDP, ("checkpoint_io",)),
    Spelling(ddp(checkpoint_io=OwnFiles()), error="roomier export"),
    Spelling(
        ddp(precision_plugin=precision.MixedPrecision("bf16-mixed", "cpu")), {**DDP, "precision.mode": "bf16-mixed"}
    ),
    Spelling(ddp(ddp_comm_hook=default_hooks.allreduce_hook), DDP, ("ddp_comm_hook",)),
    Spelling(ddp(ddp_comm_hook=default_hooks.bf16_compress_hook), {**DDP, "parallel.reduce_dtype": "bf16"}),
    Spelling(ddp(ddp_comm_hook=default_hooks.fp16_compress_hook), error="'reduce_dtype': 'bf16'"),
    Spelling(
        ddp(
            ddp_comm_hook=powerSGD_hook.powerSGD_hook,
            ddp_comm_state=powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=50),
        ),
        {
            **DDP,
            "parallel.gradient_compression": "powersgd",
            "parallel.compression_rank": 2,
            "parallel.compression_warmup_steps": 50,
        },
    ),
    Spelling(ddp(ddp_comm_hook=powerSGD_hook.batched_powerSGD_hook), error="'gradient_compression': 'powersgd'"),
    Spelling(ddp(ddp_comm_wrapper=default_hooks.fp16_compress_wrapper), error="reduce_dtype"),
    Spelling(ddp(model_averaging_period=4), error="accumulate_grad_batches"),
    Spelling(ddp(mixed_precision=MIXED), error="Use precision='bf16-mixed'"),
    Spelling(ddp(unheard_of=1), error="has no equivalent in roomier"),
    Spelling({"strategy": Made("OwnStrategy", OwnStrategy)}, error="move the overridden methods to a callback"),
    Spelling({**ddp(), "precision": "bf16-mixed"}, {**DDP, "precision.mode": "bf16-mixed"}),
    Spelling(
        {**ddp(precision_plugin=precision.DoublePrecision()), "precision": "16-mixed"},
        error="precision='16-mixed': differs from '64-true', which DDPStrategy requests",
    ),
]

OF_FSDP = [
    Spelling(fsdp(), ZERO3),
    Spelling(fsdp(sharding_strategy="FULL_SHARD"), ZERO3),
    Spelling(fsdp(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), {**ZERO3, "parallel.strategy": "zero2"}),
    Spelling(fsdp(sharding_strategy="NO_SHARD"), DDP),
    Spelling(
        fsdp(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
        {**ZERO3, "parallel.strategy": "hsdp", "parallel.shard_size": 2},
    ),
    Spelling(
        fsdp(sharding_strategy="_HYBRID_SHARD_ZERO2", device_mesh=(2, 2)),
        {**ZERO3, "parallel.strategy": "hsdp", "parallel.shard_size": 2},
        remarks=("resharded after its forward pass",),
    ),
    Spelling(fsdp(cpu_offload=True), {**ZERO3, **HOST}),
    Spelling(fsdp(cpu_offload=CPUOffload(offload_params=True)), {**ZERO3, **HOST}),
    Spelling(fsdp(cpu_offload=False), ZERO3),
    Spelling({**fsdp(cpu_offload=True), "accelerator": "cpu"}, {**ZERO3, **HOST, "parallel.accelerator": "cpu"}),
    Spelling(
        fsdp(mixed_precision=MIXED),
        {**ZERO3, "precision.mode": "bf16-mixed", "parallel.reduce_dtype": "bf16"},
        ("mixed_precision.buffer_dtype",),
    ),
    Spelling(fsdp(mixed_precision=MixedPrecision(param_dtype=torch.float16)), {**ZERO3, "precision.mode": "16-mixed"}),
    Spelling(fsdp(mixed_precision=MixedPrecision(reduce_dtype=torch.float16)), error="Use torch.bfloat16"),
    Spelling(
        fsdp(auto_wrap_policy={torch.nn.TransformerEncoderLayer}), ZERO3, ("auto_wrap_policy",), ("model_blocks()",)
    ),
    Spelling(
        fsdp(activation_checkpointing_policy={torch.nn.Linear}),
        {**ZERO3, "activation.policy": "full"},
        remarks=("each block is recomputed",),
    ),
    Spelling(
        fsdp(activation_checkpointing_policy={torch.nn.Linear}, cpu_offload=True, state_dict_type="sharded"),
        {**ZERO3, **HOST, "activation.policy": "full"},
        ("state_dict_type",),
    ),
    Spelling(fsdp(state_dict_type="sharded"), ZERO3, ("state_dict_type",), ("roomier export",)),
    Spelling(fsdp(use_orig_params=False), ZERO3, ("use_orig_params",)),
    Spelling(fsdp(limit_all_gathers=False), ZERO3, ("limit_all_gathers",)),
    Spelling(fsdp(forward_prefetch=True), ZERO3, ("forward_prefetch",)),
    Spelling(fsdp(backward_prefetch="BACKWARD_PRE"), ZERO3, ("backward_prefetch",)),
    Spelling(fsdp(backward_prefetch=None), {**ZERO3, "parallel.communication": "sequential"}),
    Spelling(fsdp(backward_prefetch=None, sharding_strategy="NO_SHARD"), DDP),
    Spelling(fsdp(sync_module_states=True), ZERO3, ("sync_module_states",)),
    Spelling(fsdp(param_init_fn=len), ZERO3, ("param_init_fn",)),
    Spelling(fsdp(ignored_states=[]), error="all parameters are sharded"),
    Spelling(fsdp(ignored_modules=[torch.nn.Linear(1, 1)]), error="all modules are sharded"),
    Spelling(fsdp(timeout=TEN_MINUTES), ZERO3, options={"hang_timeout_s": 600.0}),
    Spelling(fsdp(process_group_backend="nccl"), ZERO3, ("process_group_backend",)),
    Spelling(fsdp(precision_plugin=precision.FSDPPrecision("bf16-true")), {**ZERO3, "precision.mode": "bf16-true"}),
    Spelling({**fsdp(cpu_offload=True), "offload": "disk"}, error="offload='disk': differs from"),
]

OTHERS = [
    Spelling({"strategy": Made("single", partial(strategies.SingleDeviceStrategy, "cpu"))}),
    Spelling({"strategy": Made("single:1", partial(strategies.SingleDeviceStrategy, "cuda:1"))}, error="DEVICES=1"),
    Spelling(_strategy(strategies.ModelParallelStrategy, {}), error="Use strategy='zero3'"),
    Spelling(_strategy(strategies.ModelParallelStrategy, {"tensor_parallel_size": 1}), ZERO3),
    Spelling(
        _strategy(
            strategies.ModelParallelStrategy,
            {"tensor_parallel_size": 1, "data_parallel_size": 4, "save_distributed_checkpoint": False},
        ),
        ZERO3,
        ("data_parallel_size", "save_distributed_checkpoint"),
    ),
    # plugins
    Spelling({"plugins": []}),
    Spelling({"plugins": None}),
    Spelling({"plugins": _plugin(io.TorchCheckpointIO)}, {}, ("TorchCheckpointIO",)),
    Spelling({"plugins": _plugin(io.AsyncCheckpointIO)}, error="ModelCheckpoint(async_save=True)"),
    Spelling({"plugins": _plugin(OwnFiles)}, error="roomier export"),
    Spelling({"plugins": _plugin(environments.SLURMEnvironment)}, {}, ("SLURMEnvironment",)),
    Spelling({"plugins": _plugin(precision.DoublePrecision)}, {"precision.mode": "64-true"}),
    Spelling({"plugins": Made("half", lambda: precision.HalfPrecision("bf16-true"))}, {"precision.mode": "bf16-true"}),
    Spelling({"plugins": Made("half16", lambda: precision.HalfPrecision("16-true"))}, error="Use precision='16-mixed'"),
    Spelling({"plugins": _plugin(TorchSyncBatchNorm)}, error="convert_sync_batchnorm"),
    Spelling({"plugins": [3]}, error="Use the argument that replaces the plugin"),
    # accelerators
    Spelling({"accelerator": accelerators.CPUAccelerator()}, {"parallel.accelerator": "cpu"}),
    Spelling({"accelerator": accelerators.CUDAAccelerator()}, {"parallel.accelerator": "cuda"}),
    Spelling({"accelerator": SimpleNamespace()}, error="Use accelerator='cpu'"),
    # number of devices, and the default strategy
    Spelling({"devices": 1}),
    Spelling({"devices": 2}, {"parallel.strategy": "ddp", "parallel.devices": 2}),
    Spelling({"devices": "2"}, {"parallel.strategy": "ddp", "parallel.devices": 2}),
    Spelling({"devices": [0, 1, 2, 3]}, DDP),
    Spelling({"num_nodes": 2}, {"parallel.strategy": "ddp", "parallel.num_nodes": 2}),
    Spelling({"devices": 2, "strategy": "single"}, error="Use strategy='ddp'"),
    Spelling(
        {"devices": 2, "strategy": "auto"},
        {"parallel.strategy": "auto", "parallel.devices": 2},
        remarks=("the fastest plan that fits",),
    ),
    Spelling({"strategy": "fdsp"}, error="Did you mean 'fsdp'?"),
    # folders
    Spelling({"default_root_dir": "memory://bucket/runs"}),
    Spelling({"default_root_dir": "hdfs://bucket/runs"}, error="a protocol that roomier does not support"),
]


BAREBONES = {
    "enable_plan_table": False,
    "num_sanity_val_steps": 0,
}
DDP_2 = {"parallel.strategy": "ddp", "parallel.devices": 2}

OF_TRAINER = [
    # precision
    *(Spelling({"precision": value}) for value in (None, 32, "32", "32-true", "fp32")),
    *(Spelling({"precision": value}, {"precision.mode": "64-true"}) for value in (64, "64", "64-true")),
    *(Spelling({"precision": value}, {"precision.mode": "16-mixed"}) for value in (16, "16", "16-mixed", "fp16")),
    *(Spelling({"precision": value}, {"precision.mode": "bf16-mixed"}) for value in ("bf16", "bf16-mixed")),
    Spelling({"precision": "bf16-true"}, {"precision.mode": "bf16-true"}),
    Spelling({"precision": "16-true"}, error="Use precision='16-mixed'"),
    Spelling({"precision": "transformer-engine"}, error="Use precision='bf16-mixed'"),
    Spelling({"precision": "transformer-engine-float16"}, error="Use precision='bf16-mixed'"),
    # names of strategies, current and former
    *(
        Spelling({"strategy": name, "devices": 2}, {**DDP_2, "parallel.strategy": strategy})
        for name, strategy in {
            "ddp": "ddp",
            "ddp_spawn": "ddp",
            "ddp_fork": "ddp",
            "ddp2": "ddp",
            "no_shard": "ddp",
            "ddp_find_unused_parameters_false": "ddp",
            "fsdp": "zero3",
            "fsdp_native": "zero3",
            "full_shard": "zero3",
            "fully_sharded": "zero3",
            "ddp_fully_sharded": "zero3",
            "shard_grad_op": "zero2",
            "ddp_sharded": "zero2",
            "ddp_sharded_spawn": "zero2",
            "deepspeed": "zero2",
            "deepspeed_stage_1": "zero1",
            "deepspeed_stage_2": "zero2",
            "deepspeed_stage_3": "zero3",
            "hybrid_shard": "hsdp",
        }.items()
    ),
    *(
        Spelling({"strategy": f"{name}_find_unused_parameters_true", "devices": 2}, {**DDP_2, UNUSED: True})
        for name in ("ddp", "ddp_spawn", "ddp_fork")
    ),
    Spelling({"strategy": "deepspeed_stage_1_offload"}, {"parallel.strategy": "zero1", **HOST_STATES}),
    Spelling({"strategy": "deepspeed_stage_2_offload"}, {"parallel.strategy": "zero2", **HOST_STATES}),
    Spelling({"strategy": "deepspeed_stage_3_offload"}, {"parallel.strategy": "zero3", **HOST}),
    Spelling(
        {"strategy": "deepspeed_stage_3_offload", "precision": 16},
        {"parallel.strategy": "zero3", "precision.mode": "16-mixed", **HOST},
    ),
    Spelling({"strategy": "fsdp_cpu_offload"}, {"parallel.strategy": "zero3", **HOST}),
    Spelling(
        {"strategy": "deepspeed_stage_3_offload_nvme"},
        {"parallel.strategy": "zero3", "offload.optimizer_states": "disk", "offload.parameters": "disk"},
    ),
    Spelling({"strategy": "single_device"}),
    *(
        Spelling({"strategy": name}, error=advice)
        for name, advice in {
            "dp": "Use strategy='ddp'",
            "horovod": "Use strategy='ddp'",
            "ddp_notebook": "in a script",
            "xla": "Use accelerator='tpu'",
            "xla_fsdp": "Use accelerator='tpu'",
            "tpu_spawn": "Use accelerator='tpu'",
            "single_tpu": "strategy='single'",
            "model_parallel": "Use strategy='zero3'",
        }.items()
    ),
    # accelerators
    *(Spelling({"accelerator": name}, {"parallel.accelerator": name}) for name in ("cpu", "gpu", "cuda", "mps", "tpu")),
    Spelling({"accelerator": "auto"}),
    Spelling({"accelerator": "hpu"}, error="Use accelerator="),
    # loops, logs, and their former names
    Spelling({"barebones": True}, options=BAREBONES),
    Spelling({"barebones": False}),
    Spelling({"barebones": True, "num_sanity_val_steps": 5}, error="which barebones=True requests"),
    Spelling({"sync_batchnorm": True}, {}, ("sync_batchnorm",)),
    Spelling({"sync_batchnorm": True, "devices": 2}, error="convert_sync_batchnorm(model)"),
    Spelling({"sync_batchnorm": False, "devices": 2}, DDP_2),
    Spelling({"use_distributed_sampler": True, "devices": 2}, DDP_2),
    Spelling({"use_distributed_sampler": False}, {}, ("use_distributed_sampler",)),
    Spelling({"use_distributed_sampler": False, "devices": 2}, error="shards_by_rank = True"),
    Spelling({"replace_sampler_ddp": False, "devices": 2}, error="shards_by_rank = True"),
    Spelling({"enable_autolog_hparams": True}),
    Spelling({"enable_autolog_hparams": False}, error="save_hyperparameters(logger=False)"),
    Spelling({"model_registry": "name"}, error="on_fit_end"),
    Spelling({"profiler": "simple"}),
    Spelling({"profiler": "advanced"}),
    Spelling({"profiler": "pytorch"}),
    Spelling({"profiler": "xla"}, error="Use 'simple'"),
    Spelling({"max_time": timedelta(hours=1)}, options={"max_time_s": 3600.0}),
    Spelling({"val_check_interval": "00:00:10:00"}, options={"val_check_interval_s": 600.0}),
    Spelling({"gradient_clip_val": 0}),
    Spelling({"gradient_clip_val": 1}, {"batch.gradient_clip_val": 1.0}),
    Spelling({"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}, CLIP_VALUE),
    Spelling({"accumulate_grad_batches": 4}, {"batch.accumulate_grad_batches": 4}),
    Spelling({"accumulate_grad_batches": {4: 2}}, error="Pass an integer"),
    Spelling({"deterministic": "warn"}, options={"deterministic": "warn"}),
    Spelling({"benchmark": True}, options={"benchmark": True}),
    Spelling({"resume_from_checkpoint": "a"}, error="ckpt_path"),
    Spelling({"checkpoint_callback": False}, error="enable_checkpointing"),
    Spelling({"progress_bar_refresh_rate": 0}, error="enable_progress_bar=False"),
    Spelling({"max_nb_epochs": 3}, error="max_epochs"),
    Spelling({"use_amp": True}, error="precision='16-mixed'"),
    Spelling({"distributed_backend": "ddp"}, error="Use strategy"),
    Spelling({"plugins": "ddp_sharded"}, error="Pass it as strategy"),
    Spelling({"tpu_cores": 8}, error="accelerator='tpu' and devices=N"),
    Spelling({"ipus": 4}, error="Use accelerator and devices"),
    Spelling({"num_processes": 4}, error="Use accelerator and devices"),
    Spelling({"amp_level": "O2"}, error="precision='16-mixed'"),
    Spelling({"auto_scale_batch_size": "power"}),
    Spelling({"auto_lr_find": True}),
]


def test_the_plan_table_is_quiet_with_the_progress_bar_and_the_summary() -> None:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    rows = [({}, True), (quiet, False), ({"enable_progress_bar": False}, True), ({"enable_plan_table": False}, False)]
    for keywords, expected in [*rows, ({**quiet, "enable_plan_table": True}, True)]:
        assert roomier.Trainer(**keywords).options.enable_plan_table is expected


def test_a_disabled_plan_table_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for enabled in (True, False):
        roomier.Trainer(max_steps=1, enable_plan_table=enabled, optimizer="sgd", **QUIET).fit(
            Loss(), [torch.ones(1, 1)]
        )
        assert ("kind         note" in capsys.readouterr().err) is enabled


class Loss(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


@pytest.mark.parametrize("name", [name for name in inspect.signature(pl.Trainer.__init__).parameters if name != "self"])
def test_each_argument_of_lightning_is_accepted_or_has_a_row(name: str) -> None:
    own = inspect.signature(roomier.Trainer.__init__).parameters
    assert name in own or any(name in row.keywords for row in [*OTHERS, *OF_TRAINER]) or name == OF_LOADERS


OF_LOADERS = "reload_dataloaders_every_n_epochs"  # tests/lightning has its tests


def without_addresses(row: Spelling) -> str:
    """Return a name that is the same in all processes that run the tests."""
    return re.sub(r" at 0x\w*", "", str(row))


@pytest.mark.parametrize("row", [*OF_DDP, *OF_FSDP, *OTHERS, *OF_TRAINER], ids=without_addresses)
def test_each_spelling_has_its_answer(row: Spelling, capsys: pytest.CaptureFixture[str]) -> None:
    check(row, capsys)


@pytest.mark.parametrize(
    ("strategy", "rows"), [(strategies.DDPStrategy, OF_DDP), (strategies.FSDPStrategy, OF_FSDP)], ids=["ddp", "fsdp"]
)
def test_each_parameter_has_a_row(strategy: type, rows: list[Spelling]) -> None:
    spelled = " ".join(each.keywords["strategy"].label for each in [*OF_DDP, *rows])
    names = set(inspect.signature(strategy.__init__).parameters) - {"self", "kwargs"}
    # Lightning converts activation_checkpointing to activation_checkpointing_policy
    assert {name for name in names if f"'{name}'" not in spelled} <= {"activation_checkpointing"}


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, FullyShardedDataParallel])
def test_each_argument_of_torch_has_an_answer(wrapper: type) -> None:
    names = set(inspect.signature(wrapper.__init__).parameters) - {"self", "module"}
    handled = {"find_unused_parameters", "broadcast_buffers", "sharding_strategy", "cpu_offload"}
    assert names - handled - WITHOUT_EFFECT.keys() - REJECTED.keys() == set()


def test_an_import_of_a_plugin_is_answered_with_arguments_of_the_trainer() -> None:
    for home, name in (("plugins", "DeepSpeedPlugin"), ("strategies", "FSDPStrategy")):
        for statement in (f"from roomier.{home} import {name}", f"import roomier; roomier.{home}.{name}"):
            with pytest.raises(roomier.RoomierError, match=rf"'{name}': does not exist.*Trainer\(strategy={name}"):
                exec(statement, {})
        assert not hasattr(getattr(roomier, home), "__path__")
