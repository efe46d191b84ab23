"""The YAML loader and dumper of Plans. Every written value is read back unchanged."""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from roomier.core.errors import PlanError
from roomier.core.yaml_text import BoundedLoader


class Dumper(yaml.SafeDumper):
    """SafeDumper that quotes strings that :class:`Loader` would read as a number or would fold at a line break."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML writes strings with these line breaks unquoted, and reads each of these breaks as a space or as a
        # different line break
        style = '"' if _UNICODE_BREAK.search(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


class Loader(BoundedLoader):
    """BoundedLoader that reads ``3e-4`` as a number and rejects duplicate keys. YAML 1.2 defines ``3e-4`` as a number,
    but PyYAML reads a string."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise PlanError("plan", key, "is a duplicate key", "Remove one of the two")
        return super().construct_mapping(node, deep)


_UNICODE_BREAK = re.compile("[\x85\u2028\u2029]")
_SCIENTIFIC = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
Dumper.add_representer(str, Dumper.represent_str)
for _resolver in (Dumper, Loader):
    _resolver.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))
