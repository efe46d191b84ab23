"""The YAML loader and dumper of Plans. Every written value is read back unchanged."""

import re

import yaml

from roomier.core.errors import PlanError
from roomier.core.yaml_text import DuplicateKeyError, UniqueKeysLoader


class Dumper(yaml.SafeDumper):
    """SafeDumper that quotes strings that :class:`Loader` would read as a number or would fold at a line break."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML writes strings with these line breaks unquoted, and reads each of these breaks as a space or as a
        # different line break
        style = '"' if _UNICODE_BREAK.search(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


class Loader(UniqueKeysLoader):
    """UniqueKeysLoader that reads ``3e-4`` as a number, as YAML 1.2 defines. PyYAML itself reads ``3e-4`` as a
    string."""


def load(text: str) -> object:
    """Return the value in one YAML document.

    Raises:
        PlanError: a mapping contains a duplicate key.
        yaml.YAMLError, ValueError: the text is not YAML.
    """
    try:
        return yaml.load(text, Loader=Loader)
    except DuplicateKeyError as error:
        raise PlanError("plan", error.key, "is a duplicate key", "Remove one of the two") from None


_UNICODE_BREAK = re.compile("[\x85\u2028\u2029]")
_SCIENTIFIC = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
Dumper.add_representer(str, Dumper.represent_str)
for _resolver in (Dumper, Loader):
    _resolver.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))
