"""What every transport of weights uses: their source, the client of the engines, and all addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlhf_core.engines.sync.wire import Acknowledgement

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
    sender: tuple[str, int]
    """Address and port of policy rank 0, which sends."""
    engines: tuple[str, ...]
    """Host of each engine."""
    workers: int
    """Number of workers of each engine."""
    bucket_bytes: int
    """Largest message."""
    timeout: float
    """Time limit of each operation of the gloo transport, in seconds: `run.timeouts.sync`."""

    @property
    def receivers(self) -> list[str]:
        """Hosts of the workers of all engines."""
        return [host for host in self.engines for _ in range(self.workers)]
