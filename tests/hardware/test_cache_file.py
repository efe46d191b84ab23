"""The cache file is in the cache folder of each system."""

import sys
from pathlib import Path

import pytest

from roomier.planner.hardware.measured import cache_file


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/there"}, Path("/there/roomier/hardware.json")),
        ("linux", {}, Path.home() / ".cache/roomier/hardware.json"),
        ("darwin", {"XDG_CACHE_HOME": "/there"}, Path.home() / "Library/Caches/roomier/hardware.json"),
        ("win32", {"LOCALAPPDATA": "/local"}, Path("/local/roomier/hardware.json")),
    ],
)
def test_the_folder_of_each_system(platform, environ, expected, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cache_file() == expected
