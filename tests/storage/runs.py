"""Small runs whose checkpoints are in remote storage. The tests call these functions on ranks that they may kill."""

import os
import zlib
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import Tensor, nn

from roomier import Callback, Module, Trainer, checkpoint
from roomier.callbacks import ModelCheckpoint
from roomier.checkpoint.record import RECORD_NAME

NUM_SAMPLES = 12
GLOBAL_BATCH = 4


class Small(Module):
    """Module whose every step depends on the random state, the optimizer state and the order of the data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.3), nn.Linear(width, 6))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.layers(batch) - batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Journal(Callback):
    """Append the step and the checksum of this rank's weights to a file after each step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: Module, *_: Any) -> None:
        crc32 = 0
        for parameter in module.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            crc32 = zlib.crc32(local.detach().numpy().tobytes(), crc32)
        with self.path.open("a") as file:
            file.write(f"{trainer.global_step} {crc32:08x}\n")


def journal_of(path: Path) -> dict[int, str]:
    """Return the checksum of each step. Steps that were repeated after a kill must have equal checksums."""
    found: dict[int, str] = {}
    for line in path.read_text().splitlines():
        step, crc32 = line.split()
        assert found.setdefault(int(step), crc32) == crc32, f"step {step} differs"
    return found


def train(
    root: str | Path,
    journal: Path,
    num_steps: int,
    *,
    strategy: str = "ddp",
    ckpt_path: str | None = "last",
    pid_file: Path | None = None,
    width: int = 32,
    **keywords: Any,
) -> None:
    """Train until step ``num_steps``, with a checkpoint after each step, and write a journal for each rank."""
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if pid_file is not None:
        pid_file.with_suffix(f".{rank}").write_text(str(os.getpid()))
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(NUM_SAMPLES, 6, generator=generator)
    loader = torch.utils.data.DataLoader(samples, batch_size=GLOBAL_BATCH // world_size, shuffle=True)
    torch.manual_seed(2)
    trainer = Trainer(
        default_root_dir=root,
        accelerator="cpu",
        strategy=strategy,
        max_steps=num_steps,
        max_epochs=-1,
        callbacks=[ModelCheckpoint(every_n_train_steps=1), Journal(journal.with_suffix(f".{rank}"))],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **keywords,
    )
    trainer.fit(Small(width), loader, ckpt_path=ckpt_path)


def check_storage(root: str, *, at_least: int) -> int:
    """Check that every checkpoint with a record is complete and that the newest can be loaded. Return its step."""
    system, path = fsspec.url_to_fs(root, use_listings_cache=False)
    with_record = {each.rpartition("/")[0] for each in system.find(path) if each.endswith(f"/{RECORD_NAME}")}
    complete = checkpoint.list_complete(f"{root}/version_0/checkpoints")
    assert {str(each).partition("://")[2] for each in complete} == {each.strip("/") for each in with_record}
    newest = checkpoint.find_last(root)
    assert newest is not None or at_least == 0
    if newest is None:
        return 0
    checkpoint.verify(newest)
    step = checkpoint.load(newest)["progress"]["global_step"]
    assert step >= at_least
    return step
