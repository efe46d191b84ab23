"""Names of checkpoint folders: ``"{epoch}-{val_loss:.2f}"`` -> ``"epoch=3-val_loss=0.12"``."""

from __future__ import annotations

from collections.abc import Container, Mapping
from string import Formatter

from torch import Tensor

from roomier.callbacks.monitored import scalar
from roomier.core.errors import RoomierError

DEFAULT_TEMPLATE = "{epoch}-{step}"


def check_template(template: str) -> str:
    """Check that ``template`` can be filled in and return ``template``.

    Raises:
        RoomierError: the template is empty, contains a slash, or has an invalid field or format.
    """
    action = "Use a folder name such as '{epoch}-{step}-{val_loss:.3f}', and set the parent folder with dirpath"
    if not isinstance(template, str) or not template.strip() or template in (".", ".."):
        raise RoomierError("filename", template, "must be the name of a folder", action)
    try:
        fields = list(Formatter().parse(template))
        if any("/" in literal for literal, *_ in fields):
            raise RoomierError("filename", template, "must be the name of a folder, not a path", action)
        if any(field == "" or conversion for _, field, _, conversion in fields):
            raise RoomierError("filename", template, "must contain a name in each pair of braces", action)
        metrics = {field: 0.5 for _, field, _, _ in fields if field}
        format_name(template, {**metrics, "epoch": 0, "step": 0})
    except RoomierError:
        raise
    except ValueError as error:
        raise RoomierError("filename", template, f"is not a valid template ({error})", action) from error
    return template


def metrics_named_in(template: str) -> list[str]:
    """Return the names of the logged metrics that ``template`` contains."""
    fields = {field: None for _, field, _, _ in Formatter().parse(template) if field}
    return [field for field in fields if field not in ("epoch", "step")]


def format_name(template: str, metrics: Mapping[str, Tensor | float], auto_insert_metric_name: bool = True) -> str:
    """Fill in ``template`` with ``epoch``, ``step`` and metrics.

    Args:
        metrics: values by name, including ``epoch`` and ``step``. A metric that was not logged is written as ``none``.
        auto_insert_metric_name: if True, write the name of each field in front of its value, for example ``step=100``
            for ``{step}``. A slash in the name of a metric is replaced with ``_``, because a checkpoint is one folder.
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


def first_free_name(name: str, taken: Container[str], suffix: str = "") -> str:
    """Return the first of ``name``, ``name-v1``, ``name-v2``, ..., each with ``suffix``, that is not in ``taken``."""
    candidate, version = f"{name}{suffix}", 0
    while candidate in taken:
        version += 1
        candidate = f"{name}-v{version}{suffix}"
    return candidate
