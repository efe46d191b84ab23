"""Objects on their way to the ranks of a notebook."""

import io
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from roomier.callbacks import LambdaCallback
from roomier.core.errors import RoomierError
from roomier.launch.pickled import by_reference, check, read, write_by_value

pytest.importorskip("cloudpickle", reason="needs the extra roomier[notebooks]")

LOCK: Any = threading.Lock()


def with_lock() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    model[1][0].lock = LOCK
    return model


def use_lock() -> None:
    with LOCK:
        pass


def enclosing() -> Any:
    lock = LOCK
    return lambda: lock


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"model": with_lock()}, r"model\.1\.0\.lock="),
        (
            {"model": nn.ReLU(), "train_dataloaders": [[1], (each for each in [1])]},
            r"train_dataloaders\[1\]=<generator",
        ),
        ({"datamodule": {"a": 1, "b": partial(print, LOCK)}}, r"datamodule\['b'\]\.args\[0\]="),
        ({"callbacks": [LambdaCallback(on_fit_start=enclosing())]}, r"lock \(a variable that callbacks\[0\]\."),
        ({"model": LOCK}, "model="),
    ],
    ids=["layer", "data", "argument", "variable", "itself"],
)
def test_an_object_that_cannot_be_pickled_is_named(values: dict[str, Any], name: str) -> None:
    with pytest.raises(RoomierError, match=f"^{name}.*cannot be sent to the ranks: TypeError: cannot pickle"):
        check(values)


def test_tensors_arrive_with_their_values_and_shared_memory() -> None:
    tied = nn.Linear(2, 3)
    tied.same, tied.part = tied.weight, tied.weight.detach()[1:]
    tied.half = torch.ones(3, dtype=torch.bfloat16)
    file = io.BytesIO()
    write_by_value({"model": tied, "step": torch.ones(2, requires_grad=True) * 2}, file)
    file.seek(0)
    found = read(file)
    model = found["model"]
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.requires_grad
    assert torch.equal(model.weight, tied.weight)
    assert model.same is model.weight
    model.part.zero_()
    assert not model.weight[1:].any()
    assert model.half.dtype == torch.bfloat16
    assert found["step"].tolist() == [2, 2]
    assert by_reference(LOCK) is None
