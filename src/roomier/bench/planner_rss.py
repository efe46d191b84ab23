"""Resident-set measurement of ``roomier bench planner``, which runs as ``python -m roomier.bench.planner_rss FOLDER
SETTINGS``.

The module measures the increase in the resident set of a fresh process, from before the model is created to the peak
during the third step. The model is so wide that the memory of libraries and of the allocator is negligible.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier.api.module import Module
from roomier.core.host_memory import give_back_freed
from roomier.core.ranks import Ranks
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan

MODEL = "gpt_wide"
_CONFIG = GPTConfig(vocab_size=4096, context=256, num_layers=6, num_heads=8, width=768, dropout=0.0)
_NUM_SEQUENCES = 8
_STATUS = Path("/proc/self/status")


class WideGPT(Module):
    """A GPT of width 768."""

    def __init__(self) -> None:
        super().__init__()
        self.network = GPT(_CONFIG)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        loss: Tensor = self.network(*batch)[1]
        return loss


def make_batch() -> tuple[Tensor, Tensor]:
    """Return tokens and targets of 8 sequences."""
    tokens = torch.arange(_NUM_SEQUENCES * _CONFIG.context).view(_NUM_SEQUENCES, -1) * 7 % _CONFIG.vocab_size
    return tokens, tokens.clone()


def make_plan(recompute: str) -> Plan:
    """Return a plan for one CPU with the given policy of activation checkpointing."""
    return Plan.from_dict(
        {"parallel": {"accelerator": "cpu"}, "optimizer": {"name": "adamw"}, "activation": {"policy": recompute}}
    )


def grown_bytes(plan: Plan) -> int:
    """Return the increase of the resident set in bytes."""
    small = torch.nn.Linear(8, 8)
    small(torch.ones(2, 8)).sum().backward()  # loads libraries and starts threads
    gc.collect()
    give_back_freed()
    before = _kilobytes("VmRSS") * 1024
    module, batch = WideGPT(), make_batch()
    engine, _ = build(plan, module, lambda blocks: configure(plan, module, lambda: 1.0, blocks), EagerEngine, Ranks())
    for number in range(3):
        if number == 2:
            give_back_freed()
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        engine.forward_backward(lambda batch, _: module.training_step(batch), [batch])
        engine.step()
    return _kilobytes("VmHWM") * 1024 - before


def _kilobytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Measure one plan and write ``result.json``."""
    torch.set_num_threads(1)
    found = grown_bytes(make_plan(settings["recompute"]))
    (folder / "result.json").write_text(json.dumps({"rss_bytes": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
