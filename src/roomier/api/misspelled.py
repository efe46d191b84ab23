"""Detection of methods whose names are similar to hooks. Such methods are never called, so they are reported."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator

from roomier.api.callback import Callback
from roomier.api.overrides import PACKAGES, lightning_base
from roomier.core.errors import RoomierError
from roomier.core.log import notice

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
    "on_pretrain_routine_start": "use on_fit_start",
    "on_pretrain_routine_end": "use on_fit_start",
    "on_keyboard_interrupt": "use on_exception",
    "on_init_start": "use setup",
    "on_init_end": "use setup",
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
