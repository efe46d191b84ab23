"""Conversion of a Plan to nested plain values, YAML and JSON, and back. Floats are converted without loss."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from roomier.core.errors import PlanError, did_you_mean
from roomier.core.untrusted import MAX_TEXT_BYTES, MAX_YAML_BYTES, parse_json, read_text
from roomier.plan.parts import FIELDS, PARTS, OptimizerPlan, Options, Part
from roomier.plan.rules import refuse


def part_to_dict(part: Part) -> dict[str, object]:
    """Return the fields of a part as plain values. Options become a dict, and tuples become lists."""
    return {field.name: _to_plain(getattr(part, field.name)) for field in dataclasses.fields(part)}


def parts_from_dict(values: object) -> dict[str, Part]:
    """Return the parts that ``values`` describes, by section. Missing keys get their default values.

    The Plan validates the values of the fields.

    Raises:
        PlanError: ``values`` or a section is not a mapping, or a key is unknown.
    """
    if not isinstance(values, Mapping):
        action = "Pass sections, such as {'precision': {'mode': 'bf16-mixed'}}"
        raise PlanError("plan", values, "must be a mapping", action)
    errors: list[PlanError] = []
    parts: dict[str, Part] = {}
    for section, fields in values.items():
        if section not in PARTS:
            errors.append(PlanError("plan", section, "is an unknown section", did_you_mean(section, PARTS)))
        elif not isinstance(fields, Mapping):
            first = next(iter(FIELDS[section]))
            action = f"Pass its fields as a mapping, such as {{'{section}': {{'{first}': ...}}}}"
            errors.append(PlanError(section, fields, "must be a mapping", action))
        else:
            unknown = [name for name in fields if name not in FIELDS[section]]
            errors += [_unknown_field(section, name) for name in unknown]
            if not unknown:
                parts[section] = PARTS[section](**fields)
    refuse(errors)
    return parts


def dump_yaml(values: Mapping[str, object]) -> str:
    """Return ``values`` as YAML, with sections in the order of the Plan and one field per line."""
    import yaml

    from roomier.plan.yaml_dialect import Dumper  # late import: loads PyYAML

    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def load_yaml(text: str, source: str | None = None) -> object:
    """Parse YAML text, and return its plain values.

    Tags cannot execute code. ``3e-4`` is a number. A duplicate key is an error.

    Args:
        text: one YAML document.
        source: name that an error shows instead of the text.

    Raises:
        PlanError: the text is not YAML.
    """
    import yaml

    from roomier.plan.yaml_dialect import load

    return _parsed(text, "YAML", source, load, (yaml.YAMLError, ValueError))


def load_json(text: str, source: str | None = None) -> object:
    """Parse JSON text, and return its plain values. A duplicate key is an error.

    Args:
        text: one JSON value.
        source: name that an error shows instead of the text.

    Raises:
        PlanError: the text is not JSON.
    """
    return _parsed(text, "JSON", source, partial(parse_json, object_pairs_hook=_unique_keys), (ValueError,))


def read_file(path: Path) -> object:
    """Return the values in a ``.json`` file, or in a YAML file with any other suffix.

    Raises:
        PlanError: the file cannot be read, or is not valid YAML or JSON.
    """
    try:
        text = read_text(path, MAX_TEXT_BYTES if path.suffix == ".json" else MAX_YAML_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a file that is not UTF-8, or an invalid path
        action = "Pass the path of a YAML or JSON file that contains a plan"
        raise PlanError("plan", str(path), f"cannot be read: {error}", action) from error
    load = load_json if path.suffix == ".json" else load_yaml
    return load(text, source=str(path))


def _parsed(
    text: str, format_name: str, source: str | None, parse: Callable[[str], object], errors: tuple[type[Exception], ...]
) -> object:
    if not isinstance(text, (str, bytes)):
        raise PlanError("plan", text, f"must be {format_name} text", "Pass a string. Plan.of reads other values")
    try:
        return parse(text)
    except PlanError:
        raise
    except errors as error:  # ValueError of YAML: a date or number outside Python's range
        problem = f"is not valid {format_name}: {' '.join(str(error).split())}"
        raise PlanError("plan", source or text, problem, "Correct the text") from error


def _to_plain(value: object) -> object:
    if isinstance(value, Options):
        return {name: _to_plain(element) for name, element in value.items()}
    return [_to_plain(element) for element in value] if isinstance(value, tuple) else value


def _unknown_field(section: str, name: object) -> PlanError:
    action = did_you_mean(str(name), FIELDS[section])
    if section == OptimizerPlan.SECTION:
        action += ". Pass other keyword arguments of the optimizer in options"
    return PlanError(section, name, "is an unknown field of this section", action)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in pairs:
        if name in values:
            raise PlanError("plan", name, "is a duplicate key", "Remove one of the two")
        values[name] = value
    return values
