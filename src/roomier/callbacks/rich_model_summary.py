"""RichModelSummary: callback that adds modes, FLOPs and the shapes of inputs and outputs to the table of
ModelSummary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.model_summary import ModelSummary, Summary, SummaryRow, summarize
from roomier.core.device.rng import rng_state, set_rng_state
from roomier.core.units import format_bytes, format_count

_UNKNOWN = "?"
_WHOLE_ON_EACH_RANK = ("single", "ddp")


@dataclass(frozen=True)
class MeasuredForward:
    """Input shapes, output shapes and FLOPs of one forward pass with the ``example_input_array`` of the module.

    Attributes:
        in_sizes: shapes of the inputs in the last call of each module, keyed by module name.
        out_sizes: shapes of the outputs in the last call of each module, keyed by module name.
        num_flops: number of floating-point operations, keyed by module name; the key ``""`` has the total.
    """

    in_sizes: Mapping[str, str]
    out_sizes: Mapping[str, str]
    num_flops: Mapping[str, int]


class RichModelSummary(ModelSummary):
    """Callback that prints a framed table of modules, parameters, bytes and modes (train or eval) when ``fit`` starts.

    If the module has an ``example_input_array``, the table also contains the shapes of inputs and outputs and the FLOPs
    of one forward pass with this input. The forward pass runs in evaluation mode without gradients and does
    not change the random states. The forward pass is skipped if the strategy shards parameters. This callback replaces
    :class:`ModelSummary`.

    Args:
        max_depth: depth down to which submodules are listed; 0 lists only the total, and -1 lists all submodules.
        summarize_kwargs: only ``header_style``, the style of the header (default ``"bold magenta"``), has an effect.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[RichModelSummary(max_depth=2)])
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__(max_depth)
        self._header_style = summarize_kwargs.get("header_style", "bold magenta")

    def table(self, trainer: TrainerView, pl_module: Module) -> RenderableType:
        measured = None
        example = getattr(pl_module, "example_input_array", None)
        if example is not None and trainer.plan.parallel.strategy in _WHOLE_ON_EACH_RANK:
            engine = trainer.engine
            measured = measure(pl_module, engine.move(example), lambda step: engine.forward(step, None))
        return rich_table(summarize(pl_module, self.max_depth), pl_module, measured, self._header_style)


@torch.no_grad()
def measure(model: nn.Module, example: Any, run: Callable[[Callable[[Any], Any]], Any]) -> MeasuredForward:
    """Run one forward pass of ``model`` on ``example`` and return its measurements.

    Args:
        example: the input; a tuple contains the positional arguments, and a dict contains the keyword arguments.
        run: function that calls its argument in the precision of training.
    """
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    in_sizes: dict[str, str] = {}
    out_sizes: dict[str, str] = {}

    def note(name: str, part: nn.Module, args: Any, output: Any) -> None:
        in_sizes[name], out_sizes[name] = shapes_of(args[0] if len(args) == 1 else args), shapes_of(output)

    counter = FlopCounterMode(display=False)
    with ExitStack() as stack:
        for name, part in model.named_modules():
            if name:
                stack.callback(part.register_forward_hook(partial(note, name)).remove)
        stack.enter_context(_in_evaluation(model))
        stack.enter_context(counter)
        run(lambda _: _call(model, example))
    root = type(model).__name__
    counts = counter.get_flop_counts()
    num_flops = {name.removeprefix(f"{root}."): sum(each.values()) for name, each in counts.items() if name != root}
    return MeasuredForward(in_sizes, out_sizes, {**num_flops, "": counter.get_total_flops()})


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, tuple):
        return model(*example)
    return model(**example) if isinstance(example, dict) else model(example)


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    training, random_state = [each for each in model.modules() if each.training], rng_state()
    model.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True
        set_rng_state(random_state)


def shapes_of(value: Any) -> str:
    """Return the shapes of the tensors in ``value``, such as ``[2, 3]`` or ``[[2, 3], [2]]``; ``?`` for other
    values."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and value:
        return f"[{', '.join(map(shapes_of, value))}]"
    return _UNKNOWN


def rich_table(summary: Summary, model: nn.Module, measured: MeasuredForward | None, header_style: str) -> Group:
    """Return the table of the modules, followed by the totals."""
    table = Table(header_style=header_style)
    table.add_column("", style="dim", justify="right")
    for name in ("Name", "Type"):
        table.add_column(name, overflow="fold")
    numbers = ("Params", "Size", *(("FLOPs", "In sizes", "Out sizes") if measured else ()))
    for name in (*numbers[:2], "Mode", *numbers[2:]):
        table.add_column(name, justify="left" if name == "Mode" else "right")
    for number, row in enumerate(summary.rows):
        table.add_row(str(number), row.name, row.type_name, *_cells(row, model.get_submodule(row.name), measured))
    num_training = sum(each.training for each in model.modules())
    num_modules = sum(1 for _ in model.modules())
    lines = [
        f"Trainable params: {format_count(summary.total.num_trainable)}",
        f"Non-trainable params: {format_count(summary.num_frozen)}",
        f"Total params: {format_count(summary.total.num_params)}",
        f"Size of the params: {format_bytes(summary.total.num_bytes)}",
        f"Modules in train mode: {num_training}, in eval mode: {num_modules - num_training}",
    ]
    if measured is not None:
        lines.append(f"FLOPs of a forward pass on example_input_array: {format_count(measured.num_flops[''])}")
    return Group(table, Text("\n".join(lines)))


def _cells(row: SummaryRow, part: nn.Module, measured: MeasuredForward | None) -> tuple[str, ...]:
    mode = "train" if part.training else "eval"
    known = (format_count(row.num_params), format_bytes(row.num_bytes), mode)
    if measured is None:
        return known
    name = row.name
    num_flops = format_count(measured.num_flops.get(name, 0))
    return (*known, num_flops, measured.in_sizes.get(name, _UNKNOWN), measured.out_sizes.get(name, _UNKNOWN))
