"""The wheel and the sdist, and the first pages of the documentation in an environment that contains only the wheel."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ROOT / "docs" / "code"


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Return the standard output of ``command``; if it fails, the error shows both of its outputs."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist, and with the wheel that pip builds from it."""
    folder = tmp_path_factory.mktemp("package")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (sdist,) = folder.glob("roomier-*.tar.gz")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sdist, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def environment(dist: Path) -> Path:
    """Return the folder of the programs of the environment that the commands of the page "Install" create from this
    repository. The wheel then replaces the package, which the page builds from the last commit."""
    (wheel,) = dist.glob("*.whl")
    repository = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/roomier/roomier.git",
    }
    pip = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_NO_COMPILE": "1", "PIP_QUIET": "1"}
    page = [(CODE / "install" / f"{name}.sh").read_text() for name in ("environment", "install")]
    replace = f"pip install --force-reinstall --no-deps {wheel}"
    run("bash", "-e", "-c", "\n".join([*page, replace]), cwd=dist, PYTHONPATH="", **repository, **pip)
    return dist / "first-model" / ".venv" / "bin"


@pytest.mark.more
def test_the_wheel_contains_the_package_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = run("git", "ls-files", "src/roomier", cwd=ROOT).split()
    assert files == {name.removeprefix("src/") for name in tracked}
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as files_of_sdist:
        names = {Path(*Path(name).parts[1:]).as_posix() for name in files_of_sdist.getnames()}
    assert {"tests/house/test_package.py", "docs/start/install.md", "constraints.txt", "README.md", "LICENSE"} <= names


@pytest.mark.more
def test_the_pages_start_run_in_an_environment_with_only_the_wheel(environment: Path, tmp_path: Path) -> None:
    path = f"{environment}{os.pathsep}/usr/bin{os.pathsep}/bin"
    for page in ("install", "ten_lines", "first_project"):
        folder = tmp_path / page
        folder.mkdir()
        for file in sorted(CODE.joinpath(page).glob("*.[ps][yh]")):
            (folder / file.name).write_bytes(file.read_bytes())
        for file in sorted(folder.glob("[0-9]*")):
            program = "bash" if file.suffix == ".sh" else "python"
            run(program, file.name, cwd=folder, PATH=path, PYTHONPATH="", OMP_NUM_THREADS="1")
    packages = run(environment / "python", "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    assert "lightning" not in packages
    assert "transformers" not in packages
