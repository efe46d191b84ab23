"""Support for LSTMs under autocast on a CPU for which oneDNN has no 16-bit LSTM kernel.

[Note: LSTM under autocast]
Under autocast on a CPU, torch calls oneDNN's LSTM with 16-bit tensors without checking that oneDNN has a kernel for
this dtype and processor. Otherwise, the call raises "could not create a primitive descriptor", in bfloat16 on
processors without AVX-512, and in float16 on most processors. torch's own LSTM runs on every processor, with matrix
products in 16 bits and gates and states in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from roomier.core import torch_fake
from roomier.core.log import notice
from roomier.core.wrapped_forward import WrappedForward, install
from roomier.techniques.precision.policy import Precision


class WithoutOneDNN(WrappedForward):
    """Wrapper that runs the forward pass of a module with torch's own kernels instead of oneDNN's kernels."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            return self.forward(*args, **kwargs)
        finally:
            torch.backends.mkldnn.enabled = before


def replace_missing_lstm_kernels(network: nn.Module, precision: Precision) -> None:
    """Make each LSTM in ``network`` run without oneDNN if oneDNN has no LSTM kernel for ``precision`` on this
    processor.

    :func:`roomier.core.wrapped_forward.unwrap` undoes this change.
    """
    dtype = precision.autocast_dtype
    lstms = [each for each in network.modules() if isinstance(each, nn.LSTM)]
    if not lstms or dtype is None or precision.device.type != "cpu" or torch_fake.makes_fake_tensors():
        return
    if onednn_has_lstm(dtype):
        return
    name = str(dtype).removeprefix("torch.")
    notice(f"oneDNN has no LSTM kernel in {name} for this processor, so LSTM layers use torch's own kernels")
    for each in lstms:
        install(each, WithoutOneDNN(each))


@functools.cache
def onednn_has_lstm(dtype: torch.dtype) -> bool:
    """Run a small LSTM under autocast to ``dtype`` on this CPU, and return whether the run succeeds."""
    x = torch.zeros(1, 1, 1)
    weights = [torch.zeros(4, 1, requires_grad=True) for _ in range(2)]
    try:
        with torch.enable_grad(), torch.autocast("cpu", dtype=dtype):
            torch.lstm(x, (x, x), weights, False, 1, 0.0, True, False, False)
    except RuntimeError:
        return False
    return True
