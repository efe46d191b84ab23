"""Train in forked children, kill each with SIGKILL, resume, and check the checkpoints. Run by test_kill.py.

``python trained_and_killed.py ROOT SEED NUM_KILLS UPDATE``. UPDATE is the mode of updates with optimizer states on
disk, or ``none``. The undisturbed run does not offload. One process imports torch and forks the children, so a round
takes a fraction of a second. The parent process reads the checkpoints while a child trains. The program prints one
JSON object, and exits with an error if data is lost, incomplete, or different from the undisturbed run.
"""

import itertools
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from roomier import CheckpointError, Module, Trainer, checkpoint, seed_everything
from roomier.callbacks import ModelCheckpoint

NUM_STEPS = 125  # five epochs
SAVE_EVERY = 5
TIERS = {"optimizer_states": "disk"}
WIDTH = 256  # with the states of AdamW, a checkpoint has several megabytes, so that a kill can occur during a save


# The training -------------------------------------------------------------------------------------------------------


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.layers(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


class Reporting(ModelCheckpoint):
    """ModelCheckpoint that reports the first step of a child and the committed checkpoints to a pipe."""

    def __init__(self, pipe: int, **options: object) -> None:
        super().__init__(**options)
        self.pipe = pipe

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        super().on_train_start(trainer, pl_module)
        report(self.pipe, f"began {trainer.global_step}")

    def on_save_point(self, trainer: Trainer, pl_module: Module) -> None:
        before = os.path.realpath(self.last_model_path)
        super().on_save_point(trainer, pl_module)
        if os.path.realpath(self.last_model_path) != before:
            report(self.pipe, f"saved {trainer.global_step}")


def scratch_of(root: Path) -> Path:
    return root.parent / "scratch"


def report(pipe: int, line: str) -> None:
    os.write(pipe, f"{line}\n".encode())


def train(root: Path, pipe: int, seed: int, update: str) -> None:
    """Train to the end, after resuming the run under ``root``."""

    def report_saving(event: str, arguments: tuple) -> None:
        if event == "os.mkdir" and ".tmp-" in str(arguments[0]):
            report(pipe, "saving")

    sys.addaudithook(report_saving)
    # Every part has a different seed, so the random numbers of a resumed run must come from its checkpoint.
    seed_everything(seed)
    samples = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        accelerator="cpu",
        max_steps=NUM_STEPS,
        val_check_interval=10,
        log_every_n_steps=1,
        default_root_dir=root,
        offload=None if update == "none" else {**TIERS, "folder": str(scratch_of(root)), "update": update},
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Reporting(pipe, monitor="val_loss", save_top_k=2, save_last=True, every_n_train_steps=SAVE_EVERY),
        ],
    )
    train_data = DataLoader(samples, batch_size=4, shuffle=True)
    trainer.fit(Net(), train_data, DataLoader(samples[:8], batch_size=4), ckpt_path="last")


class Child:
    """Forked process that trains, with the pipe from which its reports are read."""

    def __init__(self, root: Path, seed: int, update: str) -> None:
        self.root = root
        self.reader, writer = os.pipe()
        self._unread = b""
        self.lines: list[str] = []
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        status = 1
        try:
            log = os.open(root.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            train(root, writer, seed, update)
            status = 0
        except SystemExit as left:
            status = left.code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def read(self, timeout_s: float) -> bool:
        """Read reports, with a maximum wait of ``timeout_s``. Return False if the process has exited."""
        if not select.select([self.reader], [], [], timeout_s)[0]:
            return True
        received = os.read(self.reader, 65536)
        *lines, self._unread = (self._unread + received).split(b"\n")
        self.lines += [line.decode() for line in lines]
        return bool(received)

    def wait(self) -> int:
        """Read all reports and return the wait status."""
        while self.read(60.0):
            pass
        os.close(self.reader)
        return os.waitpid(self.pid, 0)[1]

    def last_number(self, word: str) -> int | None:
        numbers = [int(line.split()[1]) for line in self.lines if line.startswith(f"{word} ")]
        return numbers[-1] if numbers else None


# Checks --------------------------------------------------------------------------------------------------------------


def rows_of(run_folder: Path) -> list[dict]:
    """Return the complete rows of the log without wall-clock times. A kill can truncate the last row."""
    text = (run_folder / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


def step_of(path: Path | None) -> int:
    return 0 if path is None else checkpoint.peek(path)["progress"]["global_step"]


def read_meanwhile(root: Path) -> int:
    """Verify all checkpoints under ``root``, while a child can replace them. Return the number of verified
    checkpoints."""
    num_read = 0
    for folder in root.glob("version_*/checkpoints"):
        for path in checkpoint.list_complete(folder):
            try:
                identity = path.stat().st_ino
                checkpoint.verify(path)
                num_read += 1
            except (CheckpointError, FileNotFoundError):
                still_exists = (
                    path.exists() and path.stat().st_ino == identity and path in checkpoint.list_complete(folder)
                )
                assert not still_exists, f"{path} was listed as complete and is not"
    return num_read


def check_nothing_lost(root: Path, committed: int, reference: list[dict]) -> None:
    """Check after a kill that the committed checkpoint and all checkpoints in its ledger are complete."""
    last = checkpoint.find_last(root)
    assert step_of(last) >= committed, f"step {committed} was committed, but {last} was found"
    if last is None:
        return
    checkpoint.verify(last)
    (ledger,) = (state for key, state in checkpoint.peek(last)["callbacks"].items() if key.startswith("Reporting"))
    for name, _score in ledger["kept"]:
        checkpoint.verify(last.parent / name)
    link = last.parent / "last"
    if link.is_symlink():
        checkpoint.verify(link)
    rows = rows_of(last.parent.parent)
    assert rows == reference[: len(rows)], "the rows differ from the undisturbed run"
    assert rows[-1]["step"] >= step_of(last)


def check_same(root: Path, reference_root: Path) -> None:
    """Check at the end that the log, the last checkpoint and the folders equal those of the undisturbed run."""
    ends = [checkpoint.find_last(each) for each in (reference_root, root)]
    folders = [end.parent.parent for end in ends]
    assert rows_of(folders[0]) == rows_of(folders[1])
    states = [checkpoint.load(end) for end in ends]
    for part in ("module", "optimizers", "schedulers", "progress", "random", "data", "results"):
        assert_same(states[0][part], states[1][part], part)
    names = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in folders]
    assert names[0] == names[1], f"the folders differ from the undisturbed run: {names}"
    stale = [path for folder in root.glob("version_*/checkpoints") for path in folder.glob(".*")]
    assert not stale, f"left behind by kills: {stale}"
    assert not list(scratch_of(root).iterdir()), "files of the disk tier were left behind by kills"
    assert os.readlink(folders[1] / "checkpoints" / "last") == ends[1].name


def assert_same(a: object, b: object, where: str) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for index, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert a == b, where


# The rounds ---------------------------------------------------------------------------------------------------------


def watch(child: Child, kind: str, chance: random.Random) -> int:
    """Wait until the time of the kill, and verify the child's checkpoints meanwhile. Return the number of verified
    checkpoints."""
    num_read = 0
    if kind == "in a save":
        nth = chance.randint(1, 4)
        while child.read(0.001):
            num_read += read_meanwhile(child.root)
            if child.lines.count("saving") >= nth:
                time.sleep(chance.uniform(0.0, 0.02))
                os.kill(child.pid, signal.SIGSTOP)  # the save cannot end between the next look and the kill
                if not child.read(0.0) or is_in_save(child):
                    break
                os.kill(child.pid, signal.SIGCONT)
                nth = child.lines.count("saving") + 1
        return num_read
    deadline_s = time.monotonic() + chance.uniform(0.0, 0.7)
    while time.monotonic() < deadline_s and child.read(0.02):
        num_read += read_meanwhile(child.root)
    return num_read


def is_in_save(child: Child) -> bool:
    return bool(child.lines) and child.lines[-1] == "saving"


def import_late_modules(root: Path) -> None:
    """Import late modules once before the forks. No thread is started, because forks have no threads."""
    torch.optim.AdamW(nn.Linear(1, 1).parameters())
    checkpoint.save(root / "warm", {"module": {"weight": torch.zeros(1)}})
    checkpoint.load(root / "warm")


def main(root: Path, seed: int, num_kills: int, update: str) -> None:
    import_late_modules(root)
    chance = random.Random(seed)
    reference_root = root / "undisturbed"
    scratch_of(reference_root).mkdir()
    assert Child(reference_root, seed=1, update="none").wait() == 0, "see undisturbed.log"
    reference = rows_of(checkpoint.find_last(reference_root).parent.parent)

    found = {"kills": 0, "kills_in_save": 0, "terminations": 0, "runs": 0, "resumed_at": [], "num_read_meanwhile": 0}
    seeds = itertools.count(2)
    while found["kills"] < num_kills:
        run_root = root / f"run-{found['runs']}"
        found["runs"] += 1
        committed, is_done = 0, False
        while not is_done:
            expected_step = step_of(checkpoint.find_last(run_root)) if run_root.exists() else 0
            child = Child(run_root, 1 if expected_step == 0 else next(seeds), update)
            if found["kills"] < num_kills:
                kind = chance.choice(("any time", "any time", "in a save", "in a save", "SIGTERM"))
                found["num_read_meanwhile"] += watch(child, kind, chance)
                os.kill(child.pid, signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
            status = child.wait()
            began = child.last_number("began")
            assert began is None or began == expected_step, f"began at {began} instead of {expected_step}"
            if began:
                found["resumed_at"].append(began)
            committed = max(committed, child.last_number("saved") or 0)
            if os.WIFSIGNALED(status):
                assert os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGTERM)
                found["kills"] += os.WTERMSIG(status) == signal.SIGKILL
                found["kills_in_save"] += is_in_save(child)
            elif os.WEXITSTATUS(status) == 128 + signal.SIGTERM:
                found["terminations"] += 1
            else:
                assert status == 0, f"a child failed: see {run_root.name}.log"
                is_done = True
            check_nothing_lost(run_root, committed, reference)
        check_same(run_root, reference_root)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
