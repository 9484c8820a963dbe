"""An HTTP proxy in front of a store that does to requests what networks and servers do to them."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Fault = str
"""One of the keys of `FAULTS`, or '' for none."""

ANSWERS = {
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "full": (507, "XMinioStorageFull", "Storage backend has reached its minimum free drive threshold."),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
    "denied": (403, "AccessDenied", "Access Denied"),
}
SLOW_SECONDS = 1.5
STALL_SECONDS = 30.0
"""Before a request's body is read at all."""


class FaultyProxy(ThreadingHTTPServer):
    """`fault(n)` says what happens to request n = 1, 2, ... of those for `path`; `seen` counts what happened.

    `requests` has the method and path of all requests.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        parts = urlsplit(upstream)
        self.upstream = (parts.hostname or "", parts.port or 80)
        self.fault: Callable[[int], Fault] = lambda n: ""
        self.path = ""
        self.seen: Counter[Fault] = Counter()
        self.requests: list[str] = []
        self._lock = threading.Lock()
        self._counted = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next_fault(self, method: str, path: str) -> Fault:
        with self._lock:
            self.requests.append(f"{method} {path}")
            if self.path not in path:
                return ""
            self._counted += 1
            fault = self.fault(self._counted)
            self.seen[fault] += 1
        return fault

    def restart(self, fault: Callable[[int], Fault], path: str = "") -> None:
        """Count requests whose path contains `path` from 1 again; all others pass."""
        with self._lock:
            self.fault, self.path, self._counted = fault, path, 0
            self.seen.clear()
            self.requests.clear()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def _serve(self) -> None:
        fault = self.server.next_fault(self.command, self.path)
        if fault == "stall":
            time.sleep(STALL_SECONDS)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault in ANSWERS:
            status, code, message = ANSWERS[fault]
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
            self._answer(status, [("Content-Type", "application/xml")], text.encode())
        elif fault == "reset":
            self._reset()
        elif fault == "cut request":
            self._forward_half(body)
            self._reset()
        else:
            if fault == "slow":
                time.sleep(SLOW_SECONDS)
            status, headers, content = self._forward(body)
            if fault == "lost answer":
                self._reset()
            elif fault == "cut answer":
                self._answer(status, headers, content, sent=len(content) // 2)
                self._reset()
            elif fault == "short answer":
                self._answer(status, headers, content[: len(content) // 2])
            else:
                self._answer(status, headers, content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.server.upstream, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        headers = [
            (k, v) for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")
        ]
        return answer.status, headers, content

    def _forward_half(self, body: bytes) -> None:
        with socket.create_connection(self.server.upstream) as upstream:
            head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
            upstream.sendall(
                f"{self.command} {self.path} HTTP/1.1\r\n{head}\r\n".encode() + body[: len(body) // 2]
            )

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, sent: int | None = None
    ) -> None:
        self.send_response_only(status)
        length = str(len(content))
        for name, value in headers:
            if name.lower() != "content-length":
                self.send_header(name, value)
            elif self.command == "HEAD":
                length = value
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])
            self.wfile.flush()

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy on loopback, gone afterwards."""
    server = FaultyProxy(upstream)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
