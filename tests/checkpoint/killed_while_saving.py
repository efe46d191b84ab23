"""Save in forked children, kill each child with SIGKILL, and check the remaining files. Run by test_commit.py.

``python killed_while_saving.py ROOT``. One process imports torch and forks the children, so a round takes milliseconds.
The program prints one JSON object, and exits with an error if an invariant does not hold.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from roomier import checkpoint

FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.scandir"}


def state_of(step: int) -> dict:
    return {
        "module": {"w": torch.full((200, 100), float(step)), "b": torch.full((7,), float(step))},
        "progress": {"global_step": step},
    }


def step_in(path: Path) -> int:
    """Return the step of the checkpoint at ``path``. All of its tensors must contain this step."""
    state = checkpoint.load(path)
    step = state["progress"]["global_step"]
    assert (state["module"]["w"] == step).all()
    assert (state["module"]["b"] == step).all()
    return step


def save_and_die_at(num_events: int, path: Path, step: int) -> bool:
    """Save in a child that is killed at its ``num_events``-th file system call. Return False if the save finished."""
    pid = os.fork()
    if pid == 0:
        counter = itertools.count()

        def die(event: str, _arguments: tuple) -> None:
            if event in FILE_EVENTS and next(counter) == num_events:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
        checkpoint.save(path, state_of(step))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def save_until_killed(root: Path, first_step: int, after_s: float) -> int:
    """Save in a child for ``after_s`` seconds, into new folders and ``last``. Return the last step that the child
    reported."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        for step in itertools.count(first_step):
            checkpoint.save(root / "last", state_of(step))
            checkpoint.save(root / f"step={step % 3}", state_of(step))
            os.write(writer, step.to_bytes(8, "big"))
    os.close(writer)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with open(reader, "rb") as pipe:
        reported = pipe.read()
    return int.from_bytes(reported[-8:], "big") if reported else first_step - 1


def kill_at_every_call(root: Path) -> int:
    """Replace a checkpoint repeatedly. Each save is killed one call later than the previous save, until a save
    finishes."""
    path = root / "last"
    checkpoint.save(path, state_of(0))
    surviving_path, num_events, killed = 0, 0, True
    while killed:
        killed = save_and_die_at(num_events, path, step=surviving_path + 1)
        found = checkpoint.find_last(root)
        assert found is not None
        now = step_in(found)
        assert now in (surviving_path, surviving_path + 1)
        assert step_in(path) == now, "loading by path and find_last must agree"
        assert [step_in(p) for p in checkpoint.list_complete(root)] == [now]
        surviving_path, num_events = now, num_events + 1
    assert surviving_path > 1, "some saves were killed after the commit, and the last one was not killed"
    assert os.listdir(root) == ["last"], "a finished save clears the leftovers of dead processes"
    return num_events


def kill_at_random_moments(root: Path, num_rounds: int) -> int:
    step = 0
    for _ in range(num_rounds):
        saved = save_until_killed(root, step + 1, after_s=random.uniform(0.0, 0.12))
        found = checkpoint.find_last(root)
        if saved > 0:
            assert found is not None
        now = step_in(found) if found is not None else 0
        assert now >= saved, f"step {saved} was reported as saved, found is {now}"
        for path in checkpoint.list_complete(root):
            step_in(path)
        step = max(step, now)
    return step


def main() -> None:
    root = Path(sys.argv[1])
    checkpoint.save(root / "warm", state_of(0))  # import all modules before the forks
    checkpoint.load(root / "warm")
    num_calls = kill_at_every_call(root / "calls")
    num_steps = kill_at_random_moments(root / "moments", num_rounds=12)
    print(json.dumps({"num_calls": num_calls, "num_steps": num_steps}))


if __name__ == "__main__":
    main()
