"""Answers to the settings of another library: a Trainer argument, a remark, or an error for each setting."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roomier.core.errors import PlanError, shorten
from roomier.core.log import notice
from roomier.plan.choices import canonical
from roomier.plan.rules import refuse


@dataclass(frozen=True)
class Answer:
    """Answer to one setting of another library.

    Attributes:
        setting: name of the setting in the other library, such as ``"zero_optimization.stage"``.
        value: value that was received for the setting.
        keyword: argument of the Trainer that the setting determines, such as ``"offload.parameters"``. Empty if the
            setting has no effect.
        meaning: value to which the argument is set.
        remark: reason why the setting has no effect, or a difference between the setting and the argument.
    """

    setting: str
    value: object
    keyword: str = ""
    meaning: object = None
    remark: str = ""

    @property
    def text(self) -> str:
        """Answer as text, such as ``"precision='bf16-mixed'"`` or ``"no effect: ..."``."""
        if not self.keyword:
            return f"no effect: {self.remark}"
        return f"{self.keyword}={self.meaning!r}" + (f" ({self.remark})" if self.remark else "")


class Answers:
    """Answers to all settings of one object, file or argument of another library.

    Args:
        source: name of the object, file or argument in messages, such as ``"FSDPStrategy"``.

    Attributes:
        given: the answers, that is, the results of the conversion, in the order of the settings.
        errors: the settings that are rejected.
        notes: additional sentences for the user.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.given: list[Answer] = []
        self.errors: list[PlanError] = []
        self.notes: list[str] = []

    def use(self, setting: str, value: object, keyword: str, meaning: object, remark: str = "") -> None:
        """Answer with ``keyword=meaning``. A dot in ``keyword`` precedes a key of a dict, as in ``"offload.share"``."""
        for each in self.given:
            if each.keyword == keyword and each.meaning != meaning:
                problem = f"requires {keyword}={meaning!r}, but {each.setting} requires {each.meaning!r}"
                self.reject(setting, value, problem, f"Remove {setting} or {each.setting}")
                return
        self.given.append(Answer(setting, value, keyword, meaning, remark))

    def ignore(self, setting: str, value: object, reason: str) -> None:
        """Record that the setting has no effect, and the reason."""
        self.given.append(Answer(setting, value, remark=reason))

    def reject(self, setting: str, value: object, problem: str, action: str) -> None:
        """Record an error, which :meth:`keywords` raises."""
        self.errors.append(PlanError(f"{self.source}: {setting}", value, problem, action))

    def meaning_of(self, keyword: str) -> Any:
        """Return the value of the argument ``keyword``, or None if no setting determines this argument."""
        return next((each.meaning for each in self.given if each.keyword == keyword), None)

    def settings_of(self, keyword: str) -> list[Answer]:
        """Return the answers that set keys of the argument ``keyword``, which is a dict."""
        return [each for each in self.given if each.keyword.startswith(f"{keyword}.")]

    def keywords(self) -> dict[str, Any]:
        """Return the arguments of the Trainer that the settings determine.

        Raises:
            PlanError: settings are rejected. All errors are reported together.
        """
        refuse(self.errors, self.source)
        return self.accepted()

    def accepted(self) -> dict[str, Any]:
        """Return the arguments as in :meth:`keywords`, without the settings that are rejected."""
        found: dict[str, Any] = {}
        for each in self.given:
            if each.keyword:
                name, _, key = each.keyword.partition(".")
                own_key = key or ("name" if name in _WITH_NAME else "")
                if own_key:
                    if not isinstance(found.get(name), dict):  # missing, or True, which a dict includes
                        found[name] = {}
                    found[name][own_key] = each.meaning
                elif not (each.meaning is True and isinstance(found.get(name), dict)):
                    found[name] = each.meaning
        for name in _WITH_NAME.keys() & found.keys():
            if found[name].keys() == {"name"}:
                found[name] = found[name]["name"]
        return found

    def remarks(self) -> Iterator[str]:
        """Yield one sentence for each setting that has no effect, and for each argument with a remark."""
        for each in self.given:
            if each.remark:
                yield f"{self.source}: {each.setting}={shorten(each.value, 60)}: {each.text}"

    def report(self) -> None:
        """Print the remarks as notices."""
        for remark in self.remarks():
            notice(remark)

    def table(self) -> str:
        """Return all answers as a table: first the arguments, then the settings without effect, grouped by reason."""
        used = [(f"{each.setting}={shorten(each.value, 40)}", each.text) for each in self.given if each.keyword]
        width = max((len(setting) for setting, _ in used), default=0)
        lines = [f"  {setting:{width}}  {text}" for setting, text in used]
        reasons: dict[str, list[str]] = {}
        for each in self.given:
            if not each.keyword:
                reasons.setdefault(each.remark, []).append(f"{each.setting}={shorten(each.value, 40)}")
        for reason, settings in reasons.items():
            lines += textwrap.wrap(", ".join(settings), 98, initial_indent="  ", subsequent_indent="  ")
            lines += [f"    no effect: {reason}"]
        return "\n".join([f"{self.source}:", *lines, *(f"  {note}" for note in self.notes)])


_WITH_NAME = {"strategy": "parallel.strategy", "optimizer": "optimizer.name", "lr_schedule": "optimizer.schedule"}
"""Arguments that are a name, or a dict with a name, and the fields of the Plan for their names."""


def merged(answers: Answers, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments ``given`` to the Trainer together with the arguments in ``answers``.

    Args:
        defaults: the default values of the arguments. An argument that has its default value is treated as if it were
            not given.

    Raises:
        PlanError: settings are rejected, or an argument and a setting request different values. All errors are reported
            together.
    """
    found = answers.accepted()
    errors = list(answers.errors)
    for name in sorted(found.keys() & given.keys()):
        own, value = given[name], found[name]
        if own is None or (name in defaults and own == defaults[name]):
            continue
        one, other = _as_settings(name, own), _as_settings(name, value)
        is_both = isinstance(one, Mapping) and isinstance(other, Mapping)
        if is_both and all(one[key] == other[key] for key in one.keys() & other.keys()):
            both = {**other, **one}
            found[name] = both["name"] if both.keys() == {"name"} else both
        elif own != value:
            settings = [each.setting for each in answers.given if each.keyword.partition(".")[0] == name]
            problem = f"differs from {value!r}, which {answers.source} requests ({', '.join(settings)})"
            errors.append(PlanError(name, own, problem, f"Remove {name}, or change the setting"))
    refuse(errors, answers.source)
    return {**given, **found}


def _as_settings(argument: str, value: Any) -> Any:
    """Return the value of an argument in ``_WITH_NAME`` as a dict whose name has the canonical spelling."""
    if argument not in _WITH_NAME:
        return value
    settings = {"name": value} if isinstance(value, str) else value
    if not isinstance(settings, Mapping) or "name" not in settings:
        return settings
    return {**settings, "name": canonical(_WITH_NAME[argument], settings["name"])}


_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "torch")


def kind_of(value: object, known: Mapping[str, Any], field: str) -> str | None:
    """Return the name of the class of ``value`` if the name is in ``known``; otherwise, None.

    Raises:
        PlanError: ``value`` is an instance of a subclass. roomier would not call the methods of the subclass.
    """
    own, *bases = [each.__name__ for each in type(value).__mro__]
    if own in known:
        return own
    base = next((each for each in bases if each in known), None)
    is_of_library = type(value).__module__.partition(".")[0] in _LIBRARIES
    if base is None or is_of_library:
        return None
    problem = f"is an instance of a subclass of {base}, and roomier does not call the methods of the subclass"
    raise PlanError(field, value, problem, f"Pass a {base}, and move the overridden methods to a callback")


def setting_of(value: object, *attributes: str) -> Any:
    """Return the value of the first of ``attributes`` that ``value`` has and that is not None; otherwise, None."""
    return next((found for name in attributes if (found := getattr(value, name, None)) is not None), None)


def name_of(value: object) -> str:
    """Return the name of a function, class, enum member or dtype, such as ``"bfloat16"`` for ``torch.bfloat16``."""
    text = getattr(value, "__name__", None) or getattr(value, "name", None)
    return str(text if isinstance(text, str) else value).removeprefix("torch.")
