"""Which replica of a service is asked next, and which one is left alone for a while.

closed --`failures` in a row--> open --`seconds` pass--> half-open: one request may try
  ^                              ^                          |
  |                              +-------- it fails --------+
  +--------------------- it succeeds -----------------------+
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlhf_core.rewards.failures import Failure, Refused

Clock = Callable[[], float]
_POLL_SECONDS = 0.02


class Breaker:
    """A circuit breaker. Ask `allows`, then say `began`, then `succeeded` or `failed`."""

    def __init__(self, failures: int, seconds: float, clock: Clock = time.monotonic) -> None:
        self._limit, self._seconds, self._clock = failures, seconds, clock
        self._in_row = 0
        self._opened: float | None = None
        self._probing = False

    @property
    def allows(self) -> bool:
        if self._opened is None:
            return True
        return not self._probing and self._clock() >= self._opened + self._seconds

    def began(self) -> None:
        self._probing = self._opened is not None

    def succeeded(self) -> None:
        self._in_row, self._opened, self._probing = 0, None, False

    def failed(self) -> None:
        self._in_row += 1
        if self._probing or self._in_row >= self._limit:
            self._opened = self._clock()
        self._probing = False


@dataclass
class Replica:
    """One address of the service."""

    url: str
    breaker: Breaker
    busy: int = 0
    """Requests under way."""
    asked: int = 0
    """Requests so far."""


class Replicas:
    """Hands out the least busy replica, at most `concurrency` times at once each;
    belongs to one event loop.
    """

    def __init__(self, replicas: Sequence[Replica], concurrency: int, patience: float) -> None:
        """`patience`: seconds that `take` waits while every replica is left alone."""
        self._replicas = replicas
        self._concurrency = concurrency
        self._patience = patience

    async def take(self) -> Replica:
        """The least busy one that may be asked, among equals the one asked least; `use` it. Raises `Failure`
        when none may be for too long.
        """
        deadline = time.monotonic() + self._patience
        while True:
            usable = [replica for replica in self._replicas if replica.breaker.allows]
            if free := [replica for replica in usable if replica.busy < self._concurrency]:
                chosen = min(free, key=lambda replica: (replica.busy, replica.asked))
                chosen.busy += 1
                chosen.asked += 1
                chosen.breaker.began()
                return chosen
            if usable:  # busy, not broken: their requests end within their own limit
                deadline = time.monotonic() + self._patience
            elif time.monotonic() >= deadline:
                raise Failure(f"none of its {len(self._replicas)} replicas answers", searchable=False)
            await asyncio.sleep(_POLL_SECONDS)

    @contextmanager
    def use(self, replica: Replica, *, searching: bool = False) -> Iterator[None]:
        """Around one request to a taken replica. `Refused` proves it alive; so does any failure that a sample
        may explain while the samples at fault are being searched.
        """
        try:
            yield
        except Failure as failure:
            alive = isinstance(failure, Refused) or (searching and failure.searchable)
            replica.breaker.succeeded() if alive else replica.breaker.failed()
            raise
        finally:
            replica.busy -= 1
        replica.breaker.succeeded()
