"""Run the numerical tests with the CPU kernels of other processors: ``make test-kernels``.

MKL, ATen and oneDNN choose kernels by processor, and kernels round differently. Each setting below makes one of these
libraries choose other kernels on the same processor. A bound that holds only for the rounding of one machine fails
here.

The numerical tests are the folders whose tests compare the numbers of two computations, such as runs with and without a
technique, on one rank and on several ranks, or before and after a resume. Tests marked ``slow`` are skipped.

    python tests/kernels/each_setting.py                             all settings, all folders
    python tests/kernels/each_setting.py tests/optim -k lion         arguments go to pytest; a path replaces the folders
    ATEN_CPU_CAPABILITY=avx2 python -m pytest tests/optim            one setting
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = [
    ("MKL_CBWR", "COMPATIBLE"),
    ("MKL_CBWR", "AVX2,STRICT"),
    ("ATEN_CPU_CAPABILITY", "default"),
    ("ATEN_CPU_CAPABILITY", "avx2"),
    ("ONEDNN_MAX_CPU_ISA", "AVX2"),
]
FOLDERS = [
    "activation",
    "adapters",
    "attention",
    "callbacks",
    "checkpoint",
    "engine",
    "export",
    "hugging_face",
    "lightning",
    "loss",
    "models",
    "optim",
    "parallel",
    "precision",
    "resume",
    "train",
]
ROOT = Path(__file__).parents[2]


def main(arguments: list[str]) -> int:
    """Run pytest for each setting and return 0 if every run passed."""
    has_path = any((ROOT / each.split("::")[0]).exists() for each in arguments)
    paths = [] if has_path else [f"tests/{folder}" for folder in FOLDERS]
    outcomes: list[str] = []
    failed = False
    for name, value in SETTINGS:
        print(f"\n== {name}={value}", flush=True)
        begin_s = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *paths, *arguments]
        run = subprocess.run(command, cwd=ROOT, env={**os.environ, name: value}, check=False)
        failed |= run.returncode != 0
        taken_s = time.monotonic() - begin_s
        outcomes.append(f"{name}={value}: {'passed' if run.returncode == 0 else 'FAILED'} in {taken_s:.0f} s")
    print("\n" + "\n".join(outcomes))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
