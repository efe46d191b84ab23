"""Invalid options cause one message. Exceptions of the user's code keep their traceback."""

from pathlib import Path

import pytest

from roomier.cli.main import main
from tests.covering import few

QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
TOY = ["--model", "cli_toy.ToyModule", "--data", "cli_toy.ToyData"]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent / "project")


@pytest.mark.parametrize(
    ("words", "expected"),
    few(
        [
            ([], ["--model=None: is required"]),
            (["--model"], ["--model=None: expected one argument"]),
            (["--model", "no_such.Thing"], ["model='no_such.Thing'", "the module 'no_such' does not exist"]),
            (["--model", "cli_toy.ToyModul"], ["cli_toy has no 'ToyModul'", "Did you mean 'ToyModule'?"]),
            (["--model", "ToyModul"], ["model='ToyModul': must be a class path"]),
            (["--model", "cli_toy.ToyData"], ["model='cli_toy.ToyData': must be a subclass of Module"]),
            ([*TOY[:2], "--data", "cli_toy.ToyModule"], ["data='cli_toy.ToyModule': must be a subclass of DataModule"]),
            ([*TOY, "--model.lrr", "3"], ["is not an argument of cli_toy.ToyModule", "Did you mean 'lr'?"]),
            ([*TOY, "--model.lr", "x"], ["model.lr='x': has the wrong type. Pass float"]),
            ([*TOY, "--trainer.max_step", "3"], ["--trainer.max_step='3'", "Did you mean '--trainer.max_steps'?"]),
            (
                [*TOY, "--trainer.gpus", "1"],
                ["--trainer.gpus='1'", "Use accelerator='gpu' and devices=N"],
            ),
            ([*TOY, "--trainer.distributed_backend=ddp"], ["Use strategy"]),
            ([*TOY, "--trainer.zebra", "1"], ["--trainer.zebra='1'", "See help(roomier.Trainer)"]),
            ([*TOY, "--trainer.max_steps", "x"], ["trainer.max_steps='x': has the wrong type. Pass int"]),
            (
                [*TOY, "--trainer.max_epochs", "three"],
                ["trainer.max_epochs='three': has the wrong type. Pass int or null."],
            ),
            (
                [*TOY, "--trainer.limit_val_batches", "all"],
                ["trainer.limit_val_batches='all': has the wrong type. Pass int, float or null."],
            ),
            ([*TOY, "--seed_everything", "x"], ["seed_everything='x': has the wrong type. Pass bool, int or null."]),
            ([*TOY, "--trainer", "fast"], ["trainer='fast': must be a mapping or the path of a YAML file. Write"]),
            ([*TOY, "--trainer.default_root_dir", "a\0b"], ["default_root_dir='a\\x00b': contains a NUL byte"]),
            ([*TOY, "--ckpt_path", "a\0b"], ["ckpt_path='a\\x00b': contains a NUL byte"]),
            ([*TOY, "--config", "a\0b"], ["config='a\\x00b': contains a NUL byte"]),
            ([*TOY, "--trainer.max_steps", "-5"], ["max_steps=-5", "Use an integer of -1 or more"]),
            ([*TOY, "--trainer.strategy", "nonesuch"], ["strategy='nonesuch'"]),
            ([*TOY, "--trainer.callbacks", "roomier.callbacks.EarlyStoppin"], ["Did you mean 'EarlyStopping'?"]),
            ([*TOY, "--config", "none.yaml"], ["config='none.yaml': cannot be read: No such file"]),
            ([*TOY, "--trainer.max_steps", "2", "--ckpt_path", "no/such"], ["no/such"]),
        ],
        5,
    ),
)
def test_invalid_option_gives_one_message_and_exit_code_2(
    words: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--trainer.default_root_dir", str(tmp_path), *words, *QUIET]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    message = [line for line in output.err.splitlines() if line.startswith("roomier: error: ")]
    assert len(message) == 1
    for text in expected:
        assert text in message[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    few(
        [
            (
                "trainer: {max_epochs: three}",
                ["trainer.max_epochs='three'", "wrong type, in {file}. Pass int or null."],
            ),
            ("seed_everything: x", ["seed_everything='x'", "in {file}"]),
            ("model: {class_path: cli_toy.ToyModule, init_args: {lr: x}}", ["model.lr='x'", "in {file}. Pass float."]),
            (
                "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: v, patience: y}}]}",
                ["trainer.callbacks.patience='y'", "in {file}. Pass int."],
            ),
            (
                "trainer: {callbacks: {class_path: roomier.callbacks.EarlyStopping}}",
                ["EarlyStopping", "required: monitor"],
            ),
            (
                "trainers: {max_steps: 3}",
                ["trainers.max_steps=3", "is not an option, in {file}", "'--trainer.max_steps'?"],
            ),
            ("trainer: 3", ["trainer=3: must be a mapping, in {file}"]),
            (
                "trainer:\n  max_steps: 3\n  max_steps: 4",
                ["config='{file}'", "duplicate key 'max_steps' (line 3, column 3)"],
            ),
            ("", ["config='{file}': must contain a mapping of options, but is empty"]),
            ("[1, 2]", ["config='{file}': must contain a mapping of options, but contains a list"]),
            ("trainer:\n\tmax_steps: 3", ["config='{file}': is not YAML", "(line 2, column 1)"]),
            ("day: 2021-99-99", ["config='{file}': is not YAML: month must be in 1..12"]),
            ("trainer: &a {max_steps: *a}", ["config='{file}': is not YAML: an alias contains itself"]),
            ("[" * 5000, ["config='{file}': is not YAML: the nesting is too deep"]),
            ("trainer: {max_step: 3}", ["trainer.max_step", "Did you mean 'max_steps'?"]),
            ("trainer: {gpus: 1}", ["trainer.gpus", "Use accelerator='gpu' and devices=N"]),
            ("trainer: [", ["is not YAML"]),
            ("model: cli_toy.Missing", ["cli_toy has no 'Missing'"]),
            ("model: {class_path: cli_toy.ToyModule, init_args: {lrr: 1}}", ["Did you mean 'lr'?"]),
            ("trainer: {callbacks: [{class_path: cli_toy.CountsPrediction}]}", ["Did you mean 'CountsPredictions'?"]),
            (
                "trainer: {callbacks: [{class_path: roomier.callbacks.EarlyStopping, init_args: {monito: val_loss}}]}",
                ["trainer.callbacks", "Did you mean 'monitor'?"],
            ),
        ],
        5,
    ),
)
def test_invalid_yaml_gives_one_message(
    text: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    file = tmp_path / "run.yaml"
    words = [] if "model:" in text else TOY[:2]
    assert main(["fit", *words, *TOY[2:], "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("roomier: error: ")
    assert "Parser key" not in error
    for part in expected:
        assert part.replace("{file}", str(file)) in error


ALIASES = ["a0: &a0 [x, x, x, x, x, x, x, x]"] + [
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 8)}]" for level in range(1, 40)
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["config", "a string in the config", "a file in the config", "an argument"])
def test_aliases_that_expand_to_millions_of_values_are_rejected(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inline = f"{{{', '.join(ALIASES)}}}"
    file, inner = tmp_path / "run.yaml", tmp_path / "inner.yaml"
    inner.write_text("\n".join(ALIASES))
    words = ["--config", str(file)]
    if place == "config":
        file.write_text("\n".join(ALIASES))
    elif place == "a string in the config":
        file.write_text(f"trainer: {{callbacks: '{inline}'}}")
    elif place == "a file in the config":
        file.write_text(f"trainer: {inner}")
    else:
        words = ["--trainer.callbacks", inline]
    assert main(["fit", *TOY, *words]) == 2
    error = capsys.readouterr().err
    assert f"its aliases expand to {NUM_VALUES} values, but at most 100000 are allowed" in error


def num_values(level: int) -> int:
    return 1 + 8 * (num_values(level - 1) if level else 1)


# one for the mapping, and for each level one key and one list
NUM_VALUES = 1 + sum(1 + num_values(level) for level in range(40))


def test_error_in_a_step_contains_the_place_in_the_users_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "cli_toy.LogsAVector", *TOY[2:], *QUIET, "--trainer.default_root_dir", str(tmp_path)]
    assert main(["fit", *words, "--trainer.max_steps", "2"]) == 2
    *_, message, place = capsys.readouterr().err.splitlines()
    assert "the value must be a scalar" in message
    assert place.startswith("  at ")
    assert place.endswith("in training_step")
    assert "cli_toy.py" in place


def test_exception_of_the_users_code_keeps_its_traceback(tmp_path: Path) -> None:
    words = ["--model", "cli_toy.HasABug", *TOY[2:], *QUIET, "--trainer.default_root_dir", str(tmp_path)]
    with pytest.raises(KeyError, match="a bug of the user"):
        main(["fit", *words, "--trainer.max_steps", "2"])


def test_exception_at_import_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError, match="a bug at import"):
        main(["fit", "--model", "cli_broken.Module"])
