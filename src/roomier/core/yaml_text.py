"""YAML loaders with limited expansion, so aliases cannot expand a short text to millions of values."""

from collections.abc import Hashable
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

MAX_VALUES_OF_ALIASES = 100_000


class ExpansionError(ComposerError):
    """Error for YAML that has too many values, is nested too deeply, or has a value that contains itself."""


class BoundedLoader(yaml.SafeLoader):
    """SafeLoader that rejects aliases that expand to more than :data:`MAX_VALUES_OF_ALIASES` values.

    PyYAML reads an alias as a reference, so it loads a text with many aliases quickly. However, if code later copies,
    checks or prints the values, it needs memory and time for each of them.

    Raises:
        ExpansionError: aliases expand to too many values, an alias contains itself, or the nesting is too deep.
    """

    def compose_document(self) -> yaml.Node | None:
        """Compose the document and check its size."""
        try:
            node: yaml.Node | None = super().compose_document()
            if node is not None:
                _check_size(node)
        except RecursionError:
            raise ExpansionError(None, None, "the nesting is too deep", self.get_mark()) from None
        return node


class DuplicateKeyError(ConstructorError):
    """Error for a mapping that contains a key more than once.

    Attributes:
        key: key that occurs more than once.
    """

    def __init__(self, key: object, mark: yaml.Mark) -> None:
        super().__init__(None, None, f"duplicate key {key!r}", mark)
        self.key = key


class UniqueKeysLoader(BoundedLoader):
    """BoundedLoader that rejects duplicate keys. PyYAML would use only the last value of a duplicate key.

    Raises:
        DuplicateKeyError: a mapping contains a duplicate key.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Construct the mapping and check its keys."""
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in seen:
                raise DuplicateKeyError(key, key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


def check_aliases(text: str) -> None:
    """Reject the texts that :class:`BoundedLoader` rejects. Use this function for a text that a different loader reads.

    Texts that are not YAML pass this check.

    Raises:
        ExpansionError: see :class:`BoundedLoader`.
    """
    if "&" in text and "*" in text:
        try:
            yaml.compose(text, Loader=BoundedLoader)
        except ExpansionError:
            raise
        except yaml.YAMLError:
            pass


def _check_size(root: yaml.Node) -> None:
    sizes: dict[int, int] = {}  # sizes by node; the size is 0 while the children of the node are counted
    num_values = _count(root, sizes)
    if num_values > max(MAX_VALUES_OF_ALIASES, len(sizes)):
        problem = f"its aliases expand to {num_values} values, but at most {MAX_VALUES_OF_ALIASES} are allowed"
        raise ExpansionError(None, None, problem, root.start_mark)


def _count(node: yaml.Node, sizes: dict[int, int]) -> int:
    known = sizes.get(id(node))
    if known == 0:
        raise ExpansionError(None, None, "an alias contains itself", node.start_mark)
    if known is not None:
        return known
    sizes[id(node)] = 0
    children: list[Any] = [] if isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        children = [each for pair in node.value for each in pair]
    sizes[id(node)] = 1 + sum(_count(child, sizes) for child in children)
    return sizes[id(node)]
