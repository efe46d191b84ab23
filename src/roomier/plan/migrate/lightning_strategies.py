"""Conversion of Lightning's strategies, plugins and accelerators to arguments of the Trainer.

Every parameter of ``SingleDeviceStrategy``, ``DDPStrategy``, ``FSDPStrategy``, ``ModelParallelStrategy`` and
``DeepSpeedStrategy`` is either converted, ignored with a reason, or rejected. Settings that have their default values
are skipped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from roomier.launch.job import REQUEUE
from roomier.plan.migrate.answers import Answers, kind_of, name_of, setting_of

_LONGEST_HANG_S = 1800
SHARDINGS = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "HYBRID_SHARD": "hsdp",
    "_HYBRID_SHARD_ZERO2": "hsdp",
    "NO_SHARD": "ddp",
}
_MIXED = {"bfloat16": "bf16-mixed", "float16": "16-mixed", "float32": "32-true"}

_SYNCED = "all ranks create identical weights, so weights are not broadcast"
_BUCKETS = "roomier selects the size of the buckets"
_FULL_PRECISION = "buffers keep their dtype"
WITHOUT_EFFECT: dict[str, str] = {
    "process_group_backend": "the backend is gloo on the CPU, and torch's default for other devices (nccl on CUDA)",
    "start_method": "roomier starts the ranks as processes that run the script again",
    "logging_level": "DeepSpeed is not used",
    # DistributedDataParallel
    "bucket_cap_mb": _BUCKETS,
    "bucket_cap_mb_list": _BUCKETS,
    "gradient_as_bucket_view": "gradients are already views of the buckets",
    "static_graph": "roomier determines the used parameters in the first step",
    "check_reduction": "torch ignores this argument",
    "init_sync": _SYNCED,
    "delay_all_reduce_named_params": "gradients are reduced during the backward computation",
    "param_to_hook_all_reduce": "gradients are reduced during the backward computation",
    "skip_all_reduce_unused_params": "find_unused_parameters supports unused parameters",
    "dim": "torch requires 0",
    "batched_grad_copy": "gradients are already views of the buckets",
    "forward_sync_buffers": "buffers are broadcast in each forward pass",
    **dict.fromkeys(("device_ids", "output_device", "device_id"), "each rank uses the device with its local rank"),
    "process_group": "the process group contains all ranks",
    "device_mesh": "the number of ranks determines the mesh",
    # FullyShardedDataParallel
    "auto_wrap_policy": (
        "the units are the blocks (repeated layers), or the modules that the method model_blocks() returns"
    ),
    "use_orig_params": "parameters always keep their names and shapes",
    "limit_all_gathers": "at most one block is all-gathered before its computation",
    "backward_prefetch": "the next block is prefetched; strategy={'name': 'zero3', 'communication': 'sequential'} "
    "prefetches no block",
    "forward_prefetch": "the next block is always prefetched",
    "sync_module_states": _SYNCED,
    "param_init_fn": "reset_parameters initializes modules on the meta device",
    "state_dict_type": "each rank writes its shard to a folder, which any strategy and number of ranks can load; "
    "`roomier export` writes a single file",
    "save_distributed_checkpoint": "each rank writes its shard to a folder; `roomier export` writes a single file",
}
"""Mapping from each parameter without effect in roomier to the reason why it has no effect."""

REJECTED: dict[str, tuple[str, str]] = {
    "ddp_comm_wrapper": (
        "is not supported, because roomier does not run hooks of DDP",
        "Use strategy={'name': 'ddp', 'reduce_dtype': 'bf16'}, which sends gradients in bfloat16",
    ),
    "model_averaging_period": (
        "is not supported, because ranks reduce gradients in every step",
        "Remove it. To reduce gradients less often, increase accumulate_grad_batches",
    ),
    "delay_allreduce_named_params": ("is not supported", "Remove it"),
    "ignored_modules": (
        "is not supported, because all modules are sharded",
        "Remove it. Parameters outside the blocks form a separate unit",
    ),
    "ignored_states": ("is not supported, because all parameters are sharded", "Remove it"),
    "ignored_parameters": ("is not supported, because all parameters are sharded", "Remove it"),
    "mixed_precision": (
        "is not supported, because roomier does not cast the inputs and buffers of DDP",
        "Use precision='bf16-mixed'",
    ),
}
"""Mapping from each parameter that cannot be reproduced to the problem and the action. A separate function converts
FSDP's ``mixed_precision``."""


def answers_to_strategy(strategy: object) -> Answers | None:
    """Return the results for the settings of ``strategy``; None if ``strategy`` is not a Lightning strategy.

    Raises:
        PlanError: the strategy is an instance of a subclass that a user defined.
    """
    kind = kind_of(strategy, _KINDS, "strategy")
    if kind is None:
        return None
    answers = Answers(kind)
    _KINDS[kind](answers, strategy)
    answer_environment(answers, strategy)
    return answers


def answer_environment(answers: Answers, strategy: object) -> None:
    """Record the results for the settings that all strategies have."""
    accelerator = setting_of(strategy, "_accelerator")
    if accelerator is not None:
        answer_accelerator(answers, accelerator)
    devices = setting_of(strategy, "_parallel_devices")
    if devices is not None:
        answers.use("parallel_devices", devices, "devices", len(devices), "each rank uses the device with its index")
    for name in ("cluster_environment", "_checkpoint_io", "_precision_plugin", "_layer_sync"):
        plugin = setting_of(strategy, name)
        if plugin is not None and not _is_default_precision(plugin):
            answer_plugin(answers, name.lstrip("_"), plugin)
    timeout = setting_of(strategy, "_timeout")
    if isinstance(timeout, timedelta) and timeout.total_seconds() != _LONGEST_HANG_S:
        seconds = timeout.total_seconds()
        if 0 < seconds < _LONGEST_HANG_S:
            answers.use("timeout", timeout, "hang_timeout", timeout)
        else:
            answers.ignore(
                "timeout", timeout, "collective operations fail after 30 minutes, and hang_timeout ends a run earlier"
            )
    backend = setting_of(strategy, "_process_group_backend")
    if backend is not None:
        answers.ignore("process_group_backend", backend, WITHOUT_EFFECT["process_group_backend"])


def _is_default_precision(plugin: object) -> bool:
    return type(plugin).__name__ == "Precision" and getattr(plugin, "precision", "32-true") == "32-true"


def _answer_rest(answers: Answers, keywords: Mapping[str, Any]) -> None:
    """Record the answers to keyword arguments that are passed to torch's wrapper."""
    for name, value in keywords.items():
        if value is None:
            continue
        if name in REJECTED:
            answers.reject(name, value, *REJECTED[name])
        elif name in WITHOUT_EFFECT:
            answers.ignore(name, value, WITHOUT_EFFECT[name])
        else:
            answers.reject(name, value, "has no equivalent in roomier", "Remove it")


def _single(answers: Answers, strategy: object) -> None:
    answers.use("class", type(strategy).__name__, "strategy", "single")
    device = setting_of(strategy, "_root_device")
    kind = getattr(device, "type", str(device).partition(":")[0])
    index = getattr(device, "index", None) or 0
    if index:
        problem = "is not supported, because each rank uses the device with its local rank"
        answers.reject("device", device, problem, f"Set the environment variable CUDA_VISIBLE_DEVICES={index}")
    elif kind not in ("None", "cpu"):
        answers.use("device", str(device), "accelerator", kind)


def _ddp(answers: Answers, strategy: object) -> None:
    keywords = dict(getattr(strategy, "_ddp_kwargs", {}))
    answers.use("class", type(strategy).__name__, "strategy", "ddp")
    unused = keywords.pop("find_unused_parameters", None)
    if unused is not None:
        answers.use("find_unused_parameters", unused, "strategy.find_unused_parameters", bool(unused))
    if keywords.pop("broadcast_buffers", True) is False:
        answers.ignore("broadcast_buffers", False, "buffers are broadcast, so that all ranks evaluate the same model")
    hook = setting_of(strategy, "_ddp_comm_hook")
    if hook is not None:
        _answer_hook(answers, hook, setting_of(strategy, "_ddp_comm_state"))
    for name in ("_ddp_comm_wrapper", "_model_averaging_period"):
        value = setting_of(strategy, name)
        if value is not None:
            answers.reject(name.lstrip("_"), value, *REJECTED[name.lstrip("_")])
    method = setting_of(strategy, "_start_method")
    if method not in (None, "popen"):
        answers.ignore("start_method", method, WITHOUT_EFFECT["start_method"])
    _answer_rest(answers, keywords)


def _answer_hook(answers: Answers, hook: Any, state: Any) -> None:
    """Record the answer to a communication hook of DDP. Only some of torch's hooks are supported."""
    name = name_of(hook)
    if name == "allreduce_hook":
        answers.ignore("ddp_comm_hook", name, "gradients are summed over the ranks by default")
    elif name == "bf16_compress_hook":
        answers.use("ddp_comm_hook", name, "strategy.reduce_dtype", "bf16")
    elif name == "fp16_compress_hook":
        action = "Use strategy={'name': 'ddp', 'reduce_dtype': 'bf16'}, which also halves the communication volume"
        answers.reject("ddp_comm_hook", name, "sends float16, in which gradients underflow", action)
    elif name == "powerSGD_hook":
        answers.use("ddp_comm_hook", name, "strategy.gradient_compression", "powersgd")
        rank, start = (getattr(state, each, None) for each in ("matrix_approximation_rank", "start_powerSGD_iter"))
        if rank is not None:
            answers.use("ddp_comm_state.matrix_approximation_rank", rank, "strategy.compression_rank", rank)
        if start is not None:
            answers.use("ddp_comm_state.start_powerSGD_iter", start, "strategy.compression_warmup_steps", max(3, start))
        for each, default in _POWERSGD.items():
            value = getattr(state, each, default)
            if value != default:
                answers.ignore(f"ddp_comm_state.{each}", value, f"roomier uses {default!r}")
    else:
        action = "Use strategy={'name': 'ddp', 'reduce_dtype': 'bf16'} or {'gradient_compression': 'powersgd'}"
        answers.reject("ddp_comm_hook", name, "is not supported, because roomier does not run hooks of DDP", action)


_POWERSGD = {"use_error_feedback": True, "warm_start": True, "orthogonalization_epsilon": 0}


def _fsdp(answers: Answers, strategy: object) -> None:
    keywords = dict(getattr(strategy, "kwargs", {}))
    if keywords.get("use_orig_params") is True:
        del keywords["use_orig_params"]  # Lightning sets it
    sharding = setting_of(strategy, "sharding_strategy")
    mesh = keywords.pop("device_mesh", None)
    name = name_of("FULL_SHARD" if sharding is None else sharding)
    remark = "the weights of a block are also resharded after its forward pass" if name == "_HYBRID_SHARD_ZERO2" else ""
    answers.use("sharding_strategy", name, "strategy", SHARDINGS[name], remark)
    if mesh is not None:
        size = mesh[1] if isinstance(mesh, (tuple, list)) else mesh.size(1)
        answers.use("device_mesh", mesh, "strategy.shard_size", size)
    offload = setting_of(strategy, "cpu_offload")
    if bool(getattr(offload, "offload_params", offload)):
        answers.use("cpu_offload", True, "offload.optimizer_states", "cpu")
        answers.use("cpu_offload", True, "offload.parameters", "cpu")
    if setting_of(strategy, "_activation_checkpointing_kwargs"):
        remark = "each block is recomputed, instead of the modules that the policy selects"
        answers.use("activation_checkpointing_policy", "...", "activation_checkpointing", "full", remark)
    mixed = setting_of(strategy, "mixed_precision")
    if mixed is not None:
        answer_mixed_precision(answers, mixed)
    state_dict = setting_of(strategy, "_state_dict_type")
    if state_dict not in (None, "full"):
        answers.ignore("state_dict_type", state_dict, WITHOUT_EFFECT["state_dict_type"])
    if keywords.get("backward_prefetch", True) is None and SHARDINGS[name] != "ddp":
        answers.use("backward_prefetch", None, "strategy.communication", "sequential")
    _answer_rest(answers, keywords)


def answer_mixed_precision(answers: Answers, mixed: Any) -> None:
    """Record the result for each setting in ``mixed``, which is torch's ``MixedPrecision`` or a dict of its fields."""
    fields = mixed if isinstance(mixed, Mapping) else vars(mixed)
    parameter = fields.get("param_dtype")
    if parameter is not None:
        mode = _MIXED.get(name_of(parameter))
        if mode is None:
            answers.reject("mixed_precision.param_dtype", parameter, "is not supported", "Use torch.bfloat16")
        else:
            answers.use("mixed_precision.param_dtype", parameter, "precision", mode)
    reduce = fields.get("reduce_dtype")
    if reduce is not None and name_of(reduce) == "float16":
        action = "Use torch.bfloat16, or torch.float32"
        answers.reject("mixed_precision.reduce_dtype", reduce, "sends float16, in which gradients underflow", action)
    elif reduce is not None:
        meaning = "bf16" if name_of(reduce) == "bfloat16" else "32"
        answers.use("mixed_precision.reduce_dtype", reduce, "strategy.reduce_dtype", meaning)
    if fields.get("buffer_dtype") is not None:
        answers.ignore("mixed_precision.buffer_dtype", fields["buffer_dtype"], _FULL_PRECISION)
    for name, (default, reason) in _CASTS.items():
        if fields.get(name, default) != default:
            answers.ignore(f"mixed_precision.{name}", fields[name], reason)


_CASTS = {
    "keep_low_precision_grads": (False, "gradients are float32"),
    "cast_forward_inputs": (False, "inputs of matmuls are cast, as in torch.autocast"),
    "cast_root_forward_inputs": (True, "inputs of matmuls are cast, as in torch.autocast"),
}


def _model_parallel(answers: Answers, strategy: object) -> None:
    tensor = setting_of(strategy, "_tensor_parallel_size")
    action = "Use strategy='zero3', which shards the parameters of each block"
    if tensor != 1:
        answers.reject(
            "tensor_parallel_size", tensor, "is not implemented (by default, the mesh contains all devices)", action
        )
        return
    answers.use("tensor_parallel_size", 1, "strategy", "zero3", "configure_model need not call fully_shard")
    data = setting_of(strategy, "_data_parallel_size")
    if data not in (None, "auto"):
        answers.ignore("data_parallel_size", data, "devices and num_nodes determine the number of ranks")
    if setting_of(strategy, "_save_distributed_checkpoint") is False:
        answers.ignore("save_distributed_checkpoint", False, WITHOUT_EFFECT["save_distributed_checkpoint"])


_KINDS: dict[str, Callable[[Answers, object], None]] = {
    "SingleDeviceStrategy": _single,
    "DDPStrategy": _ddp,
    "FSDPStrategy": _fsdp,
    "ModelParallelStrategy": _model_parallel,
}


_DETECTED = "roomier detects the launcher from its environment variables"
_PRECISIONS: dict[str, str | None] = {
    "Precision": "32-true",
    "DoublePrecision": "64-true",
    **dict.fromkeys(("MixedPrecision", "HalfPrecision", "FSDPPrecision", "DeepSpeedPrecision", "XLAPrecision")),
}
"""Mapping from each precision plugin to its precision; None if the object stores the precision."""

_ACCELERATORS = {"CPUAccelerator": "cpu", "CUDAAccelerator": "cuda", "MPSAccelerator": "mps", "XLAAccelerator": "tpu"}

_WITHOUT_EFFECT = {
    "LightningEnvironment": "roomier starts the ranks if no launcher has started them",
    "TorchElasticEnvironment": _DETECTED,
    "SLURMEnvironment": "roomier detects SLURM, and after SIGTERM or SIGUSR1 saves a checkpoint and requeues the job",
    "MPIEnvironment": _DETECTED,
    "TorchCheckpointIO": "checkpoints are folders, to which every rank writes; `roomier export` writes a single file",
}

_REQUEUE_SIGNALS = (None, signal.SIGTERM, getattr(signal, "SIGUSR1", None))

_REJECTED = {
    "KubeflowEnvironment": ("is not detected", "Start the pods with torchrun, whose variables roomier detects"),
    "LSFEnvironment": ("is not detected", "Start the ranks with torchrun or mpirun, whose variables roomier detects"),
    "XLAEnvironment": ("is not detected", "Start the ranks with torchrun, whose variables roomier detects"),
    "AsyncCheckpointIO": ("is not supported", "Use callbacks=[ModelCheckpoint(async_save=True)]"),
    "XLACheckpointIO": ("is not supported, because checkpoints are folders", "Remove it"),
    "TransformerEnginePrecision": ("is not implemented", "Use precision='bf16-mixed'"),
    "BitsandbytesPrecision": (
        "quantizes weights that are trained, so small updates are lost",
        "Use lora={'rank': 8, 'base': 'nf4'}, which trains adapters on quantized weights",
    ),
    "TorchSyncBatchNorm": (
        "is not applied to a model",
        "Convert the model: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    ),
}
"""Mapping from each unsupported plugin to the problem and the action."""

_BASES = {
    "CheckpointIO": (
        "is a custom CheckpointIO, which roomier does not call",
        "Remove it, and convert finished checkpoints with `roomier export`, or copy them in on_save_checkpoint",
    ),
    "ClusterEnvironment": (
        "is a custom ClusterEnvironment, which roomier does not call",
        "Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does",
    ),
    "Precision": ("is a custom precision plugin", "Use precision='bf16-mixed', or cast in forward of the module"),
    "LayerSync": ("is a custom LayerSync", "Convert the layers of the model before fit"),
}


def answer_plugin(answers: Answers, setting: str, plugin: object) -> None:
    """Record the result for one plugin."""
    name = type(plugin).__name__
    bases = {each.__name__ for each in type(plugin).__mro__[1:]}
    if name in _REJECTED:
        answers.reject(setting, name, *_REJECTED[name])
    elif name == "SLURMEnvironment" and setting_of(plugin, "auto_requeue") is False and os.environ.get(REQUEUE) != "0":
        action = f"Set the environment variable {REQUEUE}=0 in the job script, or submit the job with --no-requeue and "
        answers.reject(
            f"{setting}.auto_requeue", False, "is a setting of the job", f"{action}remove auto_requeue=False"
        )
    elif name == "SLURMEnvironment" and setting_of(plugin, "requeue_signal") not in _REQUEUE_SIGNALS:
        found = setting_of(plugin, "requeue_signal")
        answers.reject(f"{setting}.requeue_signal", found, "does not end a run", "Use --signal=TERM@120 or USR1@120")
    elif name in _WITHOUT_EFFECT:
        answers.ignore(setting, name, _WITHOUT_EFFECT[name])
    elif name in _PRECISIONS:
        _answer_precision(answers, setting, plugin)
    else:
        base = next((each for each in _BASES if each in bases), None)
        unknown = (
            "is not a plugin that roomier supports",
            "Use the argument that replaces the plugin, such as precision",
        )
        answers.reject(setting, plugin, *(unknown if base is None else _BASES[base]))


def _answer_precision(answers: Answers, setting: str, plugin: object) -> None:
    name = type(plugin).__name__
    mode = _PRECISIONS[name] or getattr(plugin, "precision", "32-true")
    answers.use(setting, name, "precision", mode)
    scaler = setting_of(plugin, "scaler")
    if scaler is not None and getattr(scaler, "get_scale", lambda: _FIRST_SCALE)() not in (_FIRST_SCALE, 1.0):
        reason = "roomier creates the scaler, whose scale does not change the gradient of a step that is not skipped"
        answers.ignore(f"{setting}.scaler", type(scaler).__name__, reason)


_FIRST_SCALE = 65536.0


def answer_accelerator(answers: Answers, accelerator: object) -> None:
    """Record the result for an accelerator object."""
    kind = kind_of(accelerator, _ACCELERATORS, "accelerator")
    if kind is None:
        action = "Use accelerator='cpu', 'cuda', 'mps', 'xpu', 'npu' or 'tpu'"
        answers.reject("accelerator", accelerator, "is not an accelerator that torch supports", action)
    else:
        answers.use("accelerator", kind, "accelerator", _ACCELERATORS[kind])
