"""Run the slow tests of third-party projects. Each project has a separate environment, which uses the packages of this
environment.

Usage: ``python tests/third_party/each_project.py [PROJECT ...]``. The environments are created in
``.venv-third-party/`` of the current folder. torch and Lightning are not replaced.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PROJECTS = {
    "scvi-tools": "test_scvi.py",
    "torch_geometric": "test_torch_geometric.py",
    "darts": "test_darts.py",
    "gluonts[torch]": "test_gluonts.py",
    "datasets": "test_datasets.py",
    "pytorch_tabular": "test_pytorch_tabular.py",
    "neuralforecast": "test_neuralforecast.py",
    "lightly": "test_lightly.py",
    "asteroid": "test_asteroid.py",
}
# Asteroid's version for Lightning 2 excludes recent versions of torchmetrics, and requires torchaudio for one loss.
WITHOUT_DEPENDENCIES = {
    "asteroid": (
        *("asteroid==0.7.0", "asteroid-filterbanks", "julius", "einops", "torch_optimizer", "pytorch_ranger"),
        *("soundfile", "mir_eval", "pb_bss_eval", "cached_property", "decorator"),
    )
}
FIXED = ("torch", "lightning", "pytorch-lightning")


def run(project: str) -> int:
    """Create the environment of ``project`` and run its tests. Return the exit code of pytest."""
    folder = Path(".venv-third-party") / project
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        [packages] = folder.glob("lib/python*/site-packages")
        root = Path(__file__).resolve().parents[2]
        paths = (sysconfig.get_path("purelib"), str(root / "src"))
        (packages / "zz_base.pth").write_text("".join(f"{path}\n" for path in paths))
        constraints = folder / "constraints.txt"
        constraints.write_text("".join(f"{name}=={importlib.metadata.version(name)}\n" for name in FIXED))
        packages_only = WITHOUT_DEPENDENCIES.get(project)
        wanted = (project,) if packages_only is None else ("--no-deps", *packages_only)
        subprocess.run([python, "-m", "pip", "install", "-q", "-c", constraints, *wanted], check=True)
    test = Path(__file__).with_name(PROJECTS[project])
    return subprocess.run([python, "-m", "pytest", "-q", "-m", "slow", test], check=False).returncode


if __name__ == "__main__":
    codes = [run(project) for project in sys.argv[1:] or PROJECTS]
    sys.exit(max(codes))
