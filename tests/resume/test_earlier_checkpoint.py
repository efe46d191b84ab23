"""Resume from a checkpoint that an earlier version wrote within an epoch, with the same result as in that version."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import roomier

HERE = Path(__file__).parent
STEP, NUM_STEPS = 7, 14


class Line(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).mean())


def fit(folder: Path, max_steps: int, ckpt_path: Path) -> Line:
    roomier.seed_everything(3)
    module = Line()
    inputs = torch.sin(torch.arange(160.0)).reshape(40, 4)
    trainer = roomier.Trainer(
        optimizer={"name": "adamw", "weight_decay": 0.1},
        learning_rate=0.05,
        lr_schedule={"name": "cosine", "warmup_steps": 2},
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        enable_checkpointing=False,
    )
    loader = DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True)
    trainer.fit(module, loader, DataLoader(TensorDataset(inputs), batch_size=8), ckpt_path=ckpt_path)
    return module


def test_a_checkpoint_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    # The run of the earlier version saved at step 7 of 14 (``earlier_checkpoint``) and continued (``earlier_end``).
    resumed = fit(tmp_path, NUM_STEPS, HERE / "earlier_checkpoint")
    assert resumed.trainer.global_step == NUM_STEPS
    saved = load_file(HERE / "earlier_end.safetensors")
    expected = {name.removeprefix("module."): value for name, value in saved.items()}
    torch.testing.assert_close(dict(resumed.state_dict()), expected, rtol=1e-5, atol=1e-7)
    restored = fit(tmp_path, STEP, HERE / "earlier_checkpoint")  # no steps remain
    assert not torch.equal(restored.state_dict()["net.0.weight"], expected["net.0.weight"])
