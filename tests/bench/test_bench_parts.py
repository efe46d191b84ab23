"""Parts that all benchmarks use: turns, clocks, frames, calls and circumstances."""

import importlib.util
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import calls, machine, timing
from benchmarks.__main__ import main
from benchmarks.cases import CASES, load


@pytest.mark.parametrize("name", CASES)
def test_every_case_implements_the_protocol(name: str) -> None:
    case = load(name)
    assert callable(case.add_arguments)
    assert callable(case.measure)
    assert callable(case.table)


def test_compared_blocks_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    collected: list[int] = []
    monkeypatch.setattr("gc.collect", lambda: collected.append(len(order)))  # a collection takes up to a second

    def block(name: str) -> Callable[[], timing.Cost]:
        def run() -> timing.Cost:
            order.append(name)
            return timing.Cost(len(order), 0.0)

        return run

    found = timing.interleave({"a": block("a"), "b": block("b"), "c": block("c")}, num_repeats=3)
    assert "".join(order) == "abccbaabc"
    assert [cost.wall_us for cost in found["b"]] == [2, 5, 8]
    assert collected == list(range(9)), "before each block"


def test_the_cost_of_a_step_counts_rare_work_and_ignores_disturbances() -> None:
    stamps = timing.Stamps()
    now_ns = 0
    for index in range(61):
        stamps._wall_ns.append(now_ns)
        stamps._cpu_ns.append(now_ns // 2)
        now_ns += 1_000 + (10_000 if index % 10 == 9 else 0)  # each tenth step logs
        now_ns += 5_000_000 if index in (3, 25) else 0  # warm-up; another process
    cost = stamps.cost(num_warmup=10, period=10)
    assert cost.wall_us == pytest.approx(2.0)
    assert cost.cpu_us == pytest.approx(1.0)


def test_stamps_record_both_clocks() -> None:
    stamps = timing.Stamps()
    for index in range(40):
        stamps(index)
        sum(range(2000))
    cost = stamps.cost(num_warmup=10, period=10)
    assert cost.wall_us > 1
    assert cost.cpu_us > 1


def test_differences() -> None:
    assert timing.median_difference([10, 30, 20], [1, 2, 9], count=2) == 9
    assert timing.quartiles_of_difference([11, 22, 33, 44, 55], [10, 20, 30, 40, 50]) == (2, 4)
    assert timing.quartiles_of_difference([3], [1]) == (2, 2)


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with timing.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_muted_discards_output(capsys: pytest.CaptureFixture[str]) -> None:
    with timing.muted():
        print("a")
        print("b", file=sys.stderr)
    print("c")
    output = capsys.readouterr()
    assert (output.out, output.err) == ("c\n", "")


@pytest.fixture
def library(tmp_path: Path) -> ModuleType:
    path = tmp_path / "toy_library" / "__init__.py"
    path.parent.mkdir()
    path.write_text(
        "def fit(step):\n"
        "    for index in range(20):\n"
        "        outer(step, index)\n"
        "def outer(step, index):\n"
        "    between(step, index)\n"
        "    list(gives(2))\n"
        "def between(step, index):\n"
        "    step(index)\n"
        "def gives(count):\n"
        "    yield from range(count)\n"
    )
    spec = importlib.util.spec_from_file_location("toy_library", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_frames_between_fit_and_training_step_are_counted(library: ModuleType) -> None:
    frames = calls.FrameCount(library.fit.__code__, (calls.folder_of(library),), at_index=7)

    def training_step(index: int) -> None:
        frames(index)

    library.fit(training_step)
    assert frames.frames == ["__init__.py:outer", "__init__.py:between"]


def test_only_calls_into_the_library_are_counted(library: ModuleType) -> None:
    count = calls.CallCount((calls.folder_of(library),), first=5, last=15)

    def training_step(index: int) -> None:
        count(index)
        io.StringIO("own").read()

    library.fit(training_step)
    # The calls are outer, between, and three calls of the generator, which is started and then resumed twice.
    assert count.per_step == 5
    assert sys.getprofile() is None


def test_a_package_outside_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PACKAGE", tmp_path)
    assert machine.commit() == {"commit": None, "has_uncommitted_changes": None}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["overhed"], ["benchmark='overhed'", "Did you mean 'overhead'?"]),
        (["overhead", "--step", "3"], ["unrecognized arguments: --step 3", "python -m benchmarks overhead --help"]),
        (["overhead", "--steps", "x"], ["'x' must be an integer of at least 200"]),
        (["overhead", "--repeats", "0"], ["'0' must be an integer of at least 1"]),
    ],
)
def test_invalid_word_gives_one_message_and_exit_code_2(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("benchmarks: error: ")
    assert output.err.count("\n") == 1
    for text in expected:
        assert text in output.err


def test_the_command_lists_its_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "overhead" in capsys.readouterr().out
