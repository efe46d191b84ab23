"""With a fixed chunk, the temporary memory of a step does not depend on the vocabulary."""

import pytest
import torch
from torch import Tensor

from roomier.engine.prepared import PreparedEngine
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.memory.kinds import Kind
from roomier.planner.memory.tracker import tracking
from roomier.prepared.prepare import prepare

WIDTH, TOKENS, CHUNK_BYTES = 8, 512, 2**20
VOCABULARIES = (1024, 8192, 65536)
BESIDE_MODEL = tuple(set(Kind) - {Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE})


def engine_of(vocabulary: int, *, chunked: bool, precision: str = "32-true") -> PreparedEngine:
    torch.manual_seed(0)
    sizes = {"context": TOKENS, "num_layers": 1, "num_heads": 1, "width": WIDTH, "dropout": 0.0}
    network = GPT(GPTConfig(vocab_size=vocabulary, **sizes))
    chunked_loss = CHUNK_BYTES // (4 * vocabulary) if chunked else False
    optimizer = {"name": "sgd", "lr": 0.1}
    plan = plan_from_flags(accelerator="cpu", precision=precision, optimizer=optimizer, chunked_loss=chunked_loss)
    return prepare(network, plan=plan)


def take_step(engine: PreparedEngine, vocabulary: int) -> None:
    tokens = torch.randint(vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = engine.module(batch, batch)[1]
        return loss

    engine.forward_backward(step, [tokens])
    engine.step()


def peak_beside_model(vocabulary: int, *, chunked: bool, precision: str = "32-true") -> int:
    """Return the peak bytes of tensors that are not weights, gradients or optimizer states."""
    engine = engine_of(vocabulary, chunked=chunked, precision=precision)
    with tracking(engine) as tracker:
        take_step(engine, vocabulary)
        tracker.restart()
        take_step(engine, vocabulary)
    engine.close()
    return tracker.peak(BESIDE_MODEL).total(BESIDE_MODEL)


def test_in_float32_the_peak_is_one_chunk_for_each_vocabulary() -> None:
    peaks = [peak_beside_model(each, chunked=True) for each in VOCABULARIES]
    assert max(peaks) < 1.05 * min(peaks)
    assert max(peaks) < 1.5 * CHUNK_BYTES
    plain = peak_beside_model(VOCABULARIES[0], chunked=False)
    assert plain > 2 * 4 * VOCABULARIES[0] * TOKENS


@pytest.mark.more
def test_in_bf16_the_peak_is_one_chunk_in_two_dtypes_and_the_weight_in_bf16() -> None:
    """In addition, one chunk's contribution to the gradient of the weight exists in bf16."""
    peaks = [peak_beside_model(each, chunked=True, precision="bf16-mixed") for each in VOCABULARIES[::2]]
    fixed = [peak - 2 * 2 * WIDTH * vocabulary for peak, vocabulary in zip(peaks, VOCABULARIES[::2], strict=True)]
    assert max(fixed) < 2 * CHUNK_BYTES
