"""An extension of griffe that converts the roles of Sphinx in docstrings, such as ``:class:`roomier.Plan```, to links.

The sources keep the roles, which editors understand. A name that has no entry in the reference becomes code.
"""

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([\w.]+)`")


class Roles(Extension):
    """Converts the roles in each docstring after griffe has read the sources."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Convert the roles in the docstring of an object."""
        if obj.docstring is not None:
            value = _EXAMPLE.sub("Examples:", obj.docstring.value)  # the name of the section in Google's style
            obj.docstring.value = _ROLE.sub(_link, value)


def _link(role: re.Match[str]) -> str:
    is_short, name = role.groups()
    shown = name.rpartition(".")[2] if is_short else name
    if not name.startswith("roomier."):
        return f"`{shown}`"
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'
