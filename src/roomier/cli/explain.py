"""Conversion of jsonargparse's errors to the form of roomier's errors: field, value, problem, action."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pydoc import locate

from jsonargparse import ArgumentParser

from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.keywords import advice_for_name
from roomier.trainer import Trainer
from roomier.trainer.keywords.arguments import FORMER_KEYWORDS

_TRAINER = "--trainer."
_NO_KEYWORD = "is not a keyword of the Trainer"

_UNRECOGNIZED = re.compile(r"unrecognized arguments: (?P<option>\S+)(?: (?P<value>[^-]\S*))?")
_UNKNOWN_IN_GROUP = re.compile(r"Group '(?P<group>[\w.]+)' does not accept option '(?P<name>[\w.]+)'")
_UNKNOWN_IN_CLASS = re.compile(r"class_path '(?P<path>[\w.]+)':\s+Option '(?P<name>[\w.]+)' is not accepted")
_BAD_VALUE = re.compile(r'Parser key "(?P<key>[\w.]+)":\s+Expected an? (?P<kind>.+)\. Got value: (?P<value>.*)')
_PROBLEM_IN_CLASS = re.compile(r"Problem with given class_path '(?P<path>[\w.]+)':\s+(?P<problem>.+)")
_NO_SUBCLASS = re.compile(r"does not correspond to a subclass of (?P<base>\w+)")
_UNION = re.compile(
    r"Union subtypes\s+Subtypes: \[(?P<kinds>.+)\]\s+Errors:(?:\s+- Expected an? \S+ \S+)+\s+Given value type:"
)
_NOT_ACCEPTED = re.compile(r"Option '(?P<name>[\w.]+)' is not accepted")
_MISSING = re.compile(r"arguments are required: (?P<names>.+)")
_NO_IMPORT_PATH = re.compile(r"Expected a dot import path string: (?P<value>.*)")
_BAD_OPTION = re.compile(r"argument (?P<option>--[\w.]+): (?P<problem>.+)")
_IN_FILE = re.compile(
    r"Parser key \"(?P<key>[\w.]+)\":\s+Unable to load config '(?P<path>.*)'\s+- (?P<problem>[\s\S]+)"
)
_KEY = re.compile(r'Parser key "(?P<key>[\w.]+)"')


def explain(message: str, parser: ArgumentParser) -> RoomierError:
    """Convert ``message`` to an error with the option and an action. An unknown message is included unchanged."""
    found = _IN_FILE.match(message)
    if found is None:
        return _explain(message, parser)
    is_file = "Unable to load config" not in found["problem"]
    if not is_file or not _KEY.match(found["problem"]):
        details = f": {' '.join(found['problem'].split())}" if is_file else ""
        problem = f"must be a mapping or the path of a YAML file{details}"
        return RoomierError(found["key"], found["path"], problem, "Write the options below it")
    return in_file(_explain(found["problem"], parser), found["path"])


def in_file(error: RoomierError, path: str, received: object = None) -> RoomierError:
    """Return ``error`` with the path of the file that contains the invalid value.

    Args:
        received: the invalid value, if ``error`` does not contain it.
    """
    given = received if error.received in (None, "...") else error.received
    return type(error)(error.field, given, f"{error.problem}, in {path}", error.action)


def _explain(message: str, parser: ArgumentParser) -> RoomierError:
    options = [text for action in parser._actions for text in action.option_strings]
    if found := _UNRECOGNIZED.search(message):
        option, is_joined, value = found["option"].partition("=")
        given = value if is_joined else found["value"]
        if option.startswith(_TRAINER):
            name = option.removeprefix(_TRAINER)
            names = [text.removeprefix(_TRAINER) for text in options if text.startswith(_TRAINER)]
            advice = advice_for_name("Trainer", name, names, FORMER_KEYWORDS, prefix=_TRAINER)
            return RoomierError(option, given, _NO_KEYWORD, advice)
        return RoomierError(option, given, "is not an option", did_you_mean(option, options))
    if found := _UNKNOWN_IN_GROUP.search(message):
        field = f"{found['group']}.{found['name']}"
        advice = advice_for_name("Trainer", found["name"], _names_of(Trainer), FORMER_KEYWORDS)
        return RoomierError(field, "...", _NO_KEYWORD, advice)
    if found := _UNKNOWN_IN_CLASS.search(message):
        action = did_you_mean(found["name"], _names_of(locate(found["path"])))
        return RoomierError(_key(message), found["name"], f"is not an argument of {found['path']}", action)
    innermost = [*_BAD_VALUE.finditer(message)]
    if innermost:
        found = innermost[-1]
        field = found["key"] if len(innermost) == 1 and found.start() == 0 else f"{_key(message)}.{found['key']}"
        return RoomierError(field, found["value"], "has the wrong type", f"Pass {_kind(found['kind'])}")
    if found := _PROBLEM_IN_CLASS.search(message):
        return RoomierError(_key(message), found["path"], found["problem"].strip(), _see_help(parser))
    if found := _NO_SUBCLASS.search(message):
        kind = f"a subclass of {found['base']}"
        return RoomierError(_key(message), _given(message), f"must be {kind}", f"Pass {kind}")
    if found := _UNION.search(message):
        return RoomierError(_key(message), _given(message), "has the wrong type", f"Pass {_kinds(found['kinds'])}")
    if found := _NOT_ACCEPTED.search(message):
        return RoomierError(found["name"], "...", "is not an option", did_you_mean(f"--{found['name']}", options))
    if found := _MISSING.search(message):
        missing = f"--{found['names'].split(', ')[0]}"
        return RoomierError(missing, None, "is required", "Pass this option, or add it to a --config file")
    if found := _NO_IMPORT_PATH.search(message):
        return RoomierError(_key(message), found["value"], "must be a class path", "Use package.module.Class")
    if found := _BAD_OPTION.search(message):
        return RoomierError(found["option"], None, found["problem"], _see_help(parser))
    return RoomierError(_key(message), _given(message), " ".join(message.split()), _see_help(parser))


def _key(message: str) -> str:
    found = _KEY.search(message)
    return found["key"] if found else "options"


def _given(message: str) -> str:
    return message.rpartition("Given value: ")[2].strip() if "Given value: " in message else "..."


def _kind(text: str) -> str:
    """Convert ``<class 'int'>`` to ``int``."""
    return re.sub(r"<class '([\w.]+)'>", r"\1", text)


def _kinds(text: str) -> str:
    """Convert ``<class 'int'>, <class 'float'>, <class 'NoneType'>`` to ``int, float or null``."""
    kinds = [_kind(each).replace("NoneType", "null") for each in re.split(r", (?=<class|\w+\.)", text)]
    return " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


def _names_of(kind: object) -> Iterable[str]:
    if not callable(kind):
        return ()
    return [name for name in inspect.signature(kind).parameters if name not in ("self", "args", "kwargs")]


def _see_help(parser: ArgumentParser) -> str:
    return f"See `{parser.prog} --help`"
