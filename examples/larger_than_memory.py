"""Train a model whose weights, gradients and optimizer states do not fit in memory.

The tensors are stored on disk, and only a few blocks are in memory at a time. The script prints the peak memory of the
process. To verify that training works with less memory than the tensors require, limit the memory of the process::

    systemd-run --user --scope -p MemoryMax=6G -p MemorySwapMax=0 python examples/larger_than_memory.py
"""

import argparse
import resource

import torch
from torch.utils.data import DataLoader

import roomier
from roomier.models.gpt import GPT, GPTConfig

CONTEXT = 128  # tokens
VOCAB_SIZE = 8192
BYTES_PER_PARAMETER = 16  # weight, gradient and two optimizer states, each in float32


class LanguageModel(roomier.Module):
    """GPT that is created on the meta device, without memory for its weights."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.config = GPTConfig(VOCAB_SIZE, CONTEXT, num_layers, num_heads=width // 64, width=width, dropout=0.0)

    def configure_model(self):
        with torch.device("meta"):
            self.gpt = GPT(self.config)

    def training_step(self, batch, batch_idx):
        _, loss = self.gpt(batch[:, :-1], batch[:, 1:])
        self.log("loss", loss, prog_bar=True)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", default=None, help="folder on a local disk")
    arguments = parser.parse_args()
    roomier.seed_everything(0)
    before_bytes = peak_bytes()
    model = LanguageModel(arguments.layers, arguments.width)
    tokens = torch.randint(VOCAB_SIZE, (1, CONTEXT + 1)).expand(arguments.steps, -1)
    trainer = roomier.Trainer(
        max_steps=arguments.steps,
        accelerator="cpu",
        optimizer={"name": "adamw", "lr": 3e-5},
        gradient_clip_val=1.0,
        offload={"parameters": "disk", "optimizer_states": "disk", "folder": arguments.folder},
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(tokens, batch_size=1))
    num_parameters = sum(each.numel() for each in model.parameters())
    print(
        f"{num_parameters / 1e6:.0f} million parameters, "
        f"{num_parameters * BYTES_PER_PARAMETER / 2**30:.1f} GiB of weights, gradients and optimizer states, "
        f"peak memory {peak_bytes() / 2**30:.2f} GiB ({before_bytes / 2**30:.2f} GiB before the model was created)"
    )


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
