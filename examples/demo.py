"""Train a GPT with 10 million parameters on Python's standard library, stop the training half-way, and resume it.

Run this example with ``make demo``. Text, tokenizer and model are created locally, without downloads.
"""

import argparse
import json
import shutil
import sys
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader

import roomier
from roomier.callbacks import LearningRateMonitor, ModelCheckpoint, Throughput
from roomier.data import TokenDataset, write_tokens
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.optim.schedule import make_schedule

VOCAB_SIZE = 2048
CONTEXT = 128  # tokens
BATCH_SIZE = 4  # sequences
NUM_VALIDATIONS = 8
OUT = Path("runs/demo")
WANTED_FALL = 1.5  # required decrease of the validation loss, in nats per token
END_OF_FILE = "<|end|>"
BULK = {"test", "tests", "idlelib", "encodings", "pydoc_data", "site-packages", "dist-packages"}


class LanguageModel(roomier.Module):
    """GPT with next-token loss, AdamW, and a cosine schedule over ``num_steps`` steps, including the warm-up."""

    def __init__(self, num_steps: int, learning_rate: float = 6e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.num_steps, self.learning_rate = num_steps, learning_rate
        self.gpt = GPT(GPTConfig(VOCAB_SIZE, CONTEXT, num_layers=5, num_heads=6, width=384, dropout=0.0))

    def training_step(self, batch, batch_idx):
        _, loss = self.gpt(batch["input_ids"], batch["targets"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        _, loss = self.gpt(batch["input_ids"], batch["targets"])
        self.log("val_loss", loss, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, betas=(0.9, 0.99), weight_decay=0.1, fused=True
        )
        schedule = make_schedule(
            "cosine", optimizer, self.num_steps, warmup_steps=self.num_steps // 10, min_lr_ratio=0.05
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def read_standard_library() -> tuple[list[str], list[str]]:
    """Return training and validation texts. A hash of the path selects about 5 % of the files for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    train_texts, val_texts = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not BULK.intersection(name.parts):
            is_held_out = zlib.crc32(name.as_posix().encode()) % 20 == 0
            (val_texts if is_held_out else train_texts).append(path.read_text("utf-8", errors="replace"))
    return train_texts, val_texts


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END_OF_FILE], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_data(folder: Path) -> Tokenizer:
    """Train a tokenizer, write ``train.tokens`` and ``val.tokens`` to ``folder``, and return the tokenizer."""
    train_texts, val_texts = read_standard_library()
    tokenizer = train_tokenizer(train_texts)
    end = tokenizer.token_to_id(END_OF_FILE)
    for name, texts in (("train", train_texts), ("val", val_texts)):
        documents = (encoding.ids for encoding in tokenizer.encode_batch(texts))
        num_tokens = write_tokens(folder / f"{name}.tokens", documents, vocab_size=VOCAB_SIZE, end_of_document=end)
        print(f"{name}: {len(texts)} files, {num_tokens:,} tokens")
    return tokenizer


def faster_precision() -> str:
    """Return ``bf16-mixed`` if the machine multiplies matrices faster in bf16 than in fp32, otherwise ``32-true``."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    elapsed_s = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.rand(1024, 1024, device=device).to(dtype)
        float((matrix @ matrix).sum())  # warm-up
        begin_s = time.perf_counter()
        for _ in range(5):
            float((matrix @ matrix).sum())
        elapsed_s[dtype] = time.perf_counter() - begin_s
    return "bf16-mixed" if elapsed_s[torch.bfloat16] < elapsed_s[torch.float32] else "32-true"


def draw_losses(metrics: Path, first_loss: float, stopped_at: int, image: Path) -> None:
    """Save a plot of the losses in ``metrics`` to ``image``. ``first_loss`` is the validation loss before training."""
    rows = [{"step": 0, "val_loss": first_loss}] + [json.loads(line) for line in metrics.read_text().splitlines()]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in (("train_loss", "-"), ("val_loss", "o-")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), style, label=name, markersize=4, linewidth=1)
    axes.axvline(stopped_at, color="grey", linestyle=":", label="stopped and resumed")
    axes.set(xlabel="optimizer steps", ylabel="nats per token", title="GPT on the Python standard library")
    axes.legend()
    figure.savefig(image, dpi=150)


def main(num_steps: int) -> int:
    """Train half-way, resume in a new Trainer, and generate code. Return 0 if the loss decreased enough, else 1."""
    shutil.rmtree(OUT, ignore_errors=True)
    begin_s = time.perf_counter()
    tokenizer = write_data(OUT)
    train_data = TokenDataset(OUT / "train.tokens", CONTEXT)
    val_data = TokenDataset(OUT / "val.tokens", CONTEXT, stride=8 * CONTEXT)
    loaders = (DataLoader(train_data, BATCH_SIZE, shuffle=True), DataLoader(val_data, 16))
    precision = faster_precision()

    def new_trainer(max_steps: int) -> roomier.Trainer:
        every = num_steps // NUM_VALIDATIONS
        return roomier.Trainer(
            max_steps=max_steps,
            precision=precision,
            gradient_clip_val=1.0,
            val_check_interval=every,
            log_every_n_steps=max(1, num_steps // 50),
            callbacks=[ModelCheckpoint(every_n_train_steps=every), LearningRateMonitor(), Throughput()],
            default_root_dir=OUT,
        )

    roomier.seed_everything(0)
    module, trainer = LanguageModel(num_steps), new_trainer(num_steps // 2)
    first_loss = trainer.validate(module, loaders[1])[0]["val_loss"]
    trainer.fit(module, *loaders)

    print(f"stopped after {num_steps // 2} steps; a new model and a new Trainer resume from the checkpoint")
    module, trainer = LanguageModel(num_steps), new_trainer(num_steps)
    trainer.fit(module, *loaders, ckpt_path="last")
    last_loss = float(trainer.callback_metrics["val_loss"])

    draw_losses(Path(trainer.log_dir) / "metrics.jsonl", first_loss, num_steps // 2, OUT / "loss.png")
    prompt = torch.tensor([tokenizer.encode("def ").ids], device=module.device)
    generator = torch.Generator(module.device).manual_seed(0)
    sample = module.gpt.generate(prompt, 200, temperature=0.7, top_k=40, generator=generator)
    print(f"--- sample\n{tokenizer.decode(sample[0].tolist())}\n---")
    print(f"{time.perf_counter() - begin_s:.0f} s; loss curve: {OUT / 'loss.png'}; run: {trainer.log_dir}")
    print(f"demo: val_loss {first_loss:.2f} -> {last_loss:.2f}", flush=True)
    return 0 if first_loss - last_loss >= WANTED_FALL else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-steps", type=int, default=560, help="total number of optimizer steps, a multiple of 8")
    arguments = parser.parse_args()
    if arguments.num_steps < NUM_VALIDATIONS or arguments.num_steps % NUM_VALIDATIONS:
        parser.error(f"--num-steps {arguments.num_steps} is not a multiple of {NUM_VALIDATIONS}")
    sys.exit(main(arguments.num_steps))
