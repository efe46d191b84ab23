"""Conversion of a machine specification to a :class:`Machine`. The specification is a device with a count, such as
``"a100-40gb:8"``, ``"8xh100"`` or ``"this:4"``, or the path of a file that describes a machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from roomier.core.device.names import is_known_to_torch
from roomier.core.errors import RoomierError, did_you_mean, nearest
from roomier.core.units import parse_bytes
from roomier.core.untrusted import MAX_YAML_BYTES, read_json, read_text
from roomier.core.yaml_text import BoundedLoader
from roomier.planner.hardware.devices import MOST_PER_NODE, SHEETS, known_names, plain_name, sheet_of
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.hardware.this_machine import this_machine

_SUFFIXES = (".yaml", ".yml", ".json")
_AFTER = re.compile(r"(?P<name>.*?)\s*:\s*(?P<count>[^:]*)")
_BEFORE = re.compile(r"(?P<count>\d+)\s*x\s*(?P<name>.+)", re.IGNORECASE)
_HERE = {"this": "auto", "here": "auto", "cpu": "cpu"}
_KINDS = ("cuda", "mps", "cpu", "xpu", "npu", "tpu")


def machine_of(spec: str, num_nodes: int | None = None) -> Machine:
    """Return the machine that ``spec`` describes.

    Args:
        spec: case-insensitive name of a GPU, as in the table (``devices.py``) or as reported by CUDA. The number of
            devices per node (default 1) is a suffix or a prefix: ``"a100-40gb:8"`` or ``"8xa100-40gb"``. ``"this:4"``
            is the current machine with 4 ranks, and ``"cpu:2"`` its processor with 2 ranks. A path that ends in .yaml,
            .yml or .json is a file with the fields of :class:`Machine`; see :func:`machine_of_dict`.
        num_nodes: number of nodes; None uses the value in the file, or 1 if ``spec`` is not a file.

    Raises:
        RoomierError: the device, the count or the file is invalid.

    Example:
        >>> machine_of("a100-40gb:8", num_nodes=4).num_ranks
        32
    """
    text = str(spec).strip()
    if num_nodes is not None and num_nodes < 1:
        raise RoomierError("nodes", num_nodes, "must be at least 1", "Set it to the number of machines")
    if Path(text).suffix.lower() in _SUFFIXES:
        return machine_of_file(Path(text), num_nodes)
    name, devices = _name_and_count(text)
    if name.lower() in _HERE:
        return this_machine(devices, num_nodes or 1, accelerator=_HERE[name.lower()])
    sheet = sheet_of(name)
    if sheet is None:
        raise RoomierError("hardware", text, f"the table of devices does not contain {name!r}", _action(name))
    if devices > MOST_PER_NODE:
        nodes = -(-devices // 8)
        action = f"Use '{sheet.name}:8' with {nodes} nodes for {8 * nodes} devices"
        raise RoomierError("hardware", text, f"a node has at most {MOST_PER_NODE} devices", action)
    return sheet.machine(devices, num_nodes or 1)


def machine_of_file(path: Path, num_nodes: int | None = None) -> Machine:
    """Return the machine that a YAML or JSON file describes.

    Raises:
        RoomierError: the file cannot be read, or :func:`machine_of_dict` rejects its content.
    """
    try:
        is_json = path.suffix.lower() == ".json"
        content = read_json(path) if is_json else yaml.load(read_text(path, MAX_YAML_BYTES), Loader=BoundedLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem, action = f"cannot be read: {' '.join(str(error).split())}", "Pass a YAML or JSON file of a machine"
        raise RoomierError("hardware", str(path), problem, action) from error
    if not isinstance(content, dict):
        raise RoomierError("hardware", str(path), "must map names to values", "See `roomier hardware --json`")
    return machine_of_dict(content if num_nodes is None else {**content, "num_nodes": num_nodes})


def machine_of_dict(content: Mapping[str, Any]) -> Machine:
    """Return the machine described by plain data. This function is the inverse of ``dataclasses.asdict``.

    The device is a name in the table, or a mapping with the fields of :class:`Device`. A link is a number (bytes per
    second), or a mapping with ``bytes_per_s`` and ``latency_s``. A size in bytes is a number, or a string such as
    ``"40GiB"``. If the device is a name in the table, missing fields default to the values of its typical node.

    Raises:
        RoomierError: a field is missing, unknown or invalid.
    """
    given = {"source": "a file", **content}
    if isinstance(content.get("device"), str):
        usual = machine_of(content["device"])
        own = {field.name: getattr(usual, field.name) for field in fields(Machine)}
        given = {**own, "source": "a file, and data sheets", **content, "device": usual.device}
    return _read(Machine, given)


def _name_and_count(text: str) -> tuple[str, int]:
    found = (_AFTER if ":" in text else _BEFORE).fullmatch(text)
    if found is None:
        return text, 1
    count = found["count"].strip()
    if not count.isdigit() or int(count) < 1:
        problem = f"{count!r} is not a number of devices"
        raise RoomierError("hardware", text, problem, f"Add the number of devices per node: '{found['name']}:8'")
    return found["name"], int(count)


def _action(name: str) -> str:
    """Return an action that suggests the device whose name or alias is most similar to ``name``."""
    near = nearest(plain_name(name), known_names(), cutoff=0.7)
    if near is not None:
        return f"Did you mean {known_names()[near].name!r}?"
    names = ", ".join(sorted(sheet.name for sheet in SHEETS))
    return f"Use one of: this, cpu, {names}; or pass a YAML file that describes a machine"


T = TypeVar("T", Machine, Device, Link)


def _read(kind: type[T], given: Mapping[str, Any], prefix: str = "") -> T:
    """Return an object of ``kind`` with the values in ``given``."""
    known = [field.name for field in fields(kind)]
    for name in given:
        if name not in known:
            raise RoomierError(f"{prefix}{name}", given[name], "is not a field of a machine", did_you_mean(name, known))
    missing = f"Add this field; a machine has the fields {', '.join(known)}"
    return kind(**{field.name: _field(field, given, prefix, missing) for field in fields(kind)})


def _field(field: Field[Any], given: Mapping[str, Any], prefix: str, missing: str) -> Any:
    """Convert one value to the type of its field. The types are strings, because the annotations in ``machine.py`` are
    not evaluated."""
    name, kind = f"{prefix}{field.name}", str(field.type)
    if field.name not in given:
        if field.default is not MISSING:
            return field.default
        raise RoomierError(name, None, "is missing", missing)
    value = given[field.name]
    if isinstance(value, (Device, Link)) or (value is None and "None" in kind):
        return value
    if kind == "Device":
        return _device(_read(Device, _mapping(name, value), f"{name}."))
    if kind.startswith("Link"):
        return _read(Link, value, f"{name}.") if isinstance(value, Mapping) else Link(_number(name, value))
    if kind.startswith("Mapping"):
        return {str(key): _number(f"{name}.{key}", rate) for key, rate in _mapping(name, value).items()}
    if kind == "str":
        return str(value)
    if field.name.endswith("_bytes") and isinstance(value, str):
        return parse_bytes(name, value)
    if kind.startswith("int"):
        number = _number(name, value)
        if number != int(number):
            raise RoomierError(name, value, "must be an integer", "Pass an integer")
        return int(number)
    return _number(name, value, may_be_zero=field.name in ("operation_s", "latency_s"))


def _device(device: Device) -> Device:
    if "fp32" not in device.flops_per_s:
        action = "Add this rate, in FLOP/s"
        raise RoomierError("device.flops_per_s", device.flops_per_s, "must contain 'fp32'", action)
    if device.kind not in _KINDS and not is_known_to_torch(device.kind):
        raise RoomierError("device.kind", device.kind, "is not a known kind", did_you_mean(device.kind, _KINDS))
    if device.product_efficiency > 1:
        problem = "is a fraction of the peak and must be at most 1"
        raise RoomierError("device.product_efficiency", device.product_efficiency, problem, "Set it to at most 1")
    return device


def _number(name: str, value: object, *, may_be_zero: bool = False) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else -1.0
    except ValueError:
        number = -1.0
    if not (0 < number < float("inf") or (may_be_zero and number == 0)):
        raise RoomierError(name, value, "must be a positive number", "Pass a number such as 312e12")
    return number


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RoomierError(name, value, "must map names to values", "See `roomier hardware --json`")
    return dict(value)
