"""Keys of a DeepSpeed configuration that determine no argument of the Trainer: keys without effect, and features that
roomier does not have.

A key is written with dots, as in ``"zero_optimization.stage"``. The names and defaults are from DeepSpeed 0.19.
"""

from __future__ import annotations

_COMMUNICATION = "roomier selects the communication buckets and overlaps communication with computation"
_PREFETCH = "each block is all-gathered when it is computed, and the next block is prefetched"
_REPLICA = (
    "weights are sharded across all ranks, without a second replica in each machine; strategy='hsdp' shards within a "
    "machine"
)
_FILES = "any strategy and number of ranks can load a checkpoint, and `roomier export` writes single files"
_BUFFERS = "the sizes of the blocks determine the transfer buffers"
_OVERLAP = "updates overlap with computation without approximation, in the mode that offload.update selects"
_LOGS = "use the arguments logger, log_every_n_steps and profiler"
_ON_DISK = "the disk tier selects its I/O"
_SCALE = "torch's GradScaler scales the loss, which does not change the gradient of a step that is not skipped"
_WEIGHTS = "each sample or token of the global batch has the same weight in the gradient"
_RECOMPUTE = "each block is recomputed"
_DTYPES = "precision determines the dtypes; gradients are summed in float32"

_GROUPS: dict[str, dict[str, str]] = {
    # section: {reason: keys}
    "zero_optimization.": {
        _COMMUNICATION: "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
        "allgather_partitions allgather_bucket_size overlap_comm round_robin_gradients sub_group_size legacy_stage1",
        _PREFETCH: "stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold "
        "param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold "
        "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance "
        "stage3_module_granularity_threshold module_granularity_threshold stage3_use_all_reduce_for_fetch_params "
        "use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential memory_efficient_linear "
        "override_module_apply mics_hierarchical_params_gather leaf_module.classes leaf_module.names "
        "leaf_module.name_suffixes",
        _REPLICA: "zero_hpz_partition_size",
        _FILES: "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save gather_fp16_weights_on_model_save elastic_checkpoint "
        "load_from_fp32_weights pipeline_loading_checkpoint",
        "roomier supports parameters that no rank uses": "ignore_unused_parameters",
        "this key enables a check of DeepSpeed's code": "log_trace_cache_warnings enable_sanity_checks",
        "the argument offload determines where optimizer states are stored": "save_muon_momentum_buffer_in_memory",
        _BUFFERS: "cpu_offload_use_pin_memory",
    },
    "zero_optimization.offload_param.": {_BUFFERS: "buffer_count buffer_size max_in_cpu pin_memory"},
    "zero_optimization.offload_optimizer.": {
        _BUFFERS: "buffer_count pin_memory pipeline_read pipeline_write pipeline fast_init cpuadam_cores_perc",
        _OVERLAP: "super_offload",
    },
    "fp16.": {
        _SCALE: "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale",
        "autocast casts the inputs of matmuls": "auto_cast",
    },
    "bf16.": {
        _DTYPES: "immediate_grad_update check_grad_overflow",
        "optimizer states are float32; optimizer='adamw8bit' stores them in 8 bits": "bf16_optimizer_states",
    },
    "torch_autocast.": {"torch.autocast selects the operations": "lower_precision_safe_modules"},
    "": {
        _WEIGHTS: "prescale_gradients gradient_predivide_factor",
        _COMMUNICATION: "disable_allgather",
        "sequences are not sharded": "seq_parallel_communication_data_type",
        "gradients have the layout that backward returns": "sparse_gradients",
        "roomier counts the micro-batches": "managed_gradient_accumulation",
        "every optimizer of torch can be sharded": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        "drop_last of the DataLoader determines this behavior": "dataloader_drop_last",
        "roomier has no such setting": "vocabulary_size graph_harvesting use_data_before_expert_parallelism ddp_bf16",
        "the launcher determines the ranks": "data_parallel_group global_rank",
        _LOGS: "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level",
    },
    "checkpoint.": {"ModelCheckpoint(async_save=True) writes while training continues": "writer"},
    "activation_checkpointing.": {
        _RECOMPUTE: "number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary profile"
    },
    "optimizer.": {"torch selects the kernels of the optimizer": "legacy_fusion"},
    "compile.": {"the argument compile compiles the blocks of the model": "enabled backend kwargs"},
}

WITHOUT_EFFECT: dict[str, str] = {
    **{
        f"{section}{key}": reason
        for section, reasons in _GROUPS.items()
        for reason, keys in reasons.items()
        for key in keys.split()
    },
    # sections, whose keys have no effect unless they are listed elsewhere
    "aio": _ON_DISK,
    "data_types": _DTYPES,
    "timers": _LOGS,
    "flops_profiler": "use callbacks=[Throughput()] or profiler=...",
    "comms_logger": "use profiler='torch'",
    "tensorboard": "logger='tensorboard' writes TensorBoard files",
    "wandb": "logger='wandb' logs to Weights & Biases",
    "csv_monitor": "logger=True writes metrics.csv",
    "comet": "logger='comet' logs to Comet",
    "checkpoint": _FILES,
    "compile": "these settings belong to DeepCompile; use the arguments offload and activation_checkpointing",
}
"""Mapping from each key and each section without effect to the reason why it has no effect."""


def reason_of(key: str) -> str | None:
    """Return the reason why ``key`` has no effect; None if it has an effect, is rejected or is unknown."""
    of_section = None if key in REJECTED else WITHOUT_EFFECT.get(key.partition(".")[0])
    return WITHOUT_EFFECT.get(key, of_section)


_QUANTIZED = (
    "sends quantized values and thereby changes the gradients",
    "Set it to false. {'reduce_dtype': 'bf16'} in the argument strategy halves the communication volume",
)
REJECTED: dict[str, tuple[str, str]] = {
    "zero_optimization.zero_quantized_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_gradients": _QUANTIZED,
    "zero_optimization.zeropp_loco_param": _QUANTIZED,
    "zero_optimization.zero_quantized_nontrainable_weights": (
        "quantizes frozen weights",
        "Set it to false, and use lora={'rank': 8, 'base': 'int8'}",
    ),
    "fp16.fp16_master_weights_and_grads": (
        "stores float16 weights, which lose small updates",
        "Set it to false, or use bf16",
    ),
    "compile.deepcompile": ("is not implemented", "Set it to false, and use the argument compile"),
    "quantize_weights_in_forward": ("is not implemented", "Remove it"),
}
"""Problem and action for each key that is rejected, unless its value is false, null or 0."""

_REMOVED = "is not part of current versions of DeepSpeed"
SECTIONS: dict[str, tuple[str, str, str]] = {
    # section: (key that enables the section, problem, action)
    "amp": ("enabled", "selects Apex, which is not supported", "Remove it, and use precision='16-mixed'"),
    "autotuning": (
        "enabled",
        "is not supported",
        "Remove it. Use `roomier plan` or auto_scale_batch_size, which search for a plan",
    ),
    "elasticity": (
        "enabled",
        "is not supported",
        "Remove it. A run can resume with a different number of ranks and the same global batch",
    ),
    "curriculum_learning": ("enabled", "is not implemented", "Remove it, and order the samples with a sampler"),
    "data_efficiency": ("enabled", "is not implemented", "Remove it, and order the samples with a sampler"),
    "expert_parallel": ("enabled", "is not implemented", "Remove it. Stage 3 shards the parameters of all experts"),
    "pipeline": (
        "stages",
        "is not supported in a DeepSpeed config",
        "Remove it. Stage 3 shards the parameters. To run stages, use strategy='ddp' without this config",
    ),
    "tensor_parallel": ("autotp_size", "is not implemented", "Remove it. Stage 3 shards the parameters"),
    "hybrid_engine": ("enabled", "is not implemented", "Remove it"),
    "nebula": ("enabled", "is not supported", "Remove it, and use ModelCheckpoint(async_save=True)"),
    "progressive_layer_drop": ("enabled", _REMOVED, "Remove it"),
    "eigenvalue": ("enabled", _REMOVED, "Remove it"),
    "sparse_attention": ("", _REMOVED, "Remove it, and use an attention mask"),
    "quantize_training": ("enabled", _REMOVED, "Remove it"),
    "compression_training": ("", "changes the model", "Remove it, and compress the trained model"),
    "weight_quantization": ("", "changes the model", "Remove it, and quantize the trained model"),
    "zero_optimization.zenflow": (
        "",
        "is not implemented, because it updates most parameters with outdated gradients",
        "Remove it. offload={'optimizer_states': 'cpu', 'update': 'deferred'} overlaps exact updates",
    ),
}
"""Sections that are rejected if they are enabled. A section with an empty key is enabled if it exists."""

OF_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_CONVERTED = {
    # section: keys
    "": "gradient_clipping gradient_allreduce_op communication_data_type optimizer scheduler zero_optimization "
    "sequence_parallel_size",
    "optimizer.": "type",
    "scheduler.": "type",
    "fp16.": "enabled",
    "bf16.": "enabled bf16_master_weights_and_grads",
    "torch_autocast.": "enabled dtype",
    "zero_optimization.": "stage mics_shard_size cpu_offload cpu_offload_param cpu_offload_params",
    "zero_optimization.offload_param.": "device nvme_path",
    "zero_optimization.offload_optimizer.": "device nvme_path ratio",
    "activation_checkpointing.": "partition_activations cpu_checkpointing",
}
HANDLED = {*OF_BATCH, *(f"{section}{key}" for section, keys in _CONVERTED.items() for key in keys.split())}
"""Keys that :mod:`roomier.plan.migrate.deepspeed.config` converts."""

KNOWN = {*HANDLED, *WITHOUT_EFFECT, *REJECTED, *SECTIONS}
"""All keys of a configuration, except the keys inside the sections of ``SECTIONS`` and the parameters of the optimizer
and the scheduler."""

MARKS = {key.partition(".")[0] for key in KNOWN} - {"optimizer", "compile"}
"""Top-level keys that distinguish a configuration from a Plan."""
