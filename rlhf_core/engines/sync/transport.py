"""What every transport of weights uses: their source, the client of the engines, all addresses, and the
policy ranks that send weights together (`SenderGroup`).

These share a store at rank 0. A sender that fails, or whose engines fail, writes it there, so that no other
sender waits for its timeout. Rank 0 adds up the checksums of the parts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlhf_core.engines.sync.wire import Acknowledgement, add_checksums
from rlhf_core.errors import WeightSyncError

Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Starts a new iteration over (name, full tensor), in the same order on every rank."""


class EngineClient(Protocol):
    """Calls vLLM's weight-sync methods on all engines, and collects their acknowledgements."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    def acknowledge(self) -> list[Acknowledgement]: ...


@dataclass(frozen=True)
class TransportConfig:
    """How weights get from the trainers to the engines."""

    backend: str
    """"gloo", "nccl" or "ipc"."""
    senders: Mapping[int, tuple[str, int]]
    """Address and port of each policy rank that sends, by rank; rank 0 is the first."""
    engines: tuple[str, ...]
    """Host of each engine."""
    workers: int
    """Number of workers of each engine."""
    bucket_bytes: int
    """Largest message."""
    timeout: float
    """Time limit of each operation of the gloo transport, in seconds: `run.timeouts.sync`."""

    @property
    def sender_names(self) -> list[str]:
        """Name of each sender, for messages."""
        return [f"policy rank {rank} on {host}" for rank, (host, _port) in self.senders.items()]

    @property
    def receivers(self) -> list[str]:
        """Hosts of the workers of all engines."""
        return [host for host in self.engines for _ in range(self.workers)]


_LOOK_SECONDS = 0.05


def sender_ranks(ranks: int, senders: int) -> list[int]:
    """Return the policy ranks that send: rank 0, and others at equal distances, so on different hosts."""
    return [index * ranks // senders for index in range(senders)]


class SenderGroup:
    """The view of one sender.

    Args:
        store: TCPStore at rank 0; None for a single sender.
        index: Index of this sender.
        senders: Name of each sender, for messages.
        timeout: Time limit in seconds for the checksums of the others: `run.timeouts.sync`.
    """

    def __init__(self, store: Any, index: int, senders: Sequence[str], timeout: float) -> None:
        self._store = store
        self._index = index
        self._senders = senders
        self._timeout = timeout
        self._round = 0
        self._next_look = 0.0

    def start(self) -> None:
        """Begin a sync. Every sender counts them, so that what an earlier one wrote is not read."""
        self._round += 1
        self._next_look = 0.0

    def report(self, error: BaseException) -> None:
        """Tell the other senders that this one failed, unless one of them has already."""
        if self._store is not None:
            # Without rank 0 there is no store, and its death is the error of the sync.
            with suppress(RuntimeError):
                # "": the key is set only if it is missing, so the first error stays.
                self._store.compare_set(self._key("failed"), "", f"{self._senders[self._index]}: {error}")

    def report_from(self, received: Future[None]) -> None:
        """Tell the other senders if the engines failed. This is a callback of their call."""
        error = received.exception(timeout=0)
        if error is not None:
            self.report(error)

    def check(self) -> None:
        """Raise WeightSyncError if a sender failed. Looks at most every 50 ms."""
        if self._store is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        # `get` would wait for the key.
        if self._store.check([self._key("failed")]):
            raise WeightSyncError(self._store.get(self._key("failed")).decode())

    def add(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the checksums of the whole tensors on sender 0; the others return theirs.

        Raises WeightSyncError if another sender failed or does not answer.
        """
        if self._store is None:
            return dict(own)
        if self._index > 0:
            self._store.set(self._key(f"checksums/{self._index}"), json.dumps(own))
            return dict(own)
        deadline = time.monotonic() + self._timeout
        keys = [self._key(f"checksums/{index}") for index in range(1, len(self._senders))]
        while not self._store.check(keys):
            self.check()
            if time.monotonic() > deadline:
                late = [
                    name
                    for name, key in zip(self._senders[1:], keys, strict=True)
                    if not self._store.check([key])
                ]
                raise WeightSyncError(
                    f"{', '.join(late)} did not finish sending weights within {self._timeout:g} s"
                    " (run.timeouts.sync)"
                )
            time.sleep(0.0005)
        others = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)  # the store would keep those of every sync
        return add_checksums([own, *others])

    def _key(self, name: str) -> str:
        return f"senders/{self._round}/{name}"
