"""``roomier export`` to each format, from a run of ``roomier fit``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roomier import checkpoint
from roomier.checkpoint.lightning import LightningFile
from roomier.cli.main import main
from tests.covering import few

QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
TOY = ["--model", "cli_toy.HasForward", "--data", "cli_toy.ToyData", "--trainer.max_steps", "3"]
MODEL = ["--model", "cli_toy.HasForward"]

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated:DeprecationWarning")


@pytest.fixture
def run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(Path(__file__).parent / "project")
    root = ["--trainer.default_root_dir", str(tmp_path / "runs"), "--trainer.accelerator", "cpu"]
    assert main(["fit", *TOY, *QUIET, *root, "--model.hidden", "3", "--seed_everything", "1"]) == 0
    return tmp_path / "runs"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.find_last(folder)
    assert found is not None
    read: dict[str, torch.Tensor] = checkpoint.load(found)["module"]
    return read


def test_weights_are_read_from_the_run_folder(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ["export", str(run_folder), "--to", "torchscript", str(tmp_path / "x.pt")]
    assert main([*to, *MODEL, "--model.hidden", "3"]) == 0

    scripted = torch.jit.load(tmp_path / "x.pt").state_dict()
    assert f"-> {tmp_path / 'x.pt'}: " in capsys.readouterr().out
    expected = weights(run_folder)
    assert scripted.keys() == expected.keys()
    assert all(torch.equal(scripted[name], expected[name]) for name in expected)


def test_class_that_a_run_folder_names_is_not_imported(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted_by_someone.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    config = run_folder / "version_0" / "config.yaml"
    config.write_text("model:\n  class_path: planted_by_someone.Net\n")
    words = ["export", str(run_folder), "--to", "torchscript", str(tmp_path / "x.pt")]
    assert main(words) == 2
    assert "--model" in capsys.readouterr().err
    assert main([*words, *MODEL, "--model.hidden", "3"]) == 0
    assert not (tmp_path / "executed").exists()


def test_shards_have_a_positive_size(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run_folder), "--to", "safetensors", "--max-shard-size", "0"]) == 2
    assert "--max-shard-size='0': must be positive" in capsys.readouterr().err


def test_to_lightning_writes_one_file(run_folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(run_folder), "--to", "lightning", str(tmp_path / "x.ckpt")]) == 0

    file = LightningFile(tmp_path / "x.ckpt")
    assert file.position().global_step == 3
    assert all(torch.equal(file.state_dict[name], each) for name, each in weights(run_folder).items())

    assert main(["export", str(tmp_path / "x.ckpt"), "--to", "torchscript", *MODEL, "--model.hidden", "3"]) == 0
    assert (tmp_path / "x.pt").is_file()
    assert main(["export", str(run_folder), "--to", "lightning", str(tmp_path / "x.ckpt")]) == 2


@pytest.mark.parametrize(("to", "suffix"), few([("torch-export", ".pt2"), ("onnx", ".onnx")]))
def test_inputs_have_the_format_of_plan(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, suffix: str
) -> None:
    output = tmp_path / f"x{suffix}"

    words = ["export", str(run_folder), "--to", to, *MODEL, "--model.hidden", "3", "--output", str(output)]

    assert main([*words, "--input", "2x4"]) == 2
    assert "must be a name, a dtype and sizes" in capsys.readouterr().err
    assert main([*words, "--input", "float32[2,4]"]) == 0
    assert "differs from the model by" in capsys.readouterr().err
    assert output.is_file()


@pytest.mark.parametrize(
    ("words", "expected"),
    few(
        [
            (["--to", "lightning", *MODEL], "is not supported with --to lightning"),
            (["--to", "lightning", "--model.hidden", "3"], "is not supported with --to lightning"),
            (["--to", "torchscript", "--model", "cli_toy.HasForwar"], "Did you mean 'HasForward'"),
            (["--to", "torchscript", "--model", "cli_toy.ToyData"], "must be a model class"),
            (["--to", "torchscript", *MODEL, "--model.hidden", "2"], "does not match the weights of HasForward"),
            (["--to", "torchscript", *MODEL, "--modle.hidden", "2"], "is unknown or has no value"),
            (["--to", "torchscript"], "--model=None: is required"),
            (["--to", "safetensors", *MODEL], "is not supported with --to safetensors"),
            (["--to", "onnx", *MODEL, "--model.hidden", "3"], "--input=None: is required to call forward"),
            (
                ["--to", "onnx", *MODEL, "--model.hidden", "3", "--input", "float32[2,5]"],
                "--input='float32[2,5]': cannot be passed to forward",
            ),
            (["--to", "torchscript", "--dtype", "bf16"], "is not supported with --to torchscript"),
            (["--to", "pickle"], "invalid choice"),
            (["--to", "lightning", "a", "--output", "b"], "cannot be combined with out"),
        ],
        3,
    ),
)
def test_invalid_options_are_rejected(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    before = sorted(tmp_path.rglob("*"))

    assert main(["export", str(run_folder), *words]) == 2

    assert expected in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_output_next_to_the_current_folder_and_tilde_as_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "saved", {"module": {"weight": torch.ones(2)}})
    monkeypatch.chdir(tmp_path / "saved")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    assert main(["export", ".", "--to", "safetensors"]) == 0
    assert main(["export", ".", "--to", "safetensors", "--output=~/out"]) == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "saved", "saved-safetensors"]
    assert (tmp_path / "home" / "out" / "model.safetensors").is_file()
