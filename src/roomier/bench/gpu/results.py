"""The results file of ``roomier bench gpu``: one JSON object per line. Each line is appended when its values are
known."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import roomier
from roomier.bench.gpu.parts import Setting
from roomier.bench.machine import circumstances
from roomier.core.device.resolve import device_name, num_devices

KEY = ("commit", "source", "torch", "cpu", "device", "num_devices", "size")
"""Facts that must be equal for a line in the file to be valid for this run."""

MEASURED, UNSUPPORTED, FAILED = "measured", "unsupported", "failed"  # status of a row
COMPLETE, INCOMPLETE = "complete", "incomplete"  # status of a part, in addition to FAILED

Record = dict[str, Any]


def facts_of(setting: Setting) -> Record:
    """Return the facts that each line contains: machine, versions, commit, command, device and size."""
    device = setting.device
    facts = circumstances()
    return {
        **facts,
        "source": source_hash(),
        "cpu": facts["machine"]["cpu"],
        "device": facts["machine"]["cpu"] if device.type == "cpu" else device_name(device) or device.type,
        "device_type": device.type,
        "num_devices": num_devices(device),
        "size": setting.size,
    }


def source_hash() -> str:
    """Return a hash of the installed Python files. The hash also differs between different uncommitted changes to the
    same commit."""
    folder = Path(roomier.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def default_path(facts: Mapping[str, Any]) -> Path:
    """Return the path of the results file in the repository. The file name contains the device and the commit."""
    device = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    return Path("benchmarks", "results", f"gpu-{device}-{(facts['commit'] or 'unknown')[:10]}.jsonl")


class Results:
    """The lines of a results file that are valid for this run.

    Args:
        path: the file. The file and its folder are created by the first :meth:`append`.
        facts: see :func:`facts_of`.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.facts = dict(facts)

    def append(self, record: str, part: str, **values: Any) -> None:
        """Append a line.

        Args:
            record: ``"row"`` or ``"end"``.
            part: name of the part.
            values: additional values of the line.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"record": record, "part": part, **values, **self.facts})
        with self.path.open("ab+") as file:
            if file.seek(0, 2) and (file.seek(-1, 2), file.read(1))[1] != b"\n":
                line = f"\n{line}"  # a process was stopped while it wrote the last line
            file.write(f"{line}\n".encode())

    def rows(self, part: str) -> dict[str, Record]:
        """Return the last line of each row of ``part``."""
        return {each["row"]: each for each in self._lines() if each["record"] == "row" and each["part"] == part}

    def finished_rows(self, part: str) -> set[str]:
        """Return the names of the rows that a repeated run skips."""
        return {name for name, each in self.rows(part).items() if each["status"] in (MEASURED, UNSUPPORTED)}

    def ends(self, part: str) -> list[Record]:
        """Return the ``"end"`` lines of ``part``, one for each run of the part."""
        return [each for each in self._lines() if each["record"] == "end" and each["part"] == part]

    def _lines(self) -> Iterator[Record]:
        if not self.path.exists():
            return
        for text in self.path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # a process was stopped while it wrote the line
                continue
            if isinstance(line, dict) and all(line.get(name) == self.facts[name] for name in KEY):
                yield line
