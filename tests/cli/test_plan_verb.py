"""``roomier plan``: tables, JSON, the page, exit codes, and invalid options."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from roomier.cli.main import main
from tests.covering import few

TOY = ["--model", "cli_toy.PlainNetwork", "--data", "cli_toy.ToyData"]
GPT = ["--model", "gpt-nano", "--model.vocab_size", "65", "--seq_len", "16", "--batch_size", "2"]
TWO = ["--hardware", "a100-40gb:2", "--strategy", "zero2"]
KEYS = {"strategy", "fits", "peak_bytes", "bytes_by_kind", "step_s", "reason"}

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 65,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent / "project")


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """Return the JSON object that ``--json`` printed, after checking that there is no other output."""
    assert main(["plan", *words, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


# Workload -----------------------------------------------------------------------------------------------------------


def test_json_contains_the_chosen_plan_and_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "cli_toy.PlainNetwork", "--input", "float32[1,4]", "--hardware", "a100-40gb:2"]
    found = planned(capsys, *words)
    assert 0 < found["chosen"]["peak_bytes"] <= found["budget_bytes"]
    assert found["planning_s"] > 0
    assert {each["strategy"] for each in found["plans"]} >= {"ddp", "zero1", "zero2", "zero3"}
    assert all(each.keys() >= KEYS for each in found["plans"])
    assert found["plans"][0]["strategy"] == found["chosen"]["strategy"]


def test_class_is_built_on_meta_with_a_batch_of_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--model", "cli_toy.PlainNetwork", "--model.width", "4", *TOY[2:], *TWO)
    [plan] = found["plans"]
    assert plan["strategy"] == "zero2"
    assert plan["micro_batch"] == 2
    assert plan["plan"]["optimizer"]["name"] == "adamw"  # the default


def test_shapes_instead_of_data(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "cli_toy.ToyModule", "--model.width", "3", "--input", "float32[6,3]", *TWO]
    [plan] = planned(capsys, *words)["plans"]
    assert plan["micro_batch"] == 6
    assert plan["plan"]["optimizer"]["name"] is None  # configure_optimizers creates one


@pytest.mark.more
def test_hugging_face_configuration_as_file_and_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["--batch_size", "2", "--seq_len", "8", *TWO]
    by_folder = planned(capsys, "--hf", str(tmp_path), *words)["plans"][0]
    by_file = planned(capsys, "--hf", str(tmp_path / "config.json"), *words)["plans"][0]
    longer = planned(capsys, "--hf", str(tmp_path), "--batch_size", "2", "--seq_len", "64", *TWO)["plans"][0]
    assert by_folder["peak_bytes"] == by_file["peak_bytes"] < longer["peak_bytes"]


@pytest.mark.more
def test_configuration_of_fit_is_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    with pytest.raises(SystemExit):
        main(["fit", *TOY, "--trainer.precision", "bf16-mixed", "--trainer.strategy", "zero3", "--print_config"])
    run.write_text(capsys.readouterr().out)
    [plan] = planned(capsys, "--config", str(run), *TWO)["plans"]
    assert plan["plan"]["precision"]["mode"] == "bf16-mixed"
    assert plan["strategy"] == "zero2"  # the option replaces the strategy of the run
    assert main(["plan", "--config", str(run), "--hardware", "a100-40gb:2"]) == 0
    assert "uses zero3, which fits" in capsys.readouterr().out


def test_strategy_of_the_trainer_is_planned_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    with pytest.raises(SystemExit):
        main(["fit", *TOY, "--trainer.strategy", "zero3", "--print_config"])
    run.write_text(capsys.readouterr().out)
    words = ["--config", str(run), "--hardware", "a100-40gb:2"]
    assert {each["strategy"] for each in planned(capsys, *words)["plans"]} > {"ddp"}
    assert {each["strategy"] for each in planned(capsys, *words, "--trainer.strategy", "ddp")["plans"]} == {"ddp"}
    assert {each["strategy"] for each in planned(capsys, *words, "--trainer.strategy=auto")["plans"]} > {"ddp"}


def test_default_hardware_is_this_machine_with_the_devices_of_the_trainer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*TOY, "--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.accelerator", "cpu"]
    [plan] = planned(capsys, *words)["plans"]
    assert (plan["strategy"], plan["plan"]["parallel"]["accelerator"]) == ("ddp", "cpu")
    assert planned(capsys, *words, "--trainer.num_nodes", "2")["num_ranks"] == 4


# Output -------------------------------------------------------------------------------------------------------------


def test_table_shows_the_plan_and_exit_code_1_if_none_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *GPT, *TWO]) == 0
    expected = capsys.readouterr().out
    assert "zero2" in expected
    assert "near" in expected
    assert "2 x a100-40gb" in expected
    assert main(["plan", *GPT, *TWO, "--memory_budget", "2MiB"]) == 1
    expected = " ".join(capsys.readouterr().out.split())
    assert "No plan fits." in expected
    assert "but the budget is 2.0 MiB" in expected


def test_what_if_shows_the_peak_of_other_batches(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "cli_toy.PlainNetwork", "--input", "float32[512,4]", *TWO, "--what_if"]
    grid = planned(capsys, *words)["what_if"]
    assert grid["columns"]["values"] == [256, 512, 1024, 2048]
    [peaks] = grid["peak_bytes"]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]
    assert main(["plan", *words]) == 0
    assert "micro-batch" in capsys.readouterr().out


def test_page_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    words = ["--model", "cli_toy.PlainNetwork", "--input", "float32[2,4]", *TWO]
    assert main(["plan", *words, "--html", str(page)]) == 0
    assert page.read_text().startswith("<!")
    assert str(page) in capsys.readouterr().err


def test_output_of_user_code_is_not_mixed_with_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli_toy: Any = import_module("cli_toy")

    made = cli_toy.ToyData.__init__

    def printing(self: Any, num_batches: int = 6) -> None:
        print("made by the user")
        made(self, num_batches)

    monkeypatch.setattr(cli_toy.ToyData, "__init__", printing)
    planned(capsys, *TOY, *TWO)


# Invalid options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["--model=None: a model is required"]),
        (["--hf", "none.json"], ["hf='none.json': cannot be read"]),
        (["--hf", "cli_toy.py"], ["is not JSON"]),
        ([*GPT, "--hf", "config.json"], ["cannot be combined: --hf and --model"]),
        ([*GPT, "--hardware", "a1000:8"], ["a1000"]),
        ([*GPT, "--hardware", "a100-40gb:x"], ["x"]),
        ([*GPT, "--nodes", "0"], ["--nodes=0: must be at least 1"]),
        ([*GPT, *TWO[:2], "--strategy", "zero9"], ["strategy='zero9'", "Did you mean"]),
        ([*GPT, *TWO, "--memory_budget", "much"], ["memory_budget='much': is not a number of bytes"]),
        ([*GPT[:4], "--seq_len", "4096", *TWO], ["seq_len=4096: must be at most 1024"]),
        ([*GPT, "--data", "cli_toy.ToyData"], ["because its configuration determines the batch"]),
        (["--model", "cli_toy.PlainNetwork", *TWO], ["data=None: is required, because the model has no training data"]),
        ([*TOY, "--seq_len", "8"], ["--seq_len=8", "--input 'x=int64[8,2048]'"]),
        (["--model", "cli_toy.PlainNetwork", "--input", "x=float[", *TWO], ["must be a name, a dtype and sizes"]),
        ([*TOY, "--trainer.max_step", "3"], ["Did you mean '--trainer.max_steps'?"]),
        ([*TOY, *TWO, "--trainer.strategy", "ddp"], ["--trainer.strategy='ddp': differs from --strategy zero2"]),
        (
            [*TOY, *TWO, "--trainer.accelerator=cpu"],
            ["--trainer.accelerator='cpu': contradicts --hardware a100-40gb:2, which is cuda"],
        ),
        (
            [*TOY, *TWO, "--trainer.devices", "4"],
            ["--trainer.devices=4: contradicts --hardware a100-40gb:2, which has 2 devices"],
        ),
        ([*TOY, "--nodes", "2", "--trainer.num_nodes", "3"], ["--trainer.num_nodes=3: differs from --nodes 2"]),
    ],
)
def test_invalid_option_gives_one_message_and_exit_code_2(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    [message] = [line for line in output.err.splitlines() if line.startswith("roomier: error: ")]
    for text in expected:
        assert text in message


def test_configuration_of_an_unknown_model_is_rejected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for values, expected in (({}, "has no model_type"), ({"model_type": "lama"}, "Did you mean 'llama'?")):
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert main(["plan", "--hf", str(tmp_path), *TWO]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the run would be planned for the CUDA device of this machine")
def test_missing_device_requires_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TOY, "--trainer.accelerator", "cuda"]) == 2
    expected = capsys.readouterr().err
    assert (
        "--trainer.accelerator='cuda': is not available on this machine. Pass the hardware to plan for: --hardware"
        in expected
    )


def test_file_of_a_machine_contains_the_number_of_nodes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("device: a100-40gb\ndevices_per_node: 2\nnum_nodes: 3\n")
    words = [*TOY, "--hardware", str(cluster), "--strategy", "zero2"]
    assert planned(capsys, *words)["num_ranks"] == 6
    assert planned(capsys, *words, "--nodes", "2")["num_ranks"] == 4


@pytest.mark.parametrize("callback", ["roomier.callbacks.EMAWeightAveraging", "roomier.callbacks.WeightAveraging"])
def test_copy_of_the_weights_of_a_callback_is_counted(callback: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "cli_toy.ToyModule", "--data", "cli_toy.ToyData", "--trainer.accelerator", "cpu"]
    words += ["--strategy", "single", "--trainer.enable_checkpointing", "false"]
    plain = planned(capsys, *words)["chosen"]["bytes_by_kind"]["parameter"]
    averaging = planned(capsys, *words, "--trainer.callbacks", callback)["chosen"]["bytes_by_kind"]["parameter"]
    assert (plain, averaging) == (20, 40)


@pytest.mark.parametrize("option", few(["--deepspeed", "--trainer.strategy", "--trainer.plan"]))
def test_a_deepspeed_configuration_is_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str) -> None:
    path = tmp_path / "ds_config.json"
    settings = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    path.write_text(json.dumps({"zero_optimization": settings, "bf16": {"enabled": True}, "train_batch_size": 32}))
    words = [*GPT, "--hardware", "a100-40gb:4"]
    assert main(["plan", *words, "--json", option, str(path)]) == 0
    output = capsys.readouterr()
    plan = json.loads(output.out)["chosen"]["plan"]
    assert (plan["parallel"]["strategy"], plan["parallel"]["devices"]) == ("zero3", 4)
    assert (plan["offload"]["optimizer_states"], plan["precision"]["mode"]) == ("cpu", "bf16-mixed")
    assert "overlap_comm=True" in output.err
    assert "use batch_size=8" in output.err
    assert main(["plan", *words, "--deepspeed", str(path), "--trainer.strategy", str(path)]) == 2
    assert "cannot be combined with --deepspeed" in capsys.readouterr().err


@pytest.mark.more
def test_one_line_names_the_most_useful_option_that_changes_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOMIER_PLANNING_S", "400")  # the found option does not depend on the load of the machine
    words = ["plan", "--model", "gpt-mini", "--seq_len", "16", "--batch_size", "2", "--hardware", "rtx-4090"]
    words += ["--strategy", "single", "--trainer.precision", "bf16-mixed"]
    assert main([*words, "--memory_budget", "20MiB", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    lever, peak_bytes = found["lever"], found["plans"][0]["peak_bytes"]
    option = lever["option"].split()
    assert lever["kind"] == "approximate"
    assert lever["peak_bytes"] < 0.9 * peak_bytes
    main([*words, *option, "--json"])
    repeated = json.loads(capsys.readouterr().out)["plans"][0]["peak_bytes"]
    assert repeated == pytest.approx(lever["peak_bytes"], rel=0.05)
    main([*words, "--memory_budget", "20MiB"])
    out = " ".join(capsys.readouterr().out.split())
    assert f"With {lever['option']}, the nearest plan would " in out
    assert out.endswith("it changes the results (approximate): only low-rank adapters are trained.")
