"""Accumulated gradients equal the gradients of the full batch for any split into micro-batches and ranks, without
``num_items_in_batch``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roomier import Trainer
from roomier.api.forward import ForwardModule
from roomier.checkpoint.export.hugging_face import export_hugging_face
from tests.covering import few
from tests.hugging_face.models import KINDS, Batch, transformers
from tests.ranks.pool import RankPool

LR = 0.5
SIZES = (3, 1, 2)  # number of samples in each micro-batch of a step
# One batch of all samples has the same gradients, unless the samples of a batch affect each other.
SEPARABLE = [name for name in KINDS if name not in ("clip", "mixtral")]


def micro_batches(name: str, num_steps: int = 2) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(0)
    return [[KINDS[name].make_batch(size, generator) for size in SIZES] for _ in range(num_steps)]


def joined(batches: list[Batch]) -> Batch:
    first = batches[0]
    return {
        key: torch.cat([each[key] for each in batches]) if isinstance(first[key], Tensor) else True for key in first
    }


def model_of(name: str, **changes: Any) -> Any:
    model = KINDS[name].model(dropout=False)
    for field, value in changes.items():
        setattr(model, field, value)
    return model


def bare_loop(model: Any, steps: list[list[Batch]], losses: Callable[[Any, list[Batch]], list[Tensor]]) -> list[Tensor]:
    """Return the parameters after one step of plain SGD for each window. The loss of a window is the sum of
    ``losses``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for window in steps:
        optimizer.zero_grad()
        torch.stack(losses(model, window)).sum().backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def of_one_batch(model: Any, window: list[Batch]) -> list[Tensor]:
    return [model(**joined(window)).loss]


def divided_by_num_items(count: Callable[[Batch], int]) -> Callable[[Any, list[Batch]], list[Tensor]]:
    def losses(model: Any, window: list[Batch]) -> list[Tensor]:
        total = torch.tensor(sum(map(count, window)))
        return [model(**batch, num_items_in_batch=total).loss for batch in window]

    return losses


def weighted(count: Callable[[Batch], int]) -> Callable[[Any, list[Batch]], list[Tensor]]:
    def losses(model: Any, window: list[Batch]) -> list[Tensor]:
        total = sum(map(count, window))
        return [model(**batch).loss * (count(batch) / total) for batch in window]

    return losses


def trained(make_trainer: Callable[..., Trainer], model: Any, steps: list[list[Batch]]) -> list[Tensor]:
    trainer = make_trainer(
        optimizer={"name": "sgd", "lr": LR}, max_steps=len(steps), accumulate_grad_batches=len(steps[0])
    )
    trainer.fit(model, [batch for window in steps for batch in window])
    return [each.detach() for each in model.parameters()]


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", few(SEPARABLE, 4))
def test_accumulated_gradients_equal_one_batch(make_trainer: Callable[..., Trainer], name: str) -> None:
    steps = micro_batches(name)
    ours = trained(make_trainer, model_of(name), steps)
    assert apart(ours, bare_loop(model_of(name), steps, of_one_batch)) < 1e-6
    if name in ("gpt2", "llama"):  # the other models do not accept the number, or do not use it
        theirs = bare_loop(model_of(name), steps, divided_by_num_items(KINDS[name].count))
        assert apart(ours, theirs) < 1e-6
    means = bare_loop(model_of(name), steps, lambda model, window: [model(**batch).loss / 3 for batch in window])
    assert apart(ours, means) > 1e-4, "otherwise equal weights of micro-batches would also pass"


def test_router_loss_keeps_its_weight(make_trainer: Callable[..., Trainer]) -> None:
    """The router loss depends on all tokens of a micro-batch, so it differs from the loss of the full batch. It counts
    once."""
    steps = micro_batches("mixtral")
    ours = trained(make_trainer, model_of("mixtral"), steps)
    assert apart(ours, bare_loop(model_of("mixtral"), steps, weighted(KINDS["mixtral"].count))) < 1e-6
    ours = trained(make_trainer, model_of("mixtral", router_aux_loss_coef=0.0), steps)
    assert apart(ours, bare_loop(model_of("mixtral", router_aux_loss_coef=0.0), steps, of_one_batch)) < 1e-6


def test_loss_that_compares_samples_prints_a_notice(
    make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = micro_batches("clip")
    ours = trained(make_trainer, model_of("clip"), steps)
    assert capsys.readouterr().err.count("the loss of CLIPModel compares the samples of a batch with each other") == 1
    assert apart(ours, bare_loop(model_of("clip"), steps, weighted(KINDS["clip"].count))) < 1e-6
    assert apart(ours, bare_loop(model_of("clip"), steps, of_one_batch)) > 1e-3
    trained(make_trainer, model_of("clip"), [window[:1] for window in steps])
    assert "compares" not in capsys.readouterr().err


def fit_on_ranks(folder: Path, names: list[str], strategy: str) -> dict[str, list[Tensor]]:
    found = {}
    for name in names:
        model = model_of(name)
        trainer = Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            optimizer={"name": "sgd", "lr": LR},
            accumulate_grad_batches=2,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, KINDS[name].batches(8))
        trainer.save_checkpoint(folder / name)
        found[name] = [getattr(each, "full_tensor", each.detach)().detach() for each in model.parameters()]
    return found


def check_on_ranks(
    on_ranks: RankPool, make_trainer: Callable[..., Trainer], folder: Path, names: list[str], strategy: str
) -> None:
    """Two ranks with two micro-batches per step, whose numbers of tokens differ between the ranks."""
    for ours in on_ranks(2, fit_on_ranks, folder, names, strategy):
        for name in names:
            batches = KINDS[name].batches(8)
            theirs = trained(make_trainer, model_of(name), [batches[:4], batches[4:]])
            assert apart(ours[name], theirs) < 1e-6, name
    for name in names:
        export_hugging_face(folder / name, folder / "opened" / name, max_shard_bytes=20_000)
        opened, info = type(model_of(name)).from_pretrained(folder / "opened" / name, output_loading_info=True)
        assert not any(info.values()), name
        assert apart([each.detach() for each in opened.parameters()], ours[name]) == 0, name


def test_ranks_with_different_numbers_of_tokens_equal_one_process(
    on_ranks: RankPool, make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    check_on_ranks(on_ranks, make_trainer, tmp_path, ["llama", "whisper"], "ddp")


@pytest.mark.more
def test_sharded_model_with_a_scalar_parameter_equals_one_process(
    on_ranks: RankPool, make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """The scalar is CLIP's temperature, which is not sharded."""
    check_on_ranks(on_ranks, make_trainer, tmp_path, ["clip"], "zero3")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_all_models_on_ranks_equal_one_process(
    on_ranks: RankPool, make_trainer: Callable[..., Trainer], tmp_path: Path, strategy: str
) -> None:
    check_on_ranks(on_ranks, make_trainer, tmp_path, list(KINDS), strategy)


def network(name: str, **config: Any) -> torch.nn.Module:
    """Return a model for which only the class name and the configuration matter."""
    kind = type(name, (torch.nn.Linear,), {})
    made = kind(1, 1)
    made.config = transformers.PreTrainedConfig(**config)
    return made


LABELS = torch.tensor([[1, 2, -100, 255], [3, -100, -100, 4]])


@pytest.mark.parametrize(
    ("name", "config", "batch", "num_terms"),
    [
        ("GPT2LMHeadModel", {}, {}, 3),
        ("LlavaForConditionalGeneration", {}, {}, 3),
        ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, {}, 5),
        ("Blip2ForConditionalGeneration", {"use_decoder_only_language_model": False}, {}, 5),
        ("BartForCausalLM", {}, {}, 5),
        ("LlamaForCausalLM", {}, {"shift_labels": torch.tensor([[2, 3, -100]])}, 2),
        ("SegformerForSemanticSegmentation", {"semantic_loss_ignore_index": 255}, {}, 7),
        ("Wav2Vec2ForCTC", {"ctc_loss_reduction": "mean"}, {}, 2),
    ],
)
def test_terms_are_counted_like_in_the_model(name: str, config: dict[str, Any], batch: Batch, num_terms: int) -> None:
    module = ForwardModule(network(name, **config))
    assert module.loss_reduction == "mean"
    assert module.num_loss_terms({"labels": LABELS, **batch}) == num_terms


def test_loss_with_sum_reduction_is_summed() -> None:
    assert ForwardModule(network("Wav2Vec2ForCTC", ctc_loss_reduction="sum")).loss_reduction == "sum"


def speech(reduction: str) -> Any:
    rates = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    config = transformers.Wav2Vec2Config(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8),
        conv_kernel=(4, 4),
        conv_stride=(2, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        ctc_loss_reduction=reduction,
        pad_token_id=0,
        layerdrop=0.0,
        apply_spec_augment=False,
        **dict.fromkeys(rates, 0.0),
    )
    torch.manual_seed(0)
    return transformers.Wav2Vec2ForCTC(config).train()


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_counts_samples(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, reduction: str
) -> None:
    """The CTC loss is a sum or a mean over samples, regardless of their lengths."""
    monkeypatch.setattr(f"{__name__}.LR", 0.01)
    generator = torch.Generator().manual_seed(0)
    steps: list[list[Batch]] = [[]]
    for size in SIZES:
        labels = torch.randint(1, 12, (size, 6), generator=generator)
        labels[:, -size:] = -100
        steps[0].append({"input_values": torch.randn(size, 200, generator=generator), "labels": labels})
    ours = trained(make_trainer, speech(reduction), steps)
    assert apart(ours, bare_loop(speech(reduction), steps, of_one_batch)) < 2e-6
    means = bare_loop(speech(reduction), steps, lambda model, window: [model(**batch).loss / 3 for batch in window])
    assert apart(ours, means) > 1e-4
