"""Upper limits on couplings between folders, counted in the syntax trees of the sources."""

import ast
import dataclasses
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType

import grimp
import pytest
import torch
from torch import nn

import roomier
from roomier.api.blocks import find_blocks
from roomier.api.trainer_view import TrainerView
from roomier.plan.levers import LEVERS, Lever
from roomier.run.options import LoopOptions
from roomier.run.progress import Now, Progress, Saves
from roomier.run.run import Run
from roomier.run.settled import Request, Settled, Start
from roomier.trainer import Trainer
from tests.house.sources import PACKAGE, trees
from tests.ranks.pool import RankPool

NAMES_OF_THE_TRAINER = {"trainer", "_trainer"}


def outside_trainer() -> dict[str, ast.Module]:
    return {name: tree for name, tree in trees().items() if not name.startswith("trainer/")}


def imports_trainer_for_types(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that import ``Trainer`` under ``TYPE_CHECKING``."""
    for block in ast.walk(tree):
        if not isinstance(block, ast.If) or "TYPE_CHECKING" not in ast.unparse(block.test):
            continue
        for node in ast.walk(block):
            if isinstance(node, ast.ImportFrom) and any(alias.name == "Trainer" for alias in node.names):
                yield node.lineno


def is_trainer(node: ast.expr) -> bool:
    """Return True if ``node`` reads ``trainer``, ``_trainer`` or an attribute with this name."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in NAMES_OF_THE_TRAINER


def trainer_attributes_set(tree: ast.Module) -> Iterator[str]:
    """Yield the name of each attribute of a Trainer that ``tree`` assigns, including items and calls of ``setattr``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and is_trainer(node.args[0]):
            yield ast.unparse(node.args[1]).strip("'")
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            target: ast.expr = node
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, ast.Attribute) and is_trainer(target.value):
                yield target.attr


def imports_inside_functions(tree: ast.Module) -> Iterator[int]:
    """Yield the lines inside functions that import a module of roomier."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("roomier"):
                    yield node.lineno


def comparisons_with_none(tree: ast.Module) -> Iterator[str]:
    """Yield each expression that is compared with None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node).endswith(" None"):
            yield ast.unparse(node.left)


def calls_of(function: str, tree: ast.Module) -> Iterator[int]:
    """Yield the lines that call ``function`` by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
            yield node.lineno


def has_reason(place: str) -> bool:
    """Return True if the file in ``file: number`` states a reason for its late imports. One comment is sufficient."""
    return "# late import: " in (PACKAGE / place.split(": ")[0]).read_text()


def found(search: Callable[[ast.Module], Iterator[object]], trees: dict[str, ast.Module]) -> list[str]:
    return [f"{name}: {each}" for name, tree in trees.items() for each in search(tree)]


def test_searches_find_each_form() -> None:
    tree = ast.parse(
        """
if TYPE_CHECKING:
    from roomier.trainer import Trainer
trainer.plan = run.trainer.a, self._trainer.b = 1
setattr(trainer, "c", 1)
trainer.d["e"] = trainer.read
def f():
    from roomier.plan import Plan
    return a is None or b is not None
"""
    )
    assert list(imports_trainer_for_types(tree)) == [3]
    assert sorted(trainer_attributes_set(tree)) == ["a", "b", "c", "d", "plan"]
    assert list(imports_inside_functions(tree)) == [8]
    assert list(comparisons_with_none(tree)) == ["a", "b"]
    assert list(calls_of("setattr", tree)) == [5]


def test_only_the_package_imports_the_trainer_for_types() -> None:
    assert {each.split(":")[0] for each in found(imports_trainer_for_types, outside_trainer())} == {"__init__.py"}


def test_code_below_the_trainer_does_not_assign_its_attributes() -> None:
    assigned = [each for each in found(trainer_attributes_set, outside_trainer()) if not each.endswith(" should_stop")]
    assert not assigned


def test_imports_of_our_modules_are_at_the_top_of_the_file() -> None:
    """Other imports are late because the imported module is slow to load, and a comment states this reason."""
    late = found(imports_inside_functions, trees())
    assert [each for each in late if not has_reason(each)] == []
    assert len(late) <= 57


def test_no_circle_of_imports_exists_between_files() -> None:
    """Imports under ``TYPE_CHECKING`` and in functions count. The CycleError lists the files of a circle."""
    graph = grimp.build_graph("roomier")
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()


def test_a_class_name_has_one_meaning() -> None:
    files = defaultdict(list)
    for file, tree in trees().items():
        if not file.startswith(("models/", "planner/")):
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    files[node.name.lstrip("_")].append(file)
    assert {name: defined for name, defined in files.items() if len(defined) > 1} == {}


def test_engine_rarely_compares_with_none() -> None:
    compared = list(comparisons_with_none(trees()["engine/eager.py"]))
    assert len(compared) <= 20
    techniques = {"runner", "parallel", "levers", "updates", "recompute", "output_layer", "scaler"}
    assert sum(name.rpartition(".")[2].lstrip("_") in techniques for name in compared) <= 2


def test_build_file_contains_only_build() -> None:
    functions = [node.name for node in ast.walk(trees()["engine/build.py"]) if isinstance(node, ast.FunctionDef)]
    assert functions == ["build"]
    assert len((PACKAGE / "engine" / "build.py").read_text().splitlines()) <= 110


def test_blocks_are_searched_in_few_places() -> None:
    """The engine searches the blocks for all techniques, and the planner searches the blocks of each shape copy."""
    calls = {name: sum(1 for _ in calls_of("find_blocks", tree)) for name, tree in trees().items()}
    assert {name: number for name, number in calls.items() if number} == {
        "checkpoint/module.py": 1,
        "engine/facts.py": 1,
        "planner/memory/predict.py": 1,
        "techniques/optim/by_name.py": 1,
        "planner/workload.py": 1,
    }


def test_a_fit_searches_the_blocks_of_a_network_one_time(on_ranks: RankPool, tmp_path: Path) -> None:
    for calls in on_ranks(2, searches_of_a_fit, str(tmp_path)):
        assert calls == {"Network": 1}


def searches_of_a_fit(root: str) -> Counter[str]:
    """Return how many times a fit with adapters, sharding and recomputation searches blocks, by the class of the
    searched module."""
    found = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is find_blocks.__code__:
            found[type(frame.f_locals["network"]).__name__.removeprefix("FSDP")] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        Trainer(
            strategy="zero3",
            devices=2,
            accelerator="cpu",
            lora={"rank": 2},
            activation_checkpointing="full",
            optimizer={"name": "adamw", "lr": 0.1},
            max_steps=2,
            default_root_dir=root,
            enable_progress_bar=False,
        ).fit(Network(), [torch.randn(4, 8) for _ in range(4)])
    finally:
        sys.setprofile(before)
    return found


class Network(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        output: torch.Tensor = self.layers(batch)
        return output.square().mean()


NUM_FILES_OF_LEVERS = {"chunked_loss": 21, "step_in_backward": 24}
"""Number of files that name a lever. The numbers may fall, but not rise."""


def names_in(node: ast.AST) -> set[str]:
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in ast.walk(node)}


def names_of(lever: Lever) -> set[str]:
    """Return the keyword and the field of a lever, the properties that only this lever has, and the functions of plan/
    with at most three statements that read one of these names, directly or through another such function."""
    properties = [each.name for each in dataclasses.fields(Lever) if each.default is False]
    names = {lever.keyword, lever.field.partition(".")[2]}
    names |= {name for name in properties if [each for each in LEVERS if getattr(each, name)] == [lever]}
    functions = [
        node
        for file, tree in trees().items()
        if file.startswith("plan/")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and len(node.body) <= 3 and "PlanError" not in names_in(node)
    ]
    while new := {each.name for each in functions if names_in(each) & names} - names:
        names |= new
    return names


def test_derived_names_of_a_lever_are_found() -> None:
    [lever] = [each for each in LEVERS if each.keyword == "step_in_backward"]
    assert names_of(lever) >= {"frees_gradients", "lever_that_frees_gradients", "has_two_backwards"}


@pytest.mark.parametrize("lever", LEVERS, ids=lambda lever: lever.keyword)
def test_few_files_name_a_lever(lever: Lever) -> None:
    word = re.compile(rf"\b({'|'.join(names_of(lever))})\b")
    files = [file for file in trees() if word.search((PACKAGE / file).read_text())]
    assert lever.keyword in NUM_FILES_OF_LEVERS, f"add {lever.keyword!r}: {len(files)} to NUM_FILES_OF_LEVERS"
    assert len(files) <= NUM_FILES_OF_LEVERS[lever.keyword], files


def test_values_of_a_call_document_each_field() -> None:
    for kind, limit in ((Run, 15), (Request, 17), (Settled, 7), (Start, 5), (Progress, 6), (Now, 13), (Saves, 9)):
        names = [each.name for each in dataclasses.fields(kind)]
        documented = re.findall(r"^ {8}([\w, ]+):", kind.__doc__ or "", re.MULTILINE)
        assert sorted(name for line in documented for name in line.split(", ")) == sorted(names), kind
        assert len(names) <= limit


def test_view_of_the_trainer_has_its_public_attributes() -> None:
    # Methods that users call, settings of the tuner, and attributes that only the session and the tuner use.
    verbs = {"fit", "validate", "test", "predict", "predict_stream"}
    of_session = {
        "begin_call",
        "show_loaders",
        "forget_runs",
        "add_callbacks_of",
        "hooked_callbacks",
        "module_of",
        "continue_from",
        "last_module",
    }
    of_tuner = {"use_learning_rate"}
    constants = {"barebones"}
    public = {name for name in dir(Trainer) if not name.startswith("_")} - verbs - of_session - of_tuner - constants
    shown = {name for name in dir(TrainerView) if not name.startswith("_")}
    assert public - shown == set()
    own = set(vars(Trainer(logger=False, enable_checkpointing=False))) | set(LoopOptions.__dataclass_fields__)
    assert shown - public - own == set()


def test_properties_of_the_view_cannot_be_set() -> None:
    properties = {name for name, each in vars(TrainerView).items() if isinstance(each, property)}
    assert all(getattr(TrainerView, name).fset is None for name in properties)
