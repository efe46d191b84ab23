"""The offload benchmark on a tiny model: equal losses, exact bytes, and ratios of each mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

TINY = ["--width", "64", "--layers", "3", "--vocab", "61", "--tokens", "16", "--steps", "2", "--json"]
NUM_PARAMETERS = 3 * (12 * 64 * 64 + 13 * 64) + 2 * 61 * 64 + 128 * 64 + 2 * 64


@pytest.mark.slow
def test_modes_and_disk(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("offload", *TINY)
    assert result["failed"] == []
    assert result["num_parameters"] == NUM_PARAMETERS
    assert 0 < result["forward_s"] < result["resident_s"]
    for mode, found in result["modes"].items():
        num_stored = 12 if mode == "speculative" else 8  # bytes per parameter, with the weights before the update
        assert 8 * NUM_PARAMETERS <= found["bytes_read"] <= 8.4 * NUM_PARAMETERS, mode
        assert num_stored * NUM_PARAMETERS <= found["bytes_written"] <= num_stored * 1.05 * NUM_PARAMETERS, mode
        assert found["step_s"] > 0
        assert found["overlap_ratio"] == pytest.approx(
            found["step_s"] / max(result["resident_s"], found["raw_io_s"]), rel=0.1
        )
        assert 0 < found["formula_ratio"] <= found["step_s"] / result["resident_s"] * 1.1
    for ratios in (result, result["under_load"]):
        assert all(ratios[f"disk_{name}_ratio"] > 0 for name in ("read", "write", "both"))
