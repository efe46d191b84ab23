"""Draw the figures of the concepts: ``python docs/pictures/make.py [FOLDER]`` writes SVG files, by default next to it.

Each figure has a variant for light and one for dark pages. The figure of the strategies shows forecasts of the planner.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch

from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.forecast import StepTime
from roomier.planner.hardware.spec import machine_of
from roomier.planner.memory.predict import predict
from roomier.planner.timing.step_time import transfer_s
from roomier.planner.workload import Workload

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
WIDTH = 720
COLORS = {
    "light": {"text": "#1f2430", "faint": "#5b6372", "line": "#9aa1ae", "box": "#eef1f6"},
    "dark": {"text": "#e6e8ee", "faint": "#a9b0be", "line": "#6f7788", "box": "#2c3140"},
}
FILLS = {"blue": "#3f68b5", "teal": "#20796d", "orange": "#b5620f", "purple": "#7a55b0", "gray": "#666e7d"}


@dataclass
class Figure:
    """Shapes of one figure. Colors are keys of ``COLORS`` or ``FILLS``, so a figure can be written in both variants."""

    height: int
    label: str
    shapes: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, color: str = "text", size: int = 14, anchor: str = "start") -> None:
        """Add a line of text whose baseline is at ``y``."""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" fill="{{{color}}}" font-size="{size}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, color: str = "box", text: str = "") -> None:
        """Add a rectangle with a centered text, whose lines are separated by newlines."""
        border = ' stroke="{line}"' if color == "box" else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{{{color}}}"{border}/>'
        )
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            middle = y + height / 2 + 4.5 + 17 * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, line, "text" if color == "box" else "on_fill", 13, "middle")

    def arrow(self, *points: tuple[float, float], color: str = "line") -> None:
        """Add a line through ``points`` with a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{{{color}}}" stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def write(self, name: str) -> None:
        """Write ``NAME-light.svg`` and ``NAME-dark.svg``."""
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        head += '<path d="M0 0 8 4 0 8z" fill="{line}"/></marker>'
        for variant, colors in COLORS.items():
            shapes = "\n".join([f"<title>{escape(self.label)}</title>", f"<defs>{head}</defs>", *self.shapes])
            for key, value in {**colors, **FILLS, "on_fill": "#ffffff"}.items():
                shapes = shapes.replace(f"{{{key}}}", value)
            (FOLDER / f"{name}-{variant}.svg").write_text(
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
                f'font-family="system-ui, sans-serif">\n{shapes}\n</svg>\n'
            )


KINDS = {
    "parameter": ("weights", "blue"),
    "gathered_parameter": ("unsharded copies", "teal"),
    "gradient": ("gradients", "orange"),
    "optimizer_state": ("optimizer states", "purple"),
    "communication_buffer": ("buffers", "gray"),
}


def strategies() -> None:
    """Draw the bytes per parameter of GPT-2 XL on eight ranks, by strategy."""
    with torch.device("meta"):
        model = GPT(GPTConfig.named("gpt2-xl"))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    figure = Figure(238, "Bytes per parameter on each of eight ranks: ddp 20, zero1 7.7, zero2 4.2, zero3 2.2")
    x = 90.0
    for text, color in KINDS.values():
        figure.box(x, 12, 14, 14, color)
        figure.text(x + 20, 24, text, size=13)
        x += 44 + 7.2 * len(text)
    for row, strategy in enumerate(("ddp", "zero1", "zero2", "zero3")):
        plan = plan_from_flags(
            strategy=strategy, devices=8, precision="bf16-mixed", optimizer="adamw", accumulate_grad_batches=4
        )
        num_bytes = {kind.value: size for kind, size in predict(model, plan).peak.num_bytes.items()}
        x, y = 90.0, 46 + 42 * row
        figure.text(80, y + 19, strategy, anchor="end")
        for kind, (_, color) in KINDS.items():
            width = 26 * num_bytes[kind] / num_parameters
            if width >= 1:
                figure.box(x, y, width - 1, 28, color)
            x += width
        figure.text(x + 8, y + 19, f"{sum(num_bytes.values()) / num_parameters:.1f}")
    figure.text(90, 228, "bytes per parameter at the peak of the model states", "faint", 13)
    figure.write("strategies")


def offload() -> None:
    """Draw a step of GPT-2 XL with offloaded optimizer states on an RTX 4090, for the three update modes."""
    with torch.device("meta"):
        model = GPT(GPTConfig.named("gpt2-xl"))
    tokens = torch.zeros(4, 1024, dtype=torch.int64)
    workload, machine = Workload.of(model, (tokens, tokens)), machine_of("rtx-4090")
    figure = Figure(322, "One step of GPT-2 XL with optimizer states in host memory, for the three update modes")
    x = 96.0
    for text, color in (("forward", "blue"), ("backward", "teal"), ("update", "orange"), ("copies", "purple")):
        figure.box(x, 12, 14, 14, color)
        figure.text(x + 20, 24, text, size=13)
        x += 44 + 7.2 * len(text)
    for row, mode in enumerate(("plain", "deferred", "speculative")):
        plan = plan_from_flags(
            precision="bf16-mixed",
            optimizer="adamw",
            activation_checkpointing="full",
            gradient_clip_val=1.0,
            accelerator="cuda",
            offload={"optimizer_states": "cpu", "update": mode},
        )
        forecast = confirm(workload, plan, machine)
        assert forecast.time is not None
        step_bars(figure, 46 + 84 * row, mode, forecast.time, transfer_s(forecast.traffic, machine))
    figure.text(96, 312, "seconds of one step on an RTX 4090 (forecast; batch of 4 x 1,024 tokens)", "faint", 13)
    figure.write("offload")


def step_bars(figure: Figure, y: float, mode: str, time: StepTime, copies_s: float) -> None:
    """Draw the computation of a step and, below it, the copies of the optimizer states."""
    left, scale, slices = 96.0, 440.0, 8
    forward_s = (time.compute_s - time.recompute_s) / 3  # a backward pass takes as long as two forward passes
    backward_s, update_s = time.compute_s - forward_s, time.update_s
    bars: dict[str, list[tuple[str, float]]] = {
        "plain": [("blue", forward_s), ("teal", backward_s), ("orange+", update_s + time.offload_s)],
        "deferred": [("orange+blue", forward_s + update_s + time.offload_s), ("teal", backward_s)],
        "speculative": [("blue", forward_s), ("teal+orange", backward_s + update_s)],
    }
    lengths = {"blue": forward_s, "teal": backward_s, "orange": update_s}
    figure.text(left - 10, y + 19, mode, anchor="end")
    start = 0.0
    for colors, length in bars[mode]:
        parts = colors.split("+") if "+" in colors else [colors]
        count = slices if "+" in colors else 1
        for number in range(count):
            x = left + scale * (start + length * number / count)
            for color in filter(None, parts):
                width = scale * lengths[color] / count
                figure.box(x, y, max(width - 1, 1.5), 26, color)
                x += width
        start += length
    first = time.compute_s if mode == "plain" else 0.0
    figure.box(left + scale * first, y + 29, scale * min(copies_s, time.total_s - first) - 1, 26, "purple")
    figure.text(left + scale * time.total_s + 8, y + 19, f"{time.total_s:.2f} s")


def fit() -> None:
    """Draw the data flow of a fit."""
    figure = Figure(420, "Data flow of a fit: from the arguments to the Plan, the engine and the loop of steps")
    figure.box(20, 16, 200, 62, "box", 'arguments, YAML,\nstrategy="auto"')
    figure.box(260, 16, 200, 62, "box", "Plan\nchecked, printed, stored")
    figure.box(500, 16, 200, 62, "box", "engine\nmodel with all techniques")
    figure.arrow((220, 47), (259, 47))
    figure.arrow((460, 47), (499, 47))
    figure.arrow((600, 78), (600, 131))
    figure.text(610, 110, "runs each step", "faint", 13)
    figure.shapes.append(
        '<rect x="20" y="132" width="680" height="200" rx="6" fill="none" stroke="{line}" stroke-dasharray="5 4"/>'
    )
    figure.text(34, 154, "one step", "faint", 13)
    figure.box(36, 172, 132, 52, "purple", "loader\nread a window")
    figure.box(202, 172, 132, 52, "blue", "forward\ntraining_step")
    figure.box(368, 172, 132, 52, "teal", "backward\nadd gradients")
    figure.box(534, 172, 150, 52, "gray", "reduce\nacross ranks")
    figure.arrow((168, 198), (201, 198))
    figure.arrow((334, 198), (367, 198))
    figure.arrow((500, 198), (533, 198))
    figure.arrow((434, 172), (434, 152), (268, 152), (268, 171))
    figure.text(351, 147, "each micro-batch of the window", "faint", 12, "middle")
    figure.box(534, 262, 150, 52, "orange", "clip, update,\nschedules")
    figure.box(368, 262, 132, 52, "box", "log row,\nvalidation if due")
    figure.box(202, 262, 132, 52, "box", "save point")
    figure.arrow((609, 224), (609, 261))
    figure.arrow((534, 288), (501, 288))
    figure.arrow((368, 288), (335, 288))
    figure.arrow((202, 288), (102, 288), (102, 225))
    figure.text(110, 306, "next step", "faint", 12)
    figure.box(202, 356, 132, 48, "box", "checkpoint")
    figure.box(368, 356, 132, 48, "box", "metrics.jsonl,\nloggers")
    figure.arrow((268, 314), (268, 355))
    figure.arrow((434, 314), (434, 355))
    figure.write("fit")


if __name__ == "__main__":
    strategies()
    offload()
    fit()
