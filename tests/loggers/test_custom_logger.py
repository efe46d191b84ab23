"""The example of a custom logger in docs/design/callbacks.md runs."""

import json
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "design" / "callbacks.md"


def test_logger_of_the_design_note_keeps_the_best_after_a_resume(make_trainer, line, loader, tmp_path) -> None:
    [code] = [block for block in DOCUMENT.read_text().split("```python\n")[1:] if "class Best" in block]
    code = code.partition("```")[0]
    assert len(code.splitlines()) <= 20
    names: dict[str, Any] = {}
    exec(code, names)
    first, second = names["Best"](), names["Best"]()
    keywords = {"log_every_n_steps": 1, "enable_checkpointing": True}
    make_trainer(logger=first, max_steps=3, **keywords).fit(line, loader)
    best = json.loads((tmp_path / "version_0" / "best.json").read_text())
    line.net.weight.data.fill_(100.0)  # later values are worse
    make_trainer(logger=second, max_steps=4, **keywords).fit(line, loader, ckpt_path="last")
    after = json.loads((tmp_path / "version_0" / "best.json").read_text())
    assert after["epoch"] == 0.0
    assert after["train_loss"] <= best["train_loss"]
    assert second.path == first.path
