"""Calls of the Trainer in a notebook: the ranks do the work, and the notebook receives the result.

The notebook sends the Trainer, the model and the data to the ranks, whose Trainers run the same method as in a script.
Rank 0 then sends the values that changed, and the weights one tensor at a time, so that neither side holds a second
copy of the model.
"""

from __future__ import annotations

import hashlib
import io
import linecache
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os.path import exists
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from roomier.api.adapt import seen_by_user
from roomier.api.module import Module, network_of
from roomier.checkpoint.module import add_adapters
from roomier.core.device.rng import rng_state, set_rng_state
from roomier.core.errors import RoomierError, TrainingError
from roomier.core.log import notice
from roomier.core.sharded import is_sharded, local_part, with_local_part
from roomier.launch import place, present_launch
from roomier.launch.notebook import Send, call_on_ranks
from roomier.launch.pickled import ByReference, by_reference, read
from roomier.launch.start import NUM_THREADS_AT_IMPORT
from roomier.run.progress import Progress
from roomier.run.settled import Fitted
from roomier.trainer.attributes import TrainerAttributes

_SIGNALS = {128 + number for number in (signal.SIGINT, signal.SIGTERM)}
_RETURNED = ["choice", "log_dir", "micro_batch", "num_batches_of", "num_micro_batches", "options", "plan", "read_path"]
_RETURNED += ["requested_plan", "should_stop", "state", "was_interrupted"]


def call_in_notebook(trainer: TrainerAttributes, method: str, arguments: dict[str, Any]) -> Any:
    """Call a method of ``trainer`` on new ranks, and store the results in the Trainer and the model of this process.

    Raises:
        KeyboardInterrupt: an interrupt ended the run. The results until the interrupt are stored.
        RoomierError: an object cannot be sent to the ranks, or the call is not supported.
        TrainingError: a rank failed.
    """
    if not trainer.world.is_one_node:
        problem = "a notebook can start ranks only on its machine"
        action = "Move the run to a script, and start it with `torchrun` or `srun`"
        raise RoomierError("num_nodes", trainer.world.size // trainer.world.local_size, problem, action)
    model = arguments["model"]
    module = trainer.module_of(model) if model is not None else trainer.last_module
    call = NotebookCall(
        trainer,
        method,
        arguments,
        trainer.last_module,
        trainer.datamodule,
        trainer.known_fit,
        _settings(trainer.world.size),
    )
    named = {"callbacks": trainer.callbacks, "trainer": trainer, **arguments}
    received = _Received(trainer, trainer.last_module if model is None else model, module, arguments["datamodule"])
    call_on_ranks(trainer.world.size, call, named, received.receive)
    if received.number:
        name = signal.Signals(received.number).name
        raise KeyboardInterrupt(f"{name} ended {method} at step {trainer.global_step}")
    return received.value


_rank_states: list[dict[str, Any]] = []  # random states of all ranks after the last call


def _states_of_ranks(num_ranks: int) -> list[dict[str, Any]]:
    """Return the random states with which the ranks start: the states after the last call, as in a script, unless code
    of the notebook has changed the state of this process since then."""
    own = rng_state(only_host=True)
    is_unchanged = len(_rank_states) == num_ranks and by_reference(_rank_states[0]) == by_reference(own)
    return _rank_states if is_unchanged else [own] * num_ranks


def _settings(num_ranks: int) -> dict[str, Any]:
    num_threads = torch.get_num_threads()
    return {
        "dtype": torch.get_default_dtype(),
        "seed": torch.initial_seed(),
        "rng": _states_of_ranks(num_ranks),
        "num_threads": None if num_threads == NUM_THREADS_AT_IMPORT else num_threads,
        "sources": {name: entry[2] for name, entry in linecache.cache.items() if not exists(name) and len(entry) > 2},
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _use(settings: Mapping[str, Any], rank: int) -> None:
    for name, lines in settings["sources"].items():  # the code of cells, for tracebacks
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    torch.set_default_dtype(settings["dtype"])
    torch.manual_seed(settings["seed"])  # also seeds the devices, whose states the notebook does not read
    set_rng_state(settings["rng"][rank])
    if settings["num_threads"] is not None:
        torch.set_num_threads(settings["num_threads"])
    if settings["is_deterministic"]:
        torch.use_deterministic_algorithms(True)


@dataclass
class NotebookCall:
    """One call of a method, which each rank runs.

    Attributes:
        trainer: the Trainer of the notebook.
        method: name of the method.
        arguments: arguments of the method.
        module, datamodule: the module and the DataModule of the previous call.
        fitted: the results of the last fit.
        settings: settings and random states of the notebook's process.
    """

    trainer: TrainerAttributes
    method: str
    arguments: dict[str, Any]
    module: Module | None
    datamodule: Any
    fitted: Fitted | None
    settings: dict[str, Any]

    def __call__(self, send: Send) -> None:
        """Run the method, and send its results from rank 0."""
        trainer, number = self.trainer, 0
        trainer.world = place(trainer.world.local_size, 1, present_launch())
        trainer.is_in_notebook = False
        trainer.continue_from(self.module, self.datamodule, self.fitted)
        _use(self.settings, trainer.world.rank)
        model = self.arguments["model"]
        objects = [_seen(self.module if model is None else model), *trainer.callbacks]
        before = [dict(_digests(each)) for each in objects]
        value = None
        try:
            value = getattr(trainer, self.method)(**self.arguments)
        except SystemExit as ended:
            if ended.code not in _SIGNALS:
                raise
            number = int(ended.code) - 128
        states = trainer.ranks.gather(rng_state(only_host=True))
        if trainer.is_global_zero:
            send({**_result(trainer, value, number), "rng": states})
            send([_changed(each, known) for each, known in zip(objects, before, strict=True)])
        if trainer.run is not None and (self.method == "fit" or trainer.read_path is not None):
            _send_weights(trainer, send)
        if trainer.is_global_zero:
            send(None)


def _result(trainer: TrainerAttributes, value: Any, number: int) -> dict[str, Any]:
    metrics = {name: dict(getattr(trainer, f"{name}_metrics")) for name in trainer.given_metrics}
    fitted = trainer.fitted
    return {
        "value": value,
        "number": number,
        "progress": trainer.run.progress.state() if trainer.run else None,
        "folder": None if fitted is None else fitted.folder,
        "fitted": None if fitted is None else fitted.progress.state(),
        "metrics": {name: {key: _on_host(each) for key, each in group.items()} for name, group in metrics.items()},
        "attributes": {name: getattr(trainer, name) for name in _RETURNED},
    }


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


@torch.no_grad()
def _send_weights(trainer: TrainerAttributes, send: Send) -> None:
    """Send the unsharded weights, one at a time. Every rank must call this function."""
    assert trainer.run is not None
    engine = trainer.run.engine
    for name, value in engine.weights().items():
        whole: Any = value
        if isinstance(value, Tensor) and is_sharded(value):
            # the shard of an offloaded parameter is in host memory, where its collectives do not work
            whole = with_local_part(value, local_part(value).to(engine.device))
            whole = whole.full_tensor()
        if trainer.is_global_zero:
            send((name, _on_host(whole).contiguous() if isinstance(whole, Tensor) else whole))


class _Received:
    """The results of a call, which :meth:`receive` stores in the objects of the notebook.

    Attributes:
        value: the return value of the method.
        number: the signal that ended the run, or 0.
    """

    def __init__(self, trainer: TrainerAttributes, model: Any, module: Module | None, datamodule: Any) -> None:
        self.value: Any = None
        self.number = 0
        self._trainer, self._module, self._datamodule = trainer, module, datamodule
        self._objects = [_seen(model), *trainer.callbacks]

    def receive(self, next_value: Callable[[], Any]) -> None:
        """Store the results. ``next_value`` returns the next value that rank 0 sends."""
        result, changes = next_value(), next_value()
        module = self._module
        assert module is not None
        for target, changed in zip(self._objects, changes, strict=True):
            for name, content in changed.items():
                _put(target, name, read(io.BytesIO(content)))
        weights: _Weights | None = None
        while (pair := next_value()) is not None:
            weights = weights or _Weights(module, result["attributes"]["plan"])
            weights.put(*pair)
        if weights is not None:
            weights.end()
        self.value, self.number = result["value"], result["number"]
        self._store(result, module)

    def _store(self, result: Mapping[str, Any], module: Module) -> None:
        trainer, fitted, returned = self._trainer, self._trainer.known_fit, result["attributes"]
        if result["fitted"] is not None:
            fitted = Fitted(module, Progress(**result["fitted"]), result["folder"], returned["choice"])
        trainer.forget_runs(trainer.copied_progress if result["progress"] is None else Progress(**result["progress"]))
        trainer.continue_from(module, self._datamodule, fitted)
        vars(trainer).update(returned)
        trainer.given_metrics = result["metrics"]
        for part in module.modules():
            if isinstance(part, Module):
                part.__dict__["_trainer"] = trainer
        _rank_states[:] = result["rng"]
        set_rng_state(_rank_states[0])


class _Weights:
    """The weights of the notebook's model, which receive the values of the ranks."""

    def __init__(self, module: Module, plan: Any) -> None:
        self._module, self._plan = module, plan
        self._network = network_of(module)
        self._others: dict[str, Any] = {}
        self._is_complete = False
        self._tensors = self._network.state_dict(keep_vars=True)

    def put(self, name: str, value: Any) -> None:
        """Store ``value`` under ``name``."""
        if name not in self._tensors and not self._is_complete:  # a hook or LoRA added layers on the ranks
            self._is_complete = True
            if self._plan.adapter.lora_rank is None:
                self._module.configure_model()
            else:
                add_adapters(self._module, self._plan.to_dict())
            self._tensors = self._network.state_dict(keep_vars=True)
        target = self._tensors.get(name)
        if not isinstance(value, Tensor):
            self._others[name] = value
        elif target is None:
            action = "Create all layers in __init__ or in configure_model, or read the weights from a checkpoint"
            raise TrainingError("model", name, "exists only on the ranks, so the notebook cannot store it", action)
        elif target.shape == value.shape and target.dtype == value.dtype and not target.is_meta:
            target.data.copy_(value)
        else:
            self._replace(name, target, value)

    def _replace(self, name: str, target: Any, value: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        part = self._network.get_submodule(owner)
        is_parameter = isinstance(target, nn.Parameter)
        setattr(part, leaf, nn.Parameter(value, requires_grad=target.requires_grad) if is_parameter else value)

    def end(self) -> None:
        """Store the values that are not tensors."""
        if self._others:
            self._network.load_state_dict(self._others, strict=False)


def _seen(model: Any) -> Any:
    """Return the object of the user whose attributes the notebook receives."""
    return seen_by_user(model) if isinstance(model, Module) else model


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute. A list, dict or set is changed in place, because the notebook may have other names for it."""
    own = vars(owner).get(name)
    if type(own) is type(value) is list:
        own[:] = value
    elif type(own) is type(value) and isinstance(own, dict | set):
        own.clear()
        own.update(value)
    else:
        vars(owner)[name] = value


def _digests(owner: Any) -> Iterator[tuple[str, bytes | None]]:
    """Yield the name and a digest of each attribute; None if the value cannot be pickled."""
    for name, value in _attributes(owner):
        found = hashlib.blake2b()
        try:
            ByReference(SimpleNamespace(write=found.update)).dump(value)
        except Exception:  # __reduce__ of any class can raise any error
            yield name, None
        else:
            yield name, found.digest()


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    is_module = isinstance(owner, nn.Module)
    for name, value in list(vars(owner).items()):
        is_internal = is_module and (name.startswith("_") or name == "training")
        if not is_internal and not isinstance(value, nn.Module | TrainerAttributes) and not callable(value):
            yield name, value


def _changed(owner: Any, before: Mapping[str, bytes | None]) -> dict[str, bytes]:
    """Return the pickles of the attributes that changed. A notice names the attributes that cannot be pickled."""
    after, values, changed = dict(_digests(owner)), dict(_attributes(owner)), {}
    for name, digest in after.items():
        if digest is None and before.get(name) is not None:
            notice(f"{type(owner).__name__}.{name} cannot be pickled, so the notebook keeps its previous value")
        elif digest is not None and digest != before.get(name):
            changed[name] = by_reference(values[name]) or b""
    return changed
