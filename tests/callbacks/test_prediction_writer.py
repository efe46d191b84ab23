"""Predictions that are written to files or streamed, so that they do not stay in memory."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.callbacks import PredictionWriter
from roomier.core.errors import RoomierError

X_NC = torch.arange(20.0).reshape(10, 2)


class Net(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.dropout = nn.Dropout(0.5)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"sum": self.dropout(self.layer(batch[0])), "name": f"batch {batch_idx}"}


def loader(num_samples: int = 10) -> Any:
    return DataLoader(TensorDataset(X_NC[:num_samples]), batch_size=4)


def quiet(*callbacks: Any, **keywords: Any) -> roomier.Trainer:
    return roomier.Trainer(
        accelerator="cpu", callbacks=list(callbacks), logger=False, enable_progress_bar=False, **keywords
    )


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_one_file_per_batch(tmp_path: Path) -> None:
    trainer = quiet(PredictionWriter(tmp_path / "out"))
    assert trainer.predict(Net(), [loader(), loader(5)], return_predictions=False) is None
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        f"predictions-{number}.pt" for number in ("0-000000", "0-000001", "0-000002", "1-000000", "1-000001")
    ]
    last = read(tmp_path / "out" / "predictions-0-000002.pt")
    assert last["name"] == "batch 2"
    assert torch.equal(last["sum"], X_NC[8:].sum(1, keepdim=True))
    assert trainer.predict_loop.predictions == [[], []]


def test_one_file_per_rank(tmp_path: Path) -> None:
    quiet(PredictionWriter(tmp_path, write_interval="epoch")).predict(Net(), loader(), return_predictions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["predictions-rank-0.pt"]
    found = read(tmp_path / "predictions-rank-0.pt")
    assert found["batch_indices"] == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]
    assert torch.equal(torch.cat([each["sum"] for each in found["predictions"]]), X_NC.sum(1, keepdim=True))


def test_custom_writer_receives_lightnings_arguments() -> None:
    seen: list[Any] = []

    class Own(PredictionWriter):
        def write_on_batch_end(
            self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *rest: Any
        ) -> None:
            batch, batch_idx, dataloader_idx = rest
            seen.append((prediction["name"], batch_indices, len(batch[0]), batch_idx, dataloader_idx))

    quiet(Own()).predict(Net(), loader(6))
    assert seen == [("batch 0", [0, 1, 2, 3], 4, 0, 0), ("batch 1", [4, 5], 2, 1, 0)]


def test_unknown_sample_indices_are_empty() -> None:
    seen: list[Any] = []

    class Own(PredictionWriter):
        def write_on_batch_end(
            self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *rest: Any
        ) -> None:
            seen.append(batch_indices)

    quiet(Own()).predict(Net(), DataLoader(TensorDataset(X_NC), batch_size=5, shuffle=True))
    quiet(Own()).predict(Net(), [[X_NC]])
    assert seen == [[], [], []]


def test_folder_with_earlier_predictions_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    quiet(PredictionWriter(tmp_path)).predict(Net(), loader())
    with pytest.raises(RoomierError, match="already contains 3 files with predictions"):
        quiet(PredictionWriter(tmp_path)).predict(Net(), loader())
    quiet(PredictionWriter(tmp_path, overwrite=True)).predict(Net(), loader(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "predictions-0-000000.pt"]


def test_prediction_that_is_not_plain_is_rejected(tmp_path: Path) -> None:
    class Odd(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return [{"where": tmp_path}]

    with pytest.raises(RoomierError, match="'PosixPath': cannot be written"):
        quiet(PredictionWriter(tmp_path / "out")).predict(Odd(), loader())
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        ({}, "Pass a folder for the files"),
        ({"output_dir": 5}, "Pass a string or a Path"),
        ({"output_dir": "a\0b"}, "Remove the NUL byte"),
        ({"output_dir": ".", "write_interval": "step"}, "Use one of: batch, epoch, batch_and_epoch"),
        ({"output_dri": "."}, "Did you mean 'output_dir'?"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], action: str) -> None:
    with pytest.raises(RoomierError, match=action):
        PredictionWriter(**arguments)


# Stream ------------------------------------------------------------------------------------------------------------


def test_stream_yields_the_results_of_predict() -> None:
    computed: list[int] = []

    class Counts(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            computed.append(batch_idx)
            return super().predict_step(batch, batch_idx)["sum"]

    module, trainer = Counts(), quiet()
    full = trainer.predict(module, [loader(), loader(5)])
    assert full is not None
    computed.clear()
    stream = trainer.predict_stream(module, [loader(), loader(5)])
    assert computed == []
    for number, (own, expected) in enumerate(
        zip(stream, [each for of_loader in full for each in of_loader], strict=True)
    ):
        assert torch.equal(own, expected)
        assert len(computed) == number + 1
        assert trainer.predicting
        assert not module.training
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert not trainer.predicting
    assert module.training
    assert trainer.state.finished


@pytest.mark.parametrize("end", ["close", "delete"])
def test_abandoned_stream_ends_the_run(end: str) -> None:
    ended: list[str] = []

    class Sees(roomier.Callback):
        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            ended.append(stage)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            ended.append("exception")

    trainer, module = quiet(Sees()), Net()
    stream = trainer.predict_stream(module, loader())
    next(stream)
    with pytest.raises(RoomierError, match="cannot be called while this Trainer is running"):
        trainer.predict(module, loader())
    if end == "close":
        stream.close()
    else:
        del stream
    assert ended == ["predict"]
    assert module.training
    assert trainer.predict(module, loader()) is not None


def test_stream_without_data_raises_immediately() -> None:
    with pytest.raises(RoomierError, match="predict requires data"):
        quiet().predict_stream(Net())


def test_error_in_a_stream_ends_the_run() -> None:
    class Fails(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx:
                raise ZeroDivisionError
            return 1

    trainer = quiet()
    stream = trainer.predict_stream(Fails(), loader())
    assert next(stream) == 1
    with pytest.raises(ZeroDivisionError):
        next(stream)
    assert not trainer.is_running
    assert trainer.state.status == "interrupted"


def test_signal_ends_a_stream_at_the_next_item() -> None:
    trainer, module = quiet(), Net()
    stream = trainer.predict_stream(module, loader())
    next(stream)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        next(stream)
    assert caught.value.code == 128 + signal.SIGTERM
    assert trainer.interrupted
    assert module.training


# Several ranks ------------------------------------------------------------------------------------------------------


def predict_on_ranks(folder: Path) -> Any:
    trainer = quiet(
        PredictionWriter(folder, write_interval="batch_and_epoch"),
        strategy="zero3",
        devices=2,
        enable_checkpointing=False,
    )
    trainer.predict(Net(), loader(), return_predictions=False)
    names = [each["name"] for each in trainer.predict_loop.predictions]
    trainer.callbacks.clear()
    streamed = [each["sum"].flatten().tolist() for each in trainer.predict_stream(Net(), loader())]
    early = trainer.predict_stream(Net(), loader())
    first = next(early)["name"]
    early.close()
    return names, streamed, first, len(trainer.predict(Net(), loader()) or ())


def test_ranks_write_their_batches_and_stream_all(on_ranks: Any, tmp_path: Path) -> None:
    (names_0, *rest_0), (names_1, *rest_1) = on_ranks(2, predict_on_ranks, tmp_path)
    assert (names_0, names_1) == (["batch 0", "batch 1"], ["batch 0"])  # each rank counts its own batches
    assert rest_0 == rest_1
    sums = X_NC.sum(1).tolist()
    assert rest_0 == [[sums[:4], sums[4:8], sums[8:]], "batch 0", 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"predictions-0-{number:06d}.pt" for number in range(3)),
        *(f"predictions-rank-{rank}.pt" for rank in range(2)),
    ]
    assert read(tmp_path / "predictions-rank-1.pt")["batch_indices"] == [[[4, 5, 6, 7]]]
