"""Conversion of the Trainer's arguments to a Plan, to callbacks and to an optimizer, resolution of ``"auto"``, and
recommendations for unknown arguments."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from roomier.api.callback import Callback
from roomier.api.overrides import is_builtin, is_one
from roomier.callbacks import ModelCheckpoint, ModelSummary, ProgressBar
from roomier.core.device.names import visible_devices_variable
from roomier.core.device.resolve import accelerator_type
from roomier.core.errors import PlanError, RoomierError
from roomier.core.log import notice
from roomier.launch import Launch, present_launch
from roomier.launch.environment import node_of
from roomier.launch.job import job_names
from roomier.plan import Plan, plan_from_flags
from roomier.plan.choices import canonical
from roomier.plan.flags import with_fitting_sizes
from roomier.plan.migrate.training_arguments import advice
from roomier.trainer.lightning.callbacks import adopted

_SHARES = (
    "Remove it: roomier shards any loader across ranks, except loaders with a DistributedSampler or with "
    "shards_by_rank = True"
)
_NAMED_OPTIMIZER = "Set it in the optimizer: optimizer={'name': 'adamw', 'weight_decay': 0.1, 'betas': [0.9, 0.95]}"

FORMER_KEYWORDS: dict[str, str] = {
    # current and earlier versions of Lightning's Trainer
    "checkpoint_callback": "Use enable_checkpointing, or add a ModelCheckpoint to callbacks",
    "resume_from_checkpoint": "Pass it to fit: trainer.fit(model, ckpt_path=...)",
    "progress_bar_refresh_rate": "Use callbacks=[ProgressBar(refresh_interval_s=0.1)], or enable_progress_bar=False",
    **dict.fromkeys(("replace_sampler_ddp", "use_distributed_sampler"), _SHARES),
    "sync_batchnorm": "Convert the model: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    "plugins": "Pass precision, environment and checkpoint plugins of Lightning, or use precision=... and strategy=...",
    "barebones": "Use True or False. True disables logs, checkpoints, the progress bar, summaries and the sanity check",
    "enable_autolog_hparams": "Remove it: save_hyperparameters(logger=False) does not log the hyperparameters",
    "model_registry": "Remove it: checkpoints are in the run folder; upload them in on_fit_end of a callback",
    "backend": "Remove it: the backend is gloo on the CPU, and torch's default for other devices (nccl on CUDA)",
    **dict.fromkeys(("use_amp", "amp_backend", "amp_level"), "Use precision='16-mixed'"),
    **dict.fromkeys(("num_gpus", "num_processes", "ipus", "hpus"), "Use accelerator and devices"),
    "gpus": "Use accelerator='gpu' and devices=N. Select certain devices with the variable CUDA_VISIBLE_DEVICES",
    "tpu_cores": "Use accelerator='tpu' and devices=N. The package torch-tpu is required",
    "auto_lr_finder": "Use auto_lr_find=True",
    "distributed_backend": "Use strategy",
    # transformers' Trainer and TrainingArguments. The Trainer converts some of these fields, but the command does not.
    **advice(),
    "num_train_epochs": "Use max_epochs",
    "gradient_accumulation_steps": "Use accumulate_grad_batches",
    "gradient_checkpointing": "Use activation_checkpointing='full'",
    "max_grad_norm": "Use gradient_clip_val",
    "fp16": "Use precision='16-mixed'",
    "bf16": "Use precision='bf16-mixed'",
    "optim": "Use optimizer='adamw'",
    "torch_compile": "Use compile=True",
    **dict.fromkeys(("weight_decay", "adam_beta1", "adam_beta2"), _NAMED_OPTIMIZER),
    "lr_scheduler_type": "Use lr_schedule='cosine', 'linear' or 'constant'",
    "warmup_steps": "Use lr_schedule={'name': 'cosine', 'warmup_steps': 100}",
    "logging_steps": "Use log_every_n_steps",
    "output_dir": "Use default_root_dir",
    "report_to": "Use logger='tensorboard', or logger=True for files",
    "ddp_timeout": "Use hang_timeout={'seconds': ...}",
    # other names
    "lr": "Use learning_rate",
    "lr_scheduler": "Use lr_schedule, or return a scheduler from configure_optimizers",
    **dict.fromkeys(("epochs", "num_epochs"), "Use max_epochs"),
    "steps": "Use max_steps",
    "batch_size": "Pass batch_size to your DataLoader",
    "device": "Use accelerator='cpu', 'cuda', 'mps', 'xpu', 'npu' or 'tpu'",
}
"""Arguments of other Trainers and of earlier versions, with their replacements."""

HARMLESS_KEYWORDS: dict[str, object] = {
    "use_distributed_sampler": True,
    "replace_sampler_ddp": True,
    "sync_batchnorm": False,
    "barebones": False,
    "plugins": None,
    "enable_autolog_hparams": True,
    "model_registry": None,
}
"""Arguments of Lightning's Trainer that are ignored if they have these values, which match roomier's behavior."""

FORMER_ARGUMENTS: dict[str, str] = {
    **dict.fromkeys(("train_dataloader", "train_loader", "trainloader"), "Use train_dataloaders"),
    **dict.fromkeys(("val_dataloader", "val_loader"), "Pass val_dataloaders to fit, and dataloaders to validate"),
    **dict.fromkeys(("test_dataloaders", "test_dataloader"), "Use dataloaders"),
    **dict.fromkeys(("loader", "dataloader"), "Pass train_dataloaders to fit, and dataloaders to the other methods"),
    "resume_from_checkpoint": "Use ckpt_path",
    **dict.fromkeys(("max_epochs", "epochs"), "Pass it to the Trainer: Trainer(max_epochs=...)"),
}
"""Arguments of fit, validate, test and predict in other libraries, with their replacements."""


_NONE_IS_DEFAULT = (
    *("logger", "num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar"),
    *("enable_model_summary",),
)


def with_defaults(given: Mapping[str, Any], init: Callable[..., None]) -> dict[str, Any]:
    """Return ``given``, in which the defaults of ``init`` replace None for the arguments in ``_NONE_IS_DEFAULT``, as in
    Lightning."""
    defaults = inspect.signature(init).parameters
    missing = {name: defaults[name].default for name in _NONE_IS_DEFAULT if given[name] is None}
    found = {**given, **missing}
    if given["enable_plan_table"] is None:
        found["enable_plan_table"] = not (found["enable_progress_bar"] is found["enable_model_summary"] is False)
    return found


def check_weights_only(weights_only: bool | None) -> None:
    """Reject ``weights_only=False``, because loading could then execute code.

    Raises:
        RoomierError: ``weights_only`` is False.
    """
    if weights_only is not None and weights_only is not True:
        action = (
            "Remove this argument. If the checkpoint cannot be loaded without it, save the weights with torch.save, "
            "and pass the new file as weights"
        )
        problem = "must be True or None, because loading a checkpoint never executes code"
        raise RoomierError("weights_only", weights_only, problem, action)


def plan_of(given: Mapping[str, Any], init: Callable[..., None], launch: Launch | None) -> Plan:
    """Return the Plan for the arguments ``given`` to ``init``.

    Args:
        given: the names and values of all Trainer arguments.
        init: the constructor of the Trainer, whose defaults are used.
        launch: the launcher of this process, which resolves ``"auto"``. None without a launcher.

    Raises:
        PlanError: the Plan is invalid.
        RoomierError: both ``plan`` and an argument that the plan contains are given.
    """
    flags = {name: given[name] for name in inspect.signature(plan_from_flags).parameters}
    if flags["optimizer"] is not None and own_optimizer_of(flags["optimizer"]) is not None:
        flags["optimizer"] = None
    if given["plan"] is None:
        return plan_from_flags(**resolve_auto(flags, launch))
    defaults = inspect.signature(init).parameters
    for name, value in flags.items():
        if value != defaults[name].default:
            raise RoomierError(name, value, "cannot be combined with plan", "Set the value in the plan, or remove plan")
    return Plan.of(given["plan"])


@dataclass(frozen=True)
class Resized:
    """Sizes of groups of ranks that replace the requested sizes if a job was restarted on other ranks.

    Attributes:
        error: error for the requested sizes, which a job that was not restarted raises.
        change: text of the requested and of the new strategy.
    """

    error: PlanError
    change: str


def resized_plan(
    error: PlanError, given: Mapping[str, Any], init: Callable[..., None], launch: Launch | None
) -> tuple[Plan, Resized]:
    """Return a Plan with sizes that suit the ranks, and the change, if the launcher can restart the job on other ranks.

    Args:
        error: error of :func:`plan_of`, which has the same other arguments.

    Raises:
        PlanError: ``error``, because the Plan is invalid with other sizes, too, or the job cannot be restarted.
    """
    if launch is None or given["plan"] is not None or not job_names(os.environ):
        raise error
    found = with_fitting_sizes(given, launch.world.local_size, launch.num_nodes)
    if found["strategy"] == given["strategy"]:
        raise error
    try:
        plan = plan_of(found, init, launch)
    except PlanError:
        raise error from None
    return plan, Resized(error, f"strategy={given['strategy']} is now {found['strategy']}")


def with_batch_field(plan: Plan, name: str, value: Any) -> Plan:
    """Return ``plan`` with the field ``name`` of :class:`BatchPlan` set to ``value``.

    Raises:
        PlanError: the value is invalid.
    """
    if name == "gradient_clip_val" and value == 0:
        value = None
    return replace(plan, batch=replace(plan.batch, **{name: value}))


def callbacks_of(given: Mapping[str, Any], enable_checkpointing: bool) -> list[Any]:
    """Return the callbacks in ``given`` and the default callbacks.

    Args:
        given: the names and values of all Trainer arguments.
        enable_checkpointing: True to add a ModelCheckpoint.

    Raises:
        RoomierError: ``callbacks`` is neither a callback nor a list, or it contains a ModelCheckpoint although
            ``enable_checkpointing`` is False.
    """
    callbacks = given["callbacks"]
    if callbacks is not None and not (isinstance(callbacks, (list, tuple)) or is_one(callbacks, Callback)):
        raise RoomierError(
            "callbacks", callbacks, "must be a list of callbacks", "Pass instances of subclasses of roomier.Callback"
        )
    found = adopted([callbacks] if is_one(callbacks, Callback) else list(callbacks or ()))
    if given["enable_progress_bar"] and not any(isinstance(each, ProgressBar) for each in found):
        found.append(ProgressBar())
    if given["enable_model_summary"] and not any(isinstance(each, ModelSummary) for each in found):
        found.append(ModelSummary())
    has_checkpoint = any(map(is_checkpoint, found))
    if has_checkpoint and not given["enable_checkpointing"]:
        problem = "must be True if callbacks contain a ModelCheckpoint"
        raise RoomierError("enable_checkpointing", False, problem, "Remove one of the two")
    if enable_checkpointing and not has_checkpoint:
        found.append(ModelCheckpoint())
    return found


def ordered(callbacks: Sequence[Any]) -> list[Any]:
    """Return ``callbacks`` with checkpoint callbacks at the end, because they store the state of the other
    callbacks."""
    return sorted(callbacks, key=is_checkpoint)


def is_checkpoint(callback: object) -> bool:
    """Return True if ``callback`` saves checkpoints: if it is a ModelCheckpoint or derives from Lightning's
    Checkpoint."""
    return isinstance(callback, ModelCheckpoint) or is_builtin(callback, "Checkpoint")


def kind_of(callback: object) -> type:
    """Return the type that a callback must have to replace ``callback``."""
    is_mirror = isinstance(callback, ModelCheckpoint) and type(callback).__qualname__ == ModelCheckpoint.__qualname__
    return ModelCheckpoint if is_mirror else type(callback)


_PARALLEL = "Pass strategy='ddp', 'zero2' (half the memory on 2 ranks) or 'zero3' (the least memory)"


def resolve_auto(flags: Mapping[str, Any], launch: Launch | None) -> dict[str, Any]:
    """Return ``flags`` with ``strategy=None``, ``devices="auto"`` and ``num_nodes="auto"`` replaced by values.

    The launcher determines the values. If there is no launcher, a strategy for several ranks uses all accelerators of
    the machine.

    Raises:
        PlanError: a launcher started several ranks although the strategy is ``"single"``.
    """
    flags = {**flags, "devices": _number_of(flags["devices"], flags["accelerator"])}
    is_default = flags["strategy"] is None
    if flags["num_nodes"] == "auto" and launch is None:
        node = node_of(os.environ)
        flags["num_nodes"] = 1 if node is None or node.size is None else node.size
    if is_default and launch is not None and launch.world.size > 1:
        flags["strategy"] = "ddp"
    elif flags["strategy"] == "auto":
        notice(
            "strategy='auto' selects the fastest plan that fits, for the ranks of this run. For Lightning's meaning of "
            "'auto' (ddp for several ranks), omit strategy"
        )
    is_single = flags["num_nodes"] in (1, "auto") if is_default else _is_single(flags["strategy"])
    if launch is not None and launch.world.size > 1 and is_single and not is_default:
        problem = f"supports one rank, but {launch.launcher} started {launch.world.size} processes"
        raise PlanError("strategy", flags["strategy"], problem, f"{_PARALLEL}, or start one process")
    if flags["num_nodes"] == "auto" and launch is not None:
        flags["num_nodes"] = launch.num_nodes
    if flags["devices"] == "auto":
        if launch is not None:
            flags["devices"] = launch.world.local_size
        elif is_default and is_single and accelerator_type() is not None:
            _report_unused_devices(flags["accelerator"])
        elif not is_single:
            flags["devices"] = _all_devices(flags["strategy"], flags["accelerator"])
    return flags


def num_ranks_of(given: Mapping[str, Any], *, alone_by_default: bool = False) -> int:
    """Return the number of ranks for the arguments ``given``.

    Args:
        given: arguments of the Trainer.
        alone_by_default: if True, ``devices="auto"`` means one device unless ``given`` names a strategy for several
            ranks.
    """
    launch = present_launch()
    if launch is not None:
        return launch.world.size
    devices = _number_of(given.get("devices", "auto"), given.get("accelerator", "auto"))
    if isinstance(devices, str):
        is_alone = alone_by_default and (given.get("strategy") is None or _is_single(given["strategy"]))
        all_devices = 1 if is_alone else max(1, torch.accelerator.device_count())
        devices = int(devices) if devices.isdecimal() else all_devices
    nodes = given.get("num_nodes", "auto")
    return devices * (nodes if isinstance(nodes, int) else 1) if isinstance(devices, int) else 1


def _report_unused_devices(accelerator: object) -> None:
    number = torch.accelerator.device_count() if accelerator in ("auto", "gpu", accelerator_type()) else 1
    if number > 1:
        notice(f"this run uses 1 of {number} devices; devices={number} uses all")


def _number_of(devices: Any, accelerator: object) -> Any:
    """Return ``"auto"`` for -1. For a list of the first devices, return its length. Return any other value
    unchanged."""
    if devices in (-1, "-1"):
        return "auto"
    listed = devices
    if isinstance(devices, str) and "," in devices:
        listed = [int(part) if part.strip().isdecimal() else part for part in devices.split(",") if part.strip()]
    if not isinstance(listed, (list, tuple)):
        return devices
    if list(listed) == list(range(len(listed))):
        return len(listed)
    kind = accelerator if accelerator not in ("auto", "gpu", "cpu") else accelerator_type() or "cuda"
    variable = visible_devices_variable(str(kind))
    action = f"Use devices={len(listed)}, and select the devices with the environment variable {variable}"
    raise PlanError(
        "devices", devices, "is not supported, because each rank uses the device whose index is its local rank", action
    )


def _is_single(strategy: object) -> bool:
    if isinstance(strategy, Mapping):
        strategy = strategy.get("name", "single")
    return isinstance(strategy, str) and canonical("parallel.strategy", strategy.partition("+")[0]) == "single"


def _all_devices(strategy: object, accelerator: object) -> int:
    present = accelerator_type()
    if present is not None and accelerator in ("auto", "gpu", present):
        return torch.accelerator.device_count()
    notice(
        f"strategy={strategy!r} with devices='auto' starts one process on this machine; devices=N starts N processes"
    )
    return 1


def own_optimizer_of(value: Any) -> Any:
    """Return ``value`` if it is an optimizer, a subclass of Optimizer, or a function; otherwise None."""
    is_class = isinstance(value, type)
    is_function = issubclass(value, Optimizer) if is_class else callable(value)
    return value if isinstance(value, Optimizer) or is_function else None


class OwnOptimizer:
    """Optimizer that the user passed for the model ``network``, or function that creates it. The strategy and the
    precision can replace the parameters of the model, so :meth:`configure` passes the final parameters to it.

    Args:
        network: the model as the user passed it.
        given: an optimizer with parameters of ``network``, or a function that receives the list of parameters and
            returns a value that ``configure_optimizers`` can return.
    """

    def __init__(self, network: nn.Module, given: Optimizer | Callable[..., Any]) -> None:
        self._given = given
        self._names = {id(each): name for name, each in network.named_parameters()}

    def configure(self, network: nn.Module) -> Any:
        """Return the optimizer of the final parameters of ``network``.

        Raises:
            RoomierError: the optimizer has parameters of a different model, or it has states of parameters that the
                strategy or the precision replaced.
        """
        if not isinstance(self._given, Optimizer):
            return self._given([each for each in network.parameters() if each.requires_grad])
        now = dict(network.named_parameters())
        groups = self._given.param_groups
        if any(id(each) not in self._names for group in groups for each in group["params"]):
            problem = "has parameters that do not belong to the model"
            raise RoomierError("optimizer", self._given, problem, "Create it with model.parameters() of this model")
        replaced = [[now[self._names[id(each)]] for each in group["params"]] for group in groups]
        now_and_before = ((group["params"], new) for group, new in zip(groups, replaced, strict=True))
        if all(one is other for pair in now_and_before for one, other in zip(*pair, strict=True)):
            return self._given
        if self._given.state:
            problem = "has states of parameters that the strategy or the precision replaced"
            raise RoomierError("optimizer", self._given, problem, "Pass a function: optimizer=lambda parameters: ...")
        for group, new in zip(groups, replaced, strict=True):
            group["params"] = new
        return self._given
