"""Conversion of a state to named tensors and JSON, and back, without a disk."""

import json
import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roomier.checkpoint import tree
from roomier.core.errors import CheckpointError


def through_json(state):
    tensors, json_tree = tree.split(state)
    joined = tree.join(json.loads(json.dumps(json_tree, allow_nan=False)))
    return tree.fill(joined, lambda _, stored: tensors[stored.name])


def same(left, right) -> bool:
    """Return True if values and types are equal. nan is equal to nan, and 0.0 differs from -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(lk, rk) and same(lv, rv) for (lk, lv), (rk, rv) in pairs)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return left.hex() == right.hex()
    return left == right


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8)
keys = st.recursive(
    scalars.filter(lambda key: key == key),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
states = st.dictionaries(
    keys,
    st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys | st.sampled_from(["~tuple", "~tensor", "a.b"]), inner, max_size=3)
        ),
        max_leaves=10,
    ),
    max_size=4,
)


@settings(deadline=None)
@given(states)
def test_plain_values_keep_their_types(state):
    assert same(through_json(state), state)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 2**5000, -(2**63) - 1])
def test_numbers_that_json_cannot_represent(value):
    assert same(through_json({"x": value}), {"x": value})


def test_each_tensor_has_a_unique_name_even_if_joined_paths_are_equal():
    state = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2), "b#2": torch.tensor(3)},
        "l": [torch.tensor(4)],
        "l.0": torch.tensor(5),
        0: torch.tensor(6),
        "0": torch.tensor(7),
        "__metadata__": torch.tensor(8),
        "\ud800": torch.tensor(9),
        "": torch.tensor(10),
    }
    tensors, _ = tree.split(state)
    assert len(tensors) == 10
    assert "__metadata__" not in tensors
    back = through_json(state)
    assert [int(leaf) for _, leaf in tree.leaves(back, torch.Tensor)] == list(range(1, 11))
    assert list(back) == list(state)


def test_names_are_paths_joined_by_dots():
    tensors, _ = tree.split({"module": {"blocks.0.weight": torch.ones(1)}, "opt": [{7: torch.ones(1)}]})
    assert list(tensors) == ["module.blocks.0.weight", "opt.0.7"]


def test_mappings_of_other_classes_become_dicts():
    assert same(through_json({"sd": OrderedDict(b=1, a=2)}), {"sd": {"b": 1, "a": 2}})


class Point(tuple):
    __slots__ = ()


def _contains_itself():
    loop: list = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (object(), "object"),
        (lambda: 0, "function"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (Point((1, 2)), "Point"),
        (torch.Size([2]), "Size"),
        (torch.float32, "dtype"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.ones(2).to_sparse(), "sparse_coo"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.nn.parameter.UninitializedParameter(), "UninitializedParameter"),
        ({b"key": 1}, "bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_values_are_rejected_with_path_and_type(value, type_name):
    with pytest.raises(CheckpointError) as caught:
        tree.split({"ok": 1, "deep": {"er": [0, value]}})
    assert str(caught.value).startswith("state['deep']['er'][1]")
    assert type_name in str(caught.value)


def test_a_state_that_contains_itself_is_rejected():
    with pytest.raises(CheckpointError, match="contains itself"):
        tree.split({"loop": _contains_itself()})


def test_a_state_that_is_not_a_mapping_is_rejected():
    with pytest.raises(CheckpointError, match=r"state=<class 'list'>: is not a mapping"):
        tree.split([1])


def test_scalars_of_numpy_are_stored_as_python_values():
    """A learning rate from ``np.logspace`` is a scalar of NumPy, and Lightning saves it, too."""
    assert same(through_json({"lr": np.float64(0.1), "count": np.int32(7)}), {"lr": 0.1, "count": 7})
