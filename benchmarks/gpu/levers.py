"""Part ``levers``: the rows of ``python -m benchmarks levers``, at the sizes of Hugging Face's guide (BERT-large, 512
tokens).

All rows run in one process, because importing the libraries takes longer than a row. The rows of roomier run first. A
row has the keys of ``python -m benchmarks levers`` except ``peak_rss_bytes``, and the keys ``model``, ``seq_len``,
``steps`` and ``published`` (the guide's samples per second and MB on a V100).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.parts import Rows, Setting, Values
from benchmarks.lever_rows import FRAMEWORKS, ROWS
from benchmarks.lever_worker import RUNNERS, Measurement
from benchmarks.levers import row_of, turns_of
from roomier.core.device.resolve import resolve_device
from roomier.core.units import format_bytes

_FULL: dict[str, Any] = {"model": "bert-large", "seq_len": 512, "steps": 10, "levers": ""}
_TINY: dict[str, Any] = {"model": "bert-tiny", "seq_len": 16, "steps": 1, "levers": "vanilla,all"}


def rows(setting: Setting) -> Rows:
    """Return a row for each framework and memory technique.

    Raises:
        RoomierError: transformers is not installed.
    """
    settings = {**(_TINY if setting.size == "tiny" else _FULL), "accelerator": setting.accelerator}
    turns = sorted(turns_of(settings["model"], settings["levers"]), key=lambda turn: FRAMEWORKS.index(turn[0]))
    return {f"{lever}, {framework}": partial(_row, framework, lever, settings) for framework, lever in turns}


def summary(values: Mapping[str, Any]) -> str:
    """Return speed and peak memory as text."""
    return f"{values['samples_per_s']:.2f} samples/s, {format_bytes(values['peak_bytes'])}"


def _row(framework: str, lever: str, settings: Mapping[str, Any]) -> Values:
    if framework == "transformers" and not _transformers_supports(resolve_device(settings["accelerator"])):
        return {"unsupported": "transformers does not support the device"}
    measurement = Measurement(settings["steps"])
    with TemporaryDirectory() as folder:
        RUNNERS[framework]({**settings, "framework": framework, "lever": lever}, measurement, folder)
    values = row_of(framework, lever, [measurement.result])
    del values["peak_rss_bytes"]  # the process also holds memory of earlier rows
    sizes = {name: settings[name] for name in ("model", "seq_len", "steps")}
    return {**values, "step_s_all": measurement.result["step_s"], **sizes, "published": ROWS[lever].published}


def _transformers_supports(device: torch.device) -> bool:
    import transformers

    with TemporaryDirectory() as folder:
        chosen = transformers.TrainingArguments(folder, use_cpu=device.type == "cpu", report_to="none").device
    return bool(chosen.type == device.type)
