"""Values are converted to bytes and back, and decoding a message executes no code."""

import json
import math
import os
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roomier.core.errors import DataError, PlanError, RoomierError
from roomier.core.wire import decode, encode
from roomier.plan import plan_from_flags
from roomier.plan.rules import CombinedPlanError
from roomier.planner.measured.record import TrackedRank
from roomier.run.logged.entry import RankEntry

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda each: (
        st.lists(each)
        | st.lists(each).map(tuple)
        | st.dictionaries(scalars, each)
        | st.sets(scalars)
        | st.frozensets(scalars)
    ),
)


def same(one: Any, other: Any) -> bool:
    """Return True if both values are equal and have equal types. Types are compared because ``True == 1``."""
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return type(one) is type(other) and one == other


@given(values)
def test_plain_data_is_decoded_unchanged(value: Any) -> None:
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float8_e4m3fn, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (4, 2, 2)])
def test_tensors_are_decoded_with_their_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    for each in (tensor, tensor.mT if len(shape) > 1 else tensor, tensor.conj() if dtype.is_complex else tensor):
        found = decode(encode([each, "text"]))[0]
        assert (found.dtype, found.shape) == (each.dtype, each.shape)
        assert torch.equal(found.to(torch.complex128), each.to(torch.complex128))
    found.zero_()  # the memory is writable


@pytest.mark.parametrize(
    "value",
    [
        plan_from_flags(strategy="zero2", devices=2, optimizer={"name": "adamw", "lr": 0.1}),
        RankEntry((True, False, False, True, "mean"), 1.5, 2.0, None, 0.0, 0, False),
        TrackedRank(3, ()),
        torch.Size([2, 3]),
        torch.float16,
        Path("/a/b"),
        DataError,
        math.inf,
    ],
)
def test_objects_of_roomier_are_decoded_as_equal_objects(value: Any) -> None:
    assert decode(encode({"one": value})) == {"one": value}
    assert type(decode(encode(value))) is type(value)


def test_errors_are_decoded_with_their_type_and_text() -> None:
    for error in (
        PlanError("devices", [4], "is wrong", "Use 2"),
        CombinedPlanError([PlanError("a", 1, "is wrong", "Use 2"), PlanError("b", object(), "is wrong", "Use 3")]),
        DataError("train_dataloaders", (number for number in range(3)), "is wrong", "Pass a list"),
        FileNotFoundError(2, "No such file", "x"),
        KeyError(1),
    ):
        found = decode(encode(error))
        assert (type(found), str(found)) == (type(error), str(error))


@dataclass
class OfUser:
    number: int


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (OfUser(1), "OfUser"),
        ({"a": [OfUser(1)]}, "OfUser"),
        (OfUser, "type"),
        (len, "builtin_function_or_method"),
        ({1: object()}, "object"),
    ],
)
def test_other_objects_are_rejected_with_their_type(value: Any, name: str) -> None:
    with pytest.raises(RoomierError, match=rf"{name}'>: objects of this type are not sent to other ranks"):
        encode(value)


def test_an_object_that_cannot_be_pickled_is_rejected_with_its_type() -> None:
    with pytest.raises(RoomierError, match=r"function'>: cannot be pickled for other ranks"):
        encode([lambda: 0], allows_pickle=True)


def test_numpy_scalars_become_python_numbers() -> None:
    assert same(decode(encode([np.int64(3), np.float32(0.5), np.bool_(True)])), [3, 0.5, True])


def test_pickles_are_decoded_only_if_the_call_allows_them() -> None:
    value = {"mine": OfUser(7), "tensor": torch.ones(2), "ordered": OrderedDict(a=1)}
    data = encode(value, allows_pickle=True)
    found = decode(data, allows_pickle=True)
    assert found["mine"] == OfUser(7)
    assert type(found["ordered"]) is OrderedDict
    with pytest.raises(ValueError, match="a pickle, but this call does not allow pickles"):
        decode(data)
    assert decode(encode(value["ordered"])) == {"a": 1}


class Bomb:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def message(node: Any, blob: bytes = b"") -> bytes:
    head = json.dumps(node).encode()
    return len(head).to_bytes(8, "little") + head + blob


@pytest.mark.parametrize(
    "node",
    [
        ["pickle", 0, 10**6],
        ["call", "os:mkdir", ["{path}"]],
        ["call", "roomier.trainer.trainer:Trainer", []],
        ["call", "roomier.launch.start:subprocess.Popen", [["touch", "{path}"]]],
        ["call", "roomier.core.errors:Path", ["{path}"]],
        ["dataclass", "roomier.core.ranks:Ranks", []],
        ["dataclass", "roomier.__main__:World", []],
        ["class", "subprocess:Popen"],
        ["enum", "roomier.core.world:World", "rank"],
        ["error", "roomier.core.world:World", "field", 1, "problem", "action", "text"],
        ["exception", "exec", ["raise KeyboardInterrupt"]],
        ["exception", "SystemExit", [1]],
        ["dtype", "load"],
        ["unknown", 1],
    ],
)
def test_a_malicious_message_executes_nothing(tmp_path: Path, node: list[Any]) -> None:
    path = tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(tmp_path / "control")))
    assert (tmp_path / "control").exists()
    filled = json.loads(json.dumps(node).replace("{path}", str(path)))
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        decode(message(filled, pickle.dumps(Bomb(path))))
    assert not path.exists()
