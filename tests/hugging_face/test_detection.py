"""Models for detection: the loss is weighted by the number of objects, and class weights are reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier import Trainer
from roomier.api.forward import ForwardModule
from roomier.api.loss_terms import num_objects, weights_classes
from tests.hugging_face.small import transformers

pytestmark = pytest.mark.more

Batch = dict[str, Any]
SIZES = ((1, 4), (2,), (0, 3))  # number of objects in each sample of each micro-batch
LR = 1e-5


def conditional_detr() -> Any:
    """Model whose losses are all divided by the number of objects."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    names = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    sizes = dict.fromkeys(names, 2) | {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 10}
    config = transformers.ConditionalDetrConfig(
        backbone_config=backbone, use_timm_backbone=False, backbone=None, dropout=0.0, num_labels=4, **sizes
    )
    torch.manual_seed(0)
    return transformers.ConditionalDetrForObjectDetection(config).train()


def yolos() -> Any:
    """Model whose loss also divides by class weights."""
    config = transformers.YolosConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=[64, 64],
        patch_size=16,
        num_detection_tokens=8,
        num_labels=4,
    )
    torch.manual_seed(0)
    return transformers.YolosForObjectDetection(config).train()


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)

    def objects(count: int) -> dict[str, Tensor]:
        boxes = torch.rand(count, 4, generator=generator) * 0.2 + torch.tensor([0.4, 0.4, 0.1, 0.1])
        return {"class_labels": torch.randint(4, (count,), generator=generator), "boxes": boxes}

    return [
        {
            "pixel_values": torch.randn(len(counts), 3, 64, 64, generator=generator),
            "labels": [objects(count) for count in counts],
        }
        for counts in SIZES
    ]


def joined(window: list[Batch]) -> Batch:
    labels = [each for batch in window for each in batch["labels"]]
    return {"pixel_values": torch.cat([batch["pixel_values"] for batch in window]), "labels": labels}


def update(make_trainer: Callable[..., Trainer], window: list[Batch], model: Any) -> Tensor:
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    trainer = make_trainer(optimizer={"name": "sgd", "lr": LR}, max_steps=1, accumulate_grad_batches=len(window))
    trainer.fit(model, window)
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


def test_losses_are_weighted_by_the_number_of_objects(
    make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = update(make_trainer, [joined(batches())], conditional_detr())
    parts = update(make_trainer, batches(), conditional_detr())
    # sums of float32 over three micro-batches: the rounding errors are far below 1e-3 of the update
    assert (parts - whole).norm() < 1e-3 * whole.norm()
    assert "class weights" not in capsys.readouterr().err
    monkeypatch.setattr(ForwardModule, "num_loss_terms", lambda self, batch: len(batch["labels"]))
    samples = update(make_trainer, batches(), conditional_detr())
    assert (samples - whole).norm() > 5e-3 * whole.norm(), "otherwise the number of samples would also pass"


@pytest.mark.parametrize("num_parts", [1, 3])
def test_class_weights_are_reported(
    make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str], num_parts: int
) -> None:
    update(make_trainer, batches()[:num_parts], yolos())
    reported = capsys.readouterr().err.count("YolosForObjectDetection divides by the class weights of the targets")
    assert reported == (num_parts > 1)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (nn.CrossEntropyLoss(), False),
        (nn.CrossEntropyLoss(weight=torch.rand(3)), True),
        (nn.CrossEntropyLoss(weight=torch.rand(3), reduction="sum"), False),
        (nn.NLLLoss(weight=torch.rand(3)), True),
    ],
)
def test_class_weights_are_found_in_the_graph(loss: nn.Module, expected: bool) -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    assert weights_classes(loss(logits.double().float(), torch.tensor([0, 2])) * 2 + logits.sum()) is expected
    images = torch.randn(2, 3, 4, 4, requires_grad=True)
    assert weights_classes(loss(images, torch.zeros(2, 4, 4, dtype=torch.long))) is expected


LABELS = torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"labels": [{"class_labels": LABELS}, {"class_labels": LABELS[:1]}]}, 3),
        ({"class_labels": [LABELS, LABELS], "mask_labels": [LABELS, LABELS]}, 4),
        ({"labels": [{"class_labels": LABELS[:0]}]}, 1),  # models divide by at least 1
        ({"labels": [{"labels": LABELS}]}, None),  # torchvision divides by the number of sampled proposals
        ({"labels": LABELS}, None),
        ({"labels": [LABELS]}, None),
        ((LABELS, LABELS), None),
    ],
)
def test_the_number_of_objects(batch: Any, expected: int | None) -> None:
    assert num_objects(batch) == expected
