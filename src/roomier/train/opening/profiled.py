"""Contexts of a call: process-wide settings, and torch's profiler or a profiler of named actions.

A profiler of actions has a method ``profile(name)`` that returns a context manager, like the profilers of Lightning.
The methods that the loops call are replaced on their objects, so a run without a profiler has no additional code.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roomier.api.callback import Callback
from roomier.api.hooks import CALLBACK_HOOKS, SHARED_HOOKS
from roomier.core.log import notice
from roomier.core.replacing import replacing
from roomier.plan import Plan
from roomier.run.options import LoopOptions
from roomier.run.run import Run
from roomier.techniques.precision.policy import matmul_precision

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_OF_ENGINE = {"forward_backward": "run_training_batch", "clip": "clip_gradients", "step": "optimizer_step"}


@contextmanager
def profiled(run: Run) -> Iterator[None]:
    """Run the profiler of the Trainer inside the context.

    ``"torch"`` and ``"pytorch"`` write a trace of a few early steps to ``<run>/profile``. ``"pytorch"`` also prints the
    operations with the longest time. A ``torch.profiler.profile`` is used unchanged.
    """
    profiler, folder = run.options.profiler, run.folder
    if profiler is None:
        yield
    elif profiler in ("torch", "pytorch") or isinstance(profiler, torch.profiler.profile):
        with _torch_profiler(profiler, folder) as run.profiler:
            yield
    else:
        with _actions(run, profiler):
            yield


def _torch_profiler(profiler: Any, folder: Path | None) -> torch.profiler.profile:
    if isinstance(profiler, torch.profiler.profile):
        return profiler
    if folder is None:
        notice(f"profiler={profiler!r}: this run has no folder (logger=False or fast_dev_run), so no trace is written")
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=partial(_end_trace, folder, profiler == "pytorch"),
        profile_memory=True,
    )


def _end_trace(folder: Path | None, prints: bool, profile: torch.profiler.profile) -> None:
    if prints:
        notice("operations of 3 steps:\n" + profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
    if folder is None:
        return
    (folder / "profile").mkdir(exist_ok=True)
    path = folder / "profile" / f"trace-step={profile.step_num}.json"
    profile.export_chrome_trace(str(path))
    notice(f"profile written to {path}")


@contextmanager
def _actions(run: Run, profiler: Any) -> Iterator[None]:
    """Measure the actions of ``run``, and report them at the end. ``setup``, ``describe`` and ``teardown`` are called
    as in Lightning."""
    request = run.settled.request
    world, folder = request.world, run.folder
    if hasattr(profiler, "start_run"):
        profiler.start_run()
    if hasattr(profiler, "setup"):
        log_dir = None if folder is None else str(folder)
        profiler.setup(stage=request.stage, local_rank=world.local_rank, log_dir=log_dir)
    undo = [_replace(owner, name, _timed(profiler, action, owner, name)) for owner, name, action in _places(run)]
    _time_hooks(run, profiler)
    try:
        yield
    finally:
        for each in undo:
            each()
        if hasattr(profiler, "describe"):
            profiler.describe()
        else:
            _report(profiler, folder, is_first=run.ranks.is_zero)
        if hasattr(profiler, "teardown"):
            profiler.teardown(stage=request.stage)


def _report(profiler: Any, folder: Path | None, *, is_first: bool) -> None:
    if not is_first:
        return
    name = type(profiler).__name__.removesuffix("Profiler").lower()
    text = profiler.summary()
    if folder is not None:
        (folder / "profile").mkdir(exist_ok=True)
        with replacing(folder / "profile" / f"{name}.txt") as file:
            file.write(text + "\n")
    print(f"roomier: profiler {name!r}\n{text}", file=sys.stderr, flush=True)


def _places(run: Run) -> Iterator[tuple[Any, str, str]]:
    """Yield the methods to measure: object, name of the method, and name of the action."""
    for name, action in _OF_ENGINE.items():
        yield run.engine, name, action
    for name in _STEPS:
        if callable(getattr(run.module, name, None)):
            yield run.module, name, name
    if run.settled.request.is_fit:
        yield run.source, "start", "train_dataloader_next"


def _timed(profiler: Any, action: str, owner: Any, name: str) -> Callable[..., Any]:
    method = getattr(owner, name)

    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if action == "train_dataloader_next":
            batches = method(*args, **kwargs)
            is_timed = getattr(batches, "gi_code", None) is _timed_iterator.__code__  # created before the first hooks
            return batches if is_timed else _timed_iterator(profiler, action, batches)
        with profiler.profile(action):
            return method(*args, **kwargs)

    return timed


def _timed_iterator(profiler: Any, action: str, batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        with profiler.profile(action):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Set ``function`` as an attribute of the object ``owner``, and return a function that restores the object."""
    before = vars(owner).get(name)
    setattr(owner, name, function)

    def restore() -> None:
        with suppress(AttributeError):
            delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)

    return restore


def _time_hooks(run: Run, profiler: Any) -> None:
    for name in (*SHARED_HOOKS, *CALLBACK_HOOKS):
        setattr(run.hooks, name, tuple(_timed_hook(profiler, hook, name) for hook in getattr(run.hooks, name)))


def _timed_hook(profiler: Any, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    function = hook.func if isinstance(hook, partial) else hook
    owner = getattr(function, "__self__", None)
    kind = "Callback" if isinstance(owner, Callback) else "LightningModule"
    action = f"[{kind}]{type(owner).__name__}.{name}"

    @functools.wraps(function)
    def timed(*args: Any) -> Any:
        with profiler.profile(action):
            return hook(*args)

    return timed


@contextmanager
def process_settings(plan: Plan, options: LoopOptions) -> Iterator[None]:
    """Apply matmul precision, determinism, cuDNN benchmarking and anomaly detection inside the context."""
    with ExitStack() as stack:
        stack.enter_context(matmul_precision(plan.precision.matmul))
        if options.deterministic is not None:
            is_on, warns = (
                torch.are_deterministic_algorithms_enabled,
                torch.is_deterministic_algorithms_warn_only_enabled,
            )
            stack.callback(torch.use_deterministic_algorithms, is_on(), warn_only=warns())
            torch.use_deterministic_algorithms(bool(options.deterministic), warn_only=options.deterministic == "warn")
        if options.benchmark is not None:
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = options.benchmark
        if options.detect_anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        yield
