"""Metrics of an evaluation, by loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def metrics_table(stage: str, of_loaders: Sequence[Mapping[str, float]]) -> str:
    """Return the metrics of all loaders as text, with one metric per line."""
    rows = [(name, value) for metrics in of_loaders for name, value in metrics.items()]
    rows = list(dict(rows).items())
    width = max([len(name) for name, _ in rows], default=0)
    lines = [f"  {name:<{width}}  {value:.6g}" for name, value in rows]
    return "\n".join([f"{stage}:", *lines] if lines else [f"{stage}: no metrics were logged"])


def by_loader(
    metrics: Mapping[str, float], loader_of: Mapping[str, int | None], num_loaders: int
) -> list[dict[str, float]]:
    """Split ``metrics`` by loader.

    Args:
        metrics: names and logged values.
        loader_of: index of the loader for each metric; None for a metric over all loaders, which every dict contains.
        num_loaders: number of loaders.
    """
    if num_loaders == 1:
        return [dict(metrics)]
    return [
        {name: value for name, value in metrics.items() if loader_of.get(name) in (None, index)}
        for index in range(num_loaders)
    ]
