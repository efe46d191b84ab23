"""Loaders that are recreated during a fit (``Trainer(reload_dataloaders_every_n_epochs=...)``)."""

from __future__ import annotations

from torch.utils.data import DataLoader

from roomier.api.lightning_module import LightningAdapter
from roomier.core.device.rng import preserved_rng
from roomier.core.log import quiet
from roomier.run.run import Run
from roomier.train.opening.open_run import batches_of_fit


def reload_loaders(run: Run) -> None:
    """Recreate the loaders of ``run`` at the start of the current epoch, if the interval requires it.

    Loaders are created for epoch 0, and then in each epoch whose index is a multiple of the interval. A resumed run
    creates the loaders of its first epoch again, because they were created before the epoch was known. In this case,
    the new loaders continue at the position of the checkpoint.
    """
    progress = run.progress
    is_new = progress.epoch % run.options.reload_dataloaders_every_n_epochs == 0 and progress.batch_idx == 0
    is_resumed = progress.num_batches == run.now.num_batches_before
    if progress.num_batches == 0 or not (is_new or is_resumed):
        return
    position = None if is_new else run.source.state_dict()
    if not run.settled.data.reload():
        return
    if position is None:
        with quiet():  # the notices about the loaders were printed before
            run.batches = batches_of_fit(run.settled, run.module)
        if isinstance(run.module, LightningAdapter) and isinstance(run.source.loader, DataLoader):
            # Lightning creates an iterator before on_train_epoch_start and another one after it, and both draw seeds.
            run.source.start(progress.epoch)
            run.source.close()
        return
    with quiet(), preserved_rng():
        run.batches = batches_of_fit(run.settled, run.module)
        run.source.check(position, run.progress.epoch)
        run.source.load_state_dict(position)
