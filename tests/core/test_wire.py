"""Values as bytes for other ranks, and what reading them must not do."""

import json
import math
import os
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roomier.core.errors import DataError, PlanError, RoomierError
from roomier.core.wire import decode, encode
from roomier.plan import plan_from_flags
from roomier.planner.record import Measured
from roomier.train.over_ranks import Told

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
    """Equal, of equal types: True is not 1."""
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return type(one) is type(other) and one == other


@given(values)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float8_e4m3fn, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (4, 2, 2)])
def test_tensors_arrive_as_they_were(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    for each in (tensor, tensor.mT if len(shape) > 1 else tensor, tensor.conj() if dtype.is_complex else tensor):
        found = decode(encode([each, "beside"]))[0]
        assert (found.dtype, found.shape) == (each.dtype, each.shape)
        assert torch.equal(found.to(torch.complex128), each.to(torch.complex128))
    found.zero_()  # it has memory of its own


@pytest.mark.parametrize(
    "value",
    [
        plan_from_flags(strategy="zero2", devices=2, optimizer={"name": "adamw", "lr": 0.1}),
        Told((True, False, False, True, "mean"), 1.5, 2.0, None, 0.0, 0, False),
        Measured(3, ()),
        torch.Size([2, 3]),
        torch.float16,
        Path("/a/b"),
        DataError,
        math.inf,
    ],
)
def test_objects_of_roomier_arrive_equal(value: Any) -> None:
    assert decode(encode({"one": value})) == {"one": value}
    assert type(decode(encode(value))) is type(value)


def test_errors_arrive_with_their_text() -> None:
    for error in (
        PlanError("devices", [4], "is wrong", "Use 2"),
        FileNotFoundError(2, "No such file", "x"),
        KeyError(1),
    ):
        found = decode(encode(error))
        assert (type(found), str(found)) == (type(error), str(error))


@dataclass
class OfUser:
    number: int


@pytest.mark.parametrize("value", [OfUser(1), {"a": [OfUser(1)]}, OfUser, len, {1: object()}])
def test_other_objects_are_rejected_or_pickled(value: Any) -> None:
    with pytest.raises(RoomierError, match="objects of this type are not sent to other ranks"):
        encode(value)


def test_pickles_are_read_only_where_they_are_allowed() -> None:
    value = {"mine": OfUser(7), "tensor": torch.ones(2), "ordered": OrderedDict(a=1)}
    data = encode(value, allows_pickle=True)
    found = decode(data, allows_pickle=True)
    assert found["mine"] == OfUser(7)
    assert type(found["ordered"]) is OrderedDict
    with pytest.raises(ValueError, match="a pickle where none is allowed"):
        decode(data)
    assert decode(encode(value["ordered"])) == {"a": 1}


class Bomb:
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
        ["error", "exec", ["raise KeyboardInterrupt"]],
        ["error", "SystemExit", [1]],
        ["dtype", "load"],
        ["unknown", 1],
    ],
)
def test_a_message_of_an_attacker_runs_nothing(tmp_path: Path, node: list[Any]) -> None:
    path = tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(tmp_path / "control")))
    assert (tmp_path / "control").exists()
    filled = json.loads(json.dumps(node).replace("{path}", str(path)))
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        decode(message(filled, pickle.dumps(Bomb(path))))
    assert not path.exists()
