"""ModelSummary and RichModelSummary: callbacks that print the modules and parameters of a model before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.core.device.rng import preserved_rng
from roomier.core.errors import check_integer
from roomier.core.log import notice
from roomier.core.units import format_bytes, format_count
from roomier.techniques.adapters.layers import InFewBits
from roomier.techniques.attention.watch import AttentionReport, AttentionWatch

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class SummaryRow:
    """Sizes of the parameters of one module, including its submodules. A parameter that two modules share is counted in
    both rows.

    Attributes:
        name: qualified name of the module.
        type_name: name of the class of the module.
        num_params: number of parameter elements.
        num_trainable: number of parameter elements that require gradients.
        num_bytes: total size of the parameters in bytes.
    """

    name: str
    type_name: str
    num_params: int
    num_trainable: int
    num_bytes: int


@dataclass(frozen=True)
class Summary:
    """Sizes of the parameters of all modules of a model.

    Attributes:
        rows: one row per module.
        total: row of the model, in which every parameter is counted once.
    """

    rows: tuple[SummaryRow, ...]
    total: SummaryRow

    @property
    def num_frozen(self) -> int:
        """Number of parameter elements that do not require gradients."""
        return self.total.num_params - self.total.num_trainable


def summarize(model: nn.Module, max_depth: int = 1) -> Summary:
    """Return the total and one row for each submodule down to ``max_depth`` (0 for none, -1 for all), in the order of
    registration."""
    rows = [
        _row(name, part)
        for name, part in model.named_modules()
        if name and (max_depth == -1 or name.count(".") < max_depth)
    ]
    return Summary(tuple(rows), _row("total", model))


def _row(name: str, part: nn.Module) -> SummaryRow:
    parameters = list(part.parameters())
    coded = [each for each in part.modules() if isinstance(each, InFewBits)]  # quantized weights are not parameters
    return SummaryRow(
        name,
        _class_name(part),
        sum(p.numel() for p in parameters) + sum(each.weight_shape.numel() for each in coded),
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(p.numel() * p.element_size() for p in parameters)
        + sum(each.weight_codes.nbytes + each.weight_scales.nbytes for each in coded),
    )


def _class_name(part: nn.Module) -> str:
    """Return the name of the original class of a module whose class ``fully_shard`` may have replaced."""
    kinds = [kind.__name__ for kind in type(part).__mro__]
    return next(name for name in kinds if not name.startswith("FSDP")) if "FSDPModule" in kinds else kinds[0]


class ModelSummary(Callback):
    """Callback that prints a table of modules, parameters and bytes, and a table of parameter groups, when ``fit``
    starts.

    After the first forward pass, the callback also prints the kernel that computed attention. The output goes to
    standard error.

    Args:
        max_depth: depth down to which submodules are listed; 0 lists only the total, and -1 lists all submodules.

    Raises:
        RoomierError: ``max_depth`` is invalid.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[ModelSummary(max_depth=2)])
    """

    reads_parameters = False

    def __init__(self, max_depth: int = 1) -> None:
        check_integer("max_depth", max_depth, -1, "Use -1 (all) or 0 (total)")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if not trainer.is_global_zero:
            return
        from rich.console import Console

        console = Console(stderr=True)
        console.print(self.table(trainer, pl_module))
        if trainer.optimizers:
            console.print(optimizer_table(trainer.optimizers))
        trainer.engine.watch(AttentionWatch(_print_attention))

    def table(self, trainer: TrainerView, pl_module: Module) -> Table:
        """Return the table of the modules of ``pl_module``."""
        return summary_table(summarize(pl_module, self.max_depth))


def _print_attention(report: AttentionReport) -> None:
    for line in report.lines():
        notice(line)


_WHOLE_ON_EACH_RANK = ("single", "ddp")
Columns = Mapping[str, Mapping[str, str]]
"""The cells of additional columns, keyed by heading and by module name; the name ``""`` is the complete model."""


class RichModelSummary(ModelSummary):
    """Callback that prints a framed table of modules, parameters, bytes and modes (train or eval) when ``fit`` starts.

    If the module has an ``example_input_array``, the table also contains the shapes of inputs and outputs and the FLOPs
    of one forward pass with this input. The forward pass runs in evaluation mode without gradients and does
    not change the random states. The forward pass is skipped if the strategy shards parameters or divides the model
    into stages. This callback replaces :class:`ModelSummary`.

    Args:
        max_depth: depth down to which submodules are listed; 0 lists only the total, and -1 lists all submodules.
        summarize_kwargs: only ``header_style``, the style of the header (default ``"bold magenta"``), has an effect.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[RichModelSummary(max_depth=2)])
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__(max_depth)
        self._header_style = summarize_kwargs.get("header_style", "bold magenta")

    def table(self, trainer: TrainerView, pl_module: Module) -> Table:
        from rich.box import HEAVY_HEAD

        columns: Columns = {
            "mode": {name: "train" if each.training else "eval" for name, each in pl_module.named_modules()}
        }
        example, engine = getattr(pl_module, "example_input_array", None), trainer.engine
        parallel = trainer.plan.parallel
        is_whole = parallel.strategy in _WHOLE_ON_EACH_RANK and parallel.pipeline_parallel_size == 1
        if example is not None and is_whole:
            run = partial(_call, pl_module, engine.move(example))
            columns = {**columns, **_measured(pl_module, lambda: engine.forward(lambda _: run(), None))}
        found = summary_table(summarize(pl_module, self.max_depth), columns)
        found.box, found.header_style, found.pad_edge = HEAVY_HEAD, self._header_style, True
        return found


@torch.no_grad()
def _measured(model: nn.Module, run: Callable[[], Any]) -> Columns:
    """Return the FLOPs and the shapes of inputs and outputs of each module in the forward pass that ``run`` runs."""
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    in_sizes: dict[str, str] = {}
    out_sizes: dict[str, str] = {}

    def note(name: str, part: nn.Module, args: Any, output: Any) -> None:
        in_sizes[name], out_sizes[name] = _shapes_of(args[0] if len(args) == 1 else args), _shapes_of(output)

    with ExitStack() as stack:
        for name, part in model.named_modules():
            stack.callback(part.register_forward_hook(partial(note, name)).remove)
        stack.enter_context(_in_evaluation(model))
        counter = stack.enter_context(FlopCounterMode(display=False))
        run()
    root = type(model).__name__
    counts = {name.removeprefix(root).removeprefix("."): each for name, each in counter.get_flop_counts().items()}
    num_flops = {name: sum(counts.get(name, {}).values()) for name, _ in model.named_modules()}
    num_flops[""] = counter.get_total_flops()
    texts = {name: format_count(count) for name, count in num_flops.items()}
    return {"FLOPs": texts, "in sizes": in_sizes, "out sizes": out_sizes}


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, tuple):
        return model(*example)
    return model(**example) if isinstance(example, dict) else model(example)


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    training = [each for each in model.modules() if each.training]
    model.eval()
    try:
        with preserved_rng():
            yield
    finally:
        for each in training:
            each.training = True


def _shapes_of(value: Any) -> str:
    """Return the shapes of the tensors in ``value``, such as ``[2, 3]`` or ``[[2, 3], [2]]``; ``?`` for other
    values."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and value:
        return f"[{', '.join(map(_shapes_of, value))}]"
    return "?"


def summary_table(summary: Summary, columns: Columns | None = None) -> Table:
    """Return a table of the modules with their sizes and ``columns``. The last lines are the totals."""
    more = columns or {}
    table = _plain_table("name", "type", numbers=("params", "bytes", "trainable", *more))
    for row in summary.rows:
        table.add_row(row.name, row.type_name, *_sizes(row), *(cells.get(row.name, "?") for cells in more.values()))
    if summary.rows:
        table.add_section()
    of_all = (cells.get("", "?") for cells in more.values())
    table.add_row("total", summary.total.type_name, *_sizes(summary.total), *of_all)
    table.add_row("frozen", "", format_count(summary.num_frozen))
    return table


def optimizer_table(optimizers: list[Optimizer]) -> Table:
    """Return a table with one row per parameter group of each optimizer. Groups that a Plan created are described by
    their contents instead of a number."""
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    has_bits = any("state_bits" in group for _, group in groups)
    numbers = ("lr", "weight decay", *(["state bits"] if has_bits else []), "tensors", "params")
    table = _plain_table("optimizer", "group", numbers=numbers)
    for optimizer, group in groups:
        parameters = group["params"]
        number = next(n for n, each in enumerate(optimizer.param_groups, start=1) if each is group)
        table.add_row(
            type(optimizer).__name__,
            str(group.get("name") or group.get("holds") or number),
            _number(group.get("lr")),
            _number(group.get("weight_decay")),
            *([_number(group.get("state_bits"))] if has_bits else []),
            str(len(parameters)),
            format_count(sum(p.numel() for p in parameters)),
        )
    return table


def _number(value: float | None) -> str:
    """Return a setting of an optimizer as text. Some optimizers have no learning rate or weight decay."""
    return "-" if value is None else f"{float(value):g}"


def _plain_table(*texts: str, numbers: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _sizes(row: SummaryRow) -> tuple[str, str, str]:
    if row.num_trainable == row.num_params:
        trainable = "all" if row.num_params else ""
    else:
        trainable = format_count(row.num_trainable) if row.num_trainable else "none"
    return format_count(row.num_params), format_bytes(row.num_bytes), trainable
