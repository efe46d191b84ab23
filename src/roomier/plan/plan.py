"""The Plan: one frozen value that says everything about how a run computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from roomier.core.errors import PlanError
from roomier.plan import rules, text
from roomier.plan.diff import Difference, differences
from roomier.plan.parts import (
    PARTS,
    ActivationPlan,
    AdapterPlan,
    AttentionPlan,
    BatchPlan,
    ChoicePlan,
    CompilePlan,
    LossPlan,
    OffloadPlan,
    OptimizerPlan,
    ParallelPlan,
    PrecisionPlan,
)
from roomier.plan.table import rich_table, table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Plan:
    """How a run computes; checked when it is made, compared and hashed by value.

    Every way of asking ends here, and nothing after it reads a flag. ``Plan()`` is the plain float32 step on one
    device. ``dataclasses.replace`` makes a changed plan, which is checked again.

    Args:
        parallel: devices, and how the work is spread over them.
        precision: number formats of weights and matrix products.
        batch: accumulation and gradient clipping.
        optimizer: optimizer and schedule by name.
        activation: what is kept of the forward pass.
        offload: what leaves the device between its uses.
        loss: how the loss of a language model is computed.
        attention: which kernel computes it.
        adapter: low-rank adapters on a frozen model.
        compile: whether blocks are compiled.
        choice: what the planner may choose, and within what memory.

    Raises:
        PlanError: a field has a wrong type or value, asks for what is not built yet, or does not go with
            another. Several findings come as one ``CombinedPlanError`` that names them all.
    """

    parallel: ParallelPlan = field(default_factory=ParallelPlan)
    precision: PrecisionPlan = field(default_factory=PrecisionPlan)
    batch: BatchPlan = field(default_factory=BatchPlan)
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    activation: ActivationPlan = field(default_factory=ActivationPlan)
    offload: OffloadPlan = field(default_factory=OffloadPlan)
    loss: LossPlan = field(default_factory=LossPlan)
    attention: AttentionPlan = field(default_factory=AttentionPlan)
    adapter: AdapterPlan = field(default_factory=AdapterPlan)
    compile: CompilePlan = field(default_factory=CompilePlan)
    choice: ChoicePlan = field(default_factory=ChoicePlan)

    def __post_init__(self) -> None:
        rules.check(self)

    @classmethod
    def of(cls, value: "Plan | Mapping[str, object] | str | PathLike[str]") -> "Plan":
        """A Plan from a Plan (itself), from nested values, or from the path of a YAML or JSON file.

        Raises:
            PlanError: the value is none of these, the file cannot be read, or the plan cannot work.
        """
        if isinstance(value, Plan):
            return value
        if isinstance(value, (str, PathLike)):
            return cls._from_file(Path(value))
        return cls.from_dict(value)

    @classmethod
    def _from_file(cls, path: Path) -> "Plan":
        values = text.read_file(path)
        try:
            return cls.from_dict(values)
        except PlanError as error:
            where = f"(in {path})"
            found = [PlanError(e.field, e.received, f"{e.problem} {where}", e.action) for e in rules.each_error(error)]
            raise rules.one_of(found) from error

    @classmethod
    def from_dict(cls, values: object) -> "Plan":
        """A Plan from nested values, ``{"precision": {"mode": "bf16-mixed"}}``; missing keys take the defaults.

        Raises:
            PlanError: a key is unknown, or the plan cannot work.
        """
        parts = text.parts_from_dict(values)
        return cls(**parts)  # type: ignore[arg-type]  # each section holds its own part: PARTS says so

    @classmethod
    def from_yaml(cls, source: str) -> "Plan":
        """A Plan from YAML text (``Plan.of`` reads a file).

        Raises:
            PlanError: the text is not YAML, a key is unknown, or the plan cannot work.
        """
        return cls.from_dict(text.load_yaml(source))

    @classmethod
    def from_json(cls, source: str) -> "Plan":
        """A Plan from JSON text (``Plan.of`` reads a file).

        Raises:
            PlanError: the text is not JSON, a key is unknown, or the plan cannot work.
        """
        return cls.from_dict(text.load_json(source))

    def to_dict(self) -> dict[str, dict[str, object]]:
        """Nested plain values, every field named: what YAML, JSON and checkpoints hold."""
        return {section: text.part_to_dict(getattr(self, section)) for section in PARTS}

    def to_yaml(self) -> str:
        """YAML text that ``from_yaml`` reads back as an equal Plan."""
        return text.dump_yaml(self.to_dict())

    def to_json(self) -> str:
        """JSON text that ``from_json`` reads back as an equal Plan."""
        return text.dump_json(self.to_dict())

    def diff(self, other: "Plan") -> list[Difference]:
        """The fields in which ``other`` differs from this Plan, in the order of the Plan.

        Raises:
            PlanError: ``other`` is not a Plan.
        """
        if not isinstance(other, Plan):
            raise PlanError("other", other, "is not a Plan", "Make one of it with Plan.of")
        return differences(self.to_dict(), other.to_dict())

    def table(self, facts: Mapping[str, str] | None = None) -> str:
        """The short table printed at the start of ``fit``, at most 100 columns wide.

        Args:
            facts: further lines, such as ``{"model": "10.8 M parameters"}``; they carry no label.
        """
        return table(self, facts)

    def __str__(self) -> str:
        return self.table()

    def __rich__(self) -> "Table":
        return rich_table(self)
