"""Blocks of a model, and units of sharding."""

import pytest
import torch
from torch import nn

from roomier.api.blocks import find_blocks, open_blocks
from roomier.core.errors import RoomierError
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.parallel.shard import parts_of, root_parameters_of, units_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 4)


class Deep(nn.Module):
    """Nested layers, and a stack of plain linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(Layer(), Layer()) for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.lone = nn.ModuleList([Layer()])


def gpt(*, tied_head: bool = False) -> GPT:
    return GPT(GPTConfig(vocab_size=50, context=8, num_layers=3, num_heads=2, width=8, tied_head=tied_head))


def test_layers_of_a_list_are_blocks() -> None:
    model = gpt()
    assert find_blocks(model) == list(model.blocks)


def test_only_outermost_repeated_modules_are_blocks() -> None:
    model = Deep()
    assert find_blocks(model) == list(model.stages)


def test_modules_without_repetition_or_submodules_are_not_blocks() -> None:
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    assert find_blocks(nn.Sequential(Layer(), nn.Linear(4, 4))) == []
    assert find_blocks(nn.Linear(2, 2)) == []


def test_layer_at_two_places_is_one_block() -> None:
    shared, other = Layer(), Layer()
    assert find_blocks(nn.Sequential(shared, other, shared)) == [shared, other]


def test_layers_of_a_dict_are_blocks() -> None:
    model = nn.ModuleDict({"a": Layer(), "b": Layer()})
    assert find_blocks(model) == [model["a"], model["b"]]


class Composite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()


def test_only_blocks_that_consist_of_blocks_are_opened() -> None:
    model = Deep()
    assert open_blocks(find_blocks(model)) == list(model.stages)  # the inner layers have one level of modules
    stages = [nn.Sequential(Composite(), Composite(), nn.Linear(4, 4)) for _ in range(2)]
    assert open_blocks(stages) == [each for stage in stages for each in [*stage][:2]]
    lists = [nn.ModuleList([Layer(), nn.Linear(4, 4)]) for _ in range(2)]  # never called
    assert open_blocks(lists) == [each for members in lists for each in members]


class Declares(Deep):
    def model_blocks(self) -> list[nn.Module]:
        return [self.lone[0], self.mlp]


def test_declared_blocks_are_used() -> None:
    model = Declares()
    assert find_blocks(model) == [model.mlp, model.lone[0]]  # in the order of registration


class DeclaresStranger(Deep):
    def model_blocks(self) -> list[nn.Module]:
        return [Layer()]


def test_declared_block_outside_the_model_is_rejected() -> None:
    with pytest.raises(RoomierError, match=r"model_blocks.*Layer.*must be a submodule of the model"):
        find_blocks(DeclaresStranger())


class NamesClasses(Deep):
    _no_split_modules = ("Layer",)


def test_classes_in_no_split_modules_are_blocks() -> None:
    holder = nn.Module()
    holder.model = NamesClasses()  # a module that contains the model
    layers = [each for each in holder.modules() if isinstance(each, Layer)]
    assert len(layers) == 5
    assert find_blocks(holder) == layers


def test_units_are_blocks_and_large_layers() -> None:
    model = gpt()
    small = {model.norm, model.positions}
    assert units_of(model, find_blocks(model)) == [model.tokens, *model.blocks, model.head] or small & set(
        units_of(model, find_blocks(model))
    )
    assert model.norm not in units_of(model, find_blocks(model))


def test_tied_parameters_belong_to_the_root() -> None:
    model = gpt(tied_head=True)
    units = units_of(model, find_blocks(model))
    assert model.tokens not in units
    assert model.head not in units
    assert set(model.blocks) <= set(units)


def test_block_with_a_shared_tensor_belongs_to_the_root() -> None:
    model = nn.Sequential(Layer(), Layer(), Layer(), nn.Linear(8, 4))
    model[3].weight = model[1].down.weight
    units = units_of(model, find_blocks(model))
    assert model[0] in units
    assert model[2] in units
    assert model[1] not in units


def test_submodules_of_attention_are_not_units() -> None:
    """The forward of attention reads the weights of its submodules without calling the submodules."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 8)})
    assert units_of(model, find_blocks(model)) == [model["attention"], model["head"]]


def test_no_parameter_is_in_two_units() -> None:
    model = nn.ModuleDict({"gpt": gpt(), "deep": Deep(), "attention": nn.MultiheadAttention(8, 2)})
    owned = [parameter for unit in units_of(model, find_blocks(model)) for parameter in unit.parameters()]
    assert len(owned) == len(set(owned))


def test_only_matmul_weights_are_gathered_in_low_precision() -> None:
    block = Layer()
    assert parts_of(block, torch.bfloat16) == [([block.norm], None), ([block], torch.bfloat16)]
    assert parts_of(block, None) == [([block], None)]
    embedding = nn.Embedding(3, 4)
    assert parts_of(embedding, torch.bfloat16) == [([embedding], None)]
    linear = nn.Linear(3, 4)
    assert parts_of(linear, torch.bfloat16) == [([linear], torch.bfloat16)]


def test_few_norms_of_a_block_belong_to_the_root() -> None:
    norm, small = nn.LayerNorm(64), nn.LayerNorm(4)
    wide, narrow = nn.Sequential(norm, nn.Linear(64, 2048)), nn.Sequential(small, nn.Linear(4, 4))
    assert root_parameters_of([wide, narrow], torch.bfloat16) == {*norm.parameters()}
    assert root_parameters_of([wide, narrow], None) == set()
    assert parts_of(wide, torch.bfloat16) == [([wide], torch.bfloat16)]
    assert parts_of(narrow, torch.bfloat16) == [([small], None), ([narrow], torch.bfloat16)]
    assert root_parameters_of([norm], torch.bfloat16) == set()
