"""The trainers' side of weight sync. Every policy rank calls `send`, because gathering the weights is a
collective operation. One or several of them transmit the weights, each its part of every tensor. Rank 0 is
one of these and calls the engines.

start  ->  update (engines receive while the senders send)  ->  finish(version)  ->  compare acknowledgements
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from rlhf_core.engines.distributed import rendezvous
from rlhf_core.engines.sync.transport import EngineClient, SenderGroup, TransportConfig, Weights
from rlhf_core.engines.sync.vllm_transport import VllmTransport
from rlhf_core.engines.sync.wire import (
    GlooSender,
    Route,
    TensorSpec,
    cut,
    pack,
    routes,
    tensor_checksum,
    verify,
)
from rlhf_core.errors import WeightSyncError
from rlhf_core.system.failpoints import failpoint


@dataclass(frozen=True)
class SyncReport:
    """One sync, as rank 0 saw it."""

    version: int
    tensors: int
    bytes: int
    seconds: float


class WeightSender:
    """Sends the policy's weights and proves that they arrived.

    Args:
        weights: The weights of the policy.
        specs: Names, shapes and dtypes of the weights as they are sent.
        client: Client of the engines on rank 0; None on other ranks.
        rank: Rank of this process among the policy's ranks.
        transport: The same on all ranks.
        listener: Socket at the address of this rank in `transport.senders`.
        sharded: Whether `weights` yields only the part of this rank of each tensor. Then every rank sends.
    """

    def __init__(
        self,
        weights: Weights,
        specs: list[TensorSpec],
        client: EngineClient | None,
        rank: int,
        transport: TransportConfig,
        *,
        listener: socket.socket | None = None,
        sharded: bool = False,
    ) -> None:
        self._weights = weights
        self._specs = specs
        self._client = client
        self._senders = list(transport.senders)
        self._index = self._senders.index(rank) if rank in transport.senders else None
        self._sharded = sharded
        self._checksums: dict[str, str] = {}
        self._transport: _GlooTransport | VllmTransport
        if transport.backend == "gloo":
            self._transport = _GlooTransport(self._stream, specs, client, self._index, transport, listener)
        else:
            if listener is not None:
                # vLLM opens the ports that it needs.
                listener.close()
            self._transport = VllmTransport(self._stream, specs, client, rank, transport)

    def send(self, version: int) -> SyncReport | None:
        """Send all weights. This is a collective operation.

        Returns the report on rank 0 and None on the others. Raises WeightSyncError unless every engine
        acknowledges the version and the checksums.
        """
        started = time.monotonic()
        self._checksums = {}
        if torch.cuda.is_initialized():
            # The transports use other streams, which do not wait for the optimizer's last step.
            torch.cuda.synchronize()
        self._transport.send(str(version))
        if self._index is None:
            return None
        checksums = self._transport.senders.add(self._checksums)
        if self._client is None:
            return None
        verify(checksums, version, self._client.acknowledge())
        total = sum(spec.bytes for spec in self._specs)
        return SyncReport(version, len(self._specs), total, time.monotonic() - started)

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank sends in the engines' precision: whole tensors, or its part of them. Senders
        store the checksums of what they send.
        """
        for spec, (name, tensor) in zip(self._specs, self._weights(), strict=True):
            assert spec.name == name, f"weights come out of order: {name} where {spec.name} was declared"
            part = self._part(spec)
            if part is not None and not self._sharded:
                tensor = tensor.flatten()[part]
            tensor = tensor.to(spec.dtype)
            first = 0 if part is None else part.start
            if self._index is not None:
                self._checksums[name] = tensor_checksum(tensor, first)
                if failpoint("weight_sync.send", "alter") == "alter":
                    tensor = tensor.clone()
                    tensor.view(-1)[:1] += 1
            yield name, tensor

    def _part(self, spec: TensorSpec) -> slice | None:
        """Return the elements of a tensor that this rank sends; None if it sends all or none."""
        # Only gloo has several senders.
        if self._index is None or len(self._senders) == 1:
            return None
        return spec.part(self._index, len(self._senders))


class _GlooTransport:
    def __init__(
        self,
        stream: Weights,
        specs: list[TensorSpec],
        client: EngineClient | None,
        index: int | None,
        transport: TransportConfig,
        listener: socket.socket | None,
    ) -> None:
        self._stream = stream
        self._specs = specs
        self._client = client
        self._index = index
        self._bucket_bytes = transport.bucket_bytes
        self.senders = SenderGroup(None, 0, transport.sender_names[:1], transport.timeout)
        if index is None:
            return
        assert listener is not None, "a sender listens"
        try:
            self._connect(index, transport, listener)
        except RuntimeError as error:  # torch's class of broken and late connections
            raise WeightSyncError(
                f"{transport.sender_names[index]} did not connect to the engines on"
                f" {', '.join(sorted(set(transport.engines)))} within {transport.timeout:g} s"
                f" (run.timeouts.sync): {error}"
            ) from error

    def _connect(self, index: int, transport: TransportConfig, listener: socket.socket) -> None:
        """Join the engines, and then the other senders if there are several."""
        addresses = list(transport.senders.values())
        paths = [routes(host, transport.receivers) for host, _port in addresses]
        size = paths[index][0].size
        client = self._client
        if client is None:
            self._group = GlooSender(listener, size, transport.timeout)
        else:
            info = {
                "senders": addresses,
                "routes": [_by_engine(path, transport.workers) for path in paths],
                "bucket_bytes": self._bucket_bytes,
                "timeout": transport.timeout,
            }
            # In a thread: the engines' call only returns after all senders have joined as well.
            with ThreadPoolExecutor(1) as pool:
                joined = pool.submit(client.init_weight_transfer_engine, info)
                self._group = GlooSender(listener, size, transport.timeout)
                joined.result()
        if len(addresses) > 1:
            limit = timedelta(seconds=transport.timeout)
            # One client more than sender 0 has counted. Its store does not wait for clients.
            store = self._group.store if index == 0 else rendezvous(*addresses[0], size, timeout=limit)
            self.senders = SenderGroup(store, index, transport.sender_names, transport.timeout)

    def send(self, version: str) -> None:
        stream = self._stream()
        self.senders.start()
        try:
            if self._client is not None:
                self._transmit(self._client, stream, version)
            elif self._index is not None:
                self._broadcast(stream, None)
        except BaseException as error:
            # Before the remaining collectives, in which another sender may wait for this one.
            self.senders.report(error)
            if self._client is not None or not isinstance(error, WeightSyncError):
                raise
            # Rank 0 raises: its error is that of the engines.
        finally:
            # Also if the engines failed: the other ranks wait for this one in the remaining collectives.
            # Ranks that do not send do only this.
            for _ in stream:
                pass

    def _transmit(
        self, client: EngineClient, stream: Iterator[tuple[str, torch.Tensor]], version: str
    ) -> None:
        """Broadcast the weights while the engines receive them, and raise the error of either side."""
        update: Mapping[str, Any] = {
            "names": [spec.name for spec in self._specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in self._specs],
            "shapes": [list(spec.shape) for spec in self._specs],
        }
        client.start_weight_update()
        pool = ThreadPoolExecutor(1)
        try:
            received = pool.submit(client.update_weights, dict(update))
            received.add_done_callback(self.senders.report_from)
            self._broadcast(stream, received)
            # The engines wait for the parts of all senders: if one has failed, they do not answer.
            while not wait([received], timeout=0.05).done:
                self.senders.check()
            received.result()
        except WeightSyncError:
            # The connection breaks because an engine failed, and its own error arrives a moment later.
            with contextlib.suppress(FutureTimeout):
                received.result(timeout=5)
            raise
        finally:
            # No wait: after a broken broadcast, the engines' call only ends with its timeout.
            pool.shutdown(wait=False)
        client.finish_weight_update(version)

    def _broadcast(self, stream: Iterator[tuple[str, torch.Tensor]], received: Future[None] | None) -> None:
        sending: tuple[Any, torch.Tensor] | None = None
        try:
            for bucket in cut(self._specs, self._bucket_bytes):
                # While the bucket before is being sent.
                buffer = pack([next(stream)[1].cpu() for _ in bucket])
                if sending is not None:
                    self._finish(sending[0], received)
                sending = (self._group.send(buffer), buffer)
            if sending is not None:
                self._finish(sending[0], received)
        except RuntimeError as error:
            raise WeightSyncError(f"the broadcast to the engines broke: {error}") from error
        for _ in stream:  # ends the last gathering context
            raise AssertionError("more weights than were declared")

    def _finish(self, sending: Any, received: Future[None] | None) -> None:
        """Wait until a bucket is sent. Raises the error of the engines or of another sender if they fail
        while it waits.
        """
        while sending is not None and not sending.is_completed():
            if received is not None and received.done():
                received.result()
            self.senders.check()
            time.sleep(0.0005)
        if sending is not None:
            sending.wait()


def _by_engine(paths: list[Route], workers: int) -> list[list[Route]]:
    """Return the routes of the workers of each engine."""
    return [paths[first : first + workers] for first in range(0, len(paths), workers)]
