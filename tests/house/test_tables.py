"""A table over optimizers, strategies, tiers or memory techniques lists all members, or a reason why it does not."""

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

from roomier.core.errors import PlanError
from roomier.plan import levers, rules
from roomier.plan.choices import CHOICES, SWITCHES
from roomier.plan.levers import LEVERS
from tests.house.sources import PACKAGE, tree_of

FAMILIES = {
    "optimizers": set(CHOICES["optimizer.name"]),
    "strategies": set(CHOICES["parallel.strategy"]) - {"auto"},
    "tiers": set(CHOICES["offload.optimizer_states"]) - {"none"},
    "levers": {lever.keyword for lever in LEVERS},
    "fields of levers": {lever.field for lever in LEVERS} - SWITCHES.keys(),
}
INCOMPLETE = {
    ("core/device/capability.py", "_FUSED"): "optimizers with fused kernels in torch",
    ("plan/choices.py", "_SPELLINGS"): "the other optimizers have one spelling",
    ("plan/migrate/deepspeed/config.py", "_NAMES"): "the other optimizers need more than another name",
    ("planner/choosing/candidates.py", "_strategies"): "the sizes of hsdp are appended",
    ("planner/timing/update_time.py", "_ROUNDED"): "the rounding of the other optimizers is part of their entry",
    ("techniques/optim/by_name.py", "_STATE_BITS"): "optimizers with quantized states",
}
"""Tables that list only some members on purpose, with the reason."""
MIN_MEMBERS = 4  # shorter tuples, lists and sets are conditions, not tables


def members_listed(node: ast.AST) -> tuple[set[str], int]:
    """Return the strings in a literal (for tuples as keys, their first element), and the number of members of one
    family that make the literal a table."""
    if isinstance(node, ast.Dict):
        elements, least = node.keys, 2
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        elements, least = node.elts, MIN_MEMBERS
    else:
        return set(), 0
    firsts = [each.elts[0] if isinstance(each, ast.Tuple) and each.elts else each for each in elements]
    return {each.value for each in firsts if isinstance(each, ast.Constant) and isinstance(each.value, str)}, least


def incomplete_tables() -> Iterator[tuple[str, str, str]]:
    """Yield file, enclosing statement or function, and missing members of each incomplete table."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for statement in tree_of(path).body:
            target = getattr(statement, "target", None) or getattr(statement, "targets", [None])[0]
            name = getattr(statement, "name", None) or getattr(target, "id", "")
            for node in ast.walk(statement):
                words, least = members_listed(node)
                for family, members in FAMILIES.items():
                    if least and len(words & members) >= min(least, len(members)) and not members <= words:
                        yield str(path.relative_to(PACKAGE)), name, f"{family} {sorted(members - words)}"


def test_tables_over_optimizers_strategies_tiers_and_levers_are_complete() -> None:
    found = {(path, name): missing for path, name, missing in incomplete_tables()}
    new = {where: missing for where, missing in found.items() if where not in INCOMPLETE}
    assert not new, f"add the missing entries, or add the table to INCOMPLETE with its reason: {new}"
    assert not INCOMPLETE.keys() - found.keys(), "remove complete or deleted tables from INCOMPLETE"


@pytest.mark.parametrize("module", [rules, levers], ids=lambda module: module.__name__)
def test_every_rule_is_in_the_list_of_rules(module: ModuleType) -> None:
    for function in vars(module).values():
        if inspect.isfunction(function) and function.__module__ == module.__name__:
            hints = inspect.get_annotations(function, eval_str=True)
            is_rule = list(hints) == ["plan", "return"] and hints["return"] == Iterator[PlanError]
            assert not is_rule or function in rules.RULES, f"add {function.__name__} to RULES or LEVER_RULES"


def test_a_missing_entry_is_found() -> None:
    node = ast.parse("{'adamw': 1, 'sgd': 2}", mode="eval").body
    words, least = members_listed(node)
    assert len(words & FAMILIES["optimizers"]) >= least
    assert "lion" in FAMILIES["optimizers"] - words
