"""Compile the simulated accelerator. Each version of the sources, of torch and of the compiler is compiled once.

The result is stored in ``.cache/simulator`` at the root of the repository. If several processes build at the same time,
one process compiles and the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

NAME = "simulator_extension"
SOURCES = Path(__file__).parent / "csrc"
CACHE = Path(__file__).parents[2] / ".cache" / "simulator"
_TORCH = Path(torch.__file__).parent
_FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-w",
    "-DUSE_DISTRIBUTED",
    "-DUSE_C10D_GLOO",
    f"-DTORCH_EXTENSION_NAME={NAME}",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    f"-I{_TORCH / 'include'}",
    f"-I{_TORCH / 'include/torch/csrc/api/include'}",
    f"-I{sysconfig.get_paths()['include']}",
)
_LIBRARIES = (
    f"-L{_TORCH / 'lib'}",
    "-ltorch",
    "-ltorch_cpu",
    "-ltorch_python",
    "-lc10",
    f"-Wl,-rpath,{_TORCH / 'lib'}",
)
_NUM_PROCESSES = 2
_SLOW = {"autocast", "collectives"}  # compiled first, so that all processes end at about the same time


def find_compiler() -> str | None:
    """Return the path of the C++ compiler that ``torch.compile`` also uses; None if there is no compiler."""
    return shutil.which(os.environ.get("CXX", "g++"))


def missing_requirement() -> str | None:
    """Return the reason why the simulated accelerator cannot be built here; None if it can be built."""
    if find_compiler() is None:
        return "the simulated accelerator requires a C++ compiler: install g++ or set CXX"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated accelerator requires the headers of Python: install python3-dev"
    return None


def build() -> Path:
    """Return the path of the compiled Python extension. Compile it if necessary.

    Raises:
        RuntimeError: a requirement is missing, or the compiler failed. The message contains the output of the compiler.
    """
    reason = missing_requirement()
    compiler = find_compiler()
    if reason is not None or compiler is None:
        raise RuntimeError(reason)
    CACHE.mkdir(parents=True, exist_ok=True)
    result = CACHE / _key(compiler) / f"{NAME}.so"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                library = _compile(compiler, Path(folder))
                result.parent.mkdir(exist_ok=True)
                os.replace(library, result)
    return result


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    content = hashlib.sha256("\0".join([version, torch.__version__, *_FLAGS, *_LIBRARIES]).encode())
    for path in sorted(SOURCES.iterdir()):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def _compile(compiler: str, folder: Path) -> Path:
    """Compile the sources in ``folder`` and return the path of the library."""
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: path.stem not in _SLOW)
    objects = [folder / f"{path.stem}.o" for path in sources]
    commands = [
        [compiler, *_FLAGS, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(_NUM_PROCESSES) as pool:
        list(pool.map(_run, commands))
    library = folder / f"{NAME}.so"
    _run([compiler, "-shared", *map(str, objects), *_LIBRARIES, "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the simulated accelerator could not be compiled: {' '.join(command)}\n{done.stdout}")
