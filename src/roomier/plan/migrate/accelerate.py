"""Answers to the keywords of ``accelerate.Accelerator``, and a table of its members that roomier does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roomier.core.errors import did_you_mean
from roomier.plan.migrate.answers import Answers, name_of, setting_of
from roomier.plan.migrate.lightning_strategies import SHARDINGS, WITHOUT_EFFECT, answer_mixed_precision

PRECISIONS = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}
"""Mapping from each value of ``mixed_precision`` to the precision of a Plan."""

_PLAN = "Pass Accelerator(plan=roomier.plan.plan_from_flags(strategy='zero3'))"
_ORDER = "all ranks use the same order of samples, which the seed of rank 0 determines"
_SCALE = "torch's GradScaler with its defaults scales the loss, which does not change the gradient of a step"


def answers_to_keywords(given: Mapping[str, Any], environ: Mapping[str, str], *, has_plan: bool) -> Answers:
    """Return the results for the keywords of ``Accelerator`` that determine the Plan, and for the keywords without
    effect.

    Args:
        given: the keywords that the user passed.
        environ: environment variables, including the variables that ``accelerate launch`` sets.
        has_plan: whether the user passed a Plan.
    """
    answers = Answers("Accelerator")
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in {**_from_environment(environ, answers, has_plan=has_plan), **given}.items():
        if name in _CONVERTED:
            _CONVERTED[name](answers, name, value)
        elif name in _REJECTED:
            answers.reject(name, value, *_REJECTED[name])
        else:
            answers.reject(name, value, "is not a keyword of Accelerator", did_you_mean(name, [*_CONVERTED, "plan"]))
    return answers


def _from_environment(environ: Mapping[str, str], answers: Answers, *, has_plan: bool) -> dict[str, Any]:
    """Return the keywords that the environment variables of ``accelerate launch`` set."""
    found: dict[str, Any] = {}
    for name in ("mixed_precision", "gradient_accumulation_steps", "dynamo_backend"):
        value = environ.get(f"ACCELERATE_{name.upper()}")
        if value is not None:
            found[name] = int(value) if value.isdecimal() else value.lower()
    if environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        found["cpu"] = True
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        variable = f"ACCELERATE_USE_{name}"
        if environ.get(variable, "").lower() == "true" and not has_plan:
            answers.reject(variable, "true", "is not read by roomier", _PLAN)
    return found


def _precision(answers: Answers, name: str, value: Any) -> None:
    word = str(getattr(value, "value", value)).lower()
    if word in PRECISIONS:
        answers.use(name, word, "precision", PRECISIONS[word])
    else:
        answers.reject(name, word, "is not supported", f"Use one of: {', '.join(PRECISIONS)}")


def _steps(answers: Answers, name: str, value: Any) -> None:
    if value != 1:
        answers.use(name, value, "accumulate_grad_batches", value)


def _accumulation_plugin(answers: Answers, name: str, value: Any) -> None:
    _steps(answers, f"{name}.num_steps", value.num_steps)
    if value.sync_each_batch:
        reason = "strategies 'zero2' and 'zero3' reduce the gradients of each batch; 'ddp' reduces once per step"
        answers.ignore(f"{name}.sync_each_batch", True, reason)
    if not value.adjust_scheduler:
        answers.ignore(f"{name}.adjust_scheduler", False, "schedulers count optimizer steps only")


def _loaders(answers: Answers, name: str, value: Any) -> None:
    if value.dispatch_batches:
        answers.ignore(
            f"{name}.dispatch_batches", True, "each rank reads the dataset and uses its share of the samples"
        )
    if not value.even_batches:
        action = "Remove it, and use gather_for_metrics, which drops repeated samples"
        problem = "is not supported, because all ranks must run the same number of steps"
        answers.reject(f"{name}.even_batches", False, problem, action)
    for setting in ("use_seedable_sampler", "data_seed"):
        if getattr(value, setting, None):
            answers.ignore(f"{name}.{setting}", getattr(value, setting), _ORDER)
    if getattr(value, "use_stateful_dataloader", False):
        action = "Use accelerator.skip_first_batches(loader, num_batches)"
        answers.reject(f"{name}.use_stateful_dataloader", True, "is not supported", action)


def _fsdp(answers: Answers, name: str, plugin: Any) -> None:
    sharding = setting_of(plugin, "sharding_strategy", "reshard_after_forward")
    if isinstance(sharding, bool):
        answers.use("reshard_after_forward", sharding, "strategy", "zero3" if sharding else "zero2")
    else:
        word = name_of("FULL_SHARD" if sharding is None else sharding)
        answers.use("sharding_strategy", word, "strategy", SHARDINGS[word])
    offload = setting_of(plugin, "cpu_offload")
    offloads = type(offload).__name__ != "OffloadPolicy" and bool(offload)
    if getattr(offload, "offload_params", offloads):
        problem = "is not supported in custom loops, in which gradients must stay on the device"
        action = "Pass a plan with offload={'optimizer_states': 'cpu'}, or use Trainer(offload={'parameters': 'cpu'})"
        answers.reject(f"{name}.cpu_offload", True, problem, action)
    if setting_of(plugin, "activation_checkpointing"):
        answers.use("activation_checkpointing", True, "activation_checkpointing", "full")
    if setting_of(plugin, "activation_checkpointing_offload"):
        action = "Pass a plan with offload={'activations': 'cpu'}"
        answers.reject(f"{name}.activation_checkpointing_offload", True, "is not converted", action)
    if setting_of(plugin, "ignored_modules"):
        problem = "is not supported, because all modules are sharded"
        answers.reject(f"{name}.ignored_modules", plugin.ignored_modules, problem, "Remove it")
    mixed = setting_of(plugin, "mixed_precision_policy")
    if mixed is not None:
        answer_mixed_precision(answers, mixed)
    for setting, default in _OF_UNITS.items():
        value = setting_of(plugin, setting)
        if value not in (None, False, default):
            answers.ignore(f"{name}.{setting}", value, WITHOUT_EFFECT.get(setting, _UNITS))


_UNITS = "the units are the blocks (repeated layers), or the modules that the method model_blocks() returns"
_OF_UNITS = {
    "auto_wrap_policy": None,
    "transformer_cls_names_to_wrap": None,
    "min_num_params": 0,
    "backward_prefetch": None,
    "forward_prefetch": None,
    "limit_all_gathers": True,
    "use_orig_params": True,
}


def _handlers(answers: Answers, name: str, handlers: Any) -> None:
    for handler in handlers:
        kind = type(handler).__name__
        changed = dict(handler.to_kwargs())
        if kind == "DistributedDataParallelKwargs":
            if changed.pop("find_unused_parameters", False):
                answers.use(f"{kind}.find_unused_parameters", True, "strategy.name", "ddp")
                answers.use(f"{kind}.find_unused_parameters", True, "strategy.find_unused_parameters", True)
            hook = name_of(changed.pop("comm_hook", "no")).lower().rpartition(".")[2]
            if hook != "no":
                action = "Pass a plan with strategy={'name': 'ddp', 'reduce_dtype': 'bf16'}"
                answers.reject(f"{kind}.comm_hook", hook, "is not supported", action)
            for setting, value in changed.items():
                answers.ignore(f"{kind}.{setting}", value, WITHOUT_EFFECT.get(setting, "hooks of DDP are not used"))
        elif kind == "AutocastKwargs" and not changed.get("enabled", True):
            answers.reject(kind, changed, "disables mixed precision", "Set mixed_precision='no'")
        elif kind in _HANDLERS_WITHOUT_EFFECT:
            if changed:
                answers.ignore(kind, changed, _HANDLERS_WITHOUT_EFFECT[kind])
        else:
            answers.reject(name, kind, "is not supported", "Remove it, and use mixed_precision='bf16'")


_HANDLERS_WITHOUT_EFFECT = {
    "AutocastKwargs": "weights are cast to 16 bits once per forward pass",
    "GradScalerKwargs": _SCALE,
    "InitProcessGroupKwargs": "the backend is gloo on the CPU, and torch's default for other devices",
    "ProfileKwargs": "torch.profiler.profile records a custom loop without arguments of Accelerator",
}


def _project(answers: Answers, name: str, value: Any) -> None:
    limit = value.total_limit
    if limit is not None and not value.automatic_checkpoint_naming:
        reason = "checkpoints are removed only if automatic_checkpoint_naming=True names them"
        answers.ignore(f"{name}.total_limit", limit, reason)
    elif limit is not None and limit < 1:
        answers.reject(f"{name}.total_limit", limit, "must be at least 1", "Pass None for no limit")
    if value.save_on_each_node:
        reason = "this setting applies only to accelerator.save. In checkpoints, each rank writes its shards"
        answers.ignore(f"{name}.save_on_each_node", True, reason)


def _compile(answers: Answers, name: str, value: Any) -> None:
    backend = name_of(getattr(value, "backend", value)).lower().rpartition(".")[2]
    if backend == "inductor":
        answers.use(name, backend, "compile", True, "each block is compiled, instead of the whole model")
    elif backend != "no":
        answers.reject(name, backend, "is not supported", "Use dynamo_backend='inductor'")


def _placement(answers: Answers, name: str, value: Any) -> None:
    if value is not True:
        problem = "is not supported, because prepare moves all objects that it receives"
        answers.reject(name, value, problem, "Remove it. Objects that prepare does not receive stay on their device")


def _random_types(answers: Answers, name: str, value: Any) -> None:
    if list(value) != ["generator"]:
        answers.ignore(name, value, _ORDER)


def _of_loop(answers: Answers, name: str, value: Any) -> None:
    """Accept a keyword that ``Accelerator`` reads directly. No answer is required."""


_CONVERTED: dict[str, Callable[[Answers, str, Any], None]] = {
    "mixed_precision": _precision,
    "gradient_accumulation_steps": _steps,
    "gradient_accumulation_plugin": _accumulation_plugin,
    "cpu": lambda answers, name, value: answers.use(name, value, "accelerator", "cpu") if value else None,
    "dataloader_config": _loaders,
    "fsdp_plugin": _fsdp,
    "kwargs_handlers": _handlers,
    "dynamo_backend": _compile,
    "dynamo_plugin": _compile,
    "device_placement": _placement,
    "rng_types": _random_types,
    "project_config": _project,
    **dict.fromkeys(("split_batches", "step_scheduler_with_optimizer", "log_with", "project_dir"), _of_loop),
}

_REJECTED = {
    "torch_tp_plugin": ("is not implemented", _PLAN),
    "megatron_lm_plugin": ("is not implemented", _PLAN),
    "parallelism_config": ("is not implemented", _PLAN),
    "deepspeed_plugins": ("contains several plugins", "Pass one of the plugins as deepspeed_plugin"),
    **{word: ("is not a keyword of Accelerator", f"Use mixed_precision={word!r}") for word in ("fp16", "bf16")},
    "strategy": ("is not a keyword of Accelerator", _PLAN),
    "even_batches": ("is not supported", "Remove it, and use gather_for_metrics, which drops repeated samples"),
    "dispatch_batches": ("has not been a keyword of Accelerator since version 1.0", "Remove it"),
    "logging_dir": ("has not been a keyword of Accelerator since version 0.24", "Use project_dir"),
}

_RANK = "Use accelerator.process_index; roomier shards data across all ranks"
_HOOK = "Call accelerator.register_for_checkpointing(object), which stores the state_dict of the object"
MEMBERS = {
    "deepspeed_ulysses_dl_adapter": "Prepare the loader, which shards samples across ranks",
    "deepspeed_plugin": "Read accelerator.plan, which contains the converted settings",
    "dispatch_batches": "Prepare the loader. Each rank reads the dataset and uses its share of the samples",
    "fp8_backend": "Use mixed_precision='bf16'",
    "is_fsdp2": "Read accelerator.plan.parallel.strategy, which is 'zero2' or 'zero3' for sharded models",
    "is_composable_parallelism_enabled": "Read accelerator.plan.parallel.strategy",
    "lomo_backward": "Use the Trainer, which can update each block during backward",
    "maybe_context_parallel": "Call the model without this context. Sequences are not sharded",
    "multi_device": "Read accelerator.num_processes",
    "parallelism_config": "Read accelerator.plan.parallel",
    "profile": "Use torch.profiler.profile(), or Trainer(profiler='pytorch')",
    **{f"register_{verb}_state_pre_hook": _HOOK for verb in ("load", "save")},
    **{f"{kind}_parallel_rank": _RANK for kind in ("tensor", "pipeline", "context", "data")},
    "data_parallel_shard_rank": _RANK,
    "torch_device_mesh": "Read accelerator.plan.parallel.num_shards",
    "trigger_sync_in_backward": "Run the last forward pass outside of accelerator.no_sync(model)",
    "use_seedable_sampler": "Call roomier.seed_everything(seed). The seed of rank 0 determines the order of samples",
    "use_stateful_dataloader": "Use accelerator.skip_first_batches(loader, num_batches)",
    "verify_device_map": "Load the model without device_map; strategy 'zero3' shards its parameters",
}
"""Members of ``accelerate.Accelerator`` that roomier does not have, and an alternative for each."""
