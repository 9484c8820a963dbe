"""What every transport of weights uses: their source, the client of the engines, and all addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlhf_core.weight_sync.wire import Acknowledgement

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
