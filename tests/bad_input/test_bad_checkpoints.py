"""Missing, damaged or unsuitable checkpoints are rejected, and the run and the checkpoints do not change."""

import json

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier import checkpoint
from roomier.callbacks import ModelCheckpoint
from roomier.core.errors import CheckpointError, DataError, RoomierError

MORE = {"max_epochs": 3}


def resume(desk, model=None, **keywords):
    """Resume from the valid checkpoint. A rejected resume must not change the model."""
    model = desk.Net() if model is None else model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        return desk.fit(model, **{"ckpt_path": desk.good, **MORE, **keywords})
    except RoomierError:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        raise


def configured(desk, make):
    return desk.net(configure_optimizers=make)


def with_scheduler(make):
    def configure(self):
        optimizer = AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [make(optimizer)]

    return configure


class Renamed(roomier.Module):
    """``Net`` whose layers have other names."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        raise AssertionError("never reached")

    def configure_optimizers(self):
        return AdamW(self.parameters())


def damage(desk, change, pattern="*.safetensors"):
    """Change the bytes of a file in the valid checkpoint, and resume from this checkpoint."""
    (desk.root / "damaged-on-purpose").touch()
    path = sorted(desk.good.glob(pattern))[0]
    data = change(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    return resume(desk)


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def from_a_file(desk):
    path = desk.root.parent / "model.ckpt"
    path.write_bytes(b"a pickle, say")
    return resume(desk, ckpt_path=path)


def from_weights_only(desk):
    trainer = desk.fit(max_epochs=1, default_root_dir=desk.root.parent / "other")
    path = desk.root.parent / "weights"
    trainer.save_checkpoint(path, weights_only=True)
    return resume(desk, ckpt_path=path)


def mid_epoch(desk, loader):
    """Return a checkpoint written in the middle of an epoch over ``loader``."""
    trainer = desk.fit(train=loader, max_epochs=None, max_steps=2, default_root_dir=desk.root.parent / "other")
    return trainer.checkpoint_callback.best_model_path


def from_other_data(desk):
    path = mid_epoch(desk, loader_of(16))
    return resume(desk, train=loader_of(20), ckpt_path=path)


def from_shuffled_data(desk):
    path = mid_epoch(desk, loader_of(16, shuffle=True))
    return resume(desk, train=loader_of(16), ckpt_path=path)


def from_another_loader(desk):
    path = mid_epoch(desk, loader_of(16))
    return resume(desk, ckpt_path=path)


def from_a_shorter_list(desk):
    path = mid_epoch(desk, desk.batches)
    return resume(desk, train=desk.batches[:1], ckpt_path=path)


def loader_of(num_samples, shuffle=False):
    samples = TensorDataset(torch.randn(num_samples, 4), torch.zeros(num_samples, dtype=torch.int64))
    return DataLoader(samples, batch_size=4, shuffle=shuffle)


class Sized(roomier.Module):
    """A module that does not call ``save_hyperparameters``."""

    def __init__(self, width, activation):
        super().__init__()
        self.layer = nn.Linear(4, width)


WRONG = {
    "of a model with other names": (
        lambda d: resume(d, Renamed()),
        CheckpointError,
        "ckpt_path",
        "epoch=0-step=4",
        "Pass a checkpoint of this model",
    ),
    "weights of a model with other names": (
        lambda d: d.trainer().test(type("Other", (Renamed,), {"test_step": print})(), d.batches, ckpt_path=d.good),
        CheckpointError,
        "ckpt_path",
        "epoch=0-step=4",
        "Pass a checkpoint of this model",
    ),
    "of a model with other shapes": (
        lambda d: resume(d, d.Net(width=6)),
        CheckpointError,
        "ckpt_path",
        "epoch=0-step=4",
        "Pass a checkpoint of this model",
    ),
    "of another optimizer": (
        lambda d: resume(d, configured(d, lambda self: SGD(self.parameters(), lr=0.1))),
        CheckpointError,
        "optimizer",
        "'SGD'",
        "Create the optimizer as in the saved run",
    ),
    "of an optimizer with the same states": (
        lambda d: resume(d, configured(d, lambda self: Adam(self.parameters()))),
        CheckpointError,
        "optimizer",
        "'Adam'",
        "Create the optimizer as in the saved run",
    ),
    "of other parameter groups": (
        lambda d: resume(
            d,
            configured(
                d, lambda self: AdamW([{"params": part.parameters()} for part in (self.body, self.head)], lr=0.1)
            ),
        ),
        CheckpointError,
        "optimizer",
        "'AdamW'",
        "Create the optimizer as in the saved run",
    ),
    "of fewer parameters": (
        lambda d: resume(d, configured(d, lambda self: AdamW(self.head.parameters()))),
        CheckpointError,
        "optimizer",
        "'AdamW'",
        "Create the optimizer as in the saved run",
    ),
    "of fewer schedulers": (
        lambda d: resume(d, configured(d, with_scheduler(lambda o: StepLR(o, 1)))),
        CheckpointError,
        "lr_scheduler",
        "['StepLR']",
        "Configure the schedulers as in the saved run",
    ),
    "cut off": (
        lambda d: damage(d, lambda data: data[: len(data) // 2]),
        CheckpointError,
        "ckpt_path",
        "epoch=0-step=4",
        "Use another checkpoint",
    ),
    "with a flipped bit": (
        lambda d: damage(d, flipped),
        CheckpointError,
        "ckpt_path",
        "epoch=0-step=4",
        "Use another checkpoint",
    ),
    "with a file missing": (
        lambda d: damage(d, lambda data: None),
        CheckpointError,
        "ckpt_path",
        "epoch=0-step=4",
        "Use another checkpoint",
    ),
    "with a damaged run.json": (
        lambda d: damage(d, flipped, "run.json"),
        CheckpointError,
        "ckpt_path",
        "epoch=0-step=4",
        "Use another checkpoint",
    ),
    "with an empty run.json": (
        lambda d: damage(d, lambda data: b"", "run.json"),
        CheckpointError,
        "ckpt_path",
        "epoch=0-step=4",
        "Use another checkpoint",
    ),
    "without run.json": (
        lambda d: damage(d, lambda data: None, "run.json"),
        CheckpointError,
        "ckpt_path",
        "epoch=0-step=4",
        "Use another checkpoint",
    ),
    "of another program": (
        lambda d: damage(d, lambda data: json.dumps({"name": "run"}).encode(), "run.json"),
        CheckpointError,
        "ckpt_path",
        "epoch=0-step=4",
        "Pass the path of a checkpoint folder",
    ),
    "that does not exist": (
        lambda d: resume(d, ckpt_path=d.good.with_name("epoch=9-step=99")),
        CheckpointError,
        "ckpt_path",
        "epoch=9-step=99",
        "epoch=0-step=4', the newest valid checkpoint next to it",
    ),
    "nowhere near": (
        lambda d: resume(d, ckpt_path="/nowhere/at/all"),
        CheckpointError,
        "ckpt_path",
        "'/nowhere/at/all'",
        "Pass the path of a checkpoint folder",
    ),
    "that is a file": (from_a_file, CheckpointError, "ckpt_path", "model.ckpt", "Pass a checkpoint folder"),
    "that is a number": (
        lambda d: resume(d, ckpt_path=4),
        CheckpointError,
        "ckpt_path",
        "4",
        "Pass a checkpoint, 'last' or 'best'",
    ),
    "of weights alone": (
        from_weights_only,
        CheckpointError,
        "ckpt_path",
        "weights",
        "Load the weights with Module.load_from",
    ),
    "the best, but no checkpoint exists": (
        lambda d: d.fit(ckpt_path="best"),
        CheckpointError,
        "ckpt_path",
        "'best'",
        "Pass the path of a checkpoint",
    ),
    "in the middle of other data": (
        from_other_data,
        DataError,
        "train_dataloaders",
        "TensorDataset",
        "Resume with the data",
    ),
    "in the middle of data in another order": (
        from_shuffled_data,
        DataError,
        "train_dataloaders",
        "DataLoader",
        "Resume with the data",
    ),
    "of another kind of loader": (
        from_another_loader,
        DataError,
        "train_dataloaders",
        "[",
        "Pass the same kind of loader",
    ),
    "after the end of a list": (from_a_shorter_list, DataError, "train_dataloaders", "[", "Resume with the data"),
    "for a module whose arguments were not stored": (
        lambda d: Sized.load_from_checkpoint(d.good, width=8),
        CheckpointError,
        "checkpoint_path",
        "epoch=0-step=4",
        "Pass the missing arguments to load_from_checkpoint",
    ),
    "written before a fit": (
        lambda d: d.trainer().save_checkpoint(d.root / "early"),
        RoomierError,
        "save_checkpoint",
        "early",
        "Call fit first",
    ),
    "read from a path with a NUL byte": (
        lambda d: d.fit(ckpt_path="a\0b"),
        CheckpointError,
        "ckpt_path",
        r"'a\x00b'",
        "Remove the NUL byte",
    ),
    "written to a path with a NUL byte": (
        lambda d: d.fit().save_checkpoint("a\0b"),
        CheckpointError,
        "filepath",
        r"'a\x00b'",
        "Remove the NUL byte",
    ),
    "written to a folder with other content": (
        lambda d: d.fit(default_root_dir=d.root.parent / "other", max_epochs=1).save_checkpoint(d.root),
        CheckpointError,
        "path",
        "runs",
        "Choose another path",
    ),
    "asked of a module without a Trainer": (
        lambda d: d.Net().trainer,
        RoomierError,
        "trainer",
        "None",
        "Call Trainer.fit first",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("act", "kind", "field", "received", "action"), [pytest.param(*row, id=name) for name, row in WRONG.items()]
)
def test_an_unusable_checkpoint_is_rejected(act, kind, field, received, action, refuses):
    refuses(act, kind, field, received, action)


def test_schedulers_of_another_class_are_rejected(desk):
    root = desk.root.parent / "other"
    before = configured(desk, with_scheduler(lambda optimizer: StepLR(optimizer, 1)))
    desk.fit(before, max_epochs=1, default_root_dir=root)
    now = configured(desk, with_scheduler(lambda optimizer: CosineAnnealingLR(optimizer, 10)))
    with pytest.raises(CheckpointError, match=r"lr_scheduler=\['CosineAnnealingLR'\].*\['StepLR'\]"):
        desk.fit(now, max_epochs=2, default_root_dir=root, ckpt_path="last")


def test_last_skips_a_damaged_checkpoint_with_a_notice(desk, capsys):
    newer = desk.good.with_name("epoch=1-step=8")
    checkpoint.save(newer, {**checkpoint.load(desk.good), "progress": {"global_step": 8}})
    (newer / "run.json").write_bytes(b"")
    resumed = resume(desk, ckpt_path="last", max_epochs=1)
    assert resumed.global_step == 4
    told = capsys.readouterr().err
    assert "skipped the checkpoint" in told
    assert "epoch=1-step=8" in told


def test_hyperparameters_that_cannot_be_stored_are_reported_immediately(desk, capsys):
    class Built(desk.Net):
        def __init__(self, network):
            super().__init__()
            self.save_hyperparameters()

    root = desk.root.parent / "other"
    trainer = desk.fit(Built(nn.Linear(2, 2)), max_epochs=1, default_root_dir=root)
    assert "hyperparameter 'network' of Built is a Linear, so checkpoints do not contain it" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="'network'"):
        Built.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)


def test_a_rejected_resume_loses_no_row_of_the_log(desk):
    rows = (desk.root / "version_0" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError):
        resume(desk, desk.Net(width=6))
    assert (desk.root / "version_0" / "metrics.jsonl").read_bytes() == rows


LOST_RECORD = {
    "with tensors": lambda folder: (folder / "run.json").unlink(),
    "only a README": lambda folder: [path.unlink() for path in folder.iterdir() if path.name != "README.txt"],
}
DAMAGE = {
    **LOST_RECORD,
    "record": lambda folder: (folder / "run.json").write_text("{}"[:1]),
    "tensors": lambda folder: (file := next(folder.glob("*.safetensors"))).write_bytes(flipped(file.read_bytes())),
}


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("harm", LOST_RECORD.values(), ids=LOST_RECORD)
def test_a_checkpoint_without_its_record_is_renamed_before_its_name_is_used(desk, harm, is_last, capsys):
    keywords = {"max_epochs": 2, "ckpt_path": "last" if is_last else desk.good}
    desk.fit(**keywords, callbacks=[ModelCheckpoint(save_top_k=-1)])
    newest = desk.good.with_name("epoch=1-step=8")
    harm(newest)
    capsys.readouterr()
    for renames in (True, False):  # the renamed folder is not renamed again
        trainer = desk.fit(**keywords, callbacks=[ModelCheckpoint(save_top_k=-1)])
        text = capsys.readouterr().err
        assert (f"renamed {newest} to epoch=1-step=8.damaged, because" in text) == renames
        assert (f"skipped the checkpoint {newest} (run.json is missing)" in text) == (renames and is_last)
        assert trainer.global_step == 8
        checkpoint.verify(newest)
    assert newest.with_name("epoch=1-step=8.damaged").is_dir()


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_last_is_an_error_if_checkpoints_exist_and_none_can_be_used(desk, harm):
    harm(desk.good)
    (desk.root / "damaged-on-purpose").touch()
    for _ in range(2):  # a second attempt does not start from step 0 either
        with pytest.raises(CheckpointError) as error:
            desk.fit(max_epochs=2, ckpt_path="last")
        assert error.value.field == "ckpt_path"
        assert str(desk.good) in f"{error.value.received} {error.value.problem}"
        assert "pass ckpt_path=None to start from step 0" in error.value.action
    assert desk.fit(max_epochs=2).global_step == 8
