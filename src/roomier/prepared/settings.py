"""Settings of an Accelerator: its Plan, its trackers, and its project, which names folders and checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roomier import checkpoint
from roomier.api.logger import Logger, Nothing
from roomier.checkpoint.record import RECORD_NAME
from roomier.core.device.resolve import resolve_device
from roomier.core.errors import PlanError, RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.engine.prepared import loop_errors
from roomier.launch import present_launch
from roomier.loggers.by_name import loggers_from_flag
from roomier.loggers.group import LoggerGroup, is_logger
from roomier.plan import Plan, plan_from_flags
from roomier.plan.levers import lever_that_frees_gradients, used_levers, without_host_tiers
from roomier.plan.migrate.accelerate import answers_to_keywords
from roomier.plan.migrate.answers import Answers
from roomier.plan.migrate.deepspeed.objects import answers_to_source
from roomier.plan.rules import refuse

_FIELDS = {
    "precision": ("precision", "mode"),
    "accumulate_grad_batches": ("batch", "accumulate_grad_batches"),
    "accelerator": ("parallel", "accelerator"),
    "compile": ("compile", "enabled"),
}
"""Mapping from each argument that completes a Plan to the section and the field of the Plan."""


def plan_of(plan: Plan | Mapping[str, Any] | str | Path | None, keywords: Mapping[str, Any]) -> Plan:
    """Return the Plan of an Accelerator. The launcher determines the number of ranks, unless ``plan`` contains this
    number.

    Args:
        plan: a Plan, a mapping, the path of a YAML or JSON file, or None.
        keywords: the keywords of Accelerate that the user passed.

    Raises:
        PlanError: a keyword is not supported or contradicts ``plan``, or the Plan is not supported in a custom loop.
    """
    keywords = dict(keywords)
    deepspeed = keywords.pop("deepspeed_plugin", None)
    answers = answers_to_keywords(keywords, os.environ, has_plan=plan is not None or deepspeed is not None)
    flags = answers.keywords()
    if deepspeed is not None:
        flags = _with_deepspeed(deepspeed, flags)
    flags.pop("hang_timeout", None)
    answers.report()
    wanted = plan_from_flags(**flags) if plan is None else _completed(Plan.of(plan), flags, answers)
    found = _on_launched_ranks(wanted)
    _check(found)
    found = without_host_tiers(found, resolve_device(found.parallel.accelerator).type)
    if found.offload.optimizer_states != "none":
        found = replace(found, offload=replace(found.offload, update="plain"))
    return found


def _with_deepspeed(plugin: Any, flags: dict[str, Any]) -> dict[str, Any]:
    launch = present_launch()
    num_ranks = 1 if launch is None else launch.world.size
    answers = answers_to_source(plugin, num_ranks, flags, "deepspeed_plugin")
    for name, value in answers.keywords().items():
        if flags.setdefault(name, value) != value:
            problem = f"differs from {value!r}, which {answers.source} requests"
            raise PlanError(name, flags[name], problem, "Remove one of the two settings")
    notice(answers.table())
    return flags


def _completed(plan: Plan, flags: Mapping[str, Any], answers: Answers) -> Plan:
    errors = []
    for name, value in flags.items():
        setting = next((each.setting for each in answers.given if each.keyword.partition(".")[0] == name), name)
        if name not in _FIELDS:
            errors.append(PlanError(setting, value, "was passed together with plan", "Remove one of the two"))
            continue
        section, field = _FIELDS[name]
        part = getattr(plan, section)
        now, default = getattr(part, field), getattr(getattr(Plan(), section), field)
        if now == default:
            plan = replace(plan, **{section: replace(part, **{field: value})})
        elif now != value:
            problem = f"requests {name}={value!r}, but the plan contains {section}.{field}={now!r}"
            errors.append(PlanError(setting, value, problem, f"Remove {setting}, or change the plan"))
    refuse(errors)
    return plan


def _on_launched_ranks(plan: Plan) -> Plan:
    launch, wanted = present_launch(), plan.parallel
    if launch is None or launch.world.size == 1 or wanted.devices * wanted.num_nodes > 1:
        return plan
    strategy = "ddp" if wanted.strategy == "single" else wanted.strategy
    world = launch.world
    return replace(
        plan, parallel=replace(wanted, strategy=strategy, devices=world.local_size, num_nodes=launch.num_nodes)
    )


def _check(plan: Plan) -> None:
    """Reject the planner, and settings that a custom loop does not support.

    Raises:
        PlanError: the plan contains such a setting.
    """
    together = "Use engine = roomier.prepare(model, optimizer, plan=plan) with engine.forward_backward"
    offload = plan.offload
    found: list[tuple[str, object, str, str]] = []
    if plan.optimizer.name is not None:
        problem = "is not supported, because the script creates the optimizer"
        found.append(("optimizer", plan.optimizer.name, problem, "Remove it from the plan"))
    if plan.adapter.lora_rank is not None:
        problem = "adds parameters that the optimizer of the script does not have"
        found.append(("lora", plan.adapter.lora_rank, problem, "Use Trainer(lora=...), or the peft package"))
    if offload.parameters != "none":
        problem = "is not supported if forward and backward are separate calls"
        action = f"{together}, or set offload={{'optimizer_states': {offload.parameters!r}}}"
        found.append(("offload.parameters", offload.parameters, problem, action))
    if offload.update not in ("auto", "plain"):
        problem = "is not supported if the script steps the optimizers"
        found.append(
            ("offload.update", offload.update, problem, "Use 'plain', or " + together[0].lower() + together[1:])
        )
    lever = lever_that_frees_gradients(plan)
    if lever is not None:
        problem = "is not supported if the script steps the optimizers"
        found.append((lever.keyword, True, problem, together))
    if plan.activation.policy == "budget":
        problem = "is not supported, because the budget is allocated by measuring a full step"
        action = "Use activation_checkpointing='full', 'every_n' or 'selective'"
        found.append(("activation.policy", "budget", problem, action))
    lazy = next((each for each in used_levers(plan) if each.changes_output_layer), None)
    if lazy is not None and plan.parallel.strategy == "ddp" and plan.parallel.find_unused_parameters:
        problem = f"is not supported with {lazy.keyword}, whose logits are not in the graph that DDP searches"
        action = f"Remove {lazy.keyword} from the plan, or {together[0].lower()}{together[1:]}"
        found.append(("find_unused_parameters", True, problem, action))
    refuse([*loop_errors(plan), *(PlanError(*each) for each in found)])


_NAME = re.compile(r"checkpoint_\d+")


@dataclass
class Project:
    """Class with the fields of ``accelerate.utils.ProjectConfiguration``. Accelerate's class can be used instead.

    Attributes:
        project_dir: folder of the project, or None.
        logging_dir: folder for logs; if None, ``project_dir``.
        automatic_checkpoint_naming: if True, save checkpoints as ``project_dir/checkpoints/checkpoint_<iteration>``.
        total_limit: maximum number of checkpoints with automatic names; None for no limit.
        iteration: number of the next checkpoint with an automatic name.
        save_on_each_node: whether ``Accelerator.save`` saves on the first rank of each machine instead of only on rank
            0.
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False


def project_of(given: Any, project_dir: str | Path | None) -> Any:
    """Return ``given``, or a new :class:`Project` if ``given`` is None. Missing folders are derived from
    ``project_dir``.

    Raises:
        PlanError: checkpoints are named automatically, but no project folder is set.
    """
    project = Project() if given is None else given
    if project.project_dir is None:
        project.project_dir = project_dir
    if project.logging_dir is None:
        project.logging_dir = project.project_dir
    if project.automatic_checkpoint_naming and project.project_dir is None:
        action = "Pass Accelerator(project_dir='runs/project')"
        raise PlanError("project_config.automatic_checkpoint_naming", True, "requires a project folder", action)
    return project


def next_checkpoint(project: Any, ranks: Ranks) -> Path:
    """Return the folder of the next checkpoint. Every rank must call this function.

    Raises:
        RoomierError: the folder already exists.
    """
    folder = _folder_of(project) / f"checkpoint_{project.iteration}"
    if ranks.on_zero(folder.exists):
        problem = "exists, and automatic naming does not overwrite checkpoints"
        action = "Set accelerator.project_configuration.iteration to the number of the next checkpoint"
        raise RoomierError("save_state", str(folder), problem, action)
    return folder


def remove_oldest(project: Any, newest: Path, ranks: Ranks) -> None:
    """Remove the checkpoints with the lowest numbers if there are more than ``total_limit`` checkpoints.

    Every rank must call this function.

    Args:
        project: object with the fields of :class:`Project`.
        newest: the checkpoint that was written last, which is not removed.
        ranks: all ranks.

    Raises:
        CheckpointError: a checkpoint cannot be removed.
    """
    limit = project.total_limit

    def remove() -> None:
        earlier = [each for each in _saved(project) if each != newest]
        for each in earlier[: max(0, len(earlier) + 1 - limit)]:
            checkpoint.remove(each)

    if limit is not None:
        ranks.on_zero(remove)


def last_checkpoint(project: Any, ranks: Ranks) -> Path:
    """Return the checkpoint with the highest number, and set ``project.iteration`` to the following number. Every rank
    must call this function.

    Raises:
        RoomierError: there is no checkpoint.
    """
    saved = ranks.on_zero(lambda: [str(each) for each in _saved(project)])
    if not saved:
        problem = "contains no checkpoint of roomier"
        raise RoomierError("load_state", str(_folder_of(project)), problem, "Pass a folder, or call save_state first")
    last = Path(saved[-1])
    project.iteration = _number_of(last) + 1
    return last


def _folder_of(project: Any) -> Path:
    return Path(project.project_dir) / "checkpoints"


def _saved(project: Any) -> list[Path]:
    """Return the checkpoints with automatic names, in the order of their numbers."""
    found = (each for each in _folder_of(project).glob("checkpoint_*") if _NAME.fullmatch(each.name))
    return sorted((each for each in found if (each / RECORD_NAME).is_file()), key=_number_of)


def _number_of(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


_NAMES = {"comet_ml": "comet"}


class Trackers:
    """Loggers that :meth:`start` starts on rank 0.

    Args:
        log_with: a name, a logger, or a list of them. None for no logger.
        folder: parent folder of the log files; None for the current folder.

    Raises:
        PlanError: a name is unknown.
        RoomierError: a named logger requires a package that is not installed.
    """

    def __init__(self, log_with: Any, folder: Path | None) -> None:
        given = log_with if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
        self._loggers = loggers_from_flag([_logger_of(each) for each in given])
        self._folder = folder
        self._group = LoggerGroup([])
        self._num_logged = 0

    @property
    def started(self) -> Sequence[Logger]:
        """Loggers that were started on this rank."""
        return self._group.loggers

    def start(self, project: str, config: Mapping[str, Any] | None) -> None:
        """Start the loggers in the subfolder ``project``, and log ``config`` as hyperparameters."""
        self._group = LoggerGroup(self._loggers)
        if self._loggers:
            folder = (self._folder or Path()) / project
            folder.mkdir(parents=True, exist_ok=True)
            self._group.start(folder)
        if config is not None:
            self._group.log_hyperparams(config)

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Log numbers. If ``step`` is None, each call uses the next step.

        Raises:
            RoomierError: a value is not a number.
        """
        step = self._num_logged if step is None else step
        self._num_logged = step + 1
        self._group.log_metrics({name: _number(name, each) for name, each in values.items()}, step)

    def named(self, name: str) -> Logger:
        """Return the started logger with the name ``name`` in Accelerate or roomier.

        Raises:
            RoomierError: no logger has this name.
        """
        found = [each for each in self.started if each.name == _NAMES.get(name, name)]
        if not found:
            names = [each.name for each in self.started]
            raise RoomierError("name", name, f"is not one of the started loggers {names}", "Add it to log_with")
        return found[0]

    def finish(self) -> None:
        """Close all loggers."""
        self._group.finalize("success")


def _logger_of(given: Any) -> Any:
    if is_logger(given):
        return given
    name = str(getattr(given, "value", given))
    if name == "all":
        raise PlanError("log_with", name, "is ambiguous", "Use log_with=['tensorboard', 'wandb']")
    return _NAMES.get(name, name)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        action = "Pass numbers, or pass strings in the argument 'config' of init_trackers"
        raise RoomierError("values", {name: value}, "contains a value that is not a number", action) from error


NO_TRACKER = Nothing()
"""Tracker that ignores all calls, for all ranks except rank 0."""
