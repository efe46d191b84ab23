"""Hyperparameters in OmegaConf containers, in a Lightning checkpoint."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from roomier import Module
from roomier.checkpoint.lightning import LightningFile
from roomier.core.errors import CheckpointError

NAMES: dict[str, list[str]] = {
    "omegaconf": [],
    "omegaconf.dictconfig": ["DictConfig"],
    "omegaconf.listconfig": ["ListConfig"],
    "omegaconf.base": ["ContainerMetadata", "Metadata"],
    "omegaconf.nodes": ["AnyNode"],
}


@contextmanager
def classes_of_omegaconf() -> Iterator[dict[str, type]]:
    """While a file is written, provide classes with the names of OmegaConf's classes. OmegaConf need not be
    installed."""
    made: dict[str, type] = {}
    with pytest.MonkeyPatch.context() as patch:
        for module_name, names in NAMES.items():
            module = ModuleType(module_name)
            for name in names:
                made[name] = type(name, (), {"__module__": module_name})
                setattr(module, name, made[name])
            patch.setitem(sys.modules, module_name, module)
        yield made


def config_of(value: Any, classes: Mapping[str, type], parent: Any = None) -> Any:
    """Convert ``value`` to the form of OmegaConf 2.x: a tree of nodes, each with its metadata and its parent."""
    is_container = isinstance(value, (dict, list))
    kind = "DictConfig" if isinstance(value, dict) else "ListConfig" if is_container else "AnyNode"
    node, notes = classes[kind](), classes["ContainerMetadata" if is_container else "Metadata"]()
    vars(notes).update(ref_type=Any, object_type=type(value) if is_container else None, optional=True, key=None)
    vars(node).update(_metadata=notes, _parent=parent, _flags_cache=None)
    if not is_container:
        vars(node).update(_val=value)
        return node
    vars(notes).update(key_type=int, element_type=Any, resolver_cache=defaultdict(dict))
    items = {key: config_of(each, classes, node) for key, each in value.items()} if isinstance(value, dict) else None
    vars(node).update(_content=[config_of(each, classes, node) for each in value] if items is None else items)
    return node


def saved(path: Path, settings: dict[str, Any], module: nn.Module | None = None, **others: Any) -> Path:
    weights = {} if module is None else module.state_dict()
    with classes_of_omegaconf() as classes:
        config = config_of(settings, classes)
        torch.save({"state_dict": weights, "hyper_parameters": {"config": config}, **others}, path)
    return path


class Configured(Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(config.net.sizes[0], config["net"].sizes[1])


def test_a_module_is_created_from_omegaconf_hyperparameters(tmp_path: Path) -> None:
    settings = {"net": {"sizes": [3, 2], "act": None}, "lr": 0.1, "name": "a", "deep": [{"x": [True]}]}
    path = saved(tmp_path / "x.ckpt", settings, nn.ModuleDict({"layer": nn.Linear(3, 2)}))

    file = LightningFile(path)

    assert file.hyperparameters == {"config": settings}
    module = Configured.load_from_checkpoint(path)
    assert torch.equal(module.layer.weight, file.state_dict["layer.weight"])


def test_interpolations_are_never_used_as_text(tmp_path: Path) -> None:
    settings = {"net": {"sizes": [3, 2]}, "rate": "${base.rate}", "list": ["a", "b-${name}"], "must": "???"}
    path = saved(tmp_path / "x.ckpt", settings, nn.Linear(1, 1))

    file = LightningFile(path)

    assert set(file.state_dict) == {"weight", "bias"}, "the weights of such a file are read"
    expected = (
        r"\['config'\]\['rate'\] = '\$\{base.rate\}', .*\['list'\]\[1\] = 'b-\$\{name\}', .*\['must'\] = '\?\?\?'"
    )
    with pytest.raises(CheckpointError, match=expected + r".*OmegaConf\.resolve\(cfg\).*fit\(ckpt_path"):
        Configured.load_from_checkpoint(path)


@pytest.mark.parametrize("value", [int, [float], {"kind": dict}])
def test_a_type_among_the_hyperparameters_is_rejected(tmp_path: Path, value: Any) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": {"kind": value}}, tmp_path / "x.ckpt")

    with pytest.raises(CheckpointError, match=r"it contains a type, such as int, as a value"):
        LightningFile(tmp_path / "x.ckpt")


def test_a_container_that_contains_itself_or_has_no_content_is_rejected(tmp_path: Path) -> None:
    with classes_of_omegaconf() as classes:
        looped, empty = classes["DictConfig"](), classes["ListConfig"]()
        vars(looped)["_content"] = {"itself": looped}
        for name, config in (("looped", looped), ("empty", empty)):
            torch.save({"state_dict": {}, "hyper_parameters": {"config": config}}, tmp_path / name)

    for name in ("looped", "empty"):
        with pytest.raises(CheckpointError, match="cannot be loaded without executing code"):
            LightningFile(tmp_path / name)
