"""Sizes of matrix products that a device computes slowly."""

from __future__ import annotations

import torch
from torch import nn

from roomier.precision.policy import Precision


def size_warnings(network: nn.Module, precision: Precision, device: torch.device) -> list[str]:
    """A line for each size of a linear layer that is no multiple of what ``device`` likes in that dtype."""
    return []
