"""A LightningModule resumes bit for bit, with the sample order of torch and random numbers in its validation."""

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from roomier import Callback, Trainer
from tests.lightning.both import make_trainer
from tests.lightning.modules import NUM_BATCHES, SeveralSchedulers, WithDropout, in_order, samples, shuffled


class Drawing(WithDropout):
    """Module with dropout, a validation that consumes random numbers, and schedulers of each interval."""

    configure_optimizers = SeveralSchedulers.configure_optimizers


LOADERS = {
    "global generator": shuffled,
    "separate generator": lambda: DataLoader(samples(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
}


def fit(module: Any, folder: Any, make_loader: Any, ckpt_path: Any = None, **keywords: Any) -> Any:
    trainer = make_trainer(Trainer, folder, **keywords)
    trainer.fit(module, make_loader(), in_order(2, seed=1), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("num_steps", [NUM_BATCHES - 3, NUM_BATCHES, NUM_BATCHES + 1])
@pytest.mark.parametrize("make_loader", LOADERS.values(), ids=LOADERS)
def test_resume_within_and_between_epochs(tmp_path, make_loader, num_steps):
    torch.manual_seed(1)
    whole = Drawing()
    part, again = copy.deepcopy(whole), copy.deepcopy(whole)
    torch.manual_seed(2)
    expected = fit(whole, tmp_path, make_loader, max_epochs=3, val_check_interval=4)
    torch.manual_seed(2)
    first = fit(part, tmp_path, make_loader, max_steps=num_steps, val_check_interval=4)
    first.save_checkpoint(tmp_path / "part")
    torch.manual_seed(3)
    trainer = fit(again, tmp_path, make_loader, tmp_path / "part", max_epochs=3, val_check_interval=4)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    assert trainer.callback_metrics == expected.callback_metrics
    assert trainer.global_step == 3 * NUM_BATCHES


@pytest.mark.parametrize("in_epoch", [0, 1])
def test_interrupted_validation_restores_random_states(tmp_path, in_epoch):
    class Sends(Callback):
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.current_epoch == in_epoch and not trainer.sanity_checking:
                os.kill(os.getpid(), signal.SIGTERM)

    torch.manual_seed(1)
    whole = Drawing()
    part, again = copy.deepcopy(whole), copy.deepcopy(whole)
    torch.manual_seed(2)
    fit(whole, tmp_path / "whole", shuffled, max_epochs=3)
    torch.manual_seed(2)
    with pytest.raises(SystemExit):
        fit(part, tmp_path / "part", shuffled, max_epochs=3, callbacks=[Sends()], enable_checkpointing=True)
    [left] = (tmp_path / "part").rglob("interrupted-*")
    fit(again, tmp_path / "part", shuffled, left, max_epochs=3)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
