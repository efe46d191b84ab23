"""Images, figures and histograms: the table of loggers, the forms of images, and the files in the run folder."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import roomier
from roomier.core.errors import RoomierError
from roomier.loggers import (
    CometLogger,
    LoggerGroup,
    MLFlowLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)
from roomier.loggers.histogram import histogram_of
from roomier.loggers.pixels import pixels_of
from tests.loggers.conftest import Line

RED = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1).expand(3, 4, 5)


def figure_of_line() -> Any:
    figures = pytest.importorskip("matplotlib.figure", reason="matplotlib draws the figure")
    figure = figures.Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([0, 1])
    return figure


def decoded(path: Path) -> np.ndarray:
    images = pytest.importorskip("PIL.Image", reason="pillow reads the PNG file")
    return np.asarray(images.open(path))


class Shows(Line):
    """Module that logs one of each kind in each step, and in the validation."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log_image("samples/red", RED)
        self.log_image("pair", [RED, RED.permute(1, 2, 0).numpy()], caption=["a", "b"])
        self.log_histogram("inputs", torch.tensor([0.0, 1.0, 1.0, 4.0, torch.nan]), bins=2)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log_image("validated", RED)


class ShowsFigure(roomier.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log_figure("curve", figure_of_line())


def listed(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def fit_on_rank(folder: Path) -> str:
    trainer = roomier.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="zero3",
        max_steps=2,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LogsWeight(), [[torch.ones(4, 4)]] * 4, [[torch.ones(4, 4)]] * 2)
    return str(trainer.log_dir)


class LogsWeight(Shows):
    def on_train_batch_end(self, *args: Any) -> None:
        self.log_histogram("weight", self.net.weight, bins=3)


def test_first_rank_writes_files_once(on_ranks, tmp_path: Path) -> None:
    folder = Path(on_ranks(2, fit_on_rank, tmp_path)[0])
    images = [(row["step"], row["name"], row["captions"]) for row in listed(folder, "images.jsonl")]
    of_steps = [(step, *each) for step in (0, 1) for each in (("samples/red", []), ("pair", ["a", "b"]))]
    assert images[:4] == of_steps
    assert all(row[1:] == ("validated", []) for row in images[4:])
    assert (decoded(folder / "images/samples/red/step=1.png") == [255, 0, 0]).all()
    assert listed(folder, "images.jsonl")[1]["files"] == ["images/pair/step=0-0.png", "images/pair/step=0-1.png"]
    histograms = listed(folder, "histograms.jsonl")
    assert [(row["step"], row["counts"], row["edges"]) for row in histograms if row["name"] == "inputs"] == [
        (step, [3, 1], [0.0, 2.0, 4.0]) for step in (0, 1)
    ]
    assert [sum(row["counts"]) for row in histograms if row["name"] == "weight"] == [4, 4], "weights of both ranks"


def write_all(logger: Any) -> None:
    logger.log_image("samples/red", [RED, RED], step=3, caption=["a", "b"])
    logger.log_figure("curve", figure_of_line(), step=3)
    logger.log_histogram("inputs", [0.0, 1.0, 1.0, 4.0], step=3, bins=2)
    assert not logger.is_muted


def check_tensorboard(folder: Path) -> None:
    from tests.loggers.test_tensorboard_logger import read

    events = read(folder)
    assert {"samples/red/0", "samples/red/1", "curve"} <= set(events.Tags()["images"])
    assert (events.Images("samples/red/0")[0].step, events.Images("samples/red/0")[0].width) == (3, 5)
    [event] = events.Histograms("inputs")
    assert (event.step, event.histogram_value.bucket, event.histogram_value.bucket_limit) == (3, [3, 1], [2.0, 4.0])


@pytest.mark.more
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the logger requires it")
    logger = TensorBoardLogger()
    logger.start(tmp_path)
    write_all(logger)
    logger.finalize("success")
    check_tensorboard(tmp_path)


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*(pkg_resources|isinstance.treespec|LeafSpec|litlogger).*")
def test_loggers_of_lightning(tmp_path: Path, capsys) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers", reason="its loggers are tested")
    board, table = loggers.TensorBoardLogger(tmp_path), loggers.CSVLogger(tmp_path / "table")
    group = LoggerGroup([board, table])
    group.show("log_image", "samples/red", pixels_of([RED, RED], ""), 3, caption=[])
    group.show("log_figure", "curve", figure_of_line(), 3)
    group.show("log_histogram", "inputs", histogram_of([0.0, 1.0, 1.0, 4.0], 2), 3)
    board.experiment.close()
    check_tensorboard(Path(board.log_dir))
    assert not group.muted
    assert capsys.readouterr().err.count("logger 'lightning CSVLogger' cannot show images") == 1


@pytest.mark.more
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the logger requires it")
    from tests.loggers.test_wandb_logger import records

    for name, value in (("WANDB_SILENT", "true"), ("WANDB_CONSOLE", "off"), ("WANDB_DISABLE_GIT", "true")):
        monkeypatch.setenv(name, value)
    logger = WandbLogger("first", offline=True, project="p", save_dir=tmp_path)
    write_all(logger)
    logger.experiment.finish()
    found = {}
    for record in records(tmp_path):
        for item in record.history.item:
            found[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    assert found["trainer/global_step"] == 3
    assert [found[f"samples/red.{name}"] for name in ("count", "captions", "width")] == [2, ["a", "b"], 5]
    assert found["curve.width"] == 100
    assert [found[f"inputs.{name}"] for name in ("_type", "values", "bins")] == ["histogram", [3, 1], [0.0, 2.0, 4.0]]


@pytest.mark.more
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("mlflow", reason="the logger requires it")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}")
    write_all(logger)
    names = [path.name for path in tmp_path.rglob("images/*.png")]
    assert sorted(name.split("+timestamp")[0] for name in names) == [f"samples~red~{i}+step+3" for i in (0, 1)]
    assert [path.parent.name for path in tmp_path.rglob("figures/curve/step=3.png")] == ["curve"]
    assert "logger 'mlflow' cannot show histograms" in capsys.readouterr().err


@pytest.mark.more
@pytest.mark.filterwarnings("ignore::DeprecationWarning:comet_ml")
def test_comet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("comet_ml", reason="the logger requires it")
    from tests.loggers.test_comet_logger import messages

    for name in ("COMET_DISABLE_AUTO_LOGGING", "COMET_DISABLE_ANNOUNCEMENT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "ERROR")
    quiet = {"log_env_details": False, "log_git_metadata": False, "log_git_patch": False, "parse_args": False}
    logger = CometLogger(project="p", online=False, offline_directory=str(tmp_path), **quiet)
    write_all(logger)
    logger.experiment.end()
    uploads = [(each["upload_type"], each["additional_params"]) for each in messages(tmp_path, "file_upload")]
    assert sum(kind == "visualization" for kind, _ in uploads) == 3
    assert [each["fileName"] for kind, each in uploads if kind == "histogram3d"] == ["inputs"]


@pytest.mark.more
def test_trackio(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[int, dict[str, Any]]] = []
    trackio, run = ModuleType("trackio"), ModuleType("run")
    run.log = lambda metrics, step: rows.append((step, metrics))
    trackio.init = lambda **_: run
    trackio.Image = lambda value, caption=None: ("image", value.shape, caption)
    trackio.Histogram = lambda sequence=None, np_histogram=None: ("histogram", np_histogram)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    write_all(TrackioLogger("p"))
    image = ("image", (4, 5, 3))
    assert rows[0] == (3, {"samples/red/0": (*image, "a"), "samples/red/1": (*image, "b")})
    assert rows[1] == (3, {"curve": ("image", (50, 100, 4), None)})
    assert rows[2] == (3, {"inputs": ("histogram", ([3, 1], [0.0, 2.0, 4.0]))})


class Collects(roomier.Logger):
    """Logger that shows only images."""

    name = "collects"

    def __init__(self) -> None:
        self.images: list[tuple[str, int | None, list[Any], Any]] = []

    def log_metrics(self, metrics: Any, step: int) -> None: ...

    def log_image(self, key: str, images: Any, step: int | None = None, *, caption: Any = None) -> None:
        self.images.append((key, step, images, caption))


@pytest.mark.more
def test_custom_logger_sanity_check_and_notices(make_trainer, loader, capsys) -> None:
    logger = Collects()
    trainer = make_trainer(logger=[logger, "csv"], max_steps=1, callbacks=[ShowsFigure()], num_sanity_val_steps=1)
    trainer.fit(Shows(), loader, loader)
    assert [(key, step) for key, step, *_ in logger.images if key != "validated"] == [("samples/red", 0), ("pair", 0)]
    assert {step for key, step, *_ in logger.images if key == "validated"} <= {1}
    (red, _), caption = logger.images[1][2:]
    assert (red.shape, red.dtype, caption) == ((4, 5, 3), np.uint8, ["a", "b"])
    err = capsys.readouterr().err
    assert [err.count(f"logger 'collects' cannot show {kind}") for kind in ("figures", "histograms")] == [1, 1]
    dev = Collects()
    make_trainer(logger=dev, fast_dev_run=True).fit(Shows(), loader)
    assert not dev.images


@pytest.mark.more
def test_resumed_run_removes_later_rows(make_trainer, loader, tmp_path: Path) -> None:
    settings = {"logger": True, "enable_checkpointing": True, "max_epochs": -1}
    make_trainer(max_steps=2, **settings).fit(Shows(), loader)
    run = tmp_path / "version_0"
    late = json.dumps({"step": 9, "name": "late", "counts": [1], "edges": [0.0, 1.0]})
    with (run / "histograms.jsonl").open("a") as file:
        file.write(f"{late}\n" + '{"step": 1, "torn')
    trainer = make_trainer(max_steps=3, **settings)
    trainer.fit(Shows(), loader, ckpt_path="last")
    assert Path(trainer.log_dir) == run
    assert [row["step"] for row in listed(run, "histograms.jsonl")] == [0, 1, 2]


IMAGES = {
    "gray": (torch.rand(4, 5), (4, 5, 3)),
    "one-channel": (torch.rand(1, 4, 5), (4, 5, 3)),
    "alpha": (torch.rand(4, 6, 5, dtype=torch.bfloat16), (6, 5, 4)),
    "channels-last": (torch.rand(6, 5, 3), (6, 5, 3)),
    "array": (np.zeros((4, 5, 3), np.uint8), (4, 5, 3)),
    "array-with-three-rows": (np.zeros((3, 5, 3)), (3, 5, 3)),
    "mask": (torch.ones(4, 5, dtype=torch.bool), (4, 5, 3)),
    "view": (torch.rand(5, 4, 3, requires_grad=True).permute(2, 1, 0), (4, 5, 3)),
}


@pytest.mark.more
@pytest.mark.parametrize(("image", "shape"), IMAGES.values(), ids=IMAGES)
def test_forms_of_images(image: Any, shape: tuple[int, ...]) -> None:
    [pixels] = pixels_of(image, "x")
    assert (pixels.shape, pixels.dtype) == (shape, np.uint8)
    assert len(pixels_of([image, image], "x")) == 2


@pytest.mark.more
def test_values_of_images(capsys) -> None:
    [pixels] = pixels_of(torch.tensor([[0.0, 0.5], [1.5, torch.nan]]), "clipped")
    assert pixels[..., 0].tolist() == [[0, 128], [255, 0]]
    pixels_of(torch.tensor([[-2.0, 0.5]]), "clipped")
    assert capsys.readouterr().err.count("values between nan and nan") == 0
    pil = pytest.importorskip("PIL.Image", reason="pillow creates the image")
    assert pixels_of(pil.new("P", (5, 4)), "x")[0].shape == (4, 5, 3)
    assert pixels_of(pil.new("LA", (5, 4)), "x")[0].shape == (4, 5, 4)
    assert len(pixels_of(torch.rand(7, 3, 4, 5), "x")) == 7


@pytest.mark.more
@pytest.mark.parametrize(
    ("log", "message"),
    [
        (lambda self: self.log_image("x", torch.rand(2, 4, 5)), r"log_image=\('x', \(2, 4, 5\)\).*1, 3 or 4 channels"),
        (lambda self: self.log_image("x", torch.zeros(4, 5, dtype=torch.int64)), "values in .0, 255. as uint8"),
        (lambda self: self.log_image("x", "cat.png"), "is not an image"),
        (lambda self: self.log_image("x", [RED, RED], caption=["a"]), "has another length than the 2 images"),
        (lambda self: self.log_image("a\nb", RED), "log_image"),
        (lambda self: self.log_figure("x", RED), r"is not a figure.*plt.gcf\(\)"),
        (lambda self: self.log_histogram("x", ["a"]), "must be numbers"),
        (lambda self: self.log_histogram("x", torch.zeros(2, dtype=torch.complex64)), r"values.abs\(\)"),
        (lambda self: self.log_histogram("x", [1.0], bins=513), "a number of bins up to 512"),
    ],
)
def test_bad_input(make_trainer, loader, log: Any, message: str) -> None:
    class Logs(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            log(self)

    with pytest.raises(RoomierError, match=message):
        make_trainer(logger="csv", max_steps=1).fit(Logs(), loader)


@pytest.mark.more
def test_counts_of_unusual_values() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    counts, edges = np.histogram(values, bins=64)
    found = histogram_of(torch.tensor(values))
    assert found.counts == counts.tolist()
    assert found.edges == pytest.approx(edges.tolist(), rel=1e-6, abs=1e-6)
    assert histogram_of(torch.full((3,), 7.0), 4).counts == [0, 0, 3, 0]
    assert histogram_of(torch.tensor([]), 4).counts == [0] * 4
    assert histogram_of(torch.tensor([torch.nan, torch.inf, 1.0]), 1).counts == [1]
    assert histogram_of([3, 4, 4], [3.0, 4.0]).counts == [3]
    assert histogram_of(torch.tensor([True, False, True]), 2).counts == [1, 2]
    assert histogram_of(torch.tensor([1e-300, 3e300], dtype=torch.float64), 2).counts == [1, 1]
    assert found == histogram_of(found, 3)
