"""Storage to which a run cannot write: it fails before its first step, on every rank, within a bounded time."""

import json
import os
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from roomier.checkpoint import uploads
from roomier.core.errors import CheckpointError
from tests.ranks.pool import RankPool
from tests.storage.runs import train
from tests.storage.servers import Proxy

# Each rank is a fork of a process that has imported this file, so the clients are not imported again in each rank.
pytest.importorskip("s3fs", reason="requires the extra services")
pytestmark = pytest.mark.services

LIMIT_S = 4.0


def refusal_of(root: str, journal: Path) -> tuple[str, float]:
    """Return the error of a run and the time that the run took."""
    uploads._PROBE_S = LIMIT_S
    begin_s = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        train(root, journal, 2)
    assert not journal.with_suffix(f".{os.environ['RANK']}").exists(), "a step was run"
    return str(caught.value), time.monotonic() - begin_s


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOMIER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def user_who_reads(s3: Proxy) -> Iterator[tuple[str, str]]:
    """Key and secret of a user who may read, but not write. The server checks signatures and policies."""
    import boto3

    server = f"http://{s3.upstream}"
    iam = boto3.client("iam", endpoint_url=server)
    iam.create_user(UserName="reader")
    allowed = {"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName="reader", PolicyName="reads", PolicyDocument=policy)
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    _set_num_unchecked(server, "0")
    yield key["AccessKeyId"], key["SecretAccessKey"]
    _set_num_unchecked(server, "inf")
    iam.delete_access_key(UserName="reader", AccessKeyId=key["AccessKeyId"])
    iam.delete_user_policy(UserName="reader", PolicyName="reads")
    iam.delete_user(UserName="reader")


def _set_num_unchecked(server: str, number: str) -> None:
    """Set the number of requests after which the server checks signatures and policies."""
    url, headers = f"{server}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(url, number.encode(), headers)).close()


@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("missing bucket", "direct"),
        ("missing bucket", "proxy"),
        ("no credentials", "direct"),
        ("unknown key", "direct"),
        ("wrong secret", "direct"),
        ("no permission to write", "direct"),
        ("read-only", "proxy"),
        ("unreachable", "direct"),
        ("silent", "direct"),
    ],
)
def test_a_run_is_refused_before_its_first_step(
    case: str,
    way: str,
    tmp_path: Path,
    s3: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    on_ranks: RankPool,
    request: pytest.FixtureRequest,
) -> None:
    """The error names the field, the address and the next action."""
    root, action = "s3://bucket/runs", "Check the network and the address of the server"
    url = f"http://{s3.upstream}" if way == "direct" else s3.url
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and never answers
        if case == "missing bucket":
            root, action = "s3://missing/runs", "Create the bucket, or check its name"
        elif case == "no credentials":
            action = "Check the credentials"
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        elif case in ("unknown key", "wrong secret", "no permission to write"):
            action = "Check the credentials, and their permission"
            key, secret = request.getfixturevalue("user_who_reads")
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN" if case == "unknown key" else key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong" if case == "wrong secret" else secret)
        elif case == "read-only":
            action = "Check the credentials"
            s3.fault_of = lambda each, index: "403" if each.method == "PUT" else None
        else:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            if case == "unreachable":
                silent.close()
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        for error, seconds in on_ranks(2, refusal_of, root, tmp_path / "journal"):
            assert re.search(f"^default_root_dir='{root}': cannot be written.*{action}", error), error
            assert seconds < LIMIT_S + 5.0
