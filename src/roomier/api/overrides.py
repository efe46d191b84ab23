"""Find the methods that a user class overrides, and recognize classes of Lightning by their names, without importing
Lightning."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from types import MethodType

from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.module import Module
from roomier.core.errors import RoomierError
from roomier.core.log import notice

PACKAGES = ("lightning.pytorch.", "pytorch_lightning.")
COUNTERPARTS: dict[type, str] = {Module: "LightningModule", DataModule: "LightningDataModule", Callback: "Callback"}


def lightning_base(kind: type, counterpart: type) -> type | None:
    """Return the Lightning class among ``kind`` and its base classes; None if there is none.

    Args:
        counterpart: the corresponding class of roomier: Module, DataModule or Callback.
    """
    name = COUNTERPARTS[counterpart]
    return next((c for c in kind.__mro__ if c.__name__ == name and c.__module__.startswith(PACKAGES)), None)


def overrides(obj: object, name: str, base: type) -> bool:
    """Return True if ``obj`` or its class overrides the method ``name`` of ``base`` or of the corresponding Lightning
    class.

    As in Lightning, a method that is set to None is not an override.
    """
    defaults = [getattr(each, name, None) for each in (lightning_base(type(obj), base), base) if each is not None]
    if name in vars(obj):
        own = vars(obj)[name]
        return own is not None and getattr(own, "__func__", own) not in defaults
    own = getattr(type(obj), name, None)
    return own is not None and own is not defaults[0]


def replace_none(obj: object, base: type) -> None:
    """Replace methods of ``obj`` that are set to None with the methods of ``base``."""
    for owner in (obj, *type(obj).__mro__):
        for name, value in list(vars(owner).items()):
            if value is None and getattr(obj, name, None) is None and callable(getattr(base, name, None)):
                vars(obj)[name] = MethodType(getattr(base, name), obj)


def is_one(obj: object, counterpart: type) -> bool:
    """Return True if ``obj`` is a Module, DataModule or Callback from roomier or Lightning."""
    return isinstance(obj, counterpart) or lightning_base(type(obj), counterpart) is not None


class _KnownByName(type):
    """Metaclass of classes that represent Lightning's class ``lightning_name`` in ``issubclass`` and ``isinstance``."""

    lightning_name: str

    def __subclasscheck__(cls, kind: type) -> bool:
        return any(c.__name__ == cls.lightning_name and c.__module__.startswith(PACKAGES) for c in kind.__mro__)

    def __instancecheck__(cls, obj: object) -> bool:
        return issubclass(type(obj), cls)


class LightningCallback(metaclass=_KnownByName):
    """A ``lightning.pytorch.Callback``."""

    lightning_name = "Callback"


class LightningDataModule(metaclass=_KnownByName):
    """A ``lightning.pytorch.LightningDataModule``."""

    lightning_name = "LightningDataModule"


class LightningLogger(metaclass=_KnownByName):
    """A logger of ``lightning.pytorch.loggers``."""

    lightning_name = "Logger"


_FOLDERS = tuple(f"{package}callbacks." for package in PACKAGES)
_BASES = ("Callback", "Checkpoint", "BasePredictionWriter")  # base classes for users


def builtin_class(obj: object) -> type | None:
    """Return the built-in Lightning callback class that ``obj`` is an instance of; None for any other object."""
    for cls in type(obj).__mro__:
        if cls.__module__.startswith(_FOLDERS):
            return None if cls.__name__ in _BASES else cls
    return None


def is_builtin(obj: object, name: str) -> bool:
    """Return True if ``obj`` is an instance of Lightning's class ``name`` (a callback or a base class of callbacks)."""
    return any(cls.__name__ == name and cls.__module__.startswith(_FOLDERS) for cls in type(obj).__mro__)


def added_names(obj: object, builtin: type) -> list[str]:
    """Return the names of the public methods of ``builtin`` that the class of ``obj`` overrides. roomier's replacement
    of ``builtin`` does not call the overrides."""
    own = type(obj).__mro__[: type(obj).__mro__.index(builtin)]
    names = {name for cls in own for name, value in vars(cls).items() if callable(value) and not name.startswith("_")}
    return sorted(name for name in names if hasattr(builtin, name))


def watches_metric(callback: object) -> bool:
    """Return True if ``callback`` monitors a logged metric. ``on_train_epoch_end`` of such callbacks runs last."""
    if isinstance(callback, Callback):
        return callback.monitors
    return is_builtin(callback, "EarlyStopping") or is_builtin(callback, "Checkpoint")


# Lightning 2 also rejects these hooks of Lightning 1.
REMOVED = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}
# These hooks were also removed from Lightning, but users can define methods with these names and call them.
FORMER = {
    "training_step_end": "move its code to the end of training_step",
    "validation_step_end": "move its code to the end of validation_step",
    "test_step_end": "move its code to the end of test_step",
    "on_epoch_start": "use on_train_epoch_start",
    "on_epoch_end": "use on_train_epoch_end",
    "on_batch_start": "use on_train_batch_start",
    "on_batch_end": "use on_train_batch_end",
    **dict.fromkeys(("on_pretrain_routine_start", "on_pretrain_routine_end"), "use on_fit_start"),
    "on_keyboard_interrupt": "use on_exception",
    **dict.fromkeys(("on_init_start", "on_init_end"), "use setup"),
    "configure_sharded_model": "use configure_model",
}
_IS_NEAR = 0.85  # ratio of difflib; names that differ by one additional or missing letter have a higher ratio
_OTHER_HOOKS = ("setup", "teardown", "num_loss_terms", "optimizer_zero_grad", "transfer_batch_to_device")


def check_hook_names(obj: object, base: type) -> None:
    """Report methods of ``obj`` whose names are similar to hooks, and reject removed hooks of Lightning.

    Names that contain the name of a hook, such as ``on_train_epoch_end_extra`` or ``prepare_datasets``, are not
    reported. A method is not reported if its class also defines the similar hook.

    Args:
        obj: a Module, DataModule or Callback.
        base: the ``Module``, ``DataModule`` or ``Callback`` class.

    Raises:
        RoomierError: ``obj`` defines a hook that was removed in Lightning 2, or is a callback with a hook that does not
            accept the arguments of the hook.
    """
    of_lightning = lightning_base(type(obj), base)
    known = {name for cls in (base, of_lightning or base) for name in dir(cls) if not name.startswith("_")}
    hooks = {name for name in known if _is_hook(name) and inspect.isfunction(getattr(base, name, None))}
    for cls, name in _methods(type(obj), base):
        if name in known:
            if base is Callback and name in hooks:
                _check_arguments(obj, name)
            continue
        if name in REMOVED:
            problem = f"{cls.__name__} defines this hook of Lightning 1, but roomier never calls it"
            action = f"Use {REMOVED[name]}(self), and store the outputs of the steps in an attribute of self"
            raise RoomierError(name, type(obj).__name__, problem, action)
        if name in FORMER:
            notice(f"{cls.__name__}.{name} is no longer a hook and is never called: {FORMER[name]}")
            continue
        near = _near_hook(name, hooks)
        if near is not None and near not in vars(cls):
            notice(f"{cls.__name__}.{name} is not a hook and is never called; did you mean {near}?")


def _check_arguments(callback: object, name: str) -> None:
    """Check that the hook ``name`` of ``callback`` can be called, because users often forget ``self``."""
    own, hook = getattr(callback, name), inspect.signature(getattr(Callback, name))
    needed = [each.name for each in hook.parameters.values() if each.default is inspect.Parameter.empty][1:]
    try:
        inspect.signature(own).bind(*needed)
    except TypeError as error:
        problem = f"{type(callback).__name__}.{name} does not accept the arguments of this hook ({error})"
        arguments = ", ".join(["self", *needed])
        raise RoomierError(name, own, problem, f"Define it as `def {name}({arguments})`") from None


def _is_hook(name: str) -> bool:
    starts, ends = ("on_", "configure_"), ("_step", "_dataloader", "prepare_data", "state_dict")
    return name.startswith(starts) or name.endswith(ends) or name in _OTHER_HOOKS


def _methods(cls: type, base: type) -> Iterator[tuple[type, str]]:
    for each in cls.__mro__:
        if each not in base.__mro__ and not each.__module__.startswith(("roomier.", *PACKAGES)):
            for name, value in vars(each).items():
                if inspect.isfunction(value) and not name.startswith("_"):
                    yield each, name


def _near_hook(name: str, hooks: set[str]) -> str | None:
    if any(name.endswith(f"_{hook}") or (name.startswith(hook) and len(name) > len(hook) + 1) for hook in hooks):
        return None
    near = difflib.get_close_matches(name, sorted(hooks), n=1, cutoff=_IS_NEAR)
    return near[0] if near else None
