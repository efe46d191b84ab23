"""``python -m benchmarks optimizers``: loss, memory and speed of each optimizer, compared with AdamW in fp32.

The result is one JSON object: the settings, and ``rows``, one for each optimizer. The first row is ``"adamw"``, torch's
fused AdamW with float32 states. The keys of a row are:

- ``loss``: final validation loss in nats per byte, averaged over the seeds; ``loss_all``: the loss of each seed;
- ``ratio_to_adamw``: ratio of ``loss`` to the loss of AdamW; ``ratio_to_adamw_all``: the ratio for each seed, with
  equal data and initial weights;
- ``train_loss``: mean of the last 100 training losses (at most a tenth of all losses), averaged over the seeds;
- ``state_bytes_per_parameter``: bytes of optimizer states per parameter of large matrices, to which low-bit states
  apply; ``large_share``: fraction of the parameters in large matrices;
- ``step_s``: median wall time of an update of ``step_parameters`` parameters; ``step_cpu_s``: CPU time of this
  thread, which depends less on the load of the machine; ``step_ratio_to_adamw``: ratio of ``step_cpu_s`` to the
  ``step_cpu_s`` of AdamW.

The model is the GPT of ``examples/demo.py``, by default with a smaller width than in the demo. The data consists of the
source code of the standard library, as bytes. For each seed, all optimizers use the same batches. The learning rate
increases during the first tenth of the steps and then follows a cosine decay.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import RenderableType
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.machine import circumstances
from benchmarks.options import at_least, chosen, table_of
from benchmarks.timing import Cost, interleave, median, one_thread
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.optim.block_codes import can_be_coded
from roomier.techniques.optim.by_name import make_optimizer, trained_parameters
from roomier.techniques.optim.schedule import make_schedule

PEER = "adamw"
RATES = {PEER: 1e-3, "adamw8bit": 1e-3, "adamw4bit": 1e-3, "lion": 2e-4, "muon": 1e-3, "adafactor": 1e-2}
_DEFAULT = "adamw8bit,adamw4bit"
_BETAS = {"adamw", "adamw8bit", "adamw4bit"}
MODELS = {
    "small": GPTConfig(vocab_size=256, context=128, num_layers=4, num_heads=4, width=128, dropout=0.0),
    "demo": GPTConfig(vocab_size=256, context=128, num_layers=5, num_heads=6, width=384, dropout=0.0),
}
_BATCH_SIZE, _NUM_VALIDATION = 4, 256  # sequences
_LEFT_OUT = {"test", "tests", "idlelib", "encodings", "pydoc_data", "site-packages", "dist-packages"}
_WIDTH = 2048  # width of the matrices whose update is timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--model", choices=MODELS, default="small", help="small, or demo for the width of the demo (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=at_least(1), default=2000, help="optimizer steps per training run (%(default)s)"
    )
    parser.add_argument("--seeds", type=at_least(1), default=3, help="training runs per optimizer (%(default)s)")
    parser.add_argument(
        "--optimizers", default=_DEFAULT, help=f"in addition to {PEER}, separated by commas (%(default)s)"
    )
    parser.add_argument(
        "--step-parameters", type=at_least(1), default=2**24, help="number of updated parameters (%(default)s)"
    )
    parser.add_argument("--repeats", type=at_least(1), default=15, help="timed updates per optimizer (%(default)s)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train with each optimizer and each seed. Then time the updates."""
    facts = circumstances()
    config = MODELS[options.model]
    names = [PEER, *(each for each in chosen("--optimizers", options.optimizers or PEER, RATES) if each != PEER)]
    with one_thread():
        rows = _train_all(names, config, options.steps, options.seeds)
        costs = _time_all(names, options.step_parameters, options.repeats)
    for row in rows:
        cost = costs[row["optimizer"]]
        row["step_s"], row["step_cpu_s"] = cost.wall_us / 1e6, cost.cpu_us / 1e6
        row["step_ratio_to_adamw"] = cost.cpu_us / costs[PEER].cpu_us
    settings = {"steps": options.steps, "seeds": options.seeds, "step_parameters": options.step_parameters}
    model = {**asdict(config), "batch_size": _BATCH_SIZE}
    return {"case": "optimizers", **settings, "repeats": options.repeats, "model": model, "rows": rows, **facts}


# ---- quality ---------------------------------------------------------------------------------------------------------


def _train_all(names: Sequence[str], config: GPTConfig, num_steps: int, num_seeds: int) -> list[dict[str, Any]]:
    text = read_text()
    found: dict[str, list[dict[str, float]]] = {
        name: [_train(name, config, seed, num_steps, text) for seed in range(num_seeds)] for name in names
    }
    rows = []
    for name in names:
        losses = [each["loss"] for each in found[name]]
        peers = [each["loss"] for each in found[PEER]]
        rows.append(
            {
                "optimizer": name,
                "loss": mean(losses),
                "loss_all": losses,
                "ratio_to_adamw": mean(losses) / mean(peers),
                "ratio_to_adamw_all": [loss / peer for loss, peer in zip(losses, peers, strict=True)],
                "train_loss": mean(each["train_loss"] for each in found[name]),
                "state_bytes_per_parameter": found[name][0]["state_bytes_per_parameter"],
                "large_share": found[name][0]["large_share"],
            }
        )
    return rows


def _train(name: str, config: GPTConfig, seed: int, num_steps: int, text: Tensor) -> dict[str, float]:
    torch.manual_seed(seed)
    network = GPT(config)
    optimizer = _optimizer(name, network)
    schedule = make_schedule("cosine", optimizer, num_steps, warmup_steps=max(1, num_steps // 10), min_lr_ratio=0.05)
    held_out = len(text) // 20  # the end of the text is for validation
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(num_steps):
        loss = _loss(network, _draw(text[:-held_out], config.context, _BATCH_SIZE, generator))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad():
        validation = _draw(text[-held_out:], config.context, _NUM_VALIDATION, torch.Generator().manual_seed(0))
        final = mean(_loss(network, batch).item() for batch in torch.split(validation, 32))
    last = losses[-min(100, max(1, num_steps // 10)) :]
    return {"loss": final, "train_loss": mean(last), **_memory(network, optimizer)}


def read_text() -> Tensor:
    """Return the source code of the standard library as uint8 bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if not _LEFT_OUT.intersection(path.relative_to(root).parts)]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def _draw(text: Tensor, context: int, num_sequences: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - context, (num_sequences, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()


def _loss(network: nn.Module, sequences: Tensor) -> Tensor:
    loss: Tensor = network(sequences[:, :-1], sequences[:, 1:])[1]
    return loss


def _optimizer(name: str, network: nn.Module) -> Optimizer:
    options = {"betas": (0.9, 0.99)} if name in _BETAS else {}
    return make_optimizer(name, network, lr=RATES[name], weight_decay=0.1, options=options)


def _memory(network: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    trained = trained_parameters(network)
    large = [each for each, trait in trained if trait.is_large_matrix and can_be_coded(each.shape)]
    tensors = [tensor for each in large for tensor in optimizer.state[each].values() if isinstance(tensor, Tensor)]
    num_large = sum(each.numel() for each in large)
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    share = num_large / sum(each.numel() for each, _ in trained)
    return {"state_bytes_per_parameter": num_bytes / num_large, "large_share": share}


# ---- speed -----------------------------------------------------------------------------------------------------------


def _time_all(names: Sequence[str], num_parameters: int, num_repeats: int) -> dict[str, Cost]:
    blocks = {name: _update_of(name, num_parameters) for name in names}
    for update in blocks.values():
        update()  # the first update creates states and compiles
    costs = interleave(blocks, num_repeats)
    return {
        name: Cost(median([each.wall_us for each in found]), median([each.cpu_us for each in found]))
        for name, found in costs.items()
    }


def _update_of(name: str, num_parameters: int) -> Callable[[], Cost]:
    num_layers = math.ceil(num_parameters / _WIDTH**2)
    network = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(num_layers)))
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = _optimizer(name, network)

    def update() -> Cost:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        optimizer.step()
        return Cost(1e6 * (time.perf_counter() - wall_s), 1e6 * (time.thread_time() - cpu_s))

    return update


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return a table with one line for each optimizer."""
    seeds = "1 seed" if result["seeds"] == 1 else f"{result['seeds']} seeds"
    title = f"GPT of width {result['model']['width']} on bytes, {result['steps']} steps, {seeds}"
    caption = (
        "states are in bytes per parameter of large matrices; the update of "
        f"{result['step_parameters']:,} parameters in one thread is compared with torch's fused AdamW"
    )
    numbers = ("loss", "difference to adamw", "each seed", "states", "update", "ratio to adamw")
    found = table_of(result, title, caption, ("optimizer",), numbers)
    for row in result["rows"]:
        found.add_row(
            row["optimizer"],
            f"{row['loss']:.4f}",
            f"{row['ratio_to_adamw'] - 1:+.2%}",
            " ".join(f"{ratio - 1:+.2%}" for ratio in row["ratio_to_adamw_all"]),
            f"{row['state_bytes_per_parameter']:.2f}",
            f"{row['step_cpu_s'] * 1e3:.1f} ms",
            f"{row['step_ratio_to_adamw']:.2f}x",
        )
    return found
