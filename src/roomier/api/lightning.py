"""What was written for Lightning, seen as roomier's own. It is known by its classes: Lightning is never imported."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn

from roomier.api.hparams import HasHyperParameters, HyperParameters, is_plain
from roomier.api.module import Module
from roomier.api.overrides import lightning_base, overrides
from roomier.api.trainer_view import TrainerView
from roomier.api.wrapped import WrappedModule

OF_LIGHTNING_CLI = ("_instantiator", "_class_path")  # how LightningCLI made the object, no hyperparameters

# What a LightningModule does through its trainer, done by roomier's Module of the same name while it is attached.
LENT = (
    "is_attached",
    "log",
    "log_dict",
    "print",
    "optimizers",
    "lr_schedulers",
    "manual_backward",
    "clip_gradients",
    "toggle_optimizer",
    "untoggle_optimizer",
    "toggled_optimizer",
    "all_gather",
    "logger",
    "loggers",
    "current_epoch",
    "global_step",
    "global_rank",
    "local_rank",
    "device",
    "dtype",
)


class LightningAdapter(WrappedModule):
    """A LightningModule as a Module: what it overrides is called, on the object itself, and nothing else is.

    Each has a class of its own named after the user's, for messages say ``type(module).__name__``.

    Micro-batches count alike when gradients are accumulated, as in Lightning, unless the class has
    ``num_loss_terms`` (see :meth:`roomier.Module.num_loss_terms`).
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        kind: Any = type(network)
        self.__class__ = _adapter_class(kind)
        for name in _public_names():
            if hasattr(type(network), name) and overrides(network, name, Module):
                vars(self)[name] = getattr(network, name)
        if hasattr(network, "loss_reduction"):
            self.loss_reduction = self._user.loss_reduction

    @property
    def _user(self) -> Any:
        """The LightningModule, whose attributes are its class's business."""
        return self.network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)

    def num_loss_terms(self, batch: Any) -> int | Tensor:
        return 1

    @property
    def automatic_optimization(self) -> bool:
        """The network's own, which may be set at any time."""
        return bool(self._user.automatic_optimization)

    @automatic_optimization.setter
    def automatic_optimization(self, is_automatic: bool) -> None:
        self._user.automatic_optimization = is_automatic

    @property
    def strict_loading(self) -> bool:
        return bool(self._user.strict_loading)

    @strict_loading.setter
    def strict_loading(self, is_strict: bool) -> None:
        self._user.strict_loading = is_strict

    @property
    def example_input_array(self) -> Any:
        return self._user.example_input_array

    @example_input_array.setter
    def example_input_array(self, example: Any) -> None:
        self._user.example_input_array = example

    @property
    def hparams(self) -> HyperParameters:
        return HyperParameters(hparams_of(self.network))

    @hparams.setter
    def hparams(self, values: Any) -> None:
        self._user.hparams = values  # whose class refuses it

    @property
    def logged_hparams(self) -> dict[str, Any]:
        return logged_hparams_of(self.network)


@cache
def _adapter_class(kind: type) -> type:
    names = {"__module__": LightningAdapter.__module__, "__doc__": kind.__doc__, "user_class": kind}
    return type(kind.__name__, (LightningAdapter,), names)


def hparams_of(obj: Any) -> dict[str, Any]:
    """What ``save_hyperparameters`` kept of a Module or DataModule, of roomier or of Lightning, by name."""
    return _without_cli(obj.hparams)


def logged_hparams_of(obj: Any) -> dict[str, Any]:
    """Those of a Module or DataModule, of roomier or of Lightning, that go to the loggers: as it was made with them."""
    if isinstance(obj, HasHyperParameters):
        return obj.logged_hparams
    # What save_hyperparameters(logger=...) said stands in this one place.
    return _without_cli(obj.hparams_initial) if vars(obj).get("_log_hyperparams", False) else {}


def described_hparams(module: Module) -> dict[str, Any]:
    """What a checkpoint holds of the hyperparameters of ``module``: those that are plain data, and the one argument
    they were passed in, where it was one."""
    of_user = module.network if isinstance(module, LightningAdapter) else module
    argument = vars(of_user).get("_hparams_name")
    return {
        "hyperparameters": {name: value for name, value in hparams_of(of_user).items() if is_plain(value)},
        # Lightning notes "kwargs" where the arguments were passed one by one.
        **({} if argument in (None, "kwargs") else {"hyperparameters_argument": argument}),
    }


def _without_cli(hparams: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in dict(hparams).items() if name not in OF_LIGHTNING_CLI}


@cache
def _public_names() -> tuple[str, ...]:
    """Methods of Module that a module's author may write."""
    lent = {*LENT, "trainer", "forward", "load_from_checkpoint", "freeze", "unfreeze"}
    found = {name for cls in Module.__mro__ if cls.__module__.startswith("roomier.") for name in vars(cls)}
    return tuple(sorted(name for name in found - lent if not name.startswith("_") and callable(getattr(Module, name))))


@contextmanager
def lent_to_lightning(module: nn.Module, trainer: TrainerView) -> Iterator[None]:
    """Within it, the LightningModules in ``module`` log, step and ask through ``trainer``.

    Each gets a class between its own and Lightning's, as ``fully_shard`` does in front of a module's, so an overridden
    ``log`` that calls ``super().log`` works. The library is left as it is, and so is the object afterwards.
    """
    parts = lend_to_lightning(module, trainer)
    try:
        yield
    finally:
        for part in parts:
            _note_place(part)
            if "user_class" in vars(type(part)):
                part.__class__ = vars(type(part))["user_class"]


def lend_to_lightning(module: nn.Module, trainer: TrainerView | None) -> list[nn.Module]:
    """As :func:`lent_to_lightning`, for good: the LightningModules in ``module``, a copy that is thrown away. Without a
    ``trainer`` they are as a roomier.Module without one."""
    parts = [part for part in module.modules() if lightning_base(type(part), Module) is not None]
    for part in parts:
        vars(part)["_trainer"] = trainer
        if not _is_lent(type(part)):
            part.__class__ = _lent_class(type(part))
    return parts


def _note_place(part: nn.Module) -> None:
    # Lightning's ``device`` and ``dtype`` are notes that its own ``to`` makes; a run moves the parameters alone.
    tensor = next((each for each in part.parameters() if each.is_floating_point()), None)
    if tensor is not None:
        vars(part).update(_device=tensor.device, _dtype=tensor.dtype)


def _is_lent(kind: type) -> bool:
    return any("user_class" in vars(cls) for cls in kind.__mro__)


_LENT_CLASSES: dict[type, type] = {}


def _lent_class(kind: type) -> type:
    if kind not in _LENT_CLASSES:
        _LENT_CLASSES[kind] = _make_lent_class(kind)
    return _LENT_CLASSES[kind]


def _make_lent_class(kind: type) -> type:
    base = lightning_base(kind, Module)
    assert base is not None
    lender = type("RoomierMethods", (base,), {name: vars(Module)[name] for name in LENT})
    names: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": _reduce_as(kind),
        "user_class": kind,
    }
    return type(kind.__name__, (kind, lender), names)


def _reduce_as(kind: type) -> Callable[[Any, Any], Any]:
    # A copy, or a pickle, is one of the user's class: the class made here has no name to be found by.
    def reduce_ex(self: Any, protocol: Any) -> Any:
        user_class: Any = kind
        maker, arguments, *state = user_class.__reduce_ex__(self, protocol)
        if maker is copyreg.__newobj__:  # type: ignore[attr-defined]  # which must get the very class of the object
            maker, arguments = object.__new__, (kind, *arguments[1:])
        return (maker, arguments, *state)

    return reduce_ex
