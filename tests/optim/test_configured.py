"""Every documented return value of ``configure_optimizers``, and invalid return values."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from roomier import RoomierError
from roomier.techniques.optim.configured import LRSchedulerConfig, check_schedulers, read_configured


@pytest.fixture
def optimizer():
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.fixture
def other():
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.fixture
def scheduler(optimizer):
    return StepLR(optimizer, 1)


def test_nothing():
    configured = read_configured(None)
    assert (configured.optimizers, configured.schedulers) == ([], [])


def test_one_optimizer(optimizer):
    configured = read_configured(optimizer)
    assert (configured.optimizers, configured.schedulers) == ([optimizer], [])


@pytest.mark.parametrize("form", [list, tuple])
def test_several_optimizers(optimizer, other, form):
    configured = read_configured(form([optimizer, other]))
    assert configured.optimizers == [optimizer, other]
    assert configured.schedulers == []


@pytest.mark.parametrize("form", [list, tuple])
def test_two_lists(optimizer, other, scheduler, form):
    config = {"scheduler": StepLR(other, 1), "interval": "step"}
    configured = read_configured(form([[optimizer, other], [scheduler, config]]))
    assert configured.optimizers == [optimizer, other]
    assert configured.schedulers == [
        LRSchedulerConfig(scheduler),
        LRSchedulerConfig(config["scheduler"], interval="step"),
    ]


def test_two_lists_without_schedulers(optimizer):
    assert read_configured(([optimizer], [])).optimizers == [optimizer]


def test_a_dictionary(optimizer, scheduler):
    assert read_configured({"optimizer": optimizer}).optimizers == [optimizer]
    configured = read_configured({"optimizer": optimizer, "lr_scheduler": scheduler})
    assert configured.optimizers == [optimizer]
    assert configured.schedulers == [LRSchedulerConfig(scheduler, interval="epoch", frequency=1, strict=True)]


def test_every_key_of_the_scheduler_dictionary(optimizer):
    plateau = ReduceLROnPlateau(optimizer)
    given = {
        "scheduler": plateau,
        "interval": "step",
        "frequency": 3,
        "monitor": "loss",
        "strict": False,
        "name": "rate",
    }
    [config] = read_configured({"optimizer": optimizer, "lr_scheduler": given}).schedulers
    assert config == LRSchedulerConfig(
        plateau, interval="step", frequency=3, reduce_on_plateau=True, monitor="loss", strict=False, name="rate"
    )


def test_monitor_next_to_the_scheduler(optimizer):
    plateau = ReduceLROnPlateau(optimizer)
    [config] = read_configured({"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "loss"}).schedulers
    assert config == LRSchedulerConfig(plateau, reduce_on_plateau=True, monitor="loss")


def test_several_dictionaries(optimizer, other, scheduler):
    configured = read_configured(
        ({"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}, {"optimizer": other})
    )
    assert configured.optimizers == [optimizer, other]
    assert configured.schedulers == [LRSchedulerConfig(scheduler)]


def test_a_user_defined_scheduler(optimizer):
    class Own:
        def step(self, metric=None):
            pass

    own = Own()
    given = {"scheduler": own, "reduce_on_plateau": True, "monitor": "loss"}
    [config] = read_configured({"optimizer": optimizer, "lr_scheduler": given}).schedulers
    assert config.reduce_on_plateau
    assert config.scheduler is own


def unsupported_forms():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1)
    plateau = ReduceLROnPlateau(optimizer)

    def with_scheduler(**config):
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **config}}

    return [
        ("a string", "adam", "not a supported return value"),
        ("an empty list", [], "not a supported return value"),
        ("a class", torch.optim.SGD, "not a supported return value"),
        ("parameters", [nn.Parameter(torch.zeros(1))], "not a supported return value"),
        ("optimizer and scheduler side by side", (optimizer, scheduler), "not a supported return value"),
        ("three lists", ([optimizer], [scheduler], [1]), "not a supported return value"),
        ("no optimizer", {"lr_scheduler": scheduler}, "must be a torch.optim.Optimizer"),
        ("a name", {"optimizer": "adam"}, "must be a torch.optim.Optimizer"),
        ("a misspelled key", {"optimizer": optimizer, "lr_schedular": scheduler}, "Did you mean 'lr_scheduler'"),
        ("a misspelled scheduler key", with_scheduler(intervall="step"), "Did you mean 'interval'"),
        (
            "no scheduler",
            {"optimizer": optimizer, "lr_scheduler": {"interval": "step"}},
            "requires the key",
        ),
        ("no step", {"optimizer": optimizer, "lr_scheduler": object()}, "is not a scheduler"),
        ("an unknown interval", with_scheduler(interval="batch"), "Use 'epoch' or 'step'"),
        ("a frequency of 0", with_scheduler(frequency=0), "must be an integer of at least 1"),
        ("a fraction", with_scheduler(frequency=0.5), "must be an integer of at least 1"),
        ("no monitor", {"optimizer": optimizer, "lr_scheduler": plateau}, "requires the name of a logged metric"),
        ("no monitor in the list", ([optimizer], [plateau]), "requires the name of a logged metric"),
    ]


@pytest.mark.parametrize(
    ("what", "returned", "problem"), unsupported_forms(), ids=[each[0] for each in unsupported_forms()]
)
def test_an_invalid_return_value_is_rejected(what, returned, problem):
    with pytest.raises(RoomierError, match=f"(?s)configure_optimizers.*{problem}"):
        check_schedulers(read_configured(returned))
