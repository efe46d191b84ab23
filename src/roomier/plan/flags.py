"""Conversion of the Trainer's arguments to a Plan."""

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Real
from os import PathLike, fspath

from roomier.core.errors import PlanError, RoomierError, did_you_mean
from roomier.core.units import format_bytes, parse_bytes
from roomier.plan.choices import OFFLOADING_STRATEGIES, STRATEGY_SUFFIXES, canonical
from roomier.plan.levers import LEVERS, Lever
from roomier.plan.parts import FIELDS, MIN_BUDGET_BYTES, SETTINGS_OF_STRATEGY
from roomier.plan.plan import Plan
from roomier.plan.rules import each_error, refuse


def plan_from_flags(
    *,
    strategy: str | Mapping[str, object] | None = None,
    accelerator: str = "auto",
    devices: int | str = "auto",
    num_nodes: int = 1,
    precision: str | int | None = "32-true",
    matmul_precision: str = "highest",
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = "norm",
    seeding: str | None = None,
    optimizer: str | Mapping[str, object] | None = None,
    learning_rate: float | None = None,
    lr_schedule: str | Mapping[str, object] | None = None,
    step_in_backward: bool | str = False,
    activation_checkpointing: str | bool | float | Mapping[str, object] | None = None,
    offload: str | bool | Mapping[str, object] | None = None,
    chunked_loss: bool | int = False,
    attention: str = "auto",
    lora: int | Mapping[str, object] | None = None,
    compile: bool | Mapping[str, object] = False,
    memory_budget: int | str | None = None,
) -> Plan:
    """Return the Plan that the Trainer's arguments describe. :class:`roomier.Trainer` documents the arguments.

    Example:
        >>> plan_from_flags(strategy="zero2", devices=4, optimizer={"name": "adamw", "lr": 3e-4})

    Unlike the Trainer, this function does not search for a launcher, so ``devices="auto"`` means 1.

    Raises:
        PlanError: a value is invalid, or a feature is not implemented. The error contains the name and the value of the
            argument.
    """
    given = locals()
    draft = _Draft()
    if strategy is None:
        draft.ask("parallel.strategy", None, "strategy", meaning=default_strategy(devices, num_nodes))
    else:
        _set_strategy(draft, strategy)
    draft.ask("parallel.accelerator", accelerator, "accelerator")
    draft.ask("parallel.devices", devices, "devices", meaning=_num_devices(devices))
    draft.ask("parallel.num_nodes", num_nodes, "num_nodes")
    if precision is not None:
        draft.ask("precision.mode", precision, "precision")
    draft.ask("precision.matmul", matmul_precision, "matmul_precision")
    draft.ask("batch.accumulate_grad_batches", accumulate_grad_batches, "accumulate_grad_batches")
    if not _is_zero(gradient_clip_val):
        draft.ask("batch.gradient_clip_val", gradient_clip_val, "gradient_clip_val")
    if gradient_clip_algorithm is not None:
        draft.ask("batch.gradient_clip_algorithm", gradient_clip_algorithm, "gradient_clip_algorithm")
    sizes = [strategy.get(name) for name in _NEED_EVENTS] if isinstance(strategy, Mapping) else []
    implied = "events" if any(isinstance(size, int) and size > 1 for size in sizes) else "stream"
    draft.ask("batch.seeding", seeding, "seeding", meaning=implied if seeding is None else seeding)
    _set_optimizer(draft, optimizer)
    if learning_rate is not None:
        draft.ask("optimizer.lr", learning_rate, "learning_rate")
    _set_schedule(draft, lr_schedule)
    _set_recompute(draft, activation_checkpointing)
    _set_offload(draft, offload)
    for lever in LEVERS:
        _set_lever(draft, lever, given[lever.keyword])
    draft.ask("attention.kernel", attention, "attention")
    _set_adapter(draft, lora)
    if isinstance(compile, Mapping):
        draft.ask("compile.enabled", compile, "compile", meaning=True)
        draft.ask_each("compile", compile, {"backend": "compile.backend", "mode": "compile.mode"}, "compilation")
    else:
        draft.ask("compile.enabled", compile, "compile")
    budget = None if memory_budget is None else draft.bytes_of("memory_budget", memory_budget)
    if budget is not None:
        draft.ask("choice.memory_budget_bytes", memory_budget, "memory_budget", meaning=budget)
    return draft.plan()


def default_strategy(devices: object, num_nodes: object) -> str:
    """Return ``"ddp"`` for several ranks, otherwise ``"single"``."""
    devices = _num_devices(devices)
    is_single = devices == 1 or not isinstance(devices, int)
    return "single" if is_single and num_nodes in (1, "auto") else "ddp"


def with_fitting_sizes(flags: Mapping[str, object], devices: int, num_nodes: int) -> dict[str, object]:
    """Return ``flags`` with sizes of groups of ranks that suit ``devices`` ranks on each of ``num_nodes`` nodes.

    A replica of hsdp is sharded across at least as many ranks as before, if the job has as many, so that it still fits
    in memory. A context size becomes its largest divisor, which also divides the number of heads, and the number of
    stages does not increase, because the model might not have enough layers.

    Args:
        flags: arguments of :func:`plan_from_flags`.
    """
    strategy = flags["strategy"]
    if not isinstance(strategy, Mapping):
        return dict(flags)
    num_ranks, found = devices * num_nodes, dict(strategy)
    divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    shards, context, stages = (
        size if isinstance(size := strategy.get(name), int) and size > 0 else None
        for name in ("shard_size", "context_parallel_size", "pipeline_parallel_size")
    )
    if shards is not None:
        found["shard_size"] = next(number for number in divisors if number >= min(shards, num_ranks))
    if context is not None:
        is_hsdp = canonical("parallel.strategy", strategy.get("name")) == "hsdp"
        own = devices if is_hsdp else num_ranks
        found["context_parallel_size"] = math.gcd(context, found.get("shard_size", own))
    if stages is not None and stages not in divisors:
        found["pipeline_parallel_size"] = max(number for number in divisors if number < stages)
        dropped = ["split"] if found["pipeline_parallel_size"] > 1 else ["split", "schedule", "stages_per_rank"]
        found = {name: value for name, value in found.items() if name not in dropped}
    seeding = flags["seeding"] or ("events" if max(context or 1, stages or 1) > 1 else None)
    return {**flags, "strategy": found, "seeding": seeding}


_AS_GIVEN = object()
_NEED_EVENTS = ("context_parallel_size", "pipeline_parallel_size")  # a rank skips random numbers of other ranks
_WORDS = ("choice.allowed", "adapter.lora_targets", "adapter.lora_trained", "parallel.split")
"""Fields with words that are separated by commas. A list is accepted, too."""


class _Draft:
    """Values for the fields of a Plan. For error messages, a draft also records the argument that set each field."""

    def __init__(self) -> None:
        self._sections: dict[str, dict[str, object]] = {}
        self._asked: dict[str, tuple[str, object]] = {}
        self.errors: list[PlanError] = []

    def ask(self, field: str, value: object, keyword: str, *, meaning: object = _AS_GIVEN) -> None:
        """Set ``field`` to ``value``, or to ``meaning`` if the argument spells the value differently."""
        if field in self._asked:
            earlier, _ = self._asked[field]
            problem = f"is already set by {earlier}"
            self.errors.append(PlanError(keyword, value, problem, f"Remove {keyword} or {earlier}"))
            return
        self._asked[field] = keyword, value
        section, _, name = field.partition(".")
        self._sections.setdefault(section, {})[name] = value if meaning is _AS_GIVEN else meaning

    def ask_each(
        self,
        keyword: str,
        given: Mapping[str, object],
        fields: Mapping[str, str],
        kind: str,
        *,
        known: Iterable[str] = (),
    ) -> None:
        """Set the field in ``fields`` for each setting in the dict ``given``, and reject unknown settings of ``kind``.
        ``known`` are the names that an error can suggest; the default is all names."""
        for name, value in given.items():
            if name not in fields:
                action = did_you_mean(str(name), known or fields)
                self.errors.append(PlanError(keyword, name, f"is an unknown setting of {kind}", action))
            elif fields[name] in _WORDS and isinstance(value, (list, tuple)):
                self.ask(fields[name], value, f"{keyword}.{name}", meaning=",".join(map(str, value)))
            else:
                self.ask(fields[name], value, f"{keyword}.{name}")

    def bytes_of(self, keyword: str, given: object) -> object:
        """Return the number of bytes if ``given`` is a text such as ``"6GiB"``; None if the text is invalid."""
        try:
            return parse_bytes(keyword, given) if isinstance(given, str) else given
        except RoomierError as error:
            self.errors.append(PlanError(keyword, given, error.problem, error.action))
            return None

    def plan(self) -> Plan:
        """Return the validated Plan.

        Raises:
            PlanError: an argument or the Plan is invalid. The error names the argument.
        """
        try:
            plan = Plan.from_dict(self._sections)
        except PlanError as error:
            self.errors += [self._by_keyword(finding) for finding in each_error(error)]
        refuse(self.errors)
        return plan

    def _by_keyword(self, error: PlanError) -> PlanError:
        keyword, value = self._asked.get(error.field, (error.field, error.received))
        return PlanError(keyword, value, error.problem, error.action)


def _set_strategy(draft: _Draft, strategy: object) -> None:
    """Set the strategy. The suffixes ``+offload`` and ``+disk`` place the optimizer states in host memory or on
    disk."""
    if isinstance(strategy, Mapping):
        own = {name: f"parallel.{name}" for name in SETTINGS_OF_STRATEGY} | {"allow": "choice.allowed"}
        settings = {name: value for name, value in strategy.items() if name != "name"}
        draft.ask_each("strategy", settings, own, "a strategy", known=["name", *own])
        strategy = strategy.get("name", "single")
    if not isinstance(strategy, str):
        draft.ask("parallel.strategy", strategy, "strategy")
        return
    spelled, tiers = OFFLOADING_STRATEGIES.get(strategy.lower(), (strategy, {}))
    spelled, finds_unused = _with_unused(spelled)
    if finds_unused is not None:
        draft.ask("parallel.find_unused_parameters", strategy, "strategy", meaning=finds_unused)
    base, plus, suffix = spelled.partition("+")
    if suffix.lower() in STRATEGY_SUFFIXES:
        tiers = {"optimizer_states": STRATEGY_SUFFIXES[suffix.lower()]}
    elif plus:
        action = did_you_mean(suffix, STRATEGY_SUFFIXES)
        draft.errors.append(PlanError("strategy", strategy, f"'+{suffix}' is an unknown suffix", action))
    for name, tier in tiers.items():
        draft.ask(f"offload.{name}", strategy, "strategy", meaning=tier)
    draft.ask("parallel.strategy", strategy, "strategy", meaning=base)


def _with_unused(name: str) -> tuple[str, bool | None]:
    """Split a Lightning name for DDP into the strategy and a flag for the support of unused parameters. The flag is
    None if the name does not contain this information."""
    for suffix, finds in (("_find_unused_parameters_true", True), ("_find_unused_parameters_false", False)):
        if name.lower().endswith(suffix):
            return name[: -len(suffix)], finds
    return name, None


def _num_devices(devices: object) -> object:
    if not isinstance(devices, str):
        return devices
    if devices == "auto":
        return 1
    return int(devices) if devices.isdecimal() else devices


def _is_zero(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and value == 0


def _word(value: object, yes: str) -> object:
    """Return the string for the value of an argument that also accepts True, False and None."""
    if value is None or value is False:
        return "none"
    return yes if value is True else value


def _set_optimizer(draft: _Draft, optimizer: object) -> None:
    if not isinstance(optimizer, Mapping):
        draft.ask("optimizer.name", optimizer, "optimizer")
        return
    own_fields = [name for name in FIELDS["optimizer"] if name != "options"]
    options: dict[object, object] = {}
    for name, value in optimizer.items():
        if name in own_fields:
            draft.ask(f"optimizer.{name}", value, f"optimizer.{name}")
        elif name == "options" and isinstance(value, Mapping):
            options.update(value)
        else:
            options[name] = value
    draft.ask("optimizer.options", options, "optimizer")


def _set_schedule(draft: _Draft, schedule: object) -> None:
    own = ("warmup_steps", "log_warmup", "min_lr_ratio", "decay_steps")
    if isinstance(schedule, Mapping):
        fields = {"name": "optimizer.schedule", **{name: f"optimizer.{name}" for name in own}}
        draft.ask_each("lr_schedule", schedule, fields, "a schedule")
    elif schedule is not None:
        draft.ask("optimizer.schedule", schedule, "lr_schedule")


def _set_offload(draft: _Draft, offload: object) -> None:
    if isinstance(offload, Mapping):
        for name, value in offload.items():
            meaning = fspath(value) if name == "folder" and isinstance(value, PathLike) else value
            draft.ask(f"offload.{name}", value, f"offload.{name}", meaning=meaning)
    elif offload is not None and offload is not False:
        draft.ask("offload.optimizer_states", offload, "offload", meaning=_word(offload, "cpu"))


def _set_recompute(draft: _Draft, given: object) -> None:
    keyword = "activation_checkpointing"
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if is_number or (isinstance(given, str) and given[:1].isdigit()):
        given = {"budget": given}
        budget_keyword = keyword
    else:
        budget_keyword = f"{keyword}.budget"
    if not isinstance(given, Mapping):
        draft.ask("activation.policy", given, keyword, meaning=_word(given, "full"))
        return
    if not given:
        action = "Set a policy, a budget such as '6GiB', or None"
        draft.errors.append(PlanError(keyword, given, "must contain a policy or a budget", action))
    is_asked = "budget" in given and _set_budget(draft, given["budget"], budget_keyword)
    settings = {name: value for name, value in given.items() if name != "budget"}
    fields = {name: f"activation.{name}" for name in FIELDS["activation"]}
    draft.ask_each(keyword, settings, fields, "recomputation", known=["policy", "every_n", "budget"])
    for name in given:
        if (name == "every_n" or (name == "budget" and is_asked)) and "policy" not in given:
            draft.ask("activation.policy", given[name], f"{keyword}.{name}", meaning=name)


def _set_budget(draft: _Draft, given: object, keyword: str) -> bool:
    """Set the budget from text (bytes, a percentage or a fraction) or from a number. Return False if the value is
    invalid."""
    value = (_share(given) if isinstance(given, str) else None) or draft.bytes_of(keyword, given)
    if value is None and isinstance(given, str):
        return False
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    is_fraction = number <= 1
    if 1 < number < MIN_BUDGET_BYTES:
        problem = f"must be a fraction up to 1, or at least {format_bytes(MIN_BUDGET_BYTES)}"
        draft.errors.append(PlanError(keyword, given, problem, "Use '6GiB', or a fraction such as 0.5"))
        return False
    draft.ask(f"activation.budget_{'fraction' if is_fraction else 'bytes'}", given, keyword, meaning=value)
    return True


def _share(text: str) -> float | None:
    """Return the fraction in ``"50%"`` or ``"0.5"``; None if the text has a different form."""
    number, percent, rest = text.strip().partition("%")
    if rest or not re.fullmatch(r"[0-9]*\.?[0-9]+", number.strip()):
        return None
    share = float(number) / (100 if percent else 1)
    return share if percent or share <= 1 else None


def _set_lever(draft: _Draft, lever: Lever, given: object) -> None:
    if lever.number and isinstance(given, Real) and not isinstance(given, bool):
        draft.ask(lever.field, given, lever.keyword, meaning=lever.on)
        draft.ask(lever.number, given, lever.keyword)
    elif given is not None and given is not False:
        draft.ask(lever.field, given, lever.keyword, meaning=lever.on if given is True else given)


def _set_adapter(draft: _Draft, given: object) -> None:
    if not isinstance(given, Mapping):
        if given is not None:
            draft.ask("adapter.lora_rank", given, "lora")
        return
    fields = {name: f"adapter.lora_{name}" for name in ("rank", "alpha", "dropout", "targets", "trained")}
    fields["base"] = "adapter.frozen_base"
    if given.keys() <= fields.keys() and given.get("rank") is None:
        draft.errors.append(PlanError("lora", given, "must contain a rank", "Set it, as in {'rank': 8}, or use None"))
        return
    draft.ask_each("lora", given, fields, "adapters")
