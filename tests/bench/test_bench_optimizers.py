"""``python -m benchmarks optimizers``: a short run of the command, and a run of full length (slow)."""

import argparse
import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from benchmarks import optimizers
from roomier.core.errors import RoomierError

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def result(bench: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    words = ["--steps", "60", "--seeds", "1", "--step-parameters", "1000", "--repeats", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "_WIDTH", 64)  # with so few parameters, compilation would take too long
        return bench("optimizers", "--json", *words, "--optimizers", "adamw4bit")


def test_four_bits_learn_like_32(result: dict[str, Any]) -> None:
    peer, ours = result["rows"]
    assert (peer["optimizer"], ours["optimizer"]) == ("adamw", "adamw4bit")
    assert peer["loss"] < 3.6, "ln 256 = 5.5 is the loss of a uniform guess"
    assert ours["ratio_to_adamw"] == pytest.approx(1, abs=0.02)
    assert ours["ratio_to_adamw"] == ours["loss"] / peer["loss"]
    assert ours["loss_all"] == [ours["loss"]]
    assert ours["train_loss"] == pytest.approx(ours["loss"], rel=0.1)


def test_bytes_and_times_are_reported(result: dict[str, Any]) -> None:
    peer, ours = result["rows"]
    assert peer["state_bytes_per_parameter"] == pytest.approx(8, rel=1e-3)
    assert 1 < ours["state_bytes_per_parameter"] < 1.1
    assert 0.8 < ours["large_share"] < 1
    assert ours["step_s"] > 0
    assert ours["step_ratio_to_adamw"] == pytest.approx(ours["step_cpu_s"] / peer["step_cpu_s"])
    assert {"torch", "commit", "machine", "command", "model"} <= set(result)


def test_the_table_shows_the_same_figures(result: dict[str, Any]) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(optimizers.table(result))
    text = console.export_text()
    assert "adamw4bit" in text
    assert f"{result['rows'][1]['loss']:.4f}" in text


@pytest.mark.parametrize("words", [["--optimizers", "adamw9bit"]])
def test_an_unknown_optimizer_is_rejected(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    optimizers.add_arguments(parser)
    with pytest.raises(RoomierError, match=r"adamw9bit.*Did you mean"):
        optimizers.measure(parser.parse_args(words))


@pytest.mark.slow
def test_low_bit_states_end_within_half_a_percent_of_float32(bench: Callable[..., dict[str, Any]]) -> None:
    rows = bench("optimizers", "--json")["rows"]
    assert [row["optimizer"] for row in rows] == ["adamw", "adamw8bit", "adamw4bit"]
    for row, limit in zip(rows[1:], (2.1, 1.1), strict=True):
        assert row["ratio_to_adamw"] < 1.005
        assert row["state_bytes_per_parameter"] <= limit
        assert row["step_ratio_to_adamw"] < 3
