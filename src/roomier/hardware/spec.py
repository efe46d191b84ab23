"""Machines by name: ``"a100-40gb:8"``, ``"8xh100"``, ``"cpu:2"``, ``"this:4"``, or a file that tells all figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import Any

import yaml

from roomier.core.errors import RoomierError, did_you_mean, nearest
from roomier.core.units import parse_bytes
from roomier.core.yaml_text import BoundedLoader
from roomier.hardware.devices import MOST_PER_NODE, SHEETS, known_names, plain_name, sheet_of
from roomier.hardware.machine import Device, Link, Machine
from roomier.hardware.this_machine import this_machine

_SUFFIXES = (".yaml", ".yml", ".json")
_AFTER = re.compile(r"(?P<name>.*?)\s*:\s*(?P<count>[^:]*)")
_BEFORE = re.compile(r"(?P<count>\d+)\s*x\s*(?P<name>.+)", re.IGNORECASE)
_HERE = {"this": "auto", "here": "auto", "cpu": "cpu"}
_KINDS = ("cuda", "mps", "cpu")


def machine_of(spec: str, num_nodes: int | None = None) -> Machine:
    """The machine that ``spec`` names.

    Args:
        spec: a GPU of the table (``devices.py``) by any of its names, in upper or lower case, as ``torch.cuda`` tells
            it too, then ``:`` and the devices of each node, 1 without; or these before an ``x``. ``"this:4"`` is the
            machine at hand with 4 ranks, ``"cpu:2"`` its processor with 2. What ends in .yaml, .yml or .json is a file
            with the fields of :class:`Machine`, see :func:`machine_of_dict`.
        num_nodes: None is 1, or what the file says.

    Raises:
        RoomierError: there is no such device, count or file, or the file says something else than a machine.
    """
    text = str(spec).strip()
    if num_nodes is not None and num_nodes < 1:
        raise RoomierError("nodes", num_nodes, "is less than 1", "Give the number of machines")
    if Path(text).suffix.lower() in _SUFFIXES:
        return machine_of_file(Path(text), num_nodes)
    name, devices = _name_and_count(text)
    if name.lower() in _HERE:
        return this_machine(devices, num_nodes or 1, accelerator=_HERE[name.lower()])
    sheet = sheet_of(name)
    if sheet is None:
        raise RoomierError("hardware", text, f"there is no {name!r} in the table of devices", _action(name))
    if devices > MOST_PER_NODE:
        nodes = -(-devices // 8)
        action = f"Write '{sheet.name}:8' with {nodes} nodes, which are {8 * nodes}"
        raise RoomierError("hardware", text, f"no node has {devices} of them", action)
    return sheet.machine(devices, num_nodes or 1)


def machine_of_file(path: Path, num_nodes: int | None = None) -> Machine:
    """The machine that a YAML or JSON file tells.

    Raises:
        RoomierError: the file cannot be read, or :func:`machine_of_dict` refuses what it says.
    """
    try:
        text = path.read_text()
        content = json.loads(text) if path.suffix.lower() == ".json" else yaml.load(text, Loader=BoundedLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = f"cannot be read: {' '.join(str(error).split())}"
        raise RoomierError("hardware", str(path), problem, "Name a YAML or JSON file with a machine") from error
    if not isinstance(content, dict):
        raise RoomierError("hardware", str(path), "is no mapping of names to values", "See `roomier hardware --json`")
    return machine_of_dict(content if num_nodes is None else {**content, "num_nodes": num_nodes})


def machine_of_dict(content: Mapping[str, Any]) -> Machine:
    """The machine of plain data: the inverse of :func:`machine_as_dict`.

    The device is a name of the table, or a mapping of its own fields; links are bytes per second, or a mapping with
    ``bytes_per_s`` and ``latency_s``; bytes are numbers or texts such as ``"40GiB"``. Where the device has a name of
    the table, all that is left out is as of a usual node with it.

    Raises:
        RoomierError: a field is missing, unknown, or not what it has to be.
    """
    given = dict(content)
    _refuse_unknown("", given, Machine)
    usual = None
    if isinstance(given.get("device"), str):
        usual = machine_of(given["device"])
        given = {**{field.name: getattr(usual, field.name) for field in fields(Machine)}, **given}
        given["device"], given["source"] = usual.device, content.get("source", "a file, and data sheets")
    elif "device" in given:
        given["device"] = _device(_mapping("device", given["device"]))
    given.setdefault("source", "a file")
    given.setdefault("in_node_reduce", None)
    made: dict[str, Any] = {}
    for field in fields(Machine):
        made[field.name] = _field(field, given)
    return Machine(**made)


def machine_as_dict(machine: Machine) -> dict[str, Any]:
    """All fields as plain data."""
    plain = asdict(machine)
    plain["device"]["flops_per_s"] = dict(machine.device.flops_per_s)
    return plain


def _name_and_count(text: str) -> tuple[str, int]:
    found = (_AFTER if ":" in text else _BEFORE).fullmatch(text)
    if found is None:
        return text, 1
    count = found["count"].strip()
    if not count.isdigit() or int(count) < 1:
        problem = f"{count!r} is no number of devices"
        raise RoomierError("hardware", text, problem, f"Write how many are in a node: '{found['name']}:8'")
    return found["name"], int(count)


def _action(name: str) -> str:
    """What to write instead of ``name``: the device whose name or alias is most like it."""
    near = nearest(plain_name(name), known_names(), cutoff=0.7)
    if near is not None:
        return f"Did you mean {known_names()[near].name!r}?"
    names = ", ".join(sorted(sheet.name for sheet in SHEETS))
    return f"Use one of: this, cpu, {names}; or name a YAML file with a machine"


def _device(given: dict[str, Any]) -> Device:
    _refuse_unknown("device.", given, Device)
    made = {field.name: _field(field, given, "device.") for field in fields(Device)}
    rates = _mapping("device.flops_per_s", made["flops_per_s"])
    made["flops_per_s"] = {str(dtype): _number(f"device.flops_per_s.{dtype}", rate) for dtype, rate in rates.items()}
    if "fp32" not in made["flops_per_s"]:
        raise RoomierError("device.flops_per_s", rates, "has no 'fp32'", "Give that rate at least, in FLOP/s")
    if made["kind"] not in _KINDS:
        raise RoomierError("device.kind", made["kind"], "is no kind of device", did_you_mean(made["kind"], _KINDS))
    if made["product_efficiency"] > 1:
        problem = "is a share of the peak, and above 1"
        raise RoomierError("device.product_efficiency", made["product_efficiency"], problem, "Give at most 1")
    return Device(**made)


def _field(field: Field[Any], given: Mapping[str, Any], prefix: str = "") -> Any:
    """One value, as its type wants it. The types are strings: ``machine.py`` postpones their evaluation."""
    name, kind = f"{prefix}{field.name}", str(field.type)
    if field.name not in given:
        if field.default is not MISSING:
            return field.default
        raise RoomierError(name, None, "is missing", f"Give it; a machine has {_names(prefix)}")
    value = given[field.name]
    if isinstance(value, (Device, Link)) or (value is None and "None" in kind):
        return value
    if kind.startswith("Link"):
        return _link(name, value)
    if kind == "str":
        return str(value)
    if field.name.endswith("_bytes") and isinstance(value, str):
        return parse_bytes(name, value)
    if kind == "int":
        number = _number(name, value)
        if number != int(number):
            raise RoomierError(name, value, "is not a whole number", "Give a whole number")
        return int(number)
    may_be_zero = field.name in ("operation_s", "latency_s")
    return _number(name, value, may_be_zero=may_be_zero) if kind.startswith("float") else value


def _link(name: str, value: object) -> Link:
    if not isinstance(value, Mapping):
        return Link(_number(name, value))
    _refuse_unknown(f"{name}.", value, Link)
    return Link(**{field.name: _field(field, value, f"{name}.") for field in fields(Link)})


def _number(name: str, value: object, *, may_be_zero: bool = False) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else -1.0
    except ValueError:
        number = -1.0
    if not (0 < number < float("inf") or (may_be_zero and number == 0)):
        raise RoomierError(name, value, "is not a positive number", "Give a number such as 312e12")
    return number


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RoomierError(name, value, "is no mapping of names to values", "See `roomier hardware --json`")
    return dict(value)


def _refuse_unknown(prefix: str, given: Mapping[str, Any], owner: type) -> None:
    known = [field.name for field in fields(owner)]
    for name in given:
        if name not in known:
            raise RoomierError(f"{prefix}{name}", given[name], "is no field of a machine", did_you_mean(name, known))


def _names(prefix: str) -> str:
    owner = {"": Machine, "device.": Device}.get(prefix, Link)
    return ", ".join(field.name for field in fields(owner))
