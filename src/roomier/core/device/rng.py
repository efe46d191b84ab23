"""Functions that seed, save and restore all random number generators that a training step can use."""

import hashlib
import os
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roomier.core.device.resolve import accelerator_type
from roomier.core.errors import RoomierError
from roomier.core.forms import FormError, either, fields, finite, integer, mapping_of, one_of, optional, tensor

_LIMIT = 2**32

_GENERATOR = tensor(torch.uint8)
_OF_HOST = ("python", "numpy", "torch")


def _device_index(value: Any, place: str) -> None:
    if type(value) is not str or not value.isascii() or not value.isdecimal() or len(value) > 4:
        raise FormError(place, value, "the index of a device")


_STATES = fields(
    {
        "python": fields({"version": one_of(3), "internal": tensor(torch.int64, (625,)), "gauss": optional(finite)}),
        "numpy": fields(
            {
                "name": one_of("MT19937"),
                "keys": tensor(torch.int64, (624,)),
                "position": integer(0, 624),
                "has_gauss": integer(0, 1),
                "cached": finite,
            }
        ),
        "torch": _GENERATOR,
    },
    # Earlier versions stored the state of mps as a single tensor.
    others=either(_GENERATOR, mapping_of(_GENERATOR, keys=_device_index)),
)


def rng_form(value: Any, place: str) -> None:
    """Check that ``value`` has the structure that :func:`rng_state` returns. Each key that is not a generator of the
    host must be a device type."""
    _STATES(value, place)
    for key in of_devices(value):
        if type(key) is not str or re.fullmatch("[a-z][a-z0-9_]{0,31}", key) is None:
            raise FormError(f"a key of {place}", key, "a device type")


def mix_seed(*parts: int) -> int:
    """Combine several integers into one seed in ``[0, 2**63)``. Adjacent integers yield unrelated seeds."""
    packed = b"".join(part.to_bytes(16, "little", signed=True) for part in parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed the CPU generators of Python, NumPy and torch with ``seed`` in ``[0, 2**63)``."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed would also seed every accelerator, which worker processes do not use.
    torch.default_generator.manual_seed(seed)


def seed_everything(seed: int | None = None, workers: bool = False) -> int:
    """Seed Python, NumPy and torch (all devices), and return ``seed``.

    Args:
        seed: integer in ``[0, 2**32)``. If None, the value of the ``PL_GLOBAL_SEED`` environment variable is used, as
            in Lightning, or 0 if the variable is not set.
        workers: has no effect. This argument exists for compatibility with Lightning. roomier always seeds the workers
            of a DataLoader, separately for each sample.

    Raises:
        RoomierError: ``seed``, or the value of the environment variable, is not an integer in ``[0, 2**32)``.

    Example:
        >>> roomier.seed_everything(42)
        42
    """
    if seed is None:
        text = os.environ.get("PL_GLOBAL_SEED", "0")
        if not text.isdecimal() or int(text) >= _LIMIT:
            problem = "must be an integer in [0, 2**32)"
            raise RoomierError("PL_GLOBAL_SEED", text, problem, "Set the environment variable to an integer such as 42")
        seed = int(text)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _LIMIT:
        raise RoomierError("seed", seed, "must be an integer in [0, 2**32)", "Pass an integer such as 42")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def separate_rng(rank: int) -> None:
    """Reseed the generators of this rank so that ranks with equal states obtain different states. Rank 0 keeps its
    state.

    The new state depends only on the current state and on ``rank``.
    """
    if rank == 0:
        return
    random.seed(random.getrandbits(64) + rank)
    np.random.seed((int(np.random.randint(_LIMIT, dtype=np.uint64)) + rank) % _LIMIT)
    torch.manual_seed(int(torch.randint(2**62, ())) + rank)


def rng_state(*, only_host: bool = False) -> dict[str, Any]:
    """Return the states of all generators as nested dictionaries of tensors and plain values, for a checkpoint.

    Args:
        only_host: True to omit the devices, which this function would otherwise initialize.
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "internal": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    kind = None if only_host else accelerator_type()
    if kind is not None:
        devices = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
        state[kind] = {str(device.index): generator_state(device) for device in devices}
    return state


def of_devices(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``state`` that belong to devices, with the device types as keys."""
    return {name: each for name, each in state.items() if name not in _OF_HOST}


def generator_state(device: torch.device) -> Tensor:
    """Return the state of torch's default generator for ``device``, without synchronizing the device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Set torch's default generator for ``device`` to ``state``, which :func:`generator_state` returned."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def check_rng_state(state: dict[str, Any], place: str) -> None:
    """Check that the generators of the CPU accept the tensors of ``state``. Call :func:`rng_form` first.

    Raises:
        FormError: a generator does not accept its tensor.
    """
    internal = tuple(state["python"]["internal"].tolist())
    try:
        random.Random().setstate((3, internal, None))
    except (ValueError, OverflowError, TypeError):
        raise FormError(f"{place}.python.internal", internal, "a state of Python's generator") from None
    check_generator_state(state["torch"], f"{place}.torch")


def check_generator_state(state: torch.Tensor, place: str) -> None:
    """Raise FormError if torch's generator for the CPU does not accept ``state``.

    States of other devices have different sizes and are not checked.
    """
    if state.shape != torch.Generator().get_state().shape:
        return
    try:
        torch.Generator().set_state(state.cpu())
    except RuntimeError:
        raise FormError(place, state, "a state of torch's generator") from None


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states of all generators from a result of :func:`rng_state`. States of devices that do not exist are
    skipped."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    np.random.set_state(
        (
            numpy["name"],
            numpy["keys"].numpy().astype(np.uint32),
            numpy["position"],
            numpy["has_gauss"],
            numpy["cached"],
        )
    )
    torch.set_rng_state(state["torch"].cpu())
    kind = accelerator_type()
    of_kind = {} if kind is None else state.get(kind, {})
    for index, own in ({"0": of_kind} if isinstance(of_kind, Tensor) else of_kind).items():
        if int(index) < torch.accelerator.device_count():
            set_generator_state(torch.device(str(kind), int(index)), own.cpu())


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the random states at the end of the context."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
