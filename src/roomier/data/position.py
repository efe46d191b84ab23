"""Schema of the positions in the training data that :meth:`roomier.data.source.Source.state_dict` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roomier.core.device.rng import check_generator_state, check_rng_state, rng_form
from roomier.core.forms import (
    Form,
    FormError,
    anything,
    count,
    either,
    fields,
    flag,
    integer,
    item_of,
    list_of,
    mapping_of,
    number,
    one_of,
    optional,
    tensor,
    text,
)
from roomier.data.combined import MODES

_GENERATORS = list_of(tensor(torch.uint8))
_SEED = integer(-(2**63), 2**64 - 1)
_COUNTED_IN_BATCHES = {"num_batches": count, "num_ranks": integer(1), "seed": _SEED}
_DRAWN = {
    "random_at_start": either(
        fields({}), fields({"global": rng_form, "own": _GENERATORS}, others={"first_read": rng_form})
    ),
    "random_now": _GENERATORS,
}
_STATE = {"loader": anything, "draws": optional(rng_form)}

_FEEDS: dict[str, tuple[Mapping[str, Form], Mapping[str, Form]]] = {
    "ordered": (
        {
            "num_samples": count,
            "dataset_size": count,
            "num_ranks": integer(1),
            "batch_size": integer(1),
            "shuffle": flag,
            "seed": _SEED,
            "random_now": _GENERATORS,
        },
        {},
    ),
    "list": (_COUNTED_IN_BATCHES, {}),
    "walked": (_COUNTED_IN_BATCHES, _DRAWN),
    "replayed": (_COUNTED_IN_BATCHES, _DRAWN),
    "stateful": (_COUNTED_IN_BATCHES, _STATE),
}
"""For each kind of feed, the fields of a position and the fields that can differ between ranks."""

_ORDER = {"order": optional(either(tensor(torch.uint8), integer(-(2**63), 2**63 - 1)))}
_SAMPLER = {"sampler": mapping_of(optional(either(flag, number)))}
_COUNTS = ("num_batches", "num_samples")
_PART = {
    "cycle": integer(-1),
    "num_read": count,
    "came_to_end": flag,
    "is_at_end": flag,
    "is_complete": flag,
}


def POSITION_FORM(value: Any, place: str) -> None:  # noqa: N802 - used as a constant
    """Check the schema of a position of any kind.

    Raises:
        FormError: ``value`` does not match the schema.
    """
    of_epoch = {"kind": one_of("combined", *_FEEDS), "epoch": integer(-1), "num_batches": count, "is_exhausted": flag}
    fields(of_epoch, others=anything)(value, place)
    rest = {key: item for key, item in value.items() if key not in of_epoch or key == "num_batches"}
    if value["epoch"] < 0:
        fields({"num_batches": count})(rest, place)
    elif value["kind"] == "combined":
        fields({"mode": one_of(*MODES), "num_batches": count, "parts": list_of(_part)})(rest, place)
    else:
        _check_feed(value["kind"], rest, place, has_begun=True)


def _part(value: Any, place: str) -> None:
    """Check the schema of the position of one loader among several loaders."""
    required: dict[str, Form] = {"name": text, "kind": one_of(*_FEEDS), "position": mapping_of(anything), **_PART}
    by_rank = _by_rank({**_PART, "num_batches": count})
    fields(required, others=by_rank)(value, place)
    if value["position"] or value["cycle"] >= 0:
        _check_feed(value["kind"], value["position"], f"{place}.position", has_begun=value["cycle"] >= 0)


def _check_feed(kind: str, value: dict[str, Any], place: str, *, has_begun: bool) -> None:
    shared, own = _FEEDS[kind]
    required = {key: form for key, form in shared.items() if has_begun or key not in _COUNTS}
    if "by_rank" in value:
        required |= {"divided_by": text, "keeps_order": flag, **_by_rank(own)}
    else:
        required |= own
    fields(required, others={"num_batches": count, **_ORDER, **_SAMPLER})(value, place)


def check_generators(value: Any, place: str) -> None:
    """Check all generator states in a loaded position, including nested states.

    Raises:
        FormError: a CPU generator rejects its state.
    """
    if isinstance(value, dict) and value.keys() >= {"python", "numpy", "torch"}:
        check_rng_state(value, place)
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key != "loader":  # the value of this key is the state_dict of the user's loader
                check_generators(item, item_of(place, key))
    elif isinstance(value, Tensor):
        check_generator_state(value, place)


def _by_rank(own: Mapping[str, Form]) -> dict[str, Form]:
    def form(value: Any, place: str) -> None:
        list_of(fields(own))(value, place)
        if not value:
            raise FormError(place, value, "a list of at least one position")

    return {"by_rank": form}
