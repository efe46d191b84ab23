"""Unchanged models of several libraries compute equal results with and without a chunked loss."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier import Trainer
from roomier.api.blocks import find_blocks
from roomier.api.module import Module
from roomier.core.wrapped_forward import unwrap
from roomier.models.gpt import GPT, GPTConfig
from roomier.techniques.loss.chunked import apply_chunked_loss
from roomier.techniques.loss.lazy_logits import LazyLogits
from tests.hugging_face.small import small

VOCABULARY, LENGTH, CHUNK = 29, 8, 5
MakeTrainer = Callable[..., Trainer]


def gpt(tied_head: bool = False) -> nn.Module:
    sizes = {"context": LENGTH, "num_layers": 2, "num_heads": 2, "width": 16, "dropout": 0.0}
    return GPT(GPTConfig(vocab_size=VOCABULARY, tied_head=tied_head, **sizes))


def one_layer(class_name: str, **settings: Any) -> nn.Module:
    return small(class_name, vocab_size=VOCABULARY, num_hidden_layers=1, **settings)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": gpt,
    "GPT, tied": lambda: gpt(tied_head=True),
    "GPT-2": lambda: one_layer("GPT2LMHeadModel"),
    "Llama": lambda: one_layer("LlamaForCausalLM"),
    "Mixtral": lambda: one_layer("MixtralForCausalLM", num_local_experts=3, output_router_logits=True),
    "BERT": lambda: one_layer("BertForMaskedLM", intermediate_size=32),
    "T5": lambda: one_layer("T5ForConditionalGeneration", intermediate_size=32),
}
CAUSAL = ("GPT-2", "Llama", "Mixtral")


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


def a_batch(seed: int = 0) -> dict[str, Tensor]:
    """Batches for a language model, in which more consecutive labels are ignored than a chunk has."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (3, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (3, LENGTH), generator=generator)
    labels[0, 1:] = labels[1, 2:4] = labels[1, 6] = -100
    return {"input_ids": tokens, "labels": labels}


def loss_and_logits(network: nn.Module, batch: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    if isinstance(network, GPT):
        logits, loss = network(batch["input_ids"], batch["labels"])
        return loss, logits
    output = network(**batch, **options)
    return output.loss, output.logits


def gradients(network: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in network.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_equal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, batch = make(name), a_batch()
    chunked = copy.deepcopy(plain)
    apply_chunked_loss(chunked, find_blocks(chunked), CHUNK)
    # Hugging Face's training loop passes the number of terms in the window.
    for options in ({}, {"num_items_in_batch": 40}) if name in CAUSAL else ({},):
        expected, _ = loss_and_logits(plain, batch, **options)
        loss, logits = loss_and_logits(chunked, batch, **options)
        assert isinstance(logits, LazyLogits)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        loss.backward()
        expected.backward()
    theirs = gradients(plain)
    assert gradients(chunked).keys() == theirs.keys()
    for key, ours in gradients(chunked).items():
        # Gradients that are zero except for rounding (the bias of attention's keys) are compared with 1e-3.
        assert (ours - theirs[key]).norm() <= 2e-6 * theirs[key].norm().clamp(min=1e-3), key
    assert capsys.readouterr().err == ""  # no full logits were computed


@pytest.mark.parametrize("name", MODELS)
def test_in_bf16_the_error_is_as_small_as_without_chunks(name: str) -> None:
    exact, batch = make(name), a_batch()
    plain, chunked = copy.deepcopy(exact), copy.deepcopy(exact)
    apply_chunked_loss(chunked, find_blocks(chunked), CHUNK)
    loss_and_logits(exact, batch)[0].backward()
    losses = []
    for network in (plain, chunked):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss_and_logits(network, batch)[0])
        losses[-1].backward()
    assert losses[1].dtype is losses[0].dtype is torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    allowed, apart = (distance(gradients(each), gradients(exact)) for each in (plain, chunked))
    assert apart < 1.5 * allowed < 0.1


def distance(some: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    difference = sum((some[key] - each).square().sum() for key, each in truth.items())
    return float((difference / sum(each.square().sum() for each in truth.values())).sqrt())


@pytest.mark.parametrize("name", MODELS)
def test_outputs_without_gradients_are_equal(name: str) -> None:
    network, batch = make(name).eval(), a_batch()
    with torch.no_grad():
        expected, real = loss_and_logits(network, batch)
        apply_chunked_loss(network, find_blocks(network), CHUNK)
        loss, logits = loss_and_logits(network, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert logits.argmax(-1).equal(real.argmax(-1))
    unwrap(network)


@pytest.mark.parametrize("name", ["GPT", "GPT-2", "Llama", "T5"])
def test_generated_text_is_equal(name: str) -> None:
    network, tokens = make(name).eval(), a_batch()["input_ids"][:, :3]
    options = {"temperature": 0.0} if name == "GPT" else {"do_sample": False}
    expected = network.generate(tokens, max_new_tokens=4, **options)
    apply_chunked_loss(network, find_blocks(network), CHUNK)
    assert network.generate(tokens, max_new_tokens=4, **options).equal(expected)


class Language(Module):
    """Module that reads its logits in evaluations, and sometimes in training."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.network = make(name)
        self.accuracies: list[float] = []

    def training_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        loss, logits = loss_and_logits(self.network, batch)
        return {"loss": loss, "logits": logits}

    def validation_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss, logits = loss_and_logits(self.network, batch)
        self.log("val_loss", loss)
        self.log("accuracy", (logits.argmax(-1) == batch["labels"]).float().mean())
        return loss

    def predict_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": loss_and_logits(self.network, batch)[1]}


@pytest.mark.parametrize("name", ["GPT, tied", "Llama"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_trainer_computes_the_same_weights(make_trainer: MakeTrainer, name: str, precision: str) -> None:
    batches = [a_batch(seed) for seed in range(6)]
    trained = []
    for chunked_loss in (False, CHUNK):
        module = Language(name)
        trainer = make_trainer(
            chunked_loss=chunked_loss,
            precision=precision,
            max_epochs=1,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            optimizer={"name": "sgd", "lr": 0.1},
        )
        trainer.fit(module, batches, batches[:2])
        measured = dict(trainer.callback_metrics)
        predicted = trainer.predict(module, batches[:1])
        assert type(predicted[0]["logits"]) is Tensor
        trained.append((module, measured, predicted[0]["logits"]))
    (plain, expected, real), (chunked, measured, predicted) = trained
    tolerance = 1e-5 if precision == "32-true" else 2e-2
    assert measured["val_loss"].item() == pytest.approx(expected["val_loss"].item(), rel=tolerance)
    assert measured["accuracy"].item() == pytest.approx(expected["accuracy"].item(), abs=0.05)
    torch.testing.assert_close(predicted, real, rtol=tolerance, atol=tolerance)
    weights = dict(plain.named_parameters())
    for key, each in chunked.named_parameters():
        assert (each - weights[key]).norm() <= tolerance * weights[key].norm().clamp(min=0.1), key
    assert all("forward" not in part.__dict__ for part in chunked.modules())
    assert chunked.state_dict().keys() == plain.state_dict().keys()


class Late(Language):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["logits"].argmax(-1)


def test_reading_logits_after_the_update_raises(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(chunked_loss=True, max_steps=2, optimizer="sgd")
    with pytest.raises(ValueError, match="after the weights from which they are computed were updated"):
        trainer.fit(Late("GPT"), [a_batch()])


LEVERS = [
    {"activation_checkpointing": "full"},
    {"step_in_backward": True},
    {"step_in_backward": True, "gradient_clip_val": 1000.0},  # a second backward of the same graph, for the norm
    pytest.param({"compile": True}, marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("options", LEVERS, ids=" ".join)
def test_combinations_with_other_techniques(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    losses = []
    for given in ({}, {"chunked_loss": CHUNK, **options}):
        module = Language("GPT")
        make_trainer(max_steps=3, optimizer={"name": "sgd", "lr": 0.1}, **given).fit(module, [a_batch()] * 3)
        losses.append(loss_and_logits(module.network, a_batch())[0].item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
