"""The documentation's table of differences from Lightning is complete and true."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roomier import Trainer
from tests.lightning.both import quiet_lightning
from tests.lightning.difference import Difference
from tests.lightning.differences import DIFFERENCES, PAGE, with_table
from tests.lightning.modules import pl


@pytest.mark.more
@pytest.mark.parametrize("kind", [pl.Trainer, Trainer], ids=["lightning", "roomier"])
@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: each.observe.__name__)
def test_difference_exists(difference: Difference, kind: type, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with quiet_lightning():
        observed = difference.observe(kind, tmp_path)
    assert observed == difference.expected[kind is Trainer]
    assert difference.expected[0] != difference.expected[1]


def test_table_of_the_page_is_generated() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run python -m tests.lightning.differences"
