"""Every random state a training step can draw from: seeded, captured, put back."""

import random
from typing import Any

import numpy as np
import torch

_LIMIT = 2**32


def seed_everything(seed: int, workers: bool = False) -> int:
    """Seed Python, NumPy and torch (all devices) with ``seed`` in ``[0, 2**32)``; returns it.

    Args:
        workers: taken for Lightning's sake, changes nothing: roomier seeds the workers of a DataLoader anyway, for
            each sample.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _LIMIT:
        from roomier.core.errors import RoomierError

        raise RoomierError("seed", seed, "is not an integer in [0, 2**32)", "Pass such an integer")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def separate_rng(rank: int) -> None:
    """Let this rank draw other numbers than the ranks that were seeded like it; rank 0 goes on with its own.

    What it draws depends on the states it came with and on ``rank`` alone.
    """
    if rank == 0:
        return
    random.seed(random.getrandbits(64) + rank)
    np.random.seed((int(np.random.randint(_LIMIT, dtype=np.uint64)) + rank) % _LIMIT)
    torch.manual_seed(int(torch.randint(2**62, ())) + rank)


def rng_state() -> dict[str, Any]:
    """The state of all generators, as tensors, numbers and lists (it fits into a checkpoint)."""
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
    if torch.cuda.is_available():
        state["cuda"] = {str(i): s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what :func:`rng_state` gave. CUDA states of devices that are not here are left out."""
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
    for index, cuda_state in state.get("cuda", {}).items():
        if int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(cuda_state.cpu(), int(index))
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())
