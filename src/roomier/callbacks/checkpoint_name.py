"""The names of checkpoint folders: ``"{epoch}-{val_loss:.2f}"`` -> ``"epoch=3-val_loss=0.12"``."""

from __future__ import annotations

from collections.abc import Container, Mapping
from string import Formatter

from torch import Tensor

from roomier.callbacks.monitored import scalar
from roomier.core.errors import RoomierError

DEFAULT_TEMPLATE = "{epoch}-{step}"


def check_template(template: str) -> str:
    """``template``, after trying it out.

    Raises:
        RoomierError: it is empty, has a slash, or has a field or format that cannot be filled.
    """
    action = "Write a folder name such as '{epoch}-{step}-{val_loss:.3f}'; where it goes is dirpath's to say"
    if not isinstance(template, str) or not template.strip() or template in (".", ".."):
        raise RoomierError("filename", template, "is not the name of a folder", action)
    try:
        fields = list(Formatter().parse(template))
        if any("/" in literal for literal, *_ in fields):
            raise RoomierError("filename", template, "is a path, not the name of a folder", action)
        if any(field == "" or conversion for _, field, _, conversion in fields):
            raise RoomierError("filename", template, "has a field without a name", action)
        metrics = {field: 0.5 for _, field, _, _ in fields if field}
        format_name(template, {**metrics, "epoch": 0, "step": 0})
    except RoomierError:
        raise
    except ValueError as error:
        raise RoomierError("filename", template, f"cannot be filled in ({error})", action) from error
    return template


def metrics_named_in(template: str) -> list[str]:
    """The logged metrics that ``template`` names."""
    fields = {field: None for _, field, _, _ in Formatter().parse(template) if field}
    return [field for field in fields if field not in ("epoch", "step")]


def format_name(template: str, metrics: Mapping[str, Tensor | float], auto_insert_metric_name: bool = True) -> str:
    """Fill in ``template`` with ``epoch``, ``step`` and metrics.

    With ``auto_insert_metric_name`` a field brings its name along, ``{step}`` -> ``step=100``. A slash in a metric's
    name becomes ``_``: a checkpoint is one folder. A metric not logged so far reads ``none``.
    """
    parts = []
    for literal, field, spec, _ in Formatter().parse(template):
        parts.append(literal)
        if field is None:
            continue
        if field not in metrics:
            value = "none"
        elif field in ("epoch", "step"):
            value = format(int(scalar(metrics[field])), spec or "")
        else:
            value = format(scalar(metrics[field]), spec or "")
        text = f"{field}={value}" if auto_insert_metric_name else value
        parts.append(text.replace("/", "_"))
    return "".join(parts)


def first_free_name(name: str, taken: Container[str]) -> str:
    """``name``, else the first of ``name-v1``, ``name-v2``, ... that is not in ``taken``."""
    candidate, version = name, 0
    while candidate in taken:
        version += 1
        candidate = f"{name}-v{version}"
    return candidate
