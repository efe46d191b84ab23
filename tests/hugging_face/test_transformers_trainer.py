"""Comparison with the Trainer of transformers, which passes ``num_items_in_batch``, for the same model and batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from roomier import Trainer
from tests.hugging_face.models import KINDS, transformers

pytestmark = pytest.mark.more

pytest.importorskip("accelerate")

LR, DECAY = 1e-2, 0.1


def their_weights(name: str, samples: list[dict[str, Any]], folder: Path) -> list[torch.Tensor]:
    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(samples)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_steps=3,
        learning_rate=LR,
        weight_decay=DECAY,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="adamw_torch",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = KINDS[name].model(dropout=False)
    InOrder(model, arguments, train_dataset=samples).train()
    return [each.detach() for each in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama"])
def test_equal_weights_after_accumulated_steps(make_trainer: Callable[..., Trainer], tmp_path: Path, name: str) -> None:
    batches = KINDS[name].batches(9)
    samples = [{key: each[row] for key, each in batch.items()} for batch in batches for row in range(2)]
    theirs = their_weights(name, samples, tmp_path)
    model = KINDS[name].model(dropout=False)
    trainer = make_trainer(
        optimizer={"name": "adamw", "lr": LR, "weight_decay": DECAY}, max_steps=3, accumulate_grad_batches=3
    )
    trainer.fit(model, batches)
    for ours, other in zip(model.parameters(), theirs, strict=True):
        torch.testing.assert_close(ours.detach(), other, rtol=0, atol=2e-5)
