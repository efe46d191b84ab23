"""Every reference model trains with zero3 on 2 ranks and in a plain loop in one process, with equal results.

BatchNorm uses the statistics of a micro-batch. The plain loop therefore accumulates the micro-batches of the ranks.
SwAV compares the embeddings of all ranks, so its reference is ddp on 2 ranks. The runs are in float64, where 1e-9 is
about ten thousand roundings per step.
"""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor, nn

from benchmarks.models.bert import Bert, BertConfig
from benchmarks.models.deepspeech import DeepSpeech, DeepSpeechConfig
from benchmarks.models.igpt import ImageGPT
from benchmarks.models.swav import SwAV, SwAVConfig
from benchmarks.models.transformer_lm import TransformerLM, TransformerLMConfig
from roomier.models.gpt import GPTConfig
from tests.covering import few
from tests.parallel.parity import Batch, Setup, Task, distance, train_bare, train_on_ranks
from tests.ranks.pool import RankPool

MOST = 1e-9
ZERO3 = Setup("zero3", 2, micro_batch=3, precision="64-true", clip=0.5, num_steps=4)


class Samples(Task):
    """A task whose loss is a mean over samples, and whose network receives the batch as keyword arguments."""

    def loss(self, batch: Batch) -> Tensor:
        output = self.network(**batch)
        loss: Tensor = output[1] if isinstance(output, tuple) else output
        return loss

    def count_terms(self, batch: Batch) -> int:
        return len(next(iter(batch.values())))


class Words(Samples):
    def make_network(self) -> nn.Module:
        return TransformerLM(TransformerLMConfig(13, 6, num_layers=2, num_heads=2, width=12, inner_width=10))

    def make_batch(self, num_samples: int, generator: Generator) -> Batch:
        tokens = torch.randint(13, (num_samples, 7), generator=generator)
        return {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:].clone()}


class Classes(Samples):
    def make_network(self) -> nn.Module:
        return Bert(BertConfig(13, 6, num_layers=2, num_heads=2, width=10, dropout=0.0))

    def make_batch(self, num_samples: int, generator: Generator) -> Batch:
        tokens = torch.randint(13, (num_samples, 6), generator=generator)
        return {"input_ids": tokens, "labels": tokens[:, 0] % 2}


class Pixels(Samples):
    def make_network(self) -> nn.Module:
        return ImageGPT(GPTConfig(5, 9, num_layers=2, num_heads=2, width=10, dropout=0.0))

    def make_batch(self, num_samples: int, generator: Generator) -> Batch:
        return {"pixels": torch.randint(5, (num_samples, 3, 3), generator=generator)}


class Speech(Samples):
    def make_network(self) -> nn.Module:
        return DeepSpeech(DeepSpeechConfig(num_bands=41, num_letters=6, num_layers=2, width=7, channels=2))

    def make_batch(self, num_samples: int, generator: Generator) -> Batch:
        return {
            "spectrogram": torch.randn(num_samples, 20, 41, generator=generator, dtype=torch.float64),
            "num_frames": torch.randint(12, 21, (num_samples,), generator=generator),
            "letters": torch.randint(1, 6, (num_samples, 3), generator=generator),
            "num_letters": torch.randint(1, 4, (num_samples,), generator=generator),
        }


class Crops(Samples):
    def make_network(self) -> nn.Module:
        return SwAV(SwAVConfig((1, 1, 1, 1), 3, 10, 6, num_prototypes=5, queue_length=8))

    def make_batch(self, num_samples: int, generator: Generator) -> Batch:
        return {
            "large_crops": torch.randn(num_samples, 2, 3, 32, 32, generator=generator, dtype=torch.float64),
            "small_crops": torch.randn(num_samples, 2, 3, 16, 16, generator=generator, dtype=torch.float64),
        }


@pytest.mark.parametrize("task", few([Words, Classes, Pixels, Speech]))
def test_zero3_equals_one_process(on_ranks: RankPool, task: type[Samples]) -> None:
    trained, other = on_ranks(2, train_on_ranks, task, ZERO3)
    assert trained.losses == other.losses
    apart = distance(trained, train_bare(task, ZERO3, in_parts=True))
    assert max(apart.losses, apart.norms, apart.weights) < MOST, apart


@pytest.mark.more
def test_zero3_equals_ddp(on_ranks: RankPool) -> None:
    ddp = Setup("ddp", 2, micro_batch=3, precision="64-true", clip=0.5, num_steps=4)
    [sharded, _], [replicated, _] = on_ranks.each(2, train_on_ranks, [(Crops, ZERO3), (Crops, ddp)])
    apart = distance(sharded, replicated)
    assert max(apart.losses, apart.norms, apart.weights) < MOST, apart
    assert distance(sharded, train_bare(Crops, ZERO3, in_parts=True)).losses > MOST  # the ranks share their embeddings
