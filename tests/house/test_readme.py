"""The example in the README runs, and every file that the README links to exists."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_example_trains_and_resumes(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    resume = '\nroomier.Trainer(max_epochs=12).fit(Line(), loader, ckpt_path="last")\n'
    command = [sys.executable, "-W", "error", "-c", example + resume]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (run,) = (tmp_path / "runs").iterdir()
    assert {"plan.yaml", "metrics.jsonl", "metrics.csv", "checkpoints"} <= {path.name for path in run.iterdir()}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.5  # the first loss is 4, which is the mean of (3x + 1) squared


def test_every_linked_file_exists() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert len(links) >= 3
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_make_target_in_the_documentation_exists() -> None:
    texts = README + (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", texts, re.MULTILINE))
    assert named <= targets
    assert {"demo", "test", "install"} <= named
