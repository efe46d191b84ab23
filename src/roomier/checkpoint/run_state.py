"""Schemas of the entries that a Trainer stores in a checkpoint.

Callers of :func:`roomier.checkpoint.save` can use any names, so only the functions that read the state of a run check
these schemas. Values that depend on the objects of the current run (its optimizers, schedulers and callbacks) are
checked by the code that loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roomier.checkpoint.commit import at_home
from roomier.checkpoint.lightning import FORMS_OF_SCALER
from roomier.checkpoint.record import RECORD_NAME, damage, malformed
from roomier.checkpoint.verbs import peek
from roomier.core.device.rng import rng_form
from roomier.core.errors import PlanError, shorten
from roomier.core.forms import (
    Form,
    FormError,
    anything,
    count,
    either,
    fields,
    flag,
    items,
    list_of,
    mapping_of,
    number,
    optional,
    tensor,
    text,
)
from roomier.data.position import POSITION_FORM
from roomier.plan import Plan
from roomier.plan.rules import each_error

_STATE = mapping_of(anything)
_SCALAR = either(tensor(shape=(1,)), number, tensor(shape=()))


def _rank(value: Any, place: str) -> None:
    text(value, place)
    if not (value.isascii() and value.isdecimal() and str(int(value)) == value):
        raise FormError(place, value, "the number of a rank")


def _by_rank(form: Form) -> Form:
    def check(value: Any, place: str) -> None:
        mapping_of(form, keys=_rank)(value, place)
        fields({"0": form}, others=form)(value, place)

    return check


def _optimizer(value: Any, place: str) -> None:
    groups = list_of(fields({"params": list_of(text)}, others=anything))
    fields({"type": text, "state": mapping_of(_STATE), "param_groups": groups})(value, place)
    known = {name for group in value["param_groups"] for name in group["params"]}
    for name in value["state"]:
        if name not in known:
            raise FormError(f"a key of {place}.state", name, "the name of a parameter of the optimizer")


_SKIPPED = {"num_skipped": tensor(shape=())}
_LOGGED = fields(
    {
        "name": text,
        "is_in_batch": flag,
        "total": optional(_SCALAR),
        "weight": _SCALAR,
        "value": optional(_SCALAR),
        "options": items(flag, flag, flag, flag, text),
        "metric": optional(text),
    },
    others={"is_double": flag, "is_unseen": flag},
)
_METRIC = fields({"state": mapping_of(either(list_of(tensor()), tensor())), "num_updates": count})

FORMS: Mapping[str, Form] = {
    "module": _STATE,
    "optimizers": list_of(_optimizer),
    "scaler": optional(either(fields(_SKIPPED), fields({**FORMS_OF_SCALER, **_SKIPPED}))),
    "schedulers": list_of(fields({"type": text, "state": _STATE})),
    "stale_norm": optional(tensor(shape=())),
    "progress": fields(
        {
            "global_step": count,
            "epoch": count,
            "batch_idx": count,
            "num_batches": count,
            "is_validation_due": flag,
            "is_epoch_end_due": flag,
        }
    ),
    "seeding": fields({"seed": count}),
    "plan": mapping_of(_STATE),
    "pretrained": fields({"prefix": text, "config": _STATE}, others=anything),
    "hyperparameters": _STATE,
    "hyperparameters_argument": text,
    "random": _by_rank(rng_form),
    "data": POSITION_FORM,
    "datamodule": _STATE,
    "datamodule_init": fields({"type": text, "hyperparameters": _STATE}, others={"argument": text}),
    "results": fields(
        {"running": list_of(_LOGGED), "epoch": mapping_of(_SCALAR), "bar": mapping_of(_SCALAR)},
        others={"logged": mapping_of(_SCALAR), "evaluated": mapping_of(count)},
    ),
    "metrics": _by_rank(mapping_of(_METRIC)),
    "callbacks": mapping_of(_STATE),
}


def check_run_state(path: Path, state: Mapping[str, Any]) -> None:
    """Check the entries of ``state`` that a Trainer stores. Entries with other names are ignored.

    Args:
        path: path of the checkpoint, for the error.
        state: state as returned by :func:`roomier.checkpoint.peek`.

    Raises:
        CheckpointError: an entry does not match its schema. The error names the entry.
    """
    with malformed(path):
        for name, form in FORMS.items():
            if name in state:
                form(state[name], name)
    read_plan(path, {"adapter": state.get("plan", {}).get("adapter", {})})  # checks the adapter, which changes layers


def read_plan(path: Path, values: Mapping[str, Any]) -> Plan:
    """Return the Plan with the stored ``values``.

    Raises:
        CheckpointError: a value is malformed.
    """
    try:
        return Plan.from_dict(values)
    except PlanError as error:
        first = each_error(error)[0]
        problem = f"plan.{first.field} is {shorten(first.received)}: {first.problem}"
        raise damage(path, f"{RECORD_NAME} is malformed: {problem}") from error


def peek_run(path: str | Path, *, check_files: bool = False) -> dict[str, Any]:
    """Return the state of a run, as :func:`roomier.checkpoint.peek` does, after :func:`check_run_state`."""
    state = peek(path, check_files=check_files)
    check_run_state(at_home(path), state)
    return state
