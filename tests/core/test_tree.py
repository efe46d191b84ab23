"""Functions on nested batches preserve the structure and change the tensors."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import InitVar, dataclass, field

import pytest
import torch

from roomier.core.tree import batch_size_of, map_tensors, tensors, to_device

Pair = namedtuple("Pair", "x y")
ONE, TWO = torch.ones(2, 3), torch.zeros(4)


@dataclass
class Graph:
    nodes: torch.Tensor
    name: str
    num_nodes: int = field(init=False)

    def __post_init__(self):
        self.num_nodes = len(self.nodes)


@pytest.mark.parametrize(
    "batch",
    [
        ONE,
        [ONE, TWO],
        (ONE, "text", None),
        {"a": ONE, "b": [TWO, 3]},
        OrderedDict(b=ONE, a=TWO),
        UserDict({"a": ONE}),
        Pair(ONE, TWO),
        {"deep": [(Pair(ONE, {"x": TWO}),)]},
        "text",
        7,
        None,
        [],
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_structure_is_kept(batch):
    mapped = map_tensors(lambda t: t + 1, batch)
    assert type(mapped) is type(batch)
    before, after = list(tensors(batch)), list(tensors(mapped))
    assert len(before) == len(after)
    assert all(torch.equal(a + 1, b) for a, b in zip(before, after, strict=True))


def test_a_dataclass():
    graph = map_tensors(lambda t: t[:1], Graph(ONE, "g"), reconstructs=True)
    assert (graph.nodes.shape, graph.name, graph.num_nodes) == ((1, 3), "g", 1)
    assert next(iter(tensors(graph))) is graph.nodes


@dataclass(frozen=True)
class Scaled:
    """Batch that scales its values when it is created. The values must not be scaled again when the batch is moved."""

    values: torch.Tensor
    scale: InitVar[float]
    total: torch.Tensor = field(init=False)

    def __post_init__(self, scale):
        object.__setattr__(self, "values", self.values * scale)
        object.__setattr__(self, "total", self.values.sum())


def test_moving_a_dataclass_does_not_call_its_constructor():
    batch = Scaled(ONE, 2.0)
    moved = map_tensors(lambda t: t.double(), batch)
    assert torch.equal(moved.values, 2 * ONE.double())
    assert (float(moved.total), moved.total.dtype) == (12.0, torch.float64)
    assert batch.values.dtype == torch.float32


class Tagged(list):
    def __init__(self, items, tag):
        super().__init__(items)
        self.tag = tag


def test_a_list_subclass_keeps_its_attributes():
    batch = Tagged([ONE], "train")
    moved = map_tensors(lambda t: t + 1, batch)
    assert (type(moved), moved.tag) == (Tagged, "train")
    assert torch.equal(moved[0], ONE + 1)
    assert batch[0] is ONE


def test_tensors_are_returned_in_the_order_of_the_structure():
    first, second, third = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    found = list(tensors({"b": [first, "no"], "a": (second, {"x": third})}))
    assert [int(t) for t in found] == [1, 2, 3]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (ONE, 2),
        (torch.tensor(5.0), 1),
        ({"a": TWO, "b": ONE}, 4),
        (["text", ONE], 2),
        ("text", 1),
        ({}, 1),
        ((torch.tensor(1), ONE), 1),
    ],
    ids=str,
)
def test_batch_size(batch, size):
    assert batch_size_of(batch) == size


def test_to_device_copies_only_tensors_on_other_devices():
    batch = {"x": ONE, "name": "a"}
    same = to_device(batch, torch.device("cpu"))
    assert same["x"] is ONE
    moved = to_device(batch, torch.device("meta"))
    assert (moved["x"].device.type, moved["name"]) == ("meta", "a")


def test_an_object_with_a_method_to_is_moved_by_it():
    class Own:
        def to(self, device):
            return ("moved", device)

    assert to_device(Own(), torch.device("cpu")) == ("moved", torch.device("cpu"))


def test_nested_objects_with_a_method_to_are_moved_by_it():
    class Own:
        def to(self, device):
            return ("moved", device)

    cpu = torch.device("cpu")
    assert to_device({"pair": (Own(), ONE)}, cpu) == {"pair": (("moved", cpu), ONE)}


def test_a_packed_sequence_keeps_its_lengths_on_the_cpu():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    [moved] = to_device([packed], torch.device("meta"))
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
