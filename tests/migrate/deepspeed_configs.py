"""Configurations of DeepSpeed from its users, and the Plans that they become."""

from typing import Any

AUTO = "auto"
DEVICES = 4
BATCH_AUTO = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": AUTO}
ADAM_AUTO = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
WARMUP_AUTO = {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}
LOSS_SCALE = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
STAGE_2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ON_HOST = {"device": "cpu", "pin_memory": True}
ON_NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4}
ADAMW_OF_HF = {
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-05,
    "optimizer.weight_decay": 0.0,
    "optimizer.options.betas": [0.9, 0.999],
    "optimizer.options.eps": 1e-08,
}
WARM = {"optimizer.warmup_steps": 1, "optimizer.log_warmup": True}
CLIP = {"batch.gradient_clip_val": 1.0}
HOST = {"offload.optimizer_states": "cpu"}
HOST_3 = {**HOST, "offload.parameters": "cpu"}
BF16 = {"precision.mode": "bf16-mixed"}
FP16 = {"precision.mode": "16-mixed"}

CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: (configuration, further arguments of the Trainer, strategy and further fields of the Plan)
    "only a micro-batch": ({"train_micro_batch_size_per_gpu": 8}, {}, {"": "ddp"}),
    "the three batch sizes": (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
        {},
        {"": "ddp", "batch.accumulate_grad_batches": 4},
    ),
    "two batch sizes": (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}},
        {},
        {"": "zero1", "batch.accumulate_grad_batches": 2},
    ),
    "only the global batch": ({"train_batch_size": 16, "zero_optimization": True}, {}, {"": "zero1"}),
    "Hugging Face, stage 2": (
        {
            "fp16": {"enabled": AUTO, **LOSS_SCALE},
            "optimizer": ADAM_AUTO,
            "scheduler": {"type": "WarmupLR", "params": WARMUP_AUTO},
            "zero_optimization": {**STAGE_2, "offload_optimizer": ON_HOST},
            "gradient_clipping": AUTO,
            **BATCH_AUTO,
        },
        {"precision": "16-mixed"},
        {"": "zero2", **HOST, **ADAMW_OF_HF, **WARM, **CLIP, **FP16, "optimizer.schedule": "constant"},
    ),
    "Hugging Face, stage 3": (
        {
            "bf16": {"enabled": AUTO},
            "optimizer": ADAM_AUTO,
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": AUTO, **WARMUP_AUTO}},
            "zero_optimization": {**STAGE_3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST},
            "gradient_clipping": AUTO,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
            **BATCH_AUTO,
        },
        {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
        {
            "": "zero3",
            **HOST_3,
            **ADAMW_OF_HF,
            **WARM,
            **BF16,
            "optimizer.schedule": "linear",
            "batch.gradient_clip_val": 0.5,
            "batch.accumulate_grad_batches": 2,
        },
    ),
    "Hugging Face, stage 3 on NVMe": (
        {
            "zero_optimization": {
                **STAGE_3,
                "offload_optimizer": {**ON_NVME, "fast_init": False, "pipeline_read": False, "pipeline_write": False},
                "offload_param": {**ON_NVME, "buffer_size": 1e8, "max_in_cpu": 1e9},
            },
            "aio": {
                "block_size": 262144,
                "queue_depth": 32,
                "thread_count": 1,
                "single_submit": False,
                "overlap_events": True,
            },
            "gradient_clipping": AUTO,
            **BATCH_AUTO,
        },
        {},
        {
            "": "zero3",
            **CLIP,
            "offload.optimizer_states": "disk",
            "offload.parameters": "disk",
            "offload.folder": "/local_nvme",
        },
    ),
    "Hugging Face, stage 0 with amp": (
        {"amp": {"enabled": False, "opt_level": "O1"}, "zero_optimization": {"stage": 0}, "gradient_clipping": 1.0},
        {},
        {"": "ddp", **CLIP},
    ),
    "Hugging Face, learning rate of the Trainer": (
        {
            "optimizer": ADAM_AUTO,
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 500, **WARMUP_AUTO}},
        },
        {"learning_rate": 3e-4},
        {
            "": "ddp",
            **ADAMW_OF_HF,
            **WARM,
            "optimizer.lr": 3e-4,
            "optimizer.schedule": "linear",
            "optimizer.decay_steps": 500,
        },
    ),
    "Accelerate, stage 2 with bf16": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none"},
                "offload_param": {"device": "none"},
            },
            "gradient_clipping": 1.0,
            "steps_per_print": float("inf"),
            **BATCH_AUTO,
        },
        {},
        {"": "zero2", **BF16, **CLIP},
    ),
    "Megatron-DeepSpeed GPT, stage 1": (
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10,
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
            "prescale_gradients": True,
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "loss_scale_window": 500,
                "hysteresis": 2,
                "min_loss_scale": 1,
                "initial_scale_power": 11,
            },
            "wall_clock_breakdown": False,
            "zero_allow_untested_optimizer": True,
        },
        {},
        {"": "zero1", **FP16, **CLIP, "batch.accumulate_grad_batches": 16},
    ),
    "Megatron-DeepSpeed BLOOM, bf16": (
        {
            "train_micro_batch_size_per_gpu": 2,
            "train_batch_size": 512,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 0},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        {},
        {"": "ddp", **BF16, **CLIP, "batch.accumulate_grad_batches": 64},
    ),
    "Megatron-DeepSpeed with its own switches": (
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4, "reduce_bucket_size": 90000000},
            "sequence_parallel_size": 1,
            "pipeline": {"stages": 1},
            "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False, "prof_ops": []},
            "flops_profiler": {
                "enabled": False,
                "profile_step": 1,
                "module_depth": -1,
                "top_modules": 1,
                "detailed": True,
                "output_file": None,
            },
            "gradient_clipping": 1.0,
        },
        {},
        {"": "zero3", **CLIP},
    ),
    "CIFAR-10 example": (
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
            },
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "bf16": {"enabled": False},
            "fp16": {"enabled": True, "fp16_master_weights_and_grads": False, **LOSS_SCALE},
            "wall_clock_breakdown": False,
            "zero_optimization": {**STAGE_2, "stage": 0},
        },
        {},
        {
            "": "ddp",
            **FP16,
            **CLIP,
            "optimizer.name": "adamw",
            "optimizer.lr": 0.001,
            "optimizer.weight_decay": 3e-7,
            "optimizer.options.betas": [0.8, 0.999],
            "optimizer.options.eps": 1e-8,
            "optimizer.schedule": "constant",
            "optimizer.warmup_steps": 1000,
            "optimizer.log_warmup": True,
        },
    ),
    "BERT pre-training": (
        {
            "train_batch_size": 4096,
            "train_micro_batch_size_per_gpu": 32,
            "steps_per_print": 1000,
            "prescale_gradients": False,
            "optimizer": {"type": "Adam", "params": {"lr": 6e-3, "betas": [0.9, 0.99], "weight_decay": 0.01}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": 125000,
                    "warmup_num_steps": 2500,
                    "warmup_max_lr": 6e-3,
                    "warmup_type": "linear",
                },
            },
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True, "loss_scale": 0},
        },
        {},
        {
            "": "ddp",
            **FP16,
            **CLIP,
            "batch.accumulate_grad_batches": 32,
            "optimizer.name": "adamw",
            "optimizer.lr": 6e-3,
            "optimizer.weight_decay": 0.01,
            "optimizer.options.betas": [0.9, 0.99],
            "optimizer.schedule": "linear",
            "optimizer.warmup_steps": 2500,
            "optimizer.decay_steps": 125000,
        },
    ),
    "1-bit Adam": (
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {
                "type": "OneBitAdam",
                "params": {"lr": 4e-4, "freeze_step": 23000, "cuda_aware": False, "comm_backend_name": "nccl"},
            },
        },
        {},
        {
            "": "ddp",
            "optimizer.name": "onebit_adam",
            "optimizer.lr": 4e-4,
            "optimizer.options.freeze_step": 23000,
            "batch.accumulate_grad_batches": 1,
        },
    ),
    "ZeRO-Offload tutorial": (
        {
            "train_batch_size": 8,
            "zero_optimization": {**STAGE_2, "offload_optimizer": {"device": "cpu"}},
            "fp16": {"enabled": True},
        },
        {},
        {"": "zero2", **HOST, **FP16},
    ),
    "ZeRO-Offload, former spelling": (
        {"zero_optimization": {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": True}},
        {},
        {"": "zero2", **HOST},
    ),
    "ZeRO-3 offload, former spelling": (
        {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}},
        {},
        {"": "zero3", **HOST_3},
    ),
    "Twin-Flow": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3}}},
        {},
        {"": "zero3", **HOST, "offload.share": 0.3},
    ),
    "SuperOffload": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {**ON_HOST, "ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9},
            },
            "bf16": {"enabled": True},
        },
        {},
        {"": "zero3", **HOST, **BF16, "offload.share": 0.9},
    ),
    "DeepSpeed-Chat, supervised": (
        {
            "train_batch_size": 128,
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "none"},
                "stage3_param_persistence_threshold": 1e4,
                "stage3_max_live_parameters": 3e7,
                "stage3_prefetch_bucket_size": 3e7,
                "memory_efficient_linear": False,
            },
            "fp16": {"enabled": True, "loss_scale_window": 100},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
            "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "step1"},
        },
        {},
        {"": "zero3", **FP16, **CLIP, "batch.accumulate_grad_batches": 8},
    ),
    "instruction tuning, stage 2 with round robin": (
        {
            "zero_allow_untested_optimizer": True,
            "fp16": {"enabled": AUTO, **LOSS_SCALE},
            "bf16": {"enabled": AUTO},
            "zero_optimization": {**STAGE_2, "round_robin_gradients": True},
            "gradient_clipping": AUTO,
            **BATCH_AUTO,
        },
        {"precision": "bf16-mixed"},
        {"": "zero2", **BF16, **CLIP},
    ),
    "instruction tuning, stage 3 with bf16": (
        {
            "zero_optimization": {**STAGE_3, "sub_group_size": 0},
            "bf16": {"enabled": True},
            "fp16": {"enabled": AUTO, "auto_cast": False, **LOSS_SCALE},
            "optimizer": ADAM_AUTO,
            "gradient_clipping": AUTO,
            "steps_per_print": 2000,
            **BATCH_AUTO,
            "wall_clock_breakdown": False,
        },
        {},
        {"": "zero3", **BF16, **CLIP, **ADAMW_OF_HF},
    ),
    "MiCS": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": False}},
        {},
        {"": "hsdp", "parallel.shard_size": 2},
    ),
    "bf16 communication": (
        {"zero_optimization": {"stage": 2}, "communication_data_type": "bf16", "gradient_predivide_factor": 1.0},
        {},
        {"": "zero2", "parallel.reduce_dtype": "bf16"},
    ),
    "float32 communication": (
        {"zero_optimization": {"stage": 3}, "communication_data_type": "fp32", "sparse_gradients": False},
        {},
        {"": "zero3"},
    ),
    "activation checkpointing": (
        {
            "zero_optimization": {"stage": 3},
            "activation_checkpointing": {
                "partition_activations": True,
                "cpu_checkpointing": True,
                "contiguous_memory_optimization": False,
                "number_checkpoints": None,
                "synchronize_checkpoint_boundary": False,
                "profile": False,
            },
        },
        {},
        {"": "zero3", "activation.policy": "full", "offload.activations": "cpu"},
    ),
    "torch autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}},
        {},
        {"": "ddp", **BF16},
    ),
    "bf16 weights": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {},
        {"": "ddp", "precision.mode": "bf16-true"},
    ),
    "cosine with linear warm-up": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "torch_adam": True}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": 1000,
                    "warmup_num_steps": 100,
                    "warmup_type": "linear",
                    "warmup_min_ratio": 0.0,
                    "cos_min_ratio": 0.1,
                },
            },
        },
        {},
        {
            "": "ddp",
            "optimizer.name": "adamw",
            "optimizer.lr": 2e-4,
            "optimizer.schedule": "cosine",
            "optimizer.warmup_steps": 100,
            "optimizer.decay_steps": 1000,
            "optimizer.min_lr_ratio": 0.1,
        },
    ),
    "Adam with L2 regularization": (
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.1}}},
        {},
        {"": "ddp", "optimizer.name": "adam", "optimizer.lr": 1e-3, "optimizer.weight_decay": 0.1},
    ),
    "Lion": (
        {"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1}}},
        {},
        {
            "": "ddp",
            "optimizer.name": "lion",
            "optimizer.lr": 1e-4,
            "optimizer.options.betas": [0.9, 0.99],
            "optimizer.weight_decay": 0.1,
        },
    ),
    "all monitors": (
        {
            "tensorboard": {"enabled": True, "output_path": "o", "job_name": "j"},
            "wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"},
            "csv_monitor": {"enabled": True, "output_path": "o", "job_name": "j"},
            "comet": {"enabled": False, "project": "p"},
            "checkpoint": {
                "tag_validation": "Warn",
                "load_universal": True,
                "use_node_local_storage": False,
                "parallel_write": {"pipeline_stage": False},
            },
            "elasticity": {"enabled": False},
            "curriculum_learning": {"enabled": False},
            "compile": {"deepcompile": False, "offload_opt_states": False},
            "dump_state": False,
            "dataloader_drop_last": True,
            "seq_parallel_communication_data_type": "fp32",
        },
        {},
        {"": "ddp"},
    ),
}
