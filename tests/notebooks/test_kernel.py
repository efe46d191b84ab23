"""A Trainer with two ranks in a Jupyter kernel."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.services
nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install 'roomier[services]'")
pytest.importorskip("ipykernel", reason="needs ipykernel: pip install 'roomier[services]'")

MODEL = """
import os, signal, threading, time
import roomier, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SCALE = 2.0  # a global variable of the notebook

class Net(roomier.Module):
    def __init__(self, fails="", width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.1), nn.Linear(width, 1))
        self.fails, self.losses = fails, []

    def training_step(self, batch, batch_idx):
        if self.fails == "raise" and self.trainer.global_rank == 1:
            raise ValueError("a bad batch")
        if self.fails.isdigit() and self.trainer.global_rank == int(self.fails):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fails == "wait":
            time.sleep(0.05)
        loss = SCALE * (self.layers(batch[0]) - batch[1]).square().mean()
        self.log("loss_of_step", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.layers(batch[0]) - batch[1]).square().mean())

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

roomier.seed_everything(1)
data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
quiet = dict(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, enable_plan_table=False)
"""

BEGIN = """
import json
net = Net()
trainer = roomier.Trainer(devices=2, strategy=STRATEGY, max_epochs=2, **quiet)
trainer.fit(net, DataLoader(data, 4, shuffle=True), DataLoader(data, 8))
seen = [net.losses, float(trainer.callback_metrics["loss_of_step"])]
"""
MORE = """
seen += [trainer.validate(net, DataLoader(data, 8), verbose=False)]
predicted = trainer.predict(net, DataLoader(data, 8))
trainer.max_epochs = 3
trainer.fit(net, DataLoader(data, 4, shuffle=True))
seen += [net.losses, float(sum(each.double().sum() for each in predicted)), trainer.global_step, trainer.current_epoch]
seen += [trainer.checkpoint_callback.best_model_path[-17:]]
"""
END = """
if trainer.global_rank == 0:
    print("SEEN", json.dumps(seen))
"""


class Kernel:
    """A running kernel, in which ``run`` executes one cell after the other."""

    def __init__(self, folder: Path) -> None:
        notebook = __import__("nbformat").v4.new_notebook()
        self._client = nbclient.NotebookClient(
            notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}}
        )
        self._notebook, self._setup = notebook, self._client.setup_kernel()
        self._setup.__enter__()

    def run(self, code: str) -> tuple[str, str]:
        """Return the output of a cell, and its error (name and text)."""
        cell = __import__("nbformat").v4.new_code_cell(code)
        self._notebook.cells.append(cell)
        self._client.execute_cell(cell, len(self._notebook.cells) - 1)
        texts = [each["text"] for each in cell.outputs if each.output_type == "stream"]
        errors = [f"{each.ename}: {each.evalue}" for each in cell.outputs if each.output_type == "error"]
        return "".join(texts), "".join(errors)

    def close(self) -> None:
        self._setup.__exit__(None, None, None)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    output, error = kernel.run(MODEL)
    assert not output + error
    yield kernel
    kernel.close()


def seen_in(output: str) -> Any:
    [line] = [each for each in output.splitlines() if each.startswith("SEEN ")]
    return json.loads(line.removeprefix("SEEN "))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_notebook_computes_the_same_bits_as_a_script(kernel: Kernel, tmp_path: Path, strategy: str) -> None:
    code = f"STRATEGY = {strategy!r}" + BEGIN + MORE * (strategy == "ddp") + END
    output, error = kernel.run(code)
    assert not error
    script = tmp_path / "script" / "train.py"
    script.parent.mkdir()
    script.write_text(MODEL + code)
    done = subprocess.run([sys.executable, script.name], cwd=script.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert seen_in(output) == seen_in(done.stdout)
    assert kernel.run("print(torch.cuda.is_initialized(), torch.distributed.is_initialized())")[0] == "False False\n"


def test_the_kernel_survives_failures_and_then_fits(kernel: Kernel) -> None:
    kernel.run("def fit(fails='', **more):\n"
               "    global net, trainer\n"
               "    net, trainer = Net(fails), roomier.Trainer(devices=2, **{'max_steps': 2, **quiet, **more})\n"
               "    trainer.fit(net, DataLoader(data, 4))")  # fmt: skip
    output, error = kernel.run("fit('raise')")
    assert error.startswith(
        "TrainingError: devices=2: rank 1 raised ValueError: a bad batch. See the report of this rank"
    )
    assert 'raise ValueError("a bad batch")' in output  # the code of the cell
    assert "rank 1 ended with exit code 1, so the run ended" in output
    output, error = kernel.run("fit('1')")
    assert "rank 1 was terminated by SIGKILL (often because the machine ran out of memory), so the run ended" in output
    assert error.startswith("TrainingError: devices=2: a rank failed")
    output, error = kernel.run("fit('0')")
    assert error.startswith("TrainingError: devices=2: rank 0 was terminated by SIGKILL (often because")
    output, error = kernel.run("net.lock = threading.Lock()\ntrainer.fit(net, DataLoader(data, 4))")
    assert error.startswith("RoomierError: model.lock=<unlocked _thread.lock")
    output, error = kernel.run("fit(max_steps=3); print(trainer.global_step, len(net.losses))")
    assert not error
    assert output.endswith("3 3\n")
    children = "import psutil; print([each.name() for each in psutil.Process().children(recursive=True)])"
    assert kernel.run(children)[0] == "[]\n"


def test_an_interrupt_saves_the_step_and_returns_to_the_cell(kernel: Kernel) -> None:
    code = (
        "class Interrupt(roomier.Callback):\n"
        "    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):\n"
        "        if trainer.global_step == 3 and trainer.global_rank == 0:\n"
        "            os.kill(KERNEL, signal.SIGINT)\n"
        "KERNEL = os.getpid()\n"
        "net = Net('wait')\n"
        "trainer = roomier.Trainer(devices=2, max_steps=500, callbacks=[Interrupt()], **quiet)\n"
        "trainer.fit(net, [data[:4]] * 1000)"
    )
    output, error = kernel.run(code)
    assert error.startswith("KeyboardInterrupt: SIGINT ended fit at step ")
    assert "saved at " in output
    step = int(error.rpartition(" ")[2])
    assert 3 <= step < 400
    output, error = kernel.run(
        "print(trainer.global_step, trainer.interrupted, len(net.losses), os.listdir('runs/version_0/checkpoints'))"
    )
    assert output.startswith(f"{step} True {step} ['interrupted-step={step}'")
    output, error = kernel.run(
        f"trainer = roomier.Trainer(devices=2, max_steps={step + 2}, **quiet)\n"
        "trainer.fit(Net(), [data[:4]] * 1000, ckpt_path='last'); print(trainer.global_step)"
    )
    assert output.endswith(f"{step + 2}\n"), output + error


def test_other_processes_are_unchanged(tmp_path: Path) -> None:
    """An interactive session starts ranks. ``python -c`` does not."""
    code = f"{MODEL}\nroomier.Trainer(devices=2, max_steps=2, **quiet).fit(Net(), DataLoader(data, 4))\nprint('DONE')\n"
    (tmp_path / "train.py").write_text(f"{MODEL}\nif __name__ == '__main__':\n    print('read')\n")
    typed = "trainer = roomier.Trainer(devices=2, max_steps=2, **quiet)\ntrainer.fit(Net(), DataLoader(data, 4))\n"
    typed += "print('DONE', trainer.global_step)\n"
    session = subprocess.run(
        [sys.executable, "-i", "train.py"], input=typed, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "DONE 2" in session.stdout, session.stderr
    command = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert "code from `python -c` or from standard input cannot be run again" in command.stderr
