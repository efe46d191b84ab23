"""Names of checkpoint folders."""

import pytest
import torch

from roomier.callbacks.checkpoint_folder import DEFAULT_TEMPLATE, check_template, first_free_name, format_name
from roomier.core.errors import RoomierError

METRICS = {"epoch": 3, "step": 120, "val_loss": torch.tensor(0.12345), "val/acc": 0.5, "a.b": 2.0}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (DEFAULT_TEMPLATE, "epoch=3-step=120"),
        ("{epoch:02d}_{val_loss:.2f}", "epoch=03_val_loss=0.12"),
        ("best", "best"),
        ("{val/acc:.1f}", "val_acc=0.5"),
        ("{a.b}", "a.b=2.0"),
        ("{epoch}-{val_los:.2f}", "epoch=3-val_los=none"),
        ("a{{b}}-{step}", "a{b}-step=120"),
    ],
)
def test_template_is_filled_in(template: str, name: str) -> None:
    assert format_name(check_template(template), METRICS) == name


def test_metric_names_can_be_omitted() -> None:
    assert format_name("{epoch}-{step:05d}-{val/acc:.1f}", METRICS, auto_insert_metric_name=False) == "3-00120-0.5"


@pytest.mark.parametrize(
    "template", ["", "  ", "..", "a/b", "{epoch}/{step}", "{", "{}", "{0.5", "{epoch:zz}", "{a!r}", 7]
)
def test_invalid_template_is_rejected(template: str) -> None:
    with pytest.raises(RoomierError, match="filename="):
        check_template(template)


def test_first_free_name() -> None:
    assert first_free_name("a", set()) == "a"
    assert first_free_name("a", {"b", "a"}) == "a-v1"
    assert first_free_name("a", {"a", "a-v1", "a-v3"}) == "a-v2"
