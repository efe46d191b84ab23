"""Measurements of a device whose memory is almost full."""

import pytest
import torch

from roomier.planner.hardware import measure

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("available", "expected"), [(None, 2**27), (2**40, 2**27), (2**28, 2**26), (2**21, 2**20), (0, 2**20)]
)
def test_measurements_use_a_quarter_of_the_available_memory(available, expected, monkeypatch):
    monkeypatch.setattr(measure, "available_bytes", lambda device: available)
    assert measure._fitting(2**27, CPU) == expected


@pytest.mark.more
def test_a_product_that_does_not_fit_ends_the_measurement(monkeypatch):
    """The result is the rate of smaller matrix products. If no matrix product fits, the rate is unknown."""
    full, sizes = torch.full, []

    def limited(shape, *args, **options):
        sizes.append(shape[0])
        if shape[0] > limit:
            raise torch.OutOfMemoryError
        return full(shape, *args, **options)

    monkeypatch.setattr(torch, "full", limited)
    monkeypatch.setattr(measure, "_IS_LONG_S", 1e9)
    limit = 128
    assert measure.product_rate("fp32", CPU, 60) > 0
    assert sizes[-1] == 256
    limit = 0
    assert measure.product_rate("fp32", CPU, 60) is None
