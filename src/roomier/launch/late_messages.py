"""Messages about late ranks. Each line that contains the number of a rank begins with ``roomier: heartbeat:``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from roomier.core.errors import TrainingError
from roomier.core.units import format_seconds
from roomier.launch.records import Late, RankRecord

_NUM_SHOWN = 8


def say(message: str) -> None:
    """Print ``message`` on standard error in one write, because ranks share the terminal."""
    sys.stderr.write(f"roomier: heartbeat: {message}\n")
    sys.stderr.flush()


def names_of(late: Sequence[Late]) -> str:
    """Return the numbers of the late ranks as text."""
    names = ", ".join(str(each.rank) for each in late[:_NUM_SHOWN])
    return f"rank {names}" if len(late) <= _NUM_SHOWN else f"rank {names} and {len(late) - _NUM_SHOWN} more"


def note_of(late: Late) -> str:
    """Return the line for a late rank whose activity has no time limit."""
    silence = ", which sends no heartbeats" if late.is_silent else ""
    where = f"{late.record.position} (hang_timeout does not apply)"
    return f"other ranks have waited {_seconds(late)} for {_rank(late)}{silence}: {where}"


def report_of(late: Sequence[Late]) -> str:
    """Return the line that precedes the positions of all ranks."""
    left_s = min(each.left_s for each in late if each.left_s is not None)
    return (
        f"{problem_of(late)}. If this does not change, the run ends in {format_seconds(max(0.0, left_s))} "
        "(hang_timeout). The position and the Python stack of each rank follow"
    )


def position_of(rank: int, record: RankRecord, stack: str) -> str:
    """Return the position and the stack of one rank as text."""
    return f"rank {rank}: {record.position}\n{stack.rstrip()}"


def end_of(late: Sequence[Late], end_s: float) -> TrainingError:
    """Return the error that ends the run."""
    action = "Resume with ckpt_path='last'. If a rank can take this long, increase hang_timeout or set it to None"
    if reported := [each for each in late if not each.is_silent]:
        collective = "If the stack ends in a collective, the ranks ran different layers"
        action = f"See the reported stack of {names_of(reported)}. {collective}. {action}"
    return TrainingError("hang_timeout", {"seconds": round(end_s, 1)}, problem_of(late), action)


def problem_of(late: Sequence[Late]) -> str:
    """Describe each late rank."""
    shown = "; ".join(map(_problem, late[:_NUM_SHOWN]))
    return shown if len(late) <= _NUM_SHOWN else f"{shown}; and {len(late) - _NUM_SHOWN} more ranks"


def _problem(late: Late) -> str:
    if not late.is_silent:
        return (
            f"{_rank(late)} has made no progress for {_seconds(late)} while other ranks wait for it: "
            f"{late.record.position}"
        )
    return (
        f"{_rank(late)} has sent no heartbeat for {_seconds(late)} while other ranks wait for it (position in its "
        f"last heartbeat: {late.record.position}). {_silence(late)}, so this rank prints no stack"
    )


def _silence(late: Late) -> str:
    pid, host = late.record.pid, late.record.host
    if late.process_state == "stopped":
        return f"Its process is stopped (`kill -CONT {pid}` resumes it)"
    if late.process_state == "disk-sleep":
        return "Its process waits for storage or for a driver"
    return (
        f"Its process is stopped, or a native call holds the interpreter lock (`py-spy dump --pid {pid}` on {host} "
        "shows the call)"
    )


def _rank(late: Late) -> str:
    return f"rank {late.rank} (process {late.record.pid} on {late.record.host})"


def _seconds(late: Late) -> str:
    return format_seconds(late.waited_s)
