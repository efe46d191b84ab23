"""The pages ``reference/trainer.md`` and ``reference/plan.md``: arguments and fields with their values and defaults."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import docstring_parser

from roomier import Trainer
from roomier.cli.help_screen import FIELDS_OF, TOPICS
from roomier.plan.choices import CHOICES
from roomier.plan.parts import FIELDS, PARTS
from tests.docs.markdown import code, markdown, sentence

_TASKS = {
    "ranks": "Devices and strategy",
    "memory": "Memory",
    "speed": "Precision and speed",
    "optimizer": "Optimizer",
    "length": "Length of a run",
    "validation": "Validation, test and prediction",
    "output": "Callbacks, logs and files",
    "debugging": "Debugging",
}
"""Title of each topic of ``roomier fit --help`` that contains arguments of the Trainer."""


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each page."""
    yield "reference/trainer.md", _trainer()
    yield "reference/plan.md", _plan()


def _trainer() -> str:
    described = _described(Trainer.__doc__)
    arguments = inspect.signature(Trainer).parameters
    parts = [
        "# Trainer arguments",
        "All arguments are keyword-only. On the command line, `roomier fit --trainer.NAME VALUE` sets the argument "
        "`NAME`. Arguments that describe the computation become fields of the [Plan](plan.md). The page "
        "[roomier.Trainer](api/roomier.Trainer.md) describes the methods of the Trainer.",
    ]
    grouped: set[str] = set()
    for topic, title in _TASKS.items():
        parts.append(f"## {title}")
        for name in TOPICS[topic].names.split():
            if name in arguments and name not in grouped:
                grouped.add(name)
                parts += _argument(name, described[name], arguments[name])
    assert grouped == set(arguments), f"arguments without a topic: {set(arguments) - grouped}"
    return "\n\n".join(parts)


def _argument(name: str, text: str, parameter: inspect.Parameter) -> Iterator[str]:
    """Yield the paragraphs on an argument."""
    text = re.sub(r" \((?:``\w+Plan``(?:, )?)+\)", "", text)
    yield f"### `{name}` {{ #{name} }}"
    yield sentence(markdown(text))
    annotation = str(parameter.annotation).replace("OptimizerArgument", "dict | str | Optimizer | Callable | None")
    facts = [f"Type: `{annotation}`. Default: {code(parameter.default)}."]
    if name in FIELDS_OF:
        field, settings = FIELDS_OF[name]
        facts += [f"Values: {_values(field)}."] if field in CHOICES else []
        facts.append(f"Field of the Plan: [`{field}`](plan.md#{field}).")
        section = field.partition(".")[0]
        if settings:
            links = ", ".join(f"[`{each}`](plan.md#{section}.{each})" for each in settings.split())
            facts.append(f"Further settings of the dict: {links}.")
    yield " ".join(facts)


def _plan() -> str:
    parts = [
        "# Plan fields",
        "A [Plan](api/roomier.plan.md) consists of the sections on this page. YAML files, error messages and the "
        "`run.json` of a checkpoint refer to a field as `section.field`. The label in parentheses after a value states "
        "how this value affects the results: `exact` (the same bits), `near` (the same mathematics with different "
        "rounding) or `approximate`.",
    ]
    for section, part in PARTS.items():
        described = _described(part.__doc__)
        defaults = {each.name: each.default for each in dataclasses.fields(part)}
        parts += [f"## {section}", markdown((part.__doc__ or "").partition("\n\n")[0])]
        for name in FIELDS[section]:
            field = f"{section}.{name}"
            facts = [f"Default: {_default(defaults[name], part, name)}."]
            facts += [f"Values: {_values(field, with_labels=True)}."] if field in CHOICES else []
            parts += [f"### `{name}` {{ #{field} }}", sentence(markdown(described[name])), " ".join(facts)]
    return "\n\n".join(parts)


def _default(value: object, part: type[Any], name: str) -> str:
    """Return the default of a field as code. A field with a factory has an empty value."""
    return code(getattr(part(), name) if value is dataclasses.MISSING else value)


def _values(field: str, with_labels: bool = False) -> str:
    return ", ".join(
        f"{code(name)} ({choice.kind})" if with_labels and choice.kind is not None else code(name)
        for name, choice in CHOICES[field].items()
    )


def _described(docstring: str | None) -> dict[str, str]:
    """Return the descriptions of arguments or attributes in a docstring, by name."""
    entries = docstring_parser.parse(docstring or "").params
    return {each.arg_name: str(each.description) for each in entries}
