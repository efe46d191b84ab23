"""Storage servers for tests: an S3 server behind a proxy with faults, and a Google Cloud Storage server with a folder.

Both servers are reached through environment variables, as by a user, so processes that a test starts use them, too.
"""

import http.client
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Literal

Fault = Literal["drop", "drop answer", "truncate", "delay", "503", "403"]
"""The proxy closes the connection before or after the server acts, cuts or delays the answer, or answers an error."""

TEMPORARY: tuple[Fault, ...] = ("drop", "drop answer", "truncate", "delay", "503")
DELAY_S = 1.0
_ANSWERS = {"503": "ServiceUnavailable", "403": "AccessDenied"}
_TIMEOUT_S = 20.0
_PIECE_BYTES = 2**16
_START_BYTES = 512
_HOP_BY_HOP = ("connection", "transfer-encoding", "content-length")


@dataclass
class Request:
    """Request that passed through the proxy.

    Attributes:
        method: HTTP method.
        path: path with the query.
        start: first bytes of the body.
        num_sent: number of bytes of the body that the client received.
        fault: fault of the request.
    """

    method: str
    path: str
    start: bytes = b""
    num_sent: int = 0
    fault: Fault | None = None

    @property
    def is_read_of_tensors(self) -> bool:
        """True if the request reads a file of tensors."""
        return self.method == "GET" and ".safetensors" in self.path


@dataclass
class Proxy:
    """HTTP proxy in front of a server.

    Attributes:
        url: address of the proxy.
        upstream: host and port of the server.
        requests: the requests since the last call of ``clear``, in the order in which they arrived.
        fault_of: function that returns the fault of a request and its index.
        on_body: function that is called with each piece of a request's body, and with an empty piece after the last
            one. If it raises a ConnectionError, the request is not sent to the server.
    """

    url: str
    upstream: str
    requests: list[Request] = field(default_factory=list)
    fault_of: Callable[[Request, int], Fault | None] = lambda request, index: None
    on_body: Callable[[Request, bytes], None] = lambda request, piece: None

    def clear(self) -> None:
        """Forget the requests, and set the functions to functions that change nothing."""
        self.requests.clear()
        self.fault_of = lambda request, index: None
        self.on_body = lambda request, piece: None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    lock = threading.Lock()
    proxy: Proxy
    upstream: str

    def forward(self) -> None:
        request = Request(self.command, self.path)
        with self.lock:
            self.proxy.requests.append(request)
            request.fault = fault = self.proxy.fault_of(request, len(self.proxy.requests) - 1)
        body = b""
        for piece in chain(self._pieces(), [b""]):
            body += piece
            request.start = request.start or piece[:_START_BYTES]
            self.proxy.on_body(request, piece)
        if fault == "drop":
            self._hang_up()
            return
        if fault == "delay":
            time.sleep(DELAY_S)
        if fault in _ANSWERS:
            content = f"<Error><Code>{_ANSWERS[fault]}</Code><Message>{_ANSWERS[fault]}</Message></Error>".encode()
            self._answer(request, int(fault), [("Content-Type", "application/xml")], content, is_cut=False)
            return
        connection = http.client.HTTPConnection(self.upstream, timeout=_TIMEOUT_S)
        try:
            headers = {key: value for key, value in self.headers.items() if key.lower() not in ("expect", *_HOP_BY_HOP)}
            connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            answer = connection.getresponse()
            content = answer.read()
            if fault == "drop answer":
                self._hang_up()
                return
            kept = [(key, value) for key, value in answer.getheaders() if key.lower() not in _HOP_BY_HOP]
            if self.command == "HEAD":
                kept.append(("Content-Length", answer.getheader("content-length", "0")))
            self._answer(request, answer.status, kept, content, is_cut=fault == "truncate")
        except OSError:  # the server was stopped
            self._hang_up()
        finally:
            connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815  names that http.server prescribes

    def _answer(
        self, request: Request, status: int, headers: list[tuple[str, str]], content: bytes, *, is_cut: bool
    ) -> None:
        self.send_response_only(status)
        for key, value in headers:
            self.send_header(key, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        sent = content[: len(content) // 2] if is_cut else content
        request.num_sent = len(sent)
        self.wfile.write(sent)
        if is_cut:
            self._hang_up()

    def _pieces(self) -> Iterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            left = int(self.headers.get("content-length", 0))
            while left:
                piece = self.rfile.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise ConnectionError("the client ended within the body")
                left -= len(piece)
                yield piece
            return
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        pass  # a client that was killed leaves a broken connection


@contextmanager
def proxied(upstream: str) -> Iterator[Proxy]:
    """Run a proxy in front of the server ``upstream``, such as ``"127.0.0.1:80"``."""
    server = _Server(("127.0.0.1", 0), type("_Handler", (_Handler,), {"upstream": upstream}))
    proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}", upstream)
    server.RequestHandlerClass.proxy = proxy  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def s3_environment(url: str) -> dict[str, str]:
    """Return the environment variables of a client of the server ``url``."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": url,
        "no_proxy": "127.0.0.1",
    }


@contextmanager
def s3_server() -> Iterator[Proxy]:
    """Run moto's server, whose data is in memory, behind a proxy."""
    from moto.server import ThreadedMotoServer  # late import: takes a second

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with proxied(f"{host}:{port}") as proxy:
            yield proxy
    finally:
        server.stop()


def gcs_environment(url: str) -> dict[str, str]:
    """Return the environment variables of a client of the server ``url``."""
    # With support for hierarchical namespaces, gcsfs waits a minute for a gRPC endpoint, which the emulator lacks.
    return {"STORAGE_EMULATOR_HOST": url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "no_proxy": "127.0.0.1"}


@contextmanager
def gcs_server(folder: Path, bucket: str) -> Iterator[str]:
    """Run the emulator of Google Cloud Storage, whose objects are files in ``folder``. Return its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = ["start", "--host", "127.0.0.1", "--port", str(port), "--default-bucket", bucket, "--quiet"]
    command = [sys.executable, "-m", "gcp_storage_emulator", "--data-dir", str(folder), *start]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ})
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < end_s, "the server did not start"
            time.sleep(0.05)
