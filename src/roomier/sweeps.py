"""Sweeps with Optuna: a study whose trials train on several ranks.

[Note: rank 0 asks]
The ranks that roomier starts run the script from the beginning, so each rank would create its own study and receive
different suggestions. Only rank 0 therefore has a study: each call of a trial is made on rank 0, and the other ranks
make the same calls and receive the results. The results are sent over the store of the process group, because after an
error on one rank, another rank may still wait in a collective. Before the first fit of the script, no other ranks
exist. Until then, rank 0 writes the results of finished studies and of the current trial to a file, which the ranks
that it starts read.

[Note: a trial that fails]
If the objective raises the same error on all ranks, the trial fails as in a single process. If ranks end a trial in
different ways, or fail after a different number of operations, the collectives of the next trial could receive messages
of the failed trial, so the sweep ends with an error.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from roomier.core import torch_private
from roomier.core.device.resolve import resolve_device
from roomier.core.errors import RoomierError, TrainingError
from roomier.core.ranks import sendable
from roomier.core.replacing import replacing_path
from roomier.core.untrusted import read_regular
from roomier.core.wire import decode, encode
from roomier.launch import join, present_launch
from roomier.launch.environment import STARTED_BY_ROOMIER

__all__ = ["OptunaStudy"]

SWEEP = "ROOMIER_SWEEP"
"""Name of an environment variable that roomier sets for the ranks that it starts: the file that contains the results of
finished studies and of the current trial of an OptunaStudy."""

_RESTART = "Start the script again. With a storage and load_if_exists=True, the study continues"
_LIMIT = timedelta(seconds=20)  # for another rank that fails in the same way
_LIMIT_OF_SUCCESS = timedelta(minutes=30)  # for work of another rank after the fit


class OptunaStudy:
    """Study of Optuna whose trials can train on several ranks, with the methods and attributes of ``optuna.Study``.

    Rank 0 makes the suggestions, the reports and the decisions to prune a trial; the other ranks receive them. These
    ranks do not access the storage, and their study contains the trials after ``optimize`` returns.

    Args:
        options: arguments of ``optuna.create_study``: ``direction``, ``storage``, ``study_name``, ``sampler``,
            ``pruner``, ``load_if_exists``, ...

    Attributes:
        study: the study of Optuna.

    Raises:
        RoomierError: Optuna is not installed, or the script was started on several nodes without a launcher.

    Example:
        >>> study = OptunaStudy(direction="minimize")
        >>> study.optimize(objective, n_trials=20)
        >>> study.best_params
    """

    def __init__(self, **options: Any) -> None:
        optuna = _imported()
        self._rank_zero = _rank_zero()
        self._directions = {name: value for name, value in options.items() if name.startswith("direction")}
        self.study = optuna.create_study(**(options if self._rank_zero.is_here else self._directions))

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0, which should print the results."""
        return self._rank_zero.is_here

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.study, name)

    def optimize(self, objective: Callable[[Any], Any], n_trials: int | None = None, **options: Any) -> None:
        """Run trials of ``objective`` on all ranks.

        Args:
            objective: function that receives a trial and returns the value to optimize. Every rank calls it with the
                same suggestions. The study receives the value of rank 0.
            n_trials: number of trials.
            options: other arguments of ``optuna.Study.optimize``, such as ``timeout``, ``catch`` or ``callbacks``.

        Raises:
            RoomierError: ``n_jobs`` is not 1, or ``objective`` makes different calls on different ranks.
            TrainingError: the ranks ended a trial in different ways.
        """
        if options.get("n_jobs", 1) != 1:
            action = "Start the script several times, with the same storage and load_if_exists=True"
            raise RoomierError("n_jobs", options["n_jobs"], "the ranks of a process train one trial at a time", action)
        if self._rank_zero.is_here:
            self._lead(objective, {"n_trials": n_trials, **options})
        else:
            self._follow(objective)

    def _lead(self, objective: Callable[[Any], Any], options: dict[str, Any]) -> None:
        rank_zero = self._rank_zero

        def run(trial: Any) -> Any:
            serial = next(rank_zero.serials)
            rank_zero.begin("trial", serial)
            shared = _SharedTrial(trial, rank_zero)
            with rank_zero.same_outcome(serial, self.study.stop):
                return objective(shared)

        try:
            self.study.optimize(run, **options)
        except Exception:
            if rank_zero.failure is None:  # otherwise, the other ranks raise the failure as well
                rank_zero.begin("error", None)
            raise
        if rank_zero.failure is not None:  # optuna's argument catch can suppress any error
            raise rank_zero.failure
        rank_zero.begin("end", [_record_of(trial) for trial in self.study.get_trials(deepcopy=False)])

    def _follow(self, objective: Callable[[Any], Any]) -> None:
        error = None
        while True:
            event, value = self._rank_zero.begin()
            if event == "error":
                assert error is not None
                raise error
            if event == "end":
                break
            error = None
            shared = _SharedTrial(None, self._rank_zero)
            try:
                with self._rank_zero.same_outcome(value):
                    objective(shared)
            except Exception as raised:
                if raised is self._rank_zero.failure:
                    raise
                error = raised
        optuna = _imported()
        self.study = optuna.create_study(**self._directions)
        self.study.add_trials([_trial_of(optuna, record) for record in value])


class _RankZero:
    """Connection to rank 0, which makes the calls of the study.

    Attributes:
        is_here: True on rank 0.
        serials: numbers of the trials of this process.
        failure: error after which the ranks cannot run further trials.
    """

    def __init__(self) -> None:
        launch = present_launch()
        self.is_here = launch is None or launch.world.rank == 0
        self.serials = count()
        self._asked = count()
        self.failure: TrainingError | None = None
        self._answers: list[tuple[str, Any, Exception | None]] = []  # until the ranks are connected
        self._num_finished = 0  # the number of these answers that belong to finished studies
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if launch is None and os.environ.get("NODE_RANK", "0") != "0":
            action = "Start the script on each node with srun or torchrun"
            raise RoomierError("NODE_RANK", os.environ["NODE_RANK"], "OptunaStudy requires a launcher", action)
        if launch is not None and STARTED_BY_ROOMIER not in os.environ:
            join(launch.world, resolve_device("auto").type)
        elif not self.is_here and SWEEP in os.environ:
            self._answers = decode(read_regular(os.environ[SWEEP]))

    def begin(self, event: str = "", value: Any = None) -> Any:
        """Return the event that rank 0 passes (``"trial"``, ``"error"`` or ``"end"``), and its value."""
        if not dist.is_initialized() and self.is_here:
            del self._answers[self._num_finished :]
        outcome = self.ask("next trial", lambda: (event, value))
        self._num_finished += event == "end" and not dist.is_initialized()
        return outcome

    def ask(self, call: str, function: Callable[[], Any]) -> Any:
        """Return the result of ``function`` on rank 0.

        Args:
            call: text that identifies the call, which must be equal on all ranks.
        """
        error = None
        if self.is_here:
            try:
                result = function()
            except Exception as raised:
                result, error = None, raised
            self._send((call, result, error and sendable(error)))
            if error is not None:
                raise error
            return result
        asked, result, error = self._answers.pop(0) if self._answers else self._receive(call)
        if asked != call:
            problem = f"rank 0 called {asked} instead, but all ranks must make the same calls of the trial"
            action = "Make these calls outside conditions on the rank, and seed random decisions in the objective"
            raise RoomierError("OptunaStudy(objective)", call, problem, action)
        if error is not None:
            raise error
        return result

    def _send(self, answer: tuple[str, Any, Exception | None]) -> None:
        if dist.is_initialized():
            torch_private.default_store().set(f"roomier/sweep/{next(self._asked)}", encode(answer))
            return
        self._answers.append(answer)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="roomier-sweep-")
            os.environ[SWEEP] = str(Path(self._folder.name, "answers"))
        with replacing_path(Path(os.environ[SWEEP])) as aside:
            aside.write_bytes(encode(self._answers))

    def _receive(self, call: str) -> tuple[str, Any, Exception | None]:
        if not dist.is_initialized():
            return "nothing", None, None
        key, store = f"roomier/sweep/{next(self._asked)}", torch_private.default_store()
        has_failed = sys.exc_info()[1] is not None  # the objective handles an error, for example in a finally clause
        try:
            store.wait([key], _LIMIT if has_failed else _LIMIT_OF_SUCCESS)
        except dist.DistError as error:
            problem = "rank 0 did not make this call of the trial, so the ranks cannot run another trial"
            self.failure = TrainingError("OptunaStudy(objective)", call, problem, _RESTART)
            raise self.failure from error
        answer: tuple[str, Any, Exception | None] = decode(store.get(key))
        return answer

    @contextmanager
    def same_outcome(self, serial: int, stop: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Run a trial inside the context, and check that the ranks can run another trial.

        Args:
            serial: number of the trial.
            stop: function that ends the study if the check fails.

        Raises:
            TrainingError: the ranks ended the trial in different ways.
        """
        error, outcome, limit = None, "success", _LIMIT_OF_SUCCESS
        try:
            yield
        except Exception as raised:
            if raised is self.failure:
                raise
            error, outcome = raised, type(raised).__name__
            if not isinstance(raised, _imported().TrialPruned):
                limit = _LIMIT
                if dist.is_initialized():
                    outcome += f" after {sum(torch_private.num_calls_by_group().values())} operations"
        if dist.is_initialized():
            outcomes = self._outcomes(serial, outcome, limit)
            if len(set(outcomes)) > 1:
                problem = "the ranks ended the trial in different ways, so they cannot run another trial"
                self.failure = TrainingError("OptunaStudy(objective)", outcomes, problem, _RESTART)
                stop()
                raise self.failure from error
        if error is not None:
            raise error

    @staticmethod
    def _outcomes(serial: int, outcome: str, limit: timedelta) -> list[str]:
        """Return the outcome of each rank."""
        store = torch_private.default_store()
        keys = [f"roomier/trial/{serial}/{rank}" for rank in range(dist.get_world_size())]
        store.set(keys[dist.get_rank()], outcome)
        with suppress(dist.DistError):  # a timeout
            store.wait(keys, limit)
        return [store.get(key).decode() if store.check([key]) else f"no outcome after {limit}" for key in keys]


class _SharedTrial:
    """Trial of Optuna on all ranks: rank 0 makes each call, and all ranks receive the result.

    Args:
        trial: the trial of Optuna; None on other ranks than 0.

    Attributes:
        number: number of the trial.
    """

    def __init__(self, trial: Any, rank_zero: _RankZero) -> None:
        self._trial = trial
        self._rank_zero = rank_zero
        self.number = rank_zero.ask("number", lambda: trial.number)  # an objective may print it after an error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not callable(getattr(_imported().Trial, name)):
            return self._rank_zero.ask(name, lambda: getattr(self._trial, name))

        def call(*arguments: Any, **keywords: Any) -> Any:
            shown = f"{name}({arguments[0]!r})" if name.startswith("suggest_") and arguments else name
            return self._rank_zero.ask(shown, lambda: getattr(self._trial, name)(*arguments, **keywords))

        return call


@cache
def _rank_zero() -> _RankZero:
    return _RankZero()


def _imported() -> Any:
    try:
        import optuna  # late import: an optional package
    except ImportError as error:
        problem = f"requires a package that is not installed ({error})"
        raise RoomierError("sweeps", "OptunaStudy", problem, "Run: pip install 'roomier[sweeps]'") from error
    return optuna


def _record_of(trial: Any) -> dict[str, Any]:
    from optuna.distributions import distribution_to_json  # late import: an optional package

    return {
        "state": trial.state.name,
        "values": trial.values,
        "params": trial.params,
        "distributions": {name: distribution_to_json(each) for name, each in trial.distributions.items()},
        "intermediate_values": trial.intermediate_values,
        "user_attrs": trial.user_attrs,
        "system_attrs": trial.system_attrs,
    }


def _trial_of(optuna: Any, record: Mapping[str, Any]) -> Any:
    to_distribution = optuna.distributions.json_to_distribution
    distributions = {name: to_distribution(each) for name, each in record["distributions"].items()}
    changes = {"state": optuna.trial.TrialState[record["state"]], "distributions": distributions}
    return optuna.trial.create_trial(**{**record, **changes})
