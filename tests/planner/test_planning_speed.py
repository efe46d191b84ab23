"""Processor time and memory that planning requires."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from roomier.api.adapt import as_module
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.choosing.pricing import ClosedForms
from roomier.planner.formula import estimate
from roomier.planner.hardware.spec import machine_of
from roomier.planner.workload import Workload

_PLAN_70B = """
import json, resource, time
from transformers import LlamaConfig
from roomier.planner.hardware.spec import machine_of
from roomier.plan import plan_from_flags
from roomier.planner.choosing.choose import choose
from roomier.planner.hugging_face import workload_of_config

config = LlamaConfig({shape}, max_position_embeddings=8192, architectures=["LlamaForCausalLM"])
machine = machine_of("h100:8", {nodes})
plan = plan_from_flags(strategy="auto", devices=8, num_nodes={nodes}, accelerator="cuda", optimizer="adamw",
                       precision="bf16-mixed")
workload = workload_of_config(config, {batch}, 4096)
start = time.process_time()
choice = choose(workload, plan, machine)
peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
strategies = sorted({{each.plan.parallel.strategy for each in choice.considered}})
print(json.dumps([time.process_time() - start, peak_bytes, strategies, choice.chosen is not None]))
"""
_70B = (
    "vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, "
    "num_key_value_heads=8"
)
_1B = (
    "vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, "
    "num_key_value_heads=8, tie_word_embeddings=True"
)


def planned(shape: str, nodes: int, batch: int) -> Any:

    source = _PLAN_70B.format(shape=shape, nodes=nodes, batch=batch)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_70_billion_parameters_on_1024_devices_are_planned_within_15_s_and_2_gib() -> None:
    process_s, peak_bytes, strategies, fits = planned(_70B, 128, 1)
    assert strategies == ["ddp", "hsdp", "zero1", "zero2", "zero3"]
    assert fits
    assert peak_bytes < 2 * 2**30
    assert process_s < 15


@pytest.mark.slow
def test_1_billion_parameters_are_planned_within_4_s() -> None:
    process_s, _, _, _ = planned(_1B, 1, 1)
    assert process_s < 4


def test_plans_with_the_same_computation_share_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    name = "take_deep_trace" if hasattr(estimate, "take_deep_trace") else "take_trace"
    take = getattr(estimate, name)

    def counted(*words: Any, **named: Any) -> Any:
        taken.append(words)
        return take(*words, **named)

    monkeypatch.setattr(estimate, name, counted)
    with torch.device("meta"):
        batch = {name: torch.empty(1, 8, dtype=torch.long) for name in ("input_ids", "targets")}
        workload = Workload(as_module(GPT(GPTConfig(65, 8, 2, 2, 16))), batch, 1)
    plan = plan_from_flags(strategy="zero2", devices=8, accelerator="cuda", optimizer="adamw")
    prices = ClosedForms(workload, machine_of("a100-40gb:8"))
    for strategy in ("zero1", "zero2", "zero3"):
        prices.estimate(replace(plan, parallel=replace(plan.parallel, strategy=strategy)), 1)
    assert 1 <= len(taken) <= 2
