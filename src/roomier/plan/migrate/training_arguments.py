"""Answers to the fields of transformers' ``TrainingArguments``, and to the other arguments of transformers' Trainer.

A field is converted if an argument of roomier's Trainer results in the same computation. All other fields belong to
another object of roomier, have no effect, or are not supported. The table also contains names of fields from
transformers 4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from roomier.plan.migrate.answers import Answers

Convert = Callable[[Answers, str, Any], None]


def _as(keyword: str, meaning: Callable[[Any], Any] = lambda value: value, remark: str = "") -> Convert:
    def convert(answers: Answers, name: str, value: Any) -> None:
        answers.use(name, value, keyword, meaning(value), remark)

    return convert


def _if_true(keyword: str, meaning: object, remark: str = "") -> Convert:
    def convert(answers: Answers, name: str, value: Any) -> None:
        if value:
            answers.use(name, value, keyword, meaning, remark)

    return convert


def _if_set(convert: Convert, is_set: Callable[[Any], bool] = lambda value: value is not None) -> Convert:
    def only(answers: Answers, name: str, value: Any) -> None:
        if is_set(value):
            convert(answers, name, value)

    return only


def _count(keyword: str, action: str, remark: str = "") -> Convert:
    """Return a function that converts a number of steps or epochs, but rejects a fraction."""

    def convert(answers: Answers, name: str, value: Any) -> None:
        number = float(value) if isinstance(value, Real) else math.nan
        if not number.is_integer():
            answers.reject(name, value, "must be an integer", action)
        elif number > 0:
            answers.use(name, value, keyword, int(number), remark)

    return convert


_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def _schedule(answers: Answers, name: str, value: Any) -> None:
    word = str(getattr(value, "value", value))
    if word in _SCHEDULES:
        answers.use(name, word, "lr_schedule.name", _SCHEDULES[word])
    else:
        action = "Use lr_schedule='linear', 'cosine' or 'constant', or return a scheduler from configure_optimizers"
        answers.reject(name, word, "is not a schedule that roomier supports", action)


def _schedule_options(answers: Answers, name: str, value: Any) -> None:
    options = dict(value) if isinstance(value, Mapping) else {"lr_scheduler_kwargs": value}
    if options.keys() == {"min_lr_rate"}:
        answers.use(name, value, "lr_schedule.min_lr_ratio", options["min_lr_rate"])
    elif options:
        action = "Set lr_schedule={'name': 'cosine', 'min_lr_ratio': 0.1}"
        answers.reject(name, value, "contains settings of another schedule", action)


def _optimizer(answers: Answers, name: str, value: Any) -> None:
    word = str(getattr(value, "value", value))
    remark = "in contrast to transformers' Adafactor, the learning rate is relative to the size of each weight"
    answers.use(name, word, "optimizer.name", word, remark if word == "adafactor" else "")


def _beta(index: int) -> Convert:
    def convert(answers: Answers, name: str, value: Any) -> None:
        betas = [0.9, 0.999]
        for each in [each for each in answers.given if each.keyword == "optimizer.betas"]:
            betas = list(each.meaning)  # type: ignore[call-overload]
            answers.given.remove(each)
        betas[index] = value
        answers.use(name, value, "optimizer.betas", betas)

    return convert


def _validation(answers: Answers, name: str, value: Any) -> None:
    word = str(getattr(value, "value", value))
    if word == "no":
        answers.use(name, word, "limit_val_batches", 0)


def _reports(answers: Answers, name: str, value: Any) -> None:
    names = [value] if isinstance(value, str) else list(value)
    names = ["comet" if each == "comet_ml" else each for each in names if each != "none"]
    if names:
        answers.use(name, value, "logger", names)


_FSDP = {"full_shard": "zero3", "shard_grad_op": "zero2", "hybrid_shard": "hsdp", "no_shard": "ddp"}


def _fsdp(answers: Answers, name: str, value: Any) -> None:
    words = value.split() if isinstance(value, str) else [str(getattr(each, "value", each)) for each in value]
    for word in words:
        if word in _FSDP:
            answers.use(name, value, "strategy.name", _FSDP[word])
        elif word == "offload":
            answers.use(name, value, "offload.optimizer_states", "cpu")
            answers.use(name, value, "offload.parameters", "cpu")
        elif word == "auto_wrap":
            answers.ignore(name, word, "each block of the model is a unit")
        else:
            answers.reject(name, value, f"{word!r} is not supported", "Use strategy='zero2', 'zero3' or 'hsdp'")


_OF_UNITS = (
    *("min_num_params", "transformer_layer_cls_to_wrap", "auto_wrap_policy", "cpu_ram_efficient_loading"),
    *("sync_module_states", "limit_all_gathers", "use_orig_params", "forward_prefetch", "backward_prefetch"),
    *("version", "state_dict_type"),
)


def _fsdp_config(answers: Answers, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        answers.reject(name, value, "must be a dict, not a file", "Pass the content of the file as a dict")
        return
    for key, each in value.items():
        word = str(key).removeprefix("fsdp_")
        if word == "activation_checkpointing":
            _if_true("activation_checkpointing", "full")(answers, f"{name}.{key}", each)
        elif word == "reshard_after_forward":
            answers.use(f"{name}.{key}", each, "strategy.name", "zero3" if each else "zero2")
        elif word == "offload_params":
            _if_true("offload.optimizer_states", "cpu")(answers, f"{name}.{key}", each)
            _if_true("offload.parameters", "cpu")(answers, f"{name}.{key}", each)
        elif word in _OF_UNITS:
            answers.ignore(
                f"{name}.{key}", each, "blocks are the units, and each rank reads only its shard of the weights"
            )
        elif each:
            answers.reject(f"{name}.{key}", each, "has no equivalent", "Remove it")


_METRICS = "Compute metrics in validation_step of a Module, and log them with self.log"
_HUB = "Run `roomier export CHECKPOINT --to hugging-face OUT --push-to-hub USER/MODEL` after the run"
_BY_LENGTH = "roomier.data.LengthGroupedBatchSampler(lengths, batch_size=...)"
_LENGTHS = f"Use DataLoader(dataset, batch_sampler={_BY_LENGTH}, collate_fn=...)"
_DATA = "Pass a DataLoader to fit: trainer.fit(model, train_dataloaders, val_dataloaders)"
_OWN_LOSS = "Compute the loss in training_step of a Module"
_WARM_UP = "Use lr_schedule={'name': 'cosine', 'warmup_steps': 100}, in which the warm-up is a number of steps"
_FIRST_STEP = "the first step uses 1 / warmup_steps of the rate, but in transformers the first rate is 0"
_RECOMPUTE = _if_true("activation_checkpointing", "full")
_ON_CPU = _if_true("accelerator", "cpu")

CONVERTED: dict[str, Convert] = {
    "output_dir": _if_set(_as("default_root_dir")),
    "num_train_epochs": _count("max_epochs", "Use max_steps to train for a part of an epoch"),
    "gradient_accumulation_steps": _as("accumulate_grad_batches"),
    "max_grad_norm": _as("gradient_clip_val", lambda value: value or None),
    "lr_scheduler_type": _schedule,
    "lr_scheduler_kwargs": _if_set(_schedule_options),
    "warmup_steps": _if_set(_count("lr_schedule.warmup_steps", _WARM_UP, _FIRST_STEP), lambda value: value != 0),
    "optim": _optimizer,
    "weight_decay": _as("optimizer.weight_decay"),
    "adam_beta1": _beta(0),
    "adam_beta2": _beta(1),
    "adam_epsilon": _as("optimizer.eps"),
    "bf16": _if_true("precision", "bf16-mixed"),
    "fp16": _if_true("precision", "16-mixed"),
    "tf32": _if_set(_as("matmul_precision", lambda value: "high" if value else "highest")),
    "gradient_checkpointing": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "torch_compile": _if_true("compile", True),
    "torch_compile_backend": _if_set(_as("compile.backend")),
    "torch_compile_mode": _if_set(_as("compile.mode")),
    "auto_find_batch_size": _if_true("auto_scale_batch_size", True, "the tuner determines the size before the fit"),
    "logging_steps": _count("log_every_n_steps", "Use a number of steps"),
    "disable_tqdm": _if_true("enable_progress_bar", False),
    "report_to": _if_set(_reports),
    "eval_strategy": _validation,
    "evaluation_strategy": _validation,
    "full_determinism": _if_true("deterministic", True),
    "use_cpu": _ON_CPU,
    "no_cuda": _ON_CPU,
    "use_mps_device": _if_true("accelerator", "mps"),
    "ddp_timeout": _as("hang_timeout", lambda value: {"seconds": value}),
    "fsdp": _if_set(_fsdp, bool),
    "fsdp_config": _if_set(_fsdp_config, bool),
    "deepspeed": _if_set(_as("deepspeed")),
}
"""Functions that record the answer to a value of a field with an equivalent argument."""

_WITH_OTHER_DEFAULT = (
    *("num_train_epochs", "max_grad_norm", "lr_scheduler_type", "optim", "weight_decay", "logging_steps"),
    "eval_strategy",
)
"""Fields that are answered even if an object has their default value, because roomier's default differs."""

# instruction or reason: fields, separated by spaces
_ELSEWHERE = {
    "Evaluations use the precision of the Trainer. Use precision='bf16-mixed'": "bf16_full_eval",
    "Evaluations use the precision of the Trainer. Use precision='16-mixed'": "fp16_full_eval",
    "Set model.config.use_cache": "use_cache",
    "Use log_every_n_steps, or logger=False": "logging_strategy",
    "Use log_every_n_steps=1": "logging_first_step",
    "Use default_root_dir, which contains the logs of each run": "logging_dir",
    "Use callbacks=[Throughput()], which logs tokens per second": (
        "include_num_input_tokens_seen include_tokens_per_second"
    ),
    "Use logger=WandbLogger(...), whose arguments include the name and the project": "run_name project",
    "Use logger=TrackioLogger(space_id=...)": "trackio_space_id",
    "Use logger=TrackioLogger(...), which passes other keywords to trackio.init": (
        "trackio_bucket_id trackio_static_space_id"
    ),
    "Use val_check_interval with check_val_every_n_epoch=None, which counts micro-batches": "eval_steps",
    "Use limit_val_batches=0 in a first fit, and resume the run with validation": "eval_delay",
    "Pass batch_size to your DataLoader": "per_device_train_batch_size per_device_eval_batch_size",
    "Call trainer.validate(model, loader) before fit": "eval_on_start",
    _METRICS: (
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics include_inputs_for_metrics batch_eval_metrics"
    ),
    "Use callbacks=[ModelCheckpoint(save_weights_only=True)]": "save_only_model",
    "Use callbacks=[ModelCheckpoint(every_n_train_steps=..., save_top_k=...)]": "save_strategy save_steps",
    "Use callbacks=[ModelCheckpoint(save_top_k=...)]": "save_total_limit",
    "Use callbacks=[ModelCheckpoint(monitor='val_loss', mode='min')], and pass ckpt_path='best' to test": (
        "load_best_model_at_end metric_for_best_model greater_is_better"
    ),
    _HUB: "push_to_hub hub_model_id hub_strategy hub_always_push hub_revision",
    f"{_HUB}, with --private": "hub_private_repo",
    "Run `hf auth login` or set HF_TOKEN. `roomier export ... --push-to-hub` uses this token": "hub_token",
    "Call roomier.seed_everything before the model is created": "seed data_seed",
    f"{_LENGTHS}, or DataLoader(dataset, shuffle=...)": "train_sampling_strategy",
    _LENGTHS: "group_by_length",
    f"Use {_BY_LENGTH} with lengths=dataset[length_column_name]": "length_column_name",
    "Select the columns in collate_fn of your DataLoader": "remove_unused_columns",
    "Name the labels as the arguments of the model's forward method in collate_fn": "label_names",
    "Use strategy={'name': 'ddp', 'find_unused_parameters': True}": "ddp_find_unused_parameters",
    "Use callbacks=[MemoryAnatomy()]": "skip_memory_metrics",
    "Pass it to fit: trainer.fit(model, ckpt_path=...)": "resume_from_checkpoint",
    "Pass it to your DataLoader": (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order"
    ),
}
_WITHOUT_EFFECT = {
    "roomier recomputes blocks with its own implementation": (
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs"
    ),
    "roomier does not empty the cache of the allocator during a run": "torch_empty_cache_steps",
    "rank 0 prints the messages of roomier": "log_on_each_node log_level log_level_replica",
    "by default, a loss that is not finite ends the run": "logging_nan_inf_filter",
    "checkpoints never contain code; roomier.checkpoint.export writes safetensors": "save_safetensors",
    "each rank writes its shards to default_root_dir": "save_on_each_node",
    "after SIGTERM, a run always saves a checkpoint before it ends": "enable_jit_checkpoint",
    "each run has a new folder": "overwrite_output_dir",
    "a resumed run restores the position in the data and all callbacks": "restore_callback_states_from_checkpoint",
    "roomier selects the process groups and the buckets": (
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend"
    ),
    "each block of the model is a unit": "fsdp_transformer_layer_cls_to_wrap",
    "the methods fit, validate, test and predict replace this field": "do_train do_eval do_predict",
    "roomier detects torchrun, SLURM and MPI": "local_rank",
    "torch.autocast computes in 16 bits": "half_precision_backend",
}
_UNSUPPORTED = {
    _WARM_UP: "warmup_ratio",
    "Pass the options with the optimizer: optimizer={'name': 'adamw', 'eps': 1e-6}": "optim_args",
    "Use lora={'rank': 8, 'targets': [...]} to train adapters": "optim_target_modules",
    "Remove it, because the loss is the mean over the tokens of all ranks": "average_tokens_across_devices",
    _OWN_LOSS: "label_smoothing_factor",
    "Use chunked_loss=True, which computes the loss of a language model without the logits of all tokens": (
        "use_liger_kernel liger_kernel_config"
    ),
    "Add the noise in a forward hook of the embedding if the model is in training mode": "neftune_noise_alpha",
    "Pass weights= instead of ckpt_path to fit, so that training starts at the first batch": "ignore_data_skip",
    "Use strategy and accumulate_grad_batches. Loaders are sharded across the ranks": "accelerator_config",
    "Use strategy='zero3' or 'hsdp'": "parallelism_config",
    "Use detect_anomaly=True": "debug",
    "Export the model with roomier.checkpoint.export": "jit_mode_eval",
}


def _by_field(texts: Mapping[str, str]) -> dict[str, str]:
    return {name: text for text, names in texts.items() for name in names.split()}


ELSEWHERE = _by_field(_ELSEWHERE)
"""Fields that belong to another object of roomier, which the text names. As arguments of the Trainer, they are
rejected."""
WITHOUT_EFFECT = _by_field(_WITHOUT_EFFECT)
"""Fields that do not affect training with roomier, for the reason in the text."""
UNSUPPORTED = _by_field(_UNSUPPORTED)
"""Fields that are not supported. The text names the nearest alternative."""

FIELDS = CONVERTED.keys() | {**ELSEWHERE, **WITHOUT_EFFECT, **UNSUPPORTED}
"""All fields of TrainingArguments, except the fields that are identical in roomier's Trainer."""

SAME = ("max_steps", "learning_rate")
"""Fields with the same name and meaning as an argument of roomier's Trainer."""

OF_TRAINER: dict[str, str] = {
    "model": "Pass it to fit: trainer.fit(model, train_dataloaders)",
    "model_init": "Pass the model to fit, or create its layers in configure_model of a Module",
    "train_dataset": _DATA,
    "eval_dataset": _DATA,
    "data_collator": "Pass it to your DataLoader as collate_fn",
    "processing_class": "Pass it to roomier.checkpoint.export, which writes its files next to the weights",
    "tokenizer": "Pass it to roomier.checkpoint.export, which writes its files next to the weights",
    "compute_loss_func": _OWN_LOSS,
    "compute_metrics": _METRICS,
    "preprocess_logits_for_metrics": _METRICS,
    "optimizers": "Pass optimizer=(a function that receives the parameters), or return them from configure_optimizers",
    "optimizer_cls_and_kwargs": "Use optimizer=lambda parameters: kind(parameters, **keywords)",
}
"""Mapping from each argument of transformers' Trainer to its equivalent."""

_CLASS_NAMES = ("TrainingArguments", "Seq2SeqTrainingArguments")


def advice() -> dict[str, str]:
    """Return the alternative for each argument that is not accepted as a keyword of the Trainer."""
    return {**OF_TRAINER, **ELSEWHERE, **UNSUPPORTED}


def is_training_arguments(value: object) -> bool:
    """Return whether ``value`` is an instance of transformers' ``TrainingArguments`` or of a subclass."""
    return any(kind.__name__ in _CLASS_NAMES for kind in type(value).__mro__) and dataclasses.is_dataclass(value)


def accepted(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``names`` whose key is a field that has an equivalent argument or no effect."""
    return {name: value for name, value in names.items() if name in CONVERTED or name in WITHOUT_EFFECT}


def answers_to_fields(given: Mapping[str, Any]) -> Answers:
    """Return the results for fields that are passed as keywords of the Trainer."""
    answers = Answers("TrainingArguments")
    for name, value in given.items():
        _answer(answers, name, value)
    return answers


def answers_to_object(arguments: Any) -> Answers:
    """Return the results for the fields of a ``TrainingArguments`` object, including the defaults that differ from
    roomier's.
    """
    answers = Answers(type(arguments).__name__)
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if field.name == "num_train_epochs" and arguments.max_steps > 0:
            continue  # max_steps replaces it
        if field.name in SAME:
            answers.use(field.name, value, field.name, value)
        elif field.name in _WITH_OTHER_DEFAULT or not _is_default(field, value):
            _answer(answers, field.name, value)
    return answers


def _answer(answers: Answers, name: str, value: Any) -> None:
    reason = {**ELSEWHERE, **WITHOUT_EFFECT}.get(name)
    if name in CONVERTED:
        CONVERTED[name](answers, name, value)
    elif reason is not None:
        answers.ignore(name, value, reason)
    else:
        answers.reject(name, value, "is not supported", UNSUPPORTED.get(name, "Remove it"))


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    is_prepared = field.name in _SET_BY_TRANSFORMERS  # transformers replaces this field after the object is created
    return is_prepared or value is None or bool(value == default)


_SET_BY_TRANSFORMERS = ("accelerator_config", "local_rank", "run_name", "eval_steps", "disable_tqdm", "debug")
