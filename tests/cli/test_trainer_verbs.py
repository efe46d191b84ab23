"""``roomier fit``, ``validate``, ``test`` and ``predict`` in this process, with the classes in
``project/cli_toy.py``."""

import inspect
import json
import re
import subprocess
import sys
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from roomier import Trainer, checkpoint
from roomier.cli.help_screen import FIELDS_OF, TOPICS
from roomier.cli.main import main
from roomier.cli.options import parse, trainer_parser
from roomier.cli.plan_verb import plan_parser

QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
TOY = ["--model", "cli_toy.ToyModule", "--data", "cli_toy.ToyData"]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent / "project")


def root(folder: Path) -> list[str]:
    return ["--trainer.default_root_dir", str(folder)]


def saved_steps(folder: Path) -> list[int]:
    return sorted(checkpoint.peek(path)["progress"]["global_step"] for path in folder.glob("*/checkpoints/*"))


def weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = checkpoint.load(path)["module"]
    return found


# Options ------------------------------------------------------------------------------------------------------------


def test_each_keyword_of_the_trainer_is_an_option() -> None:
    options = {text for action in trainer_parser("fit")._actions for text in action.option_strings}
    keywords = set(inspect.signature(Trainer).parameters)
    assert len(keywords) > 30
    assert {f"--trainer.{name}" for name in keywords} <= options


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--trainer.max_steps", "7"], "max_steps", 7),
        (["--trainer.max_steps=7"], "max_steps", 7),
        (["--trainer.fast_dev_run", "true"], "fast_dev_run", True),
        (["--trainer.fast_dev_run", "3"], "fast_dev_run", 3),
        (["--trainer.limit_val_batches", "0.5"], "limit_val_batches", 0.5),
        (["--trainer.limit_val_batches", "2"], "limit_val_batches", 2),
        (["--trainer.offload", "false"], "offload", False),
        (["--trainer.activation_checkpointing", "true"], "activation_checkpointing", True),
        (["--trainer.learning_rate", "1e-3"], "learning_rate", 1e-3),
        (["--trainer.optimizer", "adamw"], "optimizer", "adamw"),
        (["--trainer.optimizer", '{"name": "sgd", "momentum": 0.9}'], "optimizer", {"name": "sgd", "momentum": 0.9}),
        (["--trainer.optimizer.name", "sgd"], "optimizer", {"name": "sgd"}),
        (["--trainer.max_time", "00:00:10:00"], "max_time", "00:00:10:00"),
        (["--trainer.logger", '["jsonl", "csv"]'], "logger", ["jsonl", "csv"]),
        (["--trainer.logger", "false"], "logger", False),
        (["--trainer.check_val_every_n_epoch", "null"], "check_val_every_n_epoch", None),
        (["--trainer.deterministic", "warn"], "deterministic", "warn"),
    ],
)
def test_keyword_is_parsed(words: list[str], name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())  # as in the command, because this test calls the parser directly
    config = parse(trainer_parser("fit"), [*TOY, *words])
    assert config.trainer[name] == value
    assert type(config.trainer[name]) is type(value)


def test_print_config_prints_a_valid_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", *TOY, "--print_config"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"] == {"class_path": "cli_toy.ToyModule", "init_args": {"lr": 0.1, "width": 4}}
    assert set(inspect.signature(Trainer).parameters) <= set(printed["trainer"])


# Runs ---------------------------------------------------------------------------------------------------------------


def test_fit_trains_and_saves_its_configuration(tmp_path: Path) -> None:
    words = ["--model.lr", "0.05", "--trainer.max_steps", "4", "--seed_everything", "7"]
    assert main(["fit", *TOY, *words, *QUIET, *root(tmp_path)]) == 0
    assert saved_steps(tmp_path) == [4]
    kept = yaml.safe_load((tmp_path / "version_0" / "config.yaml").read_text())
    assert kept["seed_everything"] == 7
    assert kept["model"]["init_args"]["lr"] == 0.05
    assert kept["trainer"]["max_steps"] == 4


def test_saved_configuration_repeats_the_run(tmp_path: Path) -> None:
    words = ["--trainer.max_steps", "4", "--seed_everything", "7"]
    assert main(["fit", *TOY, *words, *QUIET, *root(tmp_path)]) == 0
    assert main(["fit", "--config", str(tmp_path / "version_0" / "config.yaml")]) == 0
    first, second = (weights(next((tmp_path / f"version_{i}" / "checkpoints").iterdir())) for i in (0, 1))
    assert first.keys() == second.keys() == {"line.weight", "line.bias"}
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_command_line_takes_precedence_over_earlier_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer: {max_steps: 50}\nmodel: cli_toy.ToyModule\ndata: cli_toy.ToyData\n")
    words = ["--config", str(tmp_path / "run.yaml"), "--trainer.max_steps", "2", *QUIET, *root(tmp_path)]
    assert main(["fit", *words]) == 0
    assert saved_steps(tmp_path) == [2]


def test_callbacks_and_loggers_by_class_path(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        """
trainer:
  max_epochs: 3
  logger: {class_path: roomier.loggers.CSVLogger}
  callbacks:
    - class_path: roomier.callbacks.ModelCheckpoint
      init_args: {every_n_train_steps: 2, save_top_k: -1}
    - class_path: LearningRateMonitor
model: cli_toy.ToyModule
data: {class_path: cli_toy.ToyData, init_args: {num_batches: 4}}
"""
    )
    assert main(["fit", "--config", str(tmp_path / "run.yaml"), *QUIET, *root(tmp_path)]) == 0
    assert {2, 4, 6, 8, 10, 12} <= set(saved_steps(tmp_path))
    assert (tmp_path / "version_0" / "metrics.csv").exists()
    assert not (tmp_path / "version_0" / "metrics.jsonl").exists()


def test_plain_network_with_optimizer_and_schedule_keywords(tmp_path: Path) -> None:
    words = ["--trainer.optimizer", "adamw", "--trainer.learning_rate", "1e-3", "--trainer.lr_schedule", "cosine"]
    model = ["--model", "cli_toy.PlainNetwork", "--model.width", "4", "--data", "cli_toy.ToyData"]
    assert main(["fit", *model, *words, "--trainer.max_steps", "3", *QUIET, *root(tmp_path)]) == 0
    assert saved_steps(tmp_path) == [3]


def test_ckpt_path_last_resumes(tmp_path: Path) -> None:
    start = [*TOY, "--seed_everything", "1", *QUIET, *root(tmp_path)]
    assert main(["fit", *start, "--trainer.max_steps", "3"]) == 0
    assert main(["fit", *start, "--trainer.max_steps", "5", "--ckpt_path", "last"]) == 0
    assert max(saved_steps(tmp_path)) == 5
    configs = sorted(path.name for path in tmp_path.rglob("config*.yaml"))
    assert configs == ["config-step=3.yaml", "config.yaml"]  # the second run has other settings


def test_resume_with_the_same_settings_writes_no_second_configuration(tmp_path: Path) -> None:
    words = [*TOY, "--trainer.max_steps", "3", *QUIET, *root(tmp_path)]
    assert main(["fit", *words]) == 0
    assert main(["fit", *words, "--ckpt_path", "last"]) == 0
    assert [path.name for path in tmp_path.rglob("config*.yaml")] == ["config.yaml"]


@pytest.mark.parametrize(("verb", "metric"), [("validate", "val_loss"), ("test", "test_loss")])
def test_evaluation_prints_its_metrics_as_json(
    verb: str, metric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, *TOY, *QUIET, *root(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [set(each) for each in printed] == [{metric}]


def test_predict_passes_each_batch_to_the_callbacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "cli_toy.PlainNetwork", "--data", "cli_toy.ToyData"]
    callback = ["--trainer.callbacks", "cli_toy.CountsPredictions"]
    assert main(["predict", *words, *callback, *QUIET, *root(tmp_path)]) == 0
    assert sys.modules["cli_toy"].CountsPredictions.num_seen == 2
    assert "predictions are not stored" not in capsys.readouterr().err


def test_predict_prints_one_notice_if_predictions_are_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "cli_toy.PlainNetwork", "--data", "cli_toy.ToyData"]
    assert main(["predict", *words, *QUIET, *root(tmp_path)]) == 0
    output = capsys.readouterr().err
    assert output.count("predictions are not stored") == 1
    assert "on_predict_batch_end" in output


def test_sigterm_saves_the_run_and_keeps_its_exit_code(tmp_path: Path) -> None:
    words = ["--model", "cli_toy.IsTerminated", "--data", "cli_toy.ToyData", *QUIET, *root(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(["fit", *words, "--trainer.max_steps", "6"])
    assert ended.value.code == 143
    assert main(["fit", *words, "--trainer.max_steps", "6", "--ckpt_path", "last"]) == 0
    assert max(saved_steps(tmp_path)) == 6


@pytest.mark.more
def test_installed_command_imports_classes_of_the_current_folder(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("roomier")), "fit", *TOY, "--trainer.max_steps", "2", *QUIET]
    done = subprocess.run([*command, *root(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert saved_steps(tmp_path) == [2]


# Help ---------------------------------------------------------------------------------------------------------------


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict", "plan"])
def test_help_fits_on_a_screen_and_names_each_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = help_of([verb, "--help"], capsys)
    assert len(output.splitlines()) <= 60
    assert max(map(len, output.splitlines())) <= 100
    assert output.splitlines()[2][0].isupper()  # the description follows one line of usage
    assert "import path of a" in output
    assert "``" not in output
    for name in inspect.signature(Trainer).parameters:
        assert re.search(rf"\b{name}\b", output), name


def test_each_argument_of_the_trainer_belongs_to_one_topic() -> None:
    names = [name for topic in TOPICS if topic not in ("run", "plan") for name in TOPICS[topic].names.split()]
    assert sorted(names) == sorted(inspect.signature(Trainer).parameters), "correct TOPICS in cli/help_screen.py"
    assert FIELDS_OF.keys() <= set(names)


@pytest.mark.parametrize("verb", ["fit", "plan"])
def test_help_of_topics_describes_each_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    everything = help_of([verb, "--help=all"], capsys)
    topics = [help_of([verb, f"--help={topic}"], capsys) for topic in TOPICS if topic != "plan" or verb == "plan"]
    assert everything.split() == " ".join(topics).split()
    assert not {"``", "Plan``", "%(", ":class:"} & set(everything.split())
    assert "``" not in everything
    assert "LazyConv1d" not in everything  # a class of torch
    assert "micro-batches per optimizer step. (int; default: 1)" in everything
    assert "optimizer steps. -1 means no limit. (int; default: -1)" in everything
    parser = trainer_parser("fit") if verb == "fit" else plan_parser(None)
    described = {block.split()[0]: block for block in everything.split("\n\n") if block.startswith("--")}
    shown = {text for action in parser._actions for text in action.option_strings if action.help != SUPPRESS}
    not_shown = {text for text in shown if text.endswith((".help", "+"))} | {"-h", "--help", "--trainer"}
    assert described.keys() == shown - not_shown
    assert all(len(block.splitlines()) > 1 for block in described.values())


@pytest.mark.parametrize("words", [["fit", "--help=offload"], ["fit", *TOY, "--help=--trainer.offload"]])
def test_help_of_an_option_prints_its_values_and_settings(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    output = help_of(words, capsys)
    assert output.startswith("--trainer.offload\n")
    for name in ("parameters", "activations", "buffers", "folder"):
        assert f"\n    {name} " in output
    assert output.count("--trainer.") == 1


def test_help_of_an_unknown_topic_suggests_a_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help=memroy"]) == 2
    assert "Did you mean 'memory'?" in capsys.readouterr().err
