"""``roomier export --push-to-hub``, with a local server in place of the hub."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

import roomier
from roomier.checkpoint.export import hub
from roomier.cli.main import main
from roomier.core.errors import RoomierError

constants = pytest.importorskip("huggingface_hub.constants")

TOKEN = "hf_for_this_test"


class FakeHub(ThreadingHTTPServer):
    """Server that implements the hub's requests for creating a repository and committing files.

    Attributes:
        repositories: requests that created a repository.
        committed: content of each committed file, by path.
        tokens: values of the header that contains the access token.
        status: HTTP status of the response to a commit.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories: list[dict[str, Any]] = []
        self.committed: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.status = 200

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: FakeHub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.path == "/api/repos/create":
            self.server.repositories.append(json.loads(body))
            self._answer(200, {"url": f"{self.server.address}/me/model"})
        elif "/preupload/" in self.path:
            paths = [each["path"] for each in json.loads(body)["files"]]
            self._answer(200, {"files": [{"path": path, "uploadMode": "regular"} | _KEPT for path in paths]})
        elif "/commit/" in self.path:
            if self.server.status == 200:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        self.server.committed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(self.server.status, {"commitUrl": f"{self.server.address}/me/model/commit/1"} | _COMMIT)
        else:
            self._answer(404, {})

    def do_GET(self) -> None:
        self._answer(404, {})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


_KEPT = {"shouldIgnore": False}
_COMMIT = {"commitOid": "1" * 40, "success": True}


@pytest.fixture
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Net(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()


@pytest.fixture
def saved(make_trainer: Callable[..., roomier.Trainer], tmp_path: Path) -> Path:
    trainer = make_trainer(max_steps=1, optimizer="sgd")
    trainer.fit(Net(), [torch.ones(2, 3)])
    trainer.save_checkpoint(tmp_path / "c")
    return tmp_path / "c"


def test_the_exported_files_are_committed_to_the_repository(
    fake_hub: FakeHub,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"ENDPOINT": fake_hub.address, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    words = ["export", str(saved), "--to", "safetensors", "--push-to-hub", "me/model"]
    out, again = tmp_path / "out", tmp_path / "again"
    assert main([*words, "--private", "--output", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{out} -> {fake_hub.address}/me/model"
    [repository] = fake_hub.repositories
    assert (repository["organization"], repository["name"]) == ("me", "model")
    assert repository.get("visibility") == "private" or repository.get("private") is True
    assert fake_hub.tokens == {f"Bearer {TOKEN}"}
    assert fake_hub.committed == {each.name: each.read_bytes() for each in out.iterdir()}
    assert "model.safetensors" in fake_hub.committed

    fake_hub.status = 403
    assert main([*words, "--output", str(again)]) == 2
    error = capsys.readouterr().err
    assert "push_to_hub='me/model': was not uploaded (" in error
    assert f"run `hf upload me/model {again}`" in error
    assert (again / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--push-to-hub", "a/b/c"], "push_to_hub='a/b/c': is not the name of a repository"),
        (["--private"], "--private=True: requires --push-to-hub"),
    ],
)
def test_invalid_options_are_rejected_before_the_export(
    saved: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(saved), str(tmp_path / "out"), "--to", "safetensors", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["export", str(saved), str(tmp_path / "x.ckpt"), "--to", "lightning", "--push-to-hub", "me/x"]) == 2
    assert "--push-to-hub='me/x': is not supported with --to lightning" in capsys.readouterr().err


def test_a_missing_package_or_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RoomierError, match=r"folder=.* is not a folder"):
        hub.push_to_hub(tmp_path / "none", "me/model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RoomierError, match=r"requires the package huggingface_hub. pip install 'roomier\[hub\]'"):
        hub.push_to_hub(tmp_path, "me/model")
