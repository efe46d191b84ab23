"""Number of terms over which the loss of a batch is averaged: the default, and the numbers for Hugging Face models,
which are inferred from the model's class and configuration.

[Note: weighted accumulation]
Let ``g_i`` be the gradient of a loss that is a mean over the ``n_i`` terms of micro-batch ``i``. The gradient of the
full batch is ``sum(n_i * g_i) / sum(n_i)``, which differs from the mean of the ``g_i`` if the ``n_i`` differ. The
engine therefore weights each micro-batch by ``n_i / sum(n_i)`` before its backward pass, so the counts must be known
before the first backward pass. They are computed from the batches on the host, which requires no synchronization with a
device.

[Note: no num_items_in_batch]
Hugging Face models compute the gradient of the full batch if they receive the argument ``num_items_in_batch``: the loss
of micro-batch ``i`` is then ``S_i / N``, the sum over its terms, divided by the number of terms in all micro-batches.
The engine's weights produce the same value from the plain mean, ``(S_i / n_i) * (n_i / N)``; see [Note: weighted
accumulation]. They also work for custom losses and for models that do not accept this argument. Terms that are added to
the mean, such as the router loss of a mixture of experts, are averaged with the same weights. If only the mean were
divided by ``N``, they would be counted once for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from roomier.core.tree import batch_size_of, nodes_of

IGNORE_INDEX = -100  # the default ignore_index of F.cross_entropy
TARGET_KEYS = ("labels", "targets", "target", "label", "y")


def count_loss_terms(batch: Any, *, is_shifted_inside: bool = False, ignored_label: int = IGNORE_INDEX) -> int | Tensor:
    """Return the number of terms over which a loss of ``batch`` is averaged.

    Integer targets are counted, except targets equal to ``ignored_label``. Without integer targets, samples are
    counted.

    Args:
        batch: a mapping with one of the keys ``labels, targets, target, label, y``; or ``(inputs..., targets)``.
        is_shifted_inside: True if the model drops the first target of each row, as causal models of Hugging Face do.
            Targets under the key ``shift_labels`` are not shifted.
        ignored_label: the target value that is not counted.

    Returns:
        An int if the targets are on the CPU. A 0-dim tensor if the targets are on an accelerator, to avoid waiting for
        the accelerator.
    """
    shifted = batch.get("shift_labels") if is_shifted_inside and isinstance(batch, Mapping) else None
    targets = shifted if isinstance(shifted, Tensor) else _targets(batch)
    if targets is None or targets.is_floating_point() or targets.dtype is torch.bool or targets.dim() == 0:
        return batch_size_of(batch)
    if is_shifted_inside and targets is not shifted and targets.dim() > 1:
        targets = targets[..., 1:]
    count = (targets != ignored_label).sum()
    return int(count) if targets.device.type == "cpu" else count


def _targets(batch: Any) -> Tensor | None:
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in TARGET_KEYS if key in batch), None)
    elif isinstance(batch, (list, tuple)) and len(batch) > 1:
        found = batch[-1]
    else:
        return None
    return found if isinstance(found, Tensor) else None


# Models that do not shift their labels, mostly decoders of encoder-decoder models (transformers 5.23).
_UNSHIFTED = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "CpmAnt", "MBart", "Marian", "Mvp", "PLBart"),
        *("Pegasus", "ProphetNet", "TrOCR", "Whisper"),
    )
) | {"XLNetLMHeadModel", "XLMWithLMHeadModel", "FlaubertWithLMHeadModel"}
_MEAN = 1  # torch's number of the reduction "mean"
_SHIFTED_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def is_shifted_inside(network: nn.Module) -> bool:
    """Return True if ``network`` shifts its labels. The first label of each row is then not counted."""
    names = [cls.__name__ for cls in type(network).__mro__]
    config = getattr(network, "config", None)
    # Decoder-only models for images and text are named ``ForConditionalGeneration``, as are encoder-decoder models.
    is_causal = any(name.endswith(_SHIFTED_ENDINGS) for name in names) and _UNSHIFTED.isdisjoint(names)
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False) or not getattr(
        config, "use_decoder_only_language_model", True
    )
    return is_causal and not is_encoder_decoder


def ignored_label(network: nn.Module) -> int:
    """Return the label that the loss of ``network`` ignores, such as 255 for pixels without a class."""
    ignored: int = getattr(getattr(network, "config", None), "semantic_loss_ignore_index", IGNORE_INDEX)
    return ignored


def reduction_of(network: nn.Module) -> Literal["mean", "sum"]:
    """Return ``"sum"`` if the loss of ``network`` is a sum over its terms, otherwise ``"mean"``."""
    is_sum = counts_samples(network) and getattr(network.config, "ctc_loss_reduction", "mean") == "sum"
    return "sum" if is_sum else "mean"


def counts_samples(network: nn.Module) -> bool:
    """Return True if each label sequence is one term of the loss, as in CTC."""
    is_ctc = any(cls.__name__.endswith("ForCTC") for cls in type(network).__mro__)
    return is_ctc and getattr(network, "config", None) is not None


def num_objects(batch: Any) -> int | None:
    """Return the number of labeled objects in ``batch``; None if the targets are not lists of objects.

    Models for detection and instance segmentation divide their losses by this number, but at least by 1. Their targets
    are a list with the ``class_labels`` of each sample, or a list of dicts that contain them.
    """
    if not isinstance(batch, Mapping):
        return None
    found: Any = batch.get("class_labels")
    if found is None and isinstance(batch.get("labels"), (list, tuple)):
        found = [each.get("class_labels") if isinstance(each, Mapping) else None for each in batch["labels"]]
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, Tensor) for each in found):
        return None
    return max(1, sum(len(each) for each in found))


def weights_classes(loss: Tensor) -> bool:
    """Return True if the graph of ``loss`` contains a mean of cross-entropies with class weights.

    This mean is divided by the weights of the targets in a micro-batch. In models such as DETR, the targets depend on
    the predictions, so no weights of micro-batches can reproduce the loss of the full batch.
    """
    return any(
        getattr(node, "_saved_weight", None) is not None and getattr(node, "_saved_reduction", None) == _MEAN
        for node in nodes_of(loss)
        if type(node).__name__.startswith("NllLoss")
    )


def compares_samples(batch: Any) -> bool:
    """Return True if the loss of ``batch`` compares the samples of the batch with each other.

    Models such as CLIP compute a contrastive loss if the batch contains ``return_loss``. This loss is not a mean over
    samples, so weights of micro-batches cannot reproduce the loss of the full batch.
    """
    return isinstance(batch, Mapping) and bool(batch.get("return_loss"))
