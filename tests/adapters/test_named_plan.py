"""The plan of a run contains the adapters of the model, before and after the engine is built."""

from roomier.api.adapt import as_module
from roomier.api.blocks import find_blocks
from roomier.core.ranks import Ranks
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.plan import plan_from_flags
from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.lora import adapted_layers, apply_lora, name_adapters
from roomier.techniques.optim.configured import Configured
from tests.adapters.models import make_gpt


def test_the_named_plan_is_the_same_before_and_after_the_build() -> None:
    network = make_gpt()
    blocks = find_blocks(network)
    apply_lora(network, blocks, AdapterPlan(lora_rank=2, lora_targets="attention.out"))
    plan = plan_from_flags(accelerator="cpu", lora={"rank": 2, "alpha": 2, "targets": ["query_key_value"]})
    named = name_adapters(plan, network, blocks)
    build(plan, as_module(network), lambda _: Configured(), EagerEngine, Ranks())
    assert name_adapters(plan, network, blocks) == named
    assert named.adapter.lora_targets.split(",") == list(adapted_layers(network))
    assert len(adapted_layers(network)) == 2 * len(blocks)
