"""Selection of the attention kernel, which also runs in evaluation and in recomputed blocks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from roomier import Module, Trainer
from roomier.core.errors import RoomierError
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan.parts import AttentionPlan
from roomier.techniques.attention.kernels import attention_context
from roomier.techniques.attention.watch import AttentionCall, AttentionReport, AttentionWatch

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
TOKENS = torch.arange(32).view(2, 16) % 20
BATCH = {"input_ids": TOKENS, "targets": TOKENS}
SHAPE, SCORES = (2, 2, 16, 8), (2, 2, 16, 16)


class Language(Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(GPTConfig(vocab_size=20, context=16, num_layers=3, num_heads=2, width=16, dropout=dropout))

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.gpt(**batch)[1]

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.log("val_loss", self.gpt(**batch)[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def watched(run: Callable[[], Any]) -> Counter[AttentionCall]:
    reports: list[AttentionReport] = []
    with AttentionWatch(reports.append):
        run()
    return reports[0].calls


def test_the_report_contains_each_kernel_of_the_cpu() -> None:
    q = torch.randn(2, 2, 16, 8)
    assert watched(lambda: scaled_dot_product_attention(q, q, q)) == {AttentionCall("flash", SHAPE, torch.float32): 1}
    with sdpa_kernel(SDPBackend.MATH):
        seen = watched(lambda: [scaled_dot_product_attention(q, q, q, is_causal=True) for _ in range(2)])
    assert seen == {AttentionCall("math", SCORES, torch.float32): 2}


def test_the_report_contains_attention_that_a_model_computes_itself() -> None:
    q = torch.randn(2, 2, 16, 8)
    seen = watched(lambda: (q @ q.mT).softmax(-1) @ q)
    assert seen == {AttentionCall("by hand", SCORES, torch.float32): 1}
    assert "attn_implementation='sdpa'" in AttentionReport(seen).lines()[0]
    assert watched(lambda: torch.randn(4, 10).softmax(-1)) == {}, "the probabilities of a classifier are not attention"


def test_the_report_contains_flex_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 16, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the kernel warns that it is slow without compilation
        plain = flex_attention(q, q, q)
        outputs: list[Any] = []
        seen = watched(lambda: outputs.append(flex_attention(q, q, q)))
    assert torch.equal(outputs[0], plain)
    assert [call.kernel for call in seen] == ["flex"]


@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_the_selected_kernel_runs_in_training_and_evaluation(make_trainer: Callable[..., Trainer], kernel: str) -> None:
    module, seen = Language(), []

    class Watching(Language):
        def training_step(self, batch: Any) -> torch.Tensor:
            with AttentionWatch(lambda report: seen.append(("train", report))):
                return super().training_step(batch)

        def validation_step(self, batch: Any) -> None:
            with AttentionWatch(lambda report: seen.append(("val", report))):
                super().validation_step(batch)

    module = Watching()
    trainer = make_trainer(attention=kernel, max_steps=2, activation_checkpointing="full", inference_mode=False)
    trainer.fit(module, [BATCH] * 2, [BATCH])
    assert [stage for stage, _ in seen] == ["val", "train", "train", "val"]
    for _, report in seen:
        assert {call.kernel: count for call, count in report.calls.items()} == {kernel: 3}


def test_recomputation_uses_the_selected_kernel(make_trainer: Callable[..., Trainer]) -> None:
    """With a different kernel in the recomputation, gradients would be rounded differently."""
    seen: list[AttentionReport] = []

    class Watching(Language):
        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            with AttentionWatch(seen.append):
                super().backward(loss, *args, **kwargs)

    make_trainer(attention="math", max_steps=1, activation_checkpointing="full").fit(Watching(), [BATCH])
    assert {call.kernel for call in seen[0].calls} == {"math"}


def test_kernels_agree_and_auto_is_the_fastest(make_trainer: Callable[..., Trainer]) -> None:
    weights = {}
    for kernel in ("auto", "flash", "math"):
        module = Language()
        make_trainer(attention=kernel, max_steps=3).fit(module, [BATCH] * 3)
        weights[kernel] = nn.utils.parameters_to_vector(module.parameters())
    assert torch.equal(weights["auto"], weights["flash"])
    assert not torch.equal(weights["auto"], weights["math"])
    torch.testing.assert_close(weights["math"], weights["flash"], rtol=1e-5, atol=1e-6)


def test_an_unsupported_kernel_is_rejected_with_the_reason(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(attention="flash", max_steps=1, num_sanity_val_steps=1)
    with pytest.raises(RoomierError, match="dropout") as error:
        trainer.fit(Language(dropout=0.1), [BATCH], [BATCH])  # the sanity evaluation without dropout is supported
    assert error.value.field == "attention"
    assert "attention='auto'" in error.value.action
    assert "'math'" in error.value.action


def test_other_errors_and_warnings_of_a_step_are_not_changed() -> None:
    make = attention_context(AttentionPlan("flash"), CPU, None)
    with pytest.raises(RuntimeError, match="mine"), make():
        raise RuntimeError("mine")
    with pytest.warns(UserWarning, match="mine as well"), make():
        warnings.warn("mine as well", stacklevel=1)


@pytest.mark.parametrize(
    ("kernel", "device", "dtype", "action"),
    [
        ("efficient", CPU, None, "'math' or 'flash'"),
        ("cudnn", CPU, torch.bfloat16, "'math' or 'flash'"),
        ("flash", MPS, None, "'math'"),
        ("flash", CUDA, None, "bf16-mixed"),
        ("cudnn", CUDA, torch.float64, "bf16-mixed"),
    ],
)
def test_an_unavailable_kernel_is_rejected_before_the_first_step(
    kernel: str, device: torch.device, dtype: torch.dtype | None, action: str
) -> None:
    with pytest.raises(RoomierError, match=f"attention='{kernel}'") as error:
        attention_context(AttentionPlan(kernel), device, dtype)
    assert action in error.value.action


def test_available_kernels_are_accepted() -> None:
    assert attention_context(AttentionPlan("auto"), CPU, None) is nullcontext
    for kernel, dtype in (("efficient", None), ("flash", torch.bfloat16), ("cudnn", torch.float16)):
        attention_context(AttentionPlan(kernel), CUDA, dtype)


def test_the_kernel_is_reported_one_time(
    make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(enable_model_summary=True, max_steps=3).fit(Language(), [BATCH] * 3)
    printed = [line for line in capsys.readouterr().err.splitlines() if "attention:" in line]
    assert printed == ["roomier: attention: flash, 3 calls per forward pass, [2, 2, 16, 8], float32"]
    make_trainer(max_steps=3).fit(Language(), [BATCH] * 3)
    assert "attention: " not in capsys.readouterr().err


def test_the_report_contains_the_dtype_of_the_kernel(
    make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(enable_model_summary=True, max_steps=1, precision="bf16-mixed").fit(Language(), [BATCH])
    assert "flash, 3 calls per forward pass, [2, 2, 16, 8], bfloat16" in capsys.readouterr().err
