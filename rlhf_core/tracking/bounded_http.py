"""HTTP for MLflow's client whose every request ends: within a time, and with an answer of bounded size.

requests bounds the silence between two reads. A server that sends a byte now and then, headers without an end, or
`Retry-After: 3600` holds a request for ever all the same, and one whose body does not end takes all memory.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import urljoin

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import RequestException, Timeout
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

ANSWER_BYTES = 64 * 2**20
"""The largest answer: 200 versions of a model with all their tags are below 1 MB."""
UPLOAD_BYTES_PER_SECOND = 100_000
"""What a line must carry at least while a file is sent."""
_DEFAULT_SECONDS = 10.0
_CHUNK = 2**16

_here = threading.local()


class BoundedAdapter(HTTPAdapter):
    """For `Session.mount`. A request takes at most the timeout of one try for each of its tries, and the time that its
    body needs; `Retry-After` is not waited for. Raises requests' Timeout, or RequestException for too large an answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_retries = self.max_retries.new(respect_retry_after_header=False)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = _POOLS
        return manager

    def send(
        self, request: PreparedRequest, stream: bool = False, timeout: Any = None, *args: Any, **kwargs: Any
    ) -> Response:
        # A redirect that is followed is a part of the call that was redirected.
        now = time.monotonic()
        target, began = getattr(_here, "redirect", ("", now))
        spent = now - began if request.url == target else 0.0
        _here.redirect = ("", now)
        with _Call(self._seconds(request, timeout), spent):
            response = super().send(request, stream, timeout, *args, **kwargs)
            if response.is_redirect:
                _here.redirect = (urljoin(str(request.url), response.headers["location"]), now - spent)
            if not stream:
                # What `Response.content` would read, without bounds, later.
                response._content = _read(response)
                response._content_consumed = True
        return response

    def _seconds(self, request: PreparedRequest, timeout: Any) -> float:
        each = max(timeout) if isinstance(timeout, tuple) else timeout or _DEFAULT_SECONDS
        size = int(request.headers.get("Content-Length") or 0)
        return float(each) * (1 + int(self.max_retries.total or 0)) + size / UPLOAD_BYTES_PER_SECOND


class _Call:
    """One request with all its tries. When its time is up its connections are shut down, which ends any read of them."""

    def __init__(self, seconds: float, spent: float = 0.0) -> None:
        """`spent`: of its `seconds`, by the requests that led to it."""
        self._seconds = seconds
        self._timer = threading.Timer(max(0.0, seconds - spent), self._end)
        self._timer.daemon = True
        self._connections: list[HTTPConnection] = []
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> Self:
        _here.call = self
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._timer.cancel()
        _here.call = None
        if self._over:
            raise Timeout(f"no whole answer within {self._seconds:.0f} s") from error

    def use(self, connection: HTTPConnection) -> None:
        """Have `connection` shut down when the time is up. Raises _Overdue if it is."""
        with self._lock:
            if self._over:
                raise _Overdue
            self._connections.append(connection)

    def _end(self) -> None:
        with self._lock:
            self._over = True
            for connection in self._connections:
                # Past the TLS layer, which is not made for two threads.
                with suppress(OSError, TypeError):
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)


class _Overdue(Exception):
    """Not an OSError, after which urllib3 would try again."""


def _read(response: Response) -> bytes:
    content = bytearray()
    for part in response.raw.stream(_CHUNK, decode_content=True):
        content += part
        if len(content) > ANSWER_BYTES:
            response.close()
            raise RequestException(f"the answer is larger than {ANSWER_BYTES} bytes")
    response.raw.release_conn()
    return bytes(content)


def _use(connection: HTTPConnection) -> None:
    if (call := getattr(_here, "call", None)) is not None:
        call.use(connection)


class _HTTPConnection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        _use(self)
        return super()._new_conn()

    def request(self, *args: Any, **kwargs: Any) -> None:
        _use(self)
        super().request(*args, **kwargs)


class _HTTPSConnection(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        _use(self)
        return super()._new_conn()

    def request(self, *args: Any, **kwargs: Any) -> None:
        _use(self)
        super().request(*args, **kwargs)


class HTTPPool(HTTPConnectionPool):
    ConnectionCls = _HTTPConnection


class HTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _HTTPSConnection


_POOLS = {"http": HTTPPool, "https": HTTPSPool}
