"""HTTP requests for MLflow's client with a limit on their total time and on the size of the answer.

The library requests only limits the time between two reads. A server could block a request forever by sending
one byte at a time, endless headers, or `Retry-After: 3600`. An endless body could use all memory.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import RequestException, Timeout
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

ANSWER_BYTES = 64 * 2**20
"""Maximum size of an answer. 200 versions of a model with all their tags have less than 1 MB."""
UPLOAD_BYTES_PER_SECOND = 100_000
"""Minimum transfer rate for uploads."""
_DEFAULT_SECONDS = 10.0
_CHUNK = 2**16

_here = threading.local()


class BoundedAdapter(HTTPAdapter):
    """Adapter for `Session.mount` that limits the total time of a request and the size of its answer.

    The time limit is the timeout of one attempt times the number of attempts, plus the time for the request's
    body. `Retry-After` is ignored. Raises Timeout of requests, or RequestException if the answer is too
    large.
    """

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
        with _Call(self._seconds(request, timeout)):
            response = super().send(request, stream, timeout, *args, **kwargs)
            if not stream:
                # Otherwise `Response.content` would read the body later and without limits.
                response._content = _read(response)
                response._content_consumed = True
        return response

    def _seconds(self, request: PreparedRequest, timeout: Any) -> float:
        each = max(timeout) if isinstance(timeout, tuple) else timeout or _DEFAULT_SECONDS
        size = int(request.headers.get("Content-Length") or 0)
        return float(each) * (1 + int(self.max_retries.total or 0)) + size / UPLOAD_BYTES_PER_SECOND


class _Call:
    """A request with all its attempts. When its time is over, its connections are shut down, which ends any
    pending read.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._connections: list[HTTPConnection] = []
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> Self:
        _here.call = self
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._timer.cancel()
        _here.call = None
        # Ctrl-C and SIGTERM are not subclasses of `Exception` and must be raised unchanged, even if the time
        # is over.
        if self._over and (kind is None or issubclass(kind, Exception)):
            raise Timeout(f"no whole answer within {self._seconds:.0f} s") from error

    def use(self, connection: HTTPConnection) -> None:
        """Register `connection` to be shut down when the time is over.

        Raises _Overdue if it is over already.
        """
        with self._lock:
            if self._over:
                raise _Overdue
            self._connections.append(connection)

    def _end(self) -> None:
        with self._lock:
            self._over = True
            for connection in self._connections:
                # Bypass the TLS layer, which does not support concurrent threads. TypeError: the connection
                # has no socket yet, or not any more.
                with suppress(OSError, TypeError):
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)


class _Overdue(Exception):
    """Not an OSError, because urllib3 would retry after an OSError."""


def _read(response: Response) -> bytes:
    content = bytearray()
    for part in response.raw.stream(_CHUNK, decode_content=True):
        content += part
        if len(content) > ANSWER_BYTES:
            response.close()
            raise RequestException(f"the answer is larger than {ANSWER_BYTES} bytes")
    response.raw.release_conn()
    return bytes(content)


class _HTTPConnection(HTTPConnection):
    """Registers itself with the call of its thread, when it connects and when it is used again."""

    def _new_conn(self) -> socket.socket:
        self._register()
        self.sock = super()._new_conn()
        # Again, because the time can end while there is no socket that could be shut down.
        self._register()
        return self.sock

    def request(self, *args: Any, **kwargs: Any) -> None:
        self._register()
        super().request(*args, **kwargs)

    def _register(self) -> None:
        if (call := getattr(_here, "call", None)) is not None:
            call.use(self)


class _HTTPSConnection(_HTTPConnection, HTTPSConnection):
    pass


class HTTPPool(HTTPConnectionPool):
    ConnectionCls = _HTTPConnection


class HTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _HTTPSConnection


_POOLS = {"http": HTTPPool, "https": HTTPSPool}
