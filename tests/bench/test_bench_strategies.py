"""``python -m benchmarks strategies --json``, with a model that is too small for meaningful times."""

import argparse
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import rank_processes, strategies
from roomier.core.errors import RoomierError

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def result(bench: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    words = ["--model", "gpt-micro", "--seq-len", "16", "--batch-size", "1", "--steps", "1", "--repeats", "1"]
    words += ["--strategies", "zero3, zero2, ddp", "--context", "2", "--stages", "2"]
    return bench("strategies", "--json", "--ranks", "2", *words)


def test_a_row_for_each_strategy_in_one_order(result: dict[str, Any]) -> None:
    assert [row["strategy"] for row in result["rows"]] == [
        "torch_ddp",
        "ddp",
        "zero2",
        "zero3",
        "zero2+context",
        "ddp+stages",
    ]
    for row in result["rows"]:
        assert row["ranks"] == 2
        assert row["peak_bytes"] > row["model_state_bytes"] >= row["between_steps_bytes"] > 0
        assert sum(row["model_states"].values()) == row["model_state_bytes"]
        assert sum(row["peak"].values()) <= row["peak_bytes"]
        assert row["step_s_all"] == [row["step_s"]]
        assert row["ratio_to_torch_ddp"] == pytest.approx(row["step_s"] / result["rows"][0]["step_s"])


def test_rows_contain_formula_and_measurement(result: dict[str, Any]) -> None:
    *rows, staged = result["rows"]
    for row in rows:
        assert row["model_state_bytes"] == pytest.approx(row["formula_bytes"], rel=0.03), row["strategy"]
    assert staged["num_slots"] == 3
    assert 0 < staged["slot_s"] < staged["step_s"] / 2


def test_strategies_hold_less_than_ddp(result: dict[str, Any]) -> None:
    held = {row["strategy"]: row["model_state_bytes"] / result["num_parameters"] for row in result["rows"]}
    assert held["torch_ddp"] == pytest.approx(16, rel=0.01)
    assert held["ddp"] == pytest.approx(16, rel=0.01)
    assert held["zero2"] < 13
    # Most parameters are in the embedding, which is unsharded while it computes.
    assert held["zero3"] <= held["zero2"]


def test_all_strategies_have_the_same_loss(result: dict[str, Any]) -> None:
    losses = [row["loss"] for row in result["rows"]]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)


def test_collectives_and_circumstances_are_reported(result: dict[str, Any]) -> None:
    assert {"all_reduce_s", "all_gather_s", "reduce_scatter_s"} <= set(result["collectives"])
    assert all(value > 0 for value in result["collectives"].values())
    assert result["case"] == "strategies"
    assert (result["precision"], result["model"], result["ranks"]) == ("bf16-mixed", "gpt-micro", 2)
    assert {"torch", "commit", "machine", "command"} <= set(result)


def test_the_table_shows_the_same_figures(result: dict[str, Any]) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(strategies.table(result))
    text = console.export_text()
    assert "zero3" in text
    assert f"{result['rows'][-1]['step_s'] * 1e3:.0f} ms" in text


def test_all_strategies_are_measured_by_default() -> None:
    assert strategies.possible_strategies("", 1) == ["torch_ddp", "single"]
    assert strategies.possible_strategies("", 2) == ["torch_ddp", "ddp", "zero1", "zero2", "zero3"]
    assert strategies.possible_strategies("", 4) == ["torch_ddp", "ddp", "zero1", "zero2", "zero3", "hsdp"]


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    strategies.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--model", "gpt-nan"], "--model"),
        (["--strategies", "zero4"], "--strategies"),
        (["--strategies", "hsdp", "--ranks", "2"], "--strategies"),
        (["--precision", "bf17-mixed"], "precision.mode"),
    ],
)
def test_unknown_names_are_rejected_before_a_process_starts(words: list[str], field: str) -> None:
    with pytest.raises(RoomierError) as caught:
        strategies.measure(options(*words))
    assert caught.value.field == field


def test_the_failing_rank_is_reported_and_the_others_end(tmp_path: Path) -> None:
    code = (
        "import sys, time; rank = sys.argv[1]; print('no more', rank); time.sleep(60) if rank == '0' else sys.exit(3)"
    )
    processes = []
    for rank in range(2):
        with (tmp_path / f"rank{rank}.txt").open("w") as file:
            processes.append(subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=file))
    with pytest.raises(RoomierError, match=r"rank 1.*code 3") as caught:
        rank_processes._wait(processes, tmp_path, None)
    assert "no more 1" in str(caught.value)
    assert processes[0].poll() is not None
