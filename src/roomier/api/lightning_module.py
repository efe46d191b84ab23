"""Adapters for Lightning's classes, which are recognized by their class names. Lightning is never imported."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn

from roomier.api.hparams import HasHyperParameters, HyperParameters, plain_items
from roomier.api.module import Module, WrappedModule
from roomier.api.overrides import lightning_base, overrides
from roomier.api.trainer_view import TrainerView

OF_LIGHTNING_CLI = ("_instantiator", "_class_path")  # entries of LightningCLI that are not hyperparameters

# Methods of a LightningModule that use its trainer. While the module is attached, roomier's Module provides these
# methods.
LENT = (
    *("is_attached", "log", "log_dict", "log_image", "log_figure", "log_histogram", "print", "optimizers"),
    *("lr_schedulers", "manual_backward"),
    *("clip_gradients", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer", "all_gather", "logger"),
    *("loggers", "current_epoch", "global_step", "global_rank", "local_rank", "device", "dtype"),
)


class _OfUser:
    """Descriptor of an attribute of the LightningModule, whose value can change at any time."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, adapter: WrappedModule | None, owner: type) -> Any:
        return self if adapter is None else getattr(adapter.network, self._name)

    def __set__(self, adapter: WrappedModule, value: Any) -> None:
        setattr(adapter.network, self._name, value)


class LightningAdapter(WrappedModule):
    """Module that wraps a LightningModule. Methods that the LightningModule overrides are called on the LightningModule
    itself.

    Each LightningModule class has a separate adapter class with the same name, because messages contain
    ``type(module).__name__``.

    With accumulated gradients, all micro-batches have the same weight, as in Lightning, unless the class of the
    LightningModule defines ``num_loss_terms`` (see :meth:`roomier.Module.num_loss_terms`).

    Args:
        network: the LightningModule.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        kind: Any = type(network)
        self.__class__ = _adapter_class(kind)
        for name in _public_names():
            if hasattr(type(network), name) and overrides(network, name, Module):
                vars(self)[name] = getattr(network, name)
        self.loss_reduction = getattr(network, "loss_reduction", self.loss_reduction)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the LightningModule."""
        return self.network(*args, **kwargs)

    def num_loss_terms(self, batch: Any) -> int | Tensor:
        """Return 1, because all micro-batches have the same weight."""
        return 1

    automatic_optimization = _OfUser()
    strict_loading = _OfUser()
    example_input_array = _OfUser()

    @property  # type: ignore[misc]  # without a setter, like Lightning's property
    def hparams(self) -> HyperParameters:
        """Hyperparameters of the LightningModule."""
        return HyperParameters(hparams_of(self.network))

    @property
    def logged_hparams(self) -> dict[str, Any]:
        """Hyperparameters of the LightningModule that are sent to the loggers."""
        return logged_hparams_of(self.network)


@cache
def _adapter_class(kind: type) -> type:
    names = {"__module__": LightningAdapter.__module__, "__doc__": kind.__doc__, "user_class": kind}
    return type(kind.__name__, (LightningAdapter,), names)


def hparams_of(obj: Any) -> dict[str, Any]:
    """Return the hyperparameters of a Module or DataModule from roomier or Lightning."""
    return _without_cli(obj.hparams)


def logged_hparams_of(obj: Any) -> dict[str, Any]:
    """Return the initial hyperparameters that a Module or DataModule from roomier or Lightning sends to the loggers."""
    if isinstance(obj, HasHyperParameters):
        return obj.logged_hparams
    # Lightning stores the argument of save_hyperparameters(logger=...) only in this attribute.
    return _without_cli(obj.hparams_initial) if vars(obj).get("_log_hyperparams", False) else {}


def described_hparams(module: Module) -> dict[str, Any]:
    """Return the checkpoint entries for the hyperparameters of ``module``.

    The entries are the hyperparameters that are plain data, and the name of the argument that contained all
    hyperparameters, if such an argument exists.
    """
    of_user = module.network if isinstance(module, LightningAdapter) else module
    argument = vars(of_user).get("_hparams_name")
    return {
        "hyperparameters": plain_items(hparams_of(of_user)),
        # Lightning stores "kwargs" if the arguments were passed separately.
        **({} if argument in (None, "kwargs") else {"hyperparameters_argument": argument}),
    }


def described_datamodule(datamodule: Any) -> dict[str, Any]:
    """Return the checkpoint entry from which a DataModule of roomier or Lightning can be recreated.

    The entry contains the name of the class, the hyperparameters that are plain data, and the name of the argument that
    contained all hyperparameters, if such an argument exists.
    """
    argument = vars(datamodule).get("_hparams_name")
    return {
        "type": type(datamodule).__qualname__,
        "hyperparameters": plain_items(hparams_of(datamodule)),
        **({} if argument in (None, "kwargs") else {"argument": argument}),
    }


def _without_cli(hparams: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in dict(hparams).items() if name not in OF_LIGHTNING_CLI}


@cache
def _public_names() -> tuple[str, ...]:
    """Return the names of Module's methods that users may override."""
    lent = {*LENT, "trainer", "forward", "load_from_checkpoint", "freeze", "unfreeze"}
    found = {name for cls in Module.__mro__ if cls.__module__.startswith("roomier.") for name in vars(cls)}
    return tuple(sorted(name for name in found - lent if not name.startswith("_") and callable(getattr(Module, name))))


@contextmanager
def with_methods_of_module(module: nn.Module, trainer: TrainerView) -> Iterator[None]:
    """Let the LightningModules in ``module`` use ``trainer`` for logging, optimizers and properties in this context.

    Like ``fully_shard``, this function inserts a class between the class of each object and Lightning's class, so an
    overridden ``log`` that calls ``super().log`` works. Lightning itself is not changed, and the class of the object is
    restored at the end of the context.
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
    """Attach the LightningModules in ``module`` to ``trainer`` like :func:`with_methods_of_module`, but permanently.

    Use this function for a copy that is discarded later. Without a ``trainer``, the LightningModules behave like a
    roomier.Module without a Trainer.
    """
    parts = [part for part in module.modules() if lightning_base(type(part), Module) is not None]
    for part in parts:
        vars(part)["_trainer"] = trainer
        if not any("user_class" in vars(cls) for cls in type(part).__mro__):
            kind: Any = type(part)
            part.__class__ = _lent_class(kind)
    return parts


def _note_place(part: nn.Module) -> None:
    # Lightning's ``device`` and ``dtype`` are attributes that its ``to`` sets. A run moves only the parameters.
    tensor = next((each for each in part.parameters() if each.is_floating_point()), None)
    if tensor is not None:
        vars(part).update(_device=tensor.device, _dtype=tensor.dtype)


@cache
def _lent_class(kind: type) -> type:
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
    # A copy or a pickle uses the user's class, because the class created here cannot be imported.
    def reduce_ex(self: Any, protocol: Any) -> Any:
        user_class: Any = kind
        maker, arguments, *state = user_class.__reduce_ex__(self, protocol)
        if maker is copyreg.__newobj__:  # type: ignore[attr-defined]  # requires the class of the object
            maker, arguments = object.__new__, (kind, *arguments[1:])
        return (maker, arguments, *state)

    return reduce_ex
