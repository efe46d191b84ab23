"""An LSTM trains in 16 bits on every CPU, with the kernels of oneDNN or torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier import Module, Trainer
from roomier.core.wrapped_forward import WrappedForward
from roomier.techniques.precision.lstm import onednn_has_lstm

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.lstm(x)[0]
        return y


class Recurrent(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(6, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return self.head(batch).float().square().mean()

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("levers", [{}, {"activation_checkpointing": "full"}], ids=["plain", "recomputed"])
@pytest.mark.parametrize("mode", DTYPES)
def test_an_lstm_trains_as_in_a_bare_loop(
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    levers: dict[str, Any],
) -> None:
    dtype = DTYPES[mode]
    module, batches = Recurrent(), [torch.linspace(-1, 1, 2 * 4 * 6).sin().view(2, 4, 6) * n for n in (1, 2, 3)]
    bare = copy.deepcopy(module)
    torch.manual_seed(1)
    make_trainer(max_epochs=1, precision=mode, **levers).fit(module, batches, batches[:1])
    err = capsys.readouterr().err

    has_kernel = onednn_has_lstm(dtype)
    assert err.count(f"oneDNN has no LSTM kernel in {str(dtype)[6:]} for this processor") == (not has_kernel)
    assert torch.backends.mkldnn.enabled, "restored after each forward"
    assert not any(isinstance(each.forward, WrappedForward) for each in module.modules()), "restored after the run"
    # without the kernel, the bare loop would raise an error
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", has_kernel)
    optimizer, scaler = bare.configure_optimizers(), torch.amp.GradScaler("cpu", enabled=mode == "16-mixed")
    torch.manual_seed(1)
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = bare.training_step(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    for (name, ours), theirs in zip(module.named_parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert not torch.equal(ours, dict(Recurrent().named_parameters())[name]), "it was trained"
