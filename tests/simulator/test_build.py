"""The build of the simulated accelerator is cached, and its failures state reasons."""

import sys
from pathlib import Path

import pytest

from tests.simulator import build, workers


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the sources with one small file, and the cache with an empty folder."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "small.cpp").write_text("int number = 1;\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    return sources / "small.cpp"


def test_a_library_is_compiled_one_time_for_each_version_of_the_sources(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := build.missing_requirement()) is not None:
        pytest.skip(reason)
    first = build.build()
    assert first.exists()
    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
        assert build.build() == first
    small.write_text("int number = 2;\n")
    second = build.build()
    assert second != first
    assert second.exists()
    assert sorted(path.name for path in build.CACHE.iterdir()) == sorted(
        [first.parent.name, second.parent.name, "lock"]
    )


def test_errors_of_the_compiler_are_reported(small: Path) -> None:
    if (reason := build.missing_requirement()) is not None:
        pytest.skip(reason)
    small.write_text("this is not C++\n")
    with pytest.raises(RuntimeError, match=r"(?s)could not be compiled: .*small\.cpp.*error:"):
        build.build()
    assert [path.name for path in build.CACHE.iterdir()] == ["lock"]


def test_tests_are_skipped_without_a_compiler(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(pytest.skip.Exception, match=r"requires a C\+\+ compiler: install g\+\+ or set CXX"):
        workers.simulated_ranks()
    with pytest.raises(RuntimeError, match="requires a C"):
        build.build()


def test_the_process_of_pytest_has_no_simulated_device() -> None:
    assert build.NAME not in sys.modules
    assert "torch.simulated" not in sys.modules
