"""Reports of ``roomier bench levers``: a Markdown table and a chart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roomier.bench.lever_rows import FRAMEWORKS, ROWS
from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes

_HEADER = ("lever", "framework", "samples/s", "of vanilla", "peak", "of vanilla")
_COLOURS = {"roomier": "#2a6f97", "transformers": "#c9a227"}


def write_report(result: Mapping[str, Any], folder: Path) -> None:
    """Write ``levers.md`` and ``levers.png`` to ``folder``, which is created if necessary.

    Raises:
        RoomierError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RoomierError("--output", str(folder), "requires matplotlib", "Run pip install matplotlib") from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "levers.md").write_text(markdown(result))
    matplotlib.use("Agg")
    _draw(result, folder / "levers.png")


def markdown(result: Mapping[str, Any]) -> str:
    """Return the Markdown report: the table, the machine, versions, commit and command."""
    rows = [_HEADER, tuple("---" if index < 2 else "---:" for index in range(len(_HEADER))), *lines(result)]
    commit = (result["commit"] or "unknown")[:10]
    return "\n".join(
        [
            f"# {result['model']}, {result['batch_size']} sequences of {result['seq_len']} tokens per step",
            "",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            f"Peak of {result['peak_is_of']}; {result['repeats']} turns of {result['steps']} steps, medians. "
            f"{result['machine']['cpu']}, {result['threads']} threads, torch {result['torch']}, commit {commit}.",
            "",
            f"    {result['command']}",
            "",
        ]
    )


def lines(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the table. Ratios are relative to roomier without any memory technique."""
    rows = result["rows"]
    base = next((row for row in rows if row["lever"] == "vanilla" and row["samples_per_s"]), None)
    cells = []
    for row in rows:
        if row["samples_per_s"] is None:
            cells.append([row["lever"], row["framework"], "failed", "", "", ""])
            continue
        ratios = (
            ("", "")
            if base is None
            else (
                f"{row['samples_per_s'] / base['samples_per_s']:.2f}",
                f"{row['peak_bytes'] / base['peak_bytes']:.2f}",
            )
        )
        speed, peak = f"{row['samples_per_s']:.2f}", format_bytes(row["peak_bytes"])
        cells.append([row["lever"], row["framework"], speed, ratios[0], peak, ratios[1]])
    return cells


def _draw(result: Mapping[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    rows = {(row["framework"], row["lever"]): row for row in result["rows"] if row["samples_per_s"]}
    levers = [name for name in ROWS if any(lever == name for _, lever in rows)]
    figure, axes = pyplot.subplots(1, 2, sharey=True, figsize=(10, 1.5 + 0.45 * len(levers)), layout="constrained")
    for axis, key, scale, title in zip(
        axes, ("samples_per_s", "peak_bytes"), (1.0, 2**20), ("samples per second", "peak memory, MiB"), strict=True
    ):
        for index, framework in enumerate(FRAMEWORKS):
            places = [place for place, lever in enumerate(levers) if (framework, lever) in rows]
            values = [rows[framework, levers[place]][key] / scale for place in places]
            heights = [place + 0.4 * index - 0.2 for place in places]
            bars = axis.barh(heights, values, height=0.38, color=_COLOURS[framework], label=framework)
            axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axis.set_title(title)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(levers)), levers)
    axes[0].invert_yaxis()
    axes[1].legend(loc="lower right")
    figure.suptitle(f"{result['model']}, {result['batch_size']} sequences of {result['seq_len']} tokens per step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
