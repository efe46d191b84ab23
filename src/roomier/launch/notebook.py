"""Ranks of a notebook or of another interactive session, which has no script that the ranks could run again.

The kernel starts one process, the first rank, in a fresh interpreter. This process starts the other ranks and ends
with them, in the same way as a script (``start.py``, ``watch.py``). Each rank reads its work from a pipe instead of
running a script. The kernel only forwards the output of the ranks, passes on interrupts, and receives the result.

[Note: pipes]
The kernel creates one pipe for each rank and one for the reply. The first rank inherits all pipes and passes each
other rank its own pipe, so the kernel writes each copy of the model directly to the rank that uses it.
"""

from __future__ import annotations

import codecs
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import IO, Any

from roomier.core.errors import RoomierError, TrainingError
from roomier.launch import start
from roomier.launch.pickled import ByReference, check, read, write_by_value
from roomier.launch.watch import ended, watch_parent

_POLL_S = 0.1
_LAST_S = 5.0  # Maximum time between the end of the first rank and the end of the other ranks.
_FAILED, _DONE = "failed", "done"

Send = Callable[[Any], None]
"""Function with which rank 0 sends a value to the notebook."""
Receive = Callable[[Callable[[], Any]], None]
"""Function that receives all values. Its argument is a function that returns the next value."""


def call_on_ranks(num_ranks: int, work: Callable[[Send], None], named: Mapping[str, Any], receive: Receive) -> None:
    """Call ``work`` on new ranks, and return when all of them have ended.

    Args:
        num_ranks: number of ranks.
        work: function that each rank calls with a :data:`Send`. It is pickled.
        named: the parts of ``work`` that come from the user, for errors.
        receive: function that is called in another thread.

    Raises:
        KeyboardInterrupt: an interrupt ended the ranks before rank 0 had sent all values.
        RoomierError: an object cannot be pickled, or a rank raised a RoomierError.
        TrainingError: a rank failed.
    """
    check(named)
    ranks = _StartedRanks(num_ranks)
    with _interrupts(ranks.interrupt):
        ranks.start(work, receive)
        try:
            ranks.forward()
        finally:
            ranks.end()
    ranks.raise_error()


class _StartedRanks:
    """The ranks of one call, as the kernel sees them."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._num_interrupts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._is_complete = False

    def start(self, work: Callable[[Send], None], receive: Receive) -> None:
        """Start the first rank, and send ``work`` to all ranks. See [Note: pipes]."""
        pipes = [os.pipe() for _ in range(self._num_ranks)]
        reply, replied = os.pipe()
        inherited = (replied, *(pipe for pipe, _ in pipes))
        # A terminal is inherited, so that the ranks can draw a progress bar.
        outputs = [None if stream.isatty() else subprocess.PIPE for stream in (sys.stdout, sys.stderr)]
        try:
            self._process = subprocess.Popen(
                start.command_of_work().words,
                env={**os.environ, start.PIPES: start.pipes_text(*inherited)},
                stdin=subprocess.DEVNULL,
                stdout=outputs[0],
                stderr=outputs[1],
                pass_fds=inherited,
                start_new_session=True,  # Ctrl+C reaches only the kernel, which passes it on
            )
        finally:
            for pipe in inherited:
                os.close(pipe)
        for target, arguments in ((self._write, ([pipe for _, pipe in pipes], work)), (self._read, (reply, receive))):
            self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
            self._threads[-1].start()

    def interrupt(self) -> None:
        """Pass an interrupt on. As in a script, the second interrupt ends the ranks at once. The third kills them."""
        self._num_interrupts += 1
        if self._process is not None and self._process.poll() is None:
            if self._num_interrupts > 2:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.send_signal(signal.SIGINT)

    def forward(self) -> None:
        """Forward the output of the ranks until they have ended."""
        assert self._process is not None
        end_s = math.inf
        with selectors.DefaultSelector() as selector:
            for source, target in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)):
                if source is not None:
                    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
                    selector.register(source, selectors.EVENT_READ, (decoder, target))
            while self._process.poll() is None or (selector.get_map() and time.monotonic() < end_s):
                if self._process.returncode is not None:
                    end_s = min(end_s, time.monotonic() + _LAST_S)
                for key, _ in selector.select(_POLL_S):
                    data = os.read(key.fd, 1 << 16)
                    decoder, target = key.data
                    if not data:
                        selector.unregister(key.fileobj)
                    target.write(decoder.decode(data, final=not data))
                    target.flush()

    def end(self) -> None:
        """Kill the ranks that still run, and receive the last values."""
        assert self._process is not None
        if self._process.poll() != 0:  # after a complete run, background processes of loggers may still run
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        for thread in self._threads:
            thread.join()

    def raise_error(self) -> None:
        """Raise the error of a rank."""
        assert self._process is not None
        code = self._process.returncode
        if isinstance(self._error, RoomierError):
            raise self._error from None
        if self._num_interrupts and not self._is_complete:
            raise KeyboardInterrupt("the ranks ended before they returned a result")
        if self._error is None and self._is_complete and code == 0:
            return
        problem = f"rank 0 {ended(code)}" if code < 0 else "a rank failed"
        action = "See the report of this rank in the output above"
        raise TrainingError("devices", self._num_ranks, str(self._error or problem), action)

    def _write(self, pipes: list[int], work: Any) -> None:
        for pipe in pipes:
            try:
                with os.fdopen(pipe, "wb") as file:
                    write_by_value(work, file)
            except BrokenPipeError:  # the rank has ended
                pass
            except Exception as error:
                self._error = error
                assert self._process is not None
                self._process.kill()

    def _read(self, pipe: int, receive: Callable[[Callable[[], Any]], None]) -> None:
        with os.fdopen(pipe, "rb") as file:
            try:
                receive(lambda: self._next(file))
                self._is_complete = self._next(file) == _DONE
            except EOFError:  # the ranks have ended
                pass
            except Exception as error:
                self._error = error

    def _next(self, file: IO[bytes]) -> Any:
        kind, value = read(file)
        if kind == _FAILED:
            raise value if isinstance(value, RoomierError) else RuntimeError(value)
        return kind if kind == _DONE else value


@contextmanager
def _interrupts(handle: Callable[[], None]) -> Iterator[None]:
    """Call ``handle`` for each interrupt. Python handles signals only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = signal.signal(signal.SIGINT, lambda *_: handle())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def work() -> None:
    """Run as a rank of a notebook: read the work from the pipe of this rank, and do it."""
    reply, *pipes = start.take_pipes()
    if os.environ.get("RANK", "0") == "0":
        watch_parent(os.getppid())
    file = os.fdopen(reply, "wb")
    sys.excepthook = _Report(file)
    with os.fdopen(pipes[0], "rb") as received:
        answer = read(received)

    def send(value: Any, kind: str = "") -> None:
        ByReference(file).dump((kind, value))
        file.flush()

    answer(send)
    if os.environ.get("RANK", "0") == "0":
        send(None, _DONE)


class _Report:
    """Handler of uncaught exceptions that sends the error to the notebook. It prints the traceback, unless the error
    is a RoomierError, which the notebook raises itself.

    The ranks share the pipe of the reply. The first rank that fails writes to it, and the notebook reads no further.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank = os.environ.get("RANK", "0")
        text: Any = f"rank {rank} raised {kind.__name__}: {error}"
        if isinstance(error, RoomierError):
            with suppress(Exception):
                pickle.loads(pickle.dumps(error))
                text = error
        if isinstance(text, str) and not issubclass(kind, KeyboardInterrupt):
            print("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr, flush=True)
        with suppress(OSError):
            self._file.write(pickle.dumps((_FAILED, text), protocol=5))
            self._file.flush()
