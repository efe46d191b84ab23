"""The worker processes of a DataLoader end with the run that started them, and start again in the next run."""

import gc
import os
import signal
import threading
import time

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import roomier
from roomier.core.errors import DataError
from roomier.data import CombinedLoader
from tests.covering import few


class Samples(Dataset):
    """Samples of noise, with the id of the process that loaded them."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.cat([torch.tensor([float(os.getpid())]), torch.randn(3)])


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.randn(4) for _ in range(8)])


class OwnIteration(DataLoader):
    """Loader that roomier cannot copy, so the run reads the user's object."""

    def __iter__(self):
        return super().__iter__()


def persistent(dataset=None, kind=DataLoader, **options):
    options = {"batch_size": 4, "num_workers": 2, "persistent_workers": True, **options}
    return kind(Samples() if dataset is None else dataset, **options)


class Net(roomier.Module):
    """Module that records for each epoch the processes that loaded its batches."""

    def __init__(self, in_step=lambda module: None):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.in_step = in_step
        self.pids: dict[int, set[int]] = {}

    def training_step(self, batch, batch_idx):
        batch = batch[0] if isinstance(batch, list) else batch
        self.pids.setdefault(self.current_epoch, set()).update(batch[:, 0].int().tolist())
        self.in_step(self)
        return self.layer(batch[:, 1:]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[:, 1:]).square().mean())

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def running():
    """Return the child processes and the threads of this process."""
    children = psutil.Process().children()
    pids = {each.pid for each in children if "resource_tracker" not in " ".join(each.cmdline())}
    return pids | {each.ident for each in threading.enumerate()}


def started_since(before):
    """Return the processes and threads that started after ``before`` and do not end within 20 seconds.

    A thread that served a worker ends shortly after the worker.
    """
    deadline = time.monotonic() + 20
    while (started := running() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return started


def fail(module):
    if module.global_step == 1:
        raise KeyError("a bug of the user")


def terminate(module):
    if module.global_step == 1:
        signal.raise_signal(signal.SIGTERM)


FITS = {
    "after all epochs": (persistent, {"max_epochs": 2}, None, None),
    "within an epoch": (persistent, {"max_steps": 3}, None, None),
    "by an exception": (persistent, {"max_epochs": 2}, fail, KeyError),
    "by a signal": (persistent, {"max_epochs": 2}, terminate, SystemExit),
    "with a stream": (lambda: persistent(Stream()), {"max_steps": 3}, None, None),
    "with a loader that has its own __iter__": (lambda: persistent(kind=OwnIteration), {"max_epochs": 2}, None, None),
    "with several loaders": (
        lambda: CombinedLoader([persistent(), persistent(num_workers=1)], "max_size_cycle"),
        {"max_steps": 3},
        None,
        None,
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("make_loader", "limits", "in_step", "error"), few([pytest.param(*row, id=name) for name, row in FITS.items()], 4)
)
def test_no_worker_remains_after_a_fit(make_loader, limits, in_step, error, make_trainer):
    before = running()
    trainer, loader, val_loader = make_trainer(**limits), make_loader(), persistent(num_workers=1)
    net = Net() if in_step is None else Net(in_step)
    if error is None:
        trainer.fit(net, loader, val_loader)
    else:
        with pytest.raises(error):
            trainer.fit(net, loader, val_loader)
    assert not started_since(before)
    assert trainer.global_step > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_no_worker_remains_after_an_evaluation(verb, make_trainer):
    before = running()
    trainer = make_trainer(limit_val_batches=2, limit_test_batches=2)
    getattr(trainer, verb)(Net(), persistent())
    assert not started_since(before)


@pytest.mark.timeout(120)
def test_no_open_file_remains_after_a_fit(make_trainer):
    def num_files_after_a_fit():
        make_trainer(max_steps=2).fit(Net(), persistent(), persistent(num_workers=1))
        gc.collect()
        return psutil.Process().num_fds()

    first = num_files_after_a_fit()
    num_files = num_files_after_a_fit()
    end_s = time.monotonic() + 20
    while num_files > first and time.monotonic() < end_s:  # on a busy machine, pipes of ended workers close later
        time.sleep(0.1)
        gc.collect()
        num_files = psutil.Process().num_fds()
    assert num_files <= first


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [DataLoader, OwnIteration])
def test_workers_persist_within_a_fit_and_restart_in_the_next(kind, make_trainer):
    loader, first, second = persistent(kind=kind), Net(), Net()
    for net in (first, second):
        make_trainer(max_epochs=2).fit(net, loader)
        assert net.pids[0] == net.pids[1]
        assert len(net.pids[0]) == 2
    assert not first.pids[0] & second.pids[0]


@pytest.mark.timeout(120)
def test_workers_that_the_user_started_are_not_ended(make_trainer):
    loader = persistent(kind=OwnIteration)
    list(loader)
    users = {each.pid for each in loader._iterator._workers}
    make_trainer(max_epochs=1).fit(Net(), loader)
    assert {int(pid) for batch in loader for pid in batch[:, 0]} == users
    loader._iterator._shutdown_workers()


@pytest.mark.timeout(120)
def test_a_resume_with_persistent_workers_is_exact(make_trainer, tmp_path):
    def fit(max_steps, ckpt_path=None):
        torch.manual_seed(1)
        net = Net()
        trainer = make_trainer(max_steps=max_steps, enable_checkpointing=True)
        trainer.fit(net, persistent(shuffle=True), persistent(num_workers=1), ckpt_path=ckpt_path)
        path = tmp_path / f"step-{max_steps}"
        trainer.save_checkpoint(path)
        return path, [each.detach().clone() for each in net.parameters()]

    cut, _ = fit(6)  # within the second epoch
    _, resumed = fit(11, ckpt_path=cut)
    _, uninterrupted = fit(11)
    assert all(map(torch.equal, resumed, uninterrupted))


class Stuck(Samples):
    """Dataset whose last sample never returns.

    The worker blocks signals, like a worker that is stuck in native code.
    """

    def __init__(self, blocks_signals):
        self.blocks_signals = blocks_signals

    def __getitem__(self, index):
        if index == 15:
            if self.blocks_signals:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            time.sleep(3600)
        return super().__getitem__(index)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("is_persistent", "blocks_signals"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_is_stuck_is_reported_and_ended(is_persistent, blocks_signals, make_trainer, monkeypatch):
    monkeypatch.setattr(
        "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5
    )  # seconds that torch waits for the worker's exit
    before = running()
    loader = persistent(Stuck(blocks_signals), num_workers=1, persistent_workers=is_persistent, timeout=1)
    with pytest.raises(DataError) as caught:
        make_trainer(max_epochs=1).fit(Net(), loader)
    assert caught.value.field == "train_dataloaders"
    assert "within the timeout of the loader (DataLoader timed out after 1 seconds)" in caught.value.problem
    assert "Increase timeout" in caught.value.action
    assert not started_since(before)
