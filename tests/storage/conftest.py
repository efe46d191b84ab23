"""Fixtures of storage servers."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.storage.servers import Proxy, s3_environment, s3_server


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[Proxy]:
    pytest.importorskip("moto", reason="requires the extra services")
    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def s3(_s3_server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Proxy in front of an S3 server with the bucket ``bucket``, which is empty."""
    import fsspec

    for name, value in s3_environment(_s3_server.url).items():
        monkeypatch.setenv(name, value)
    system = fsspec.filesystem("s3", use_listings_cache=False)
    system.clear_instance_cache()
    system = fsspec.filesystem("s3", use_listings_cache=False)
    _s3_server.clear()
    if system.exists("bucket"):
        system.rm("bucket", recursive=True)
    system.mkdir("bucket")
    _s3_server.clear()
    yield _s3_server
    _s3_server.clear()
    system.clear_instance_cache()


@pytest.fixture
def new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Function that deletes the local cache."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("ROOMIER_CACHE", str(cache))
    return lambda: shutil.rmtree(cache, ignore_errors=True)
