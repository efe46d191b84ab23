"""Position of the training thread. The heartbeat of a rank reads the position from another thread.

The position is derived from the stack and from existing counters of the run, so tracking adds no work to a step.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

from roomier.api.hooks import CALLBACK_HOOKS, SHARED_HOOKS
from roomier.api.trainer_view import TrainerView
from roomier.core.ranks import Ranks
from roomier.launch.records import Activity, Position
from roomier.run.run import Run
from roomier.run.settled import Request

_HOOKS = frozenset((*SHARED_HOOKS, *CALLBACK_HOOKS))
_DEBUGGERS = ("bdb", "pdb", "code", "IPython.core.debugger", "IPython.terminal.embed")
_DEBUG_SERVERS = ("pydevd", "debugpy")  # debuggers may stop all threads, including the heartbeat thread
_LONG = {
    "torch._dynamo.convert_frame": "compiling",
    "torch._inductor.compile_fx": "compiling",
    "triton.compiler": "compiling",
    "triton.runtime.autotuner": "compiling",
    "torch.profiler": "profiling",
    "roomier.checkpoint": "checkpoint",
    "roomier.train.saving": "checkpoint",
    "roomier.loggers": "logging",
    "roomier.trainer.tuner": "tuning",
}
_DATA = ("roomier.data", "torch.utils.data")
_FIT = "roomier.train.fit"


class TrainingThread:
    """The calling thread, which runs ``trainer``. Other threads can call the methods of this class.

    Args:
        trainer: the Trainer that runs in this thread.
    """

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer
        self._ident = threading.get_ident()

    def position(self) -> Position:
        """Return the position of the thread."""
        run: Run | None = self._trainer.run
        if run is None:
            return Position(Activity.LONG, "setup")
        is_evaluation = run.results.stage not in (None, "train")
        batch = run.now.batch_number if is_evaluation else run.now.batch_idx
        (activity, phase), mesh = self._activity(run), run.ranks.mesh
        stage = f" on stage {mesh.stage_index + 1} of {mesh.stage}" if mesh.stage > 1 else ""
        return Position(activity, phase + stage, run.progress.global_step, max(0, batch))

    def stack(self) -> str:
        """Return the Python stack of the thread, and the stacks of autograd threads."""
        return "in another thread:\n".join("".join(traceback.format_stack(frame)) for frame in self._frames())

    def _activity(self, run: Run) -> tuple[Activity, str]:
        if any(name in sys.modules for name in _DEBUG_SERVERS):
            return Activity.DEBUGGED, "debugger"
        is_in_fit = loads_data = False
        for module, function in self._calls():
            if _contains(_DEBUGGERS, module):
                return Activity.DEBUGGED, "debugger"
            if function in _HOOKS:
                return Activity.LONG, function
            if (found := _contains(_LONG, module)) is not None:
                return Activity.LONG, _LONG[found]
            is_in_fit = is_in_fit or module == _FIT
            loads_data = loads_data or _contains(_DATA, module) is not None
        if run.results.stage not in (None, "train"):
            return Activity.LONG, str(run.results.stage)
        if not is_in_fit:
            return Activity.LONG, "setup"
        if run.progress.num_batches == run.now.num_batches_before:
            return Activity.LONG, "first step"
        if loads_data:
            return Activity.LONG if run.progress.batch_idx == 0 else Activity.STEP, "loading data"
        return Activity.STEP, "training step"

    def _calls(self) -> Iterator[tuple[str, str]]:
        """Yield the module and the name of each running function, starting with the innermost function."""
        for innermost in self._frames():
            frame: FrameType | None = innermost
            while frame is not None:
                yield str(frame.f_globals.get("__name__")), frame.f_code.co_name
                frame = frame.f_back

    def _frames(self) -> list[FrameType]:
        """Return the innermost frame of the thread and of each thread that Python did not start, such as autograd
        threads."""
        started = {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
        frames = sys._current_frames()
        others = [frame for ident, frame in frames.items() if ident not in started and ident != self._ident]
        found = [frames[self._ident], *others] if self._ident in frames else others
        # The dict contains the frame of this function, whose variables include the dict. This cycle would keep the
        # local variables of all threads, such as activations, alive until the next garbage collection.
        frames.clear()
        return found


def watch_for_hangs(request: Request, ranks: Ranks) -> AbstractContextManager[None]:
    """Return a context that monitors the ranks of a call and applies the time limit ``hang_timeout``."""
    limit_s = request.options.hang_timeout_s
    if ranks.is_alone or limit_s is None:
        return nullcontext()
    from roomier.launch.heartbeat import WatchedRun, watched  # late import: a single process does not need it
    from roomier.launch.judge import Limits  # late import: a single process does not need it

    thread = TrainingThread(request.trainer)
    return watched(WatchedRun(Limits(limit_s), thread.position, thread.stack))


def _contains(names: Iterable[str], module: str) -> str | None:
    """Return the name in ``names`` that equals ``module`` or is the name of a parent package; otherwise return None."""
    return next((name for name in names if module == name or module.startswith(f"{name}.")), None)
