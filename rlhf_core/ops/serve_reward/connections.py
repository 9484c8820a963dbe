"""Closes connections of `rlhf serve-reward` that send no request.

    connected or idle --request line and headers--> served --answer--> idle
            |
            +-- after `header_seconds`, or the oldest one if too few places are free --> closed

The server accepts a limited number of connections and can check the token only after the headers of a request
are complete. A connection that does not send them is closed after a time limit, or earlier if other
connections need its place.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_SPARE = 16
"""Number of places that are kept free of connections without a request."""


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a time limit for the headers of a request."""

    header_seconds: float
    """Time limit from the connection or the last answer until the headers of a request are complete."""
    _waiting_since: float | None = None
    """Time at which the connection began to wait for headers. None while a request is served."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        # uvicorn answers each request with 503 once it has this number of connections, idle ones included.
        limit = self.limit_concurrency
        if limit is not None and len(self.connections) > limit - _SPARE:
            waiting = [
                other for other in self.connections if isinstance(other, GuardedProtocol) and other.waits
            ]
            if waiting:
                min(waiting, key=lambda other: other._waiting_since or 0.0)._abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # uvicorn sets `cycle` after complete headers, so single bytes of headers do not stop the timer.
        if self._serves:
            self._served()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # uvicorn may already serve the next request of this connection (pipelining).
        if not self._serves:  # also if the request's body continues after a refusal
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._served()
        super().connection_lost(exc)

    @property
    def waits(self) -> bool:
        """Whether the connection waits for a request."""
        return self._waiting_since is not None

    @property
    def _serves(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._served()
        self._waiting_since = time.monotonic()
        self._timer = self.loop.call_later(self.header_seconds, self._abort)

    def _served(self) -> None:
        self._waiting_since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _abort(self) -> None:
        self._served()
        # Not `close`: a client that does not read would keep the connection open.
        self.transport.abort()
