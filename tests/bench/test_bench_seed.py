"""``python -m benchmarks seed``: options, forecasts, and training runs of the tiny sizes."""

import argparse
import io
import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.seed import case
from benchmarks.seed.case import configurations_of
from benchmarks.seed.models import MODELS
from roomier.core.errors import RoomierError

MINGPT = "--n_layer 15 --n_head 16 --n_embd 3072 --gpus 8 --precision 16 --limit_train_batches 128 --batch_size 1"


def options_of(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    case.add_arguments(parser)
    return parser.parse_args(words.split())


def lines_of(words: str) -> list[dict[str, Any]]:
    """Return the lines that ``python -m benchmarks seed`` prints with ``--json``."""
    arguments = ["seed", "--json", *words.split()]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["__main__.py", *arguments])
        assert main(arguments) == 0
    return [json.loads(line) for line in printed.getvalue().splitlines()]


def check_measured(line: dict[str, Any]) -> None:
    assert line["problem"] is None, line
    assert abs(line["error"]) < 0.02, (line["configuration"], line["error"])
    assert line["error"] == pytest.approx(line["forecast_bytes"] / line["measured_bytes"] - 1)
    assert sum(line["measured_by_kind"].values()) == line["measured_bytes"]
    assert line["samples_per_s"] == pytest.approx(line["global_batch"] / line["step_s"])
    assert min(line["step_s_all"]) <= line["step_s"] <= max(line["step_s_all"])
    assert line["forecast_step_s"] > 0


@pytest.mark.more
def test_a_training_on_two_ranks_is_measured() -> None:
    [line] = lines_of("minigpt --size tiny --only zero2 --steps 2 --limit_train_batches 10")
    check_measured(line)
    assert (line["strategy"], line["ranks"], line["global_batch"], len(line["losses"])) == ("zero2", 2, 2, 6)
    assert line["epoch_s"] == pytest.approx(10 * line["step_s"])
    assert line["commit"] is None or len(line["commit"]) == 40


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_in_every_configuration(model: str) -> None:
    lines = lines_of(f"{model} --size tiny --steps 1")
    assert [line["configuration"] for line in lines] == [each.name for each in configurations_of(model)]
    for line in lines:
        check_measured(line)
    by_name = {line["configuration"]: line for line in lines}
    if "zero2" in by_name:
        assert by_name["zero2"]["losses"][0] == pytest.approx(lines[0]["losses"][0], rel=0.02)
        smallest = min(lines, key=lambda line: line["measured_bytes"])["configuration"]
        assert "recompute" in smallest or "zero3" in smallest


@pytest.mark.more
def test_forecast_of_the_seed_size_on_the_hardware_of_the_article() -> None:
    result = case.measure(options_of("mingpt --forecast a100-40gb:8"))
    by_name = {line["configuration"]: line for line in result["lines"]}
    assert list(by_name) == [each.name for each in configurations_of("minigpt")]
    ddp = by_name["ddp"]
    assert ddp["precision"] == "16-mixed"
    assert (ddp["num_parameters"], ddp["global_batch"], ddp["measured_bytes"]) == (1_700_090_880, 8, None)
    # DDP of 2021 stored every gradient twice.
    assert ddp["forecast_bytes"] + 4 * ddp["num_parameters"] == pytest.approx(36148.55 * 2**20, rel=0.01)
    assert ddp["published"]["epoch_s"] == 43.69
    assert all(line["forecast_fits"] for line in by_name.values())
    sizes = [line["forecast_bytes"] for line in by_name.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert ddp["forecast_epoch_s"] == pytest.approx(128 * ddp["forecast_step_s"])
    text = printed(result)
    for cell in ("7,797.0", "43.7 s", "4,977.0", "a100-40gb:8"):
        assert cell in text


def test_the_table_fits_into_80_columns_and_contains_zero2_for_each_model() -> None:
    line = {"hardware": "v100-16gb", "ranks": 2, "torch": "2", "problem": None, "measured_bytes": 2**40, "epoch_s": 9e4}
    values = {"forecast_bytes": 2**40, "forecast_epoch_s": 9e4, "samples_per_s": 12345.6}
    for model in MODELS:
        lines = [
            {
                **line,
                **values,
                "configuration": each.name,
                "published": asdict(each.published) if each.published else None,
            }
            for each in configurations_of(model)
        ]
        text = printed({"model": model, "size": "seed", "lines": lines}, width=80)
        assert re.search(r"^ *configuration +measured +forecast +published *$", text, re.MULTILINE)
        assert text.count("1,048,576.0") == 2 * len(lines)
        assert re.search(r"^ *zero2 +MiB", text, re.MULTILINE)


def printed(result: dict[str, Any], width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(case.table(result))
    return console.export_text()


@pytest.mark.parametrize(
    "model",
    ["igpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("transformer-lm", "swav", "bert-large"))],
)
def test_forecasts_of_the_other_models_contain_the_largest_configuration(model: str) -> None:
    name = configurations_of(model)[0].name
    hardware = "v100-16gb:1" if model == "bert-large" else "a100-40gb:8"
    line = case.measure(options_of(f"{model} --forecast {hardware} --only {name} --size tiny"))["lines"][0]
    assert line["problem"] is None
    assert line["forecast_bytes"] > 12 * line["num_parameters"]


def test_the_command_line_of_mingpt_is_accepted() -> None:
    settings = case.settings_of(options_of(f"minigpt {MINGPT}"))
    assert settings["own_size"] == {"n_layer": 15, "n_head": 16, "n_embd": 3072, "block_size": 128}
    assert (settings["ranks"], settings["precision"], settings["batch_size"]) == (8, "16", 1)
    assert (settings["size"], settings["epoch_steps"]) == ("own", 128)
    result = case.measure(options_of("minigpt --n_layer 2 --n_head 2 --n_embd 32 --cpu_offload --forecast v100-32gb:2"))
    assert [line["configuration"] for line in result["lines"]] == ["zero3, offload", "zero3, offload, recompute"]


@pytest.mark.more
def test_a_model_that_does_not_fit_is_not_run() -> None:
    words = "minigpt --n_layer 96 --n_head 96 --n_embd 12288 --only ddp --accelerator cpu"
    result = case.measure(options_of(words))
    [line] = result["lines"]
    assert line["problem"] == "does not fit on this machine, so it was not run"
    assert result["failed"] == []
    assert "does not fit" in printed(result)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("minigp", "Did you mean 'minigpt'"),
        ("swav --n_layer 2", "--n_layer=2: is an option only for minigpt"),
        ("igpt --cpu_offload", "is an option only for minigpt"),
        ("minigpt --ranks 0", "--ranks=0: must be at least 1"),
        ("minigpt --n_layer 2 --size tiny", "contradicts --size"),
        ("igpt --only zero9", "is part of no configuration"),
    ],
)
def test_invalid_options_are_rejected(words: str, message: str) -> None:
    with pytest.raises(RoomierError, match=message):
        case.measure(options_of(words))
