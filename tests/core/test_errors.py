"""Errors with a field, a received value, a problem and an action."""

import pickle

import pytest

from roomier import CheckpointError, DataError, PlanError, RoomierError, TrainingError
from roomier.core.errors import did_you_mean, nearest, shorten


@pytest.mark.parametrize("kind", [RoomierError, PlanError, DataError, CheckpointError, TrainingError])
def test_the_text_contains_all_four_parts(kind):
    error = kind("max_steps", -7, "is not a count.", "Use 1 or more.")
    assert str(error) == "max_steps=-7: is not a count. Use 1 or more."
    assert (error.field, error.received, error.problem, error.action) == (
        "max_steps",
        -7,
        "is not a count.",
        "Use 1 or more.",
    )
    assert isinstance(error, ValueError)


def test_a_question_keeps_its_mark():
    assert str(RoomierError("a", 1, "is unknown", "Did you mean 'b'?")).endswith("Did you mean 'b'?")


def test_an_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(PlanError("a", [1, 2], "is wrong", "Do b")))
    assert type(error) is PlanError
    assert error.received == [1, 2]
    assert str(error) == "a=[1, 2]: is wrong. Do b."


def test_an_error_about_an_object_that_cannot_be_pickled_can_be_pickled():
    received = (number for number in range(3))
    error = DataError("train_dataloaders", received, "is read once only", "Pass a list")
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is DataError
    assert str(arrived) == str(error)
    assert "generator object" in str(error)


@pytest.mark.parametrize(("length", "expected"), [(10, 13), (117, 120), (118, 120), (5000, 120)])
def test_a_long_value_is_shortened(length, expected):
    shortened = shorten("x" * length + "y")
    assert len(shortened) == expected
    assert shortened.endswith("xy'")  # the end of a path names the file


def test_an_object_without_repr_is_shown_by_its_class():
    class Half:
        def __repr__(self):
            raise AttributeError("not made yet")

    assert str(RoomierError("model", Half(), "is half", "Make it whole")) == "model=<Half>: is half. Make it whole."


def test_did_you_mean():
    assert did_you_mean("max_step", ["max_steps", "min_steps"]) == "Did you mean 'max_steps'?"
    assert did_you_mean("zzz", ["b", "a"]) == "Use one of: a, b"


def test_a_name_that_starts_with_the_received_name_is_preferred():
    known = ["val_lss", "val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"]
    assert did_you_mean("val_loss", known) == "Did you mean 'val_loss/dataloader_idx_0'?"
    assert nearest("val_lass", known) == "val_lss"
    assert nearest("val_lass", known, cutoff=0.99) is None
