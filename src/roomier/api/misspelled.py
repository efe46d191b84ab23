"""Methods that look like hooks and are none: nobody calls them, so they must not be passed over in silence."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator

from roomier.api.overrides import PACKAGES, lightning_base
from roomier.core.errors import RoomierError
from roomier.core.log import notice

# Lightning 2 refuses these as well: code that has them was written for Lightning 1.
REMOVED = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}
# Removed as well, but a method of this name may be the user's own, called by the user.
FORMER = {
    "training_step_end": "do it at the end of training_step",
    "validation_step_end": "do it at the end of validation_step",
    "test_step_end": "do it at the end of test_step",
    "on_epoch_start": "write on_train_epoch_start",
    "on_epoch_end": "write on_train_epoch_end",
    "on_batch_start": "write on_train_batch_start",
    "on_batch_end": "write on_train_batch_end",
    "on_pretrain_routine_start": "write on_fit_start",
    "on_pretrain_routine_end": "write on_fit_start",
    "on_keyboard_interrupt": "write on_exception",
    "on_init_start": "write setup",
    "on_init_end": "write setup",
    "configure_sharded_model": "write configure_model",
}
_IS_NEAR = 0.85  # difflib's ratio: one letter too many or too few in the shortest hook gives more
_OTHER_HOOKS = ("setup", "teardown", "num_loss_terms", "optimizer_zero_grad", "transfer_batch_to_device")


def check_hook_names(obj: object, base: type) -> None:
    """Look at the methods that the classes of ``obj`` add to ``base`` for names that are nearly those of hooks.

    A removed hook of Lightning is refused, a near miss is said. A name that a hook's is a part of
    (``on_train_epoch_end_extra``, ``prepare_datasets``) is meant, and so is one whose near hook stands in the same
    class.

    Args:
        base: Module, DataModule or Callback.

    Raises:
        RoomierError: a hook was removed in Lightning 2.
    """
    of_lightning = lightning_base(type(obj), base)
    known = {name for cls in (base, of_lightning or base) for name in dir(cls) if not name.startswith("_")}
    hooks = {name for name in known if _is_hook(name) and inspect.isfunction(getattr(base, name, None))}
    for cls, name in _methods(type(obj), base):
        if name in known:
            continue
        if name in REMOVED:
            problem = f"{cls.__name__} defines this hook of Lightning 1, which nobody calls"
            action = f"Write {REMOVED[name]}(self) in its place; what it needs of the steps, keep on self there"
            raise RoomierError(name, type(obj).__name__, problem, action)
        if name in FORMER:
            notice(f"{cls.__name__}.{name} is no hook any more, nobody calls it: {FORMER[name]}")
            continue
        near = _near_hook(name, hooks)
        if near is not None and near not in vars(cls):
            notice(f"{cls.__name__}.{name} is no hook, nobody calls it; did you mean {near}?")


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
