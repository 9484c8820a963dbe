"""The trainers' side of weight sync. Every policy rank calls `send`, because gathering the weights is a
collective operation. Rank 0 also transmits them.

start  ->  update (engines receive while rank 0 broadcasts)  ->  finish(version)  ->  compare acknowledgements
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlhf_core.errors import WeightSyncError
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.processes import free_port
from rlhf_core.weight_sync.wire import (
    Acknowledgement,
    GlooGroup,
    TensorSpec,
    cut,
    pack,
    tensor_checksum,
    verify,
)

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
class SyncReport:
    """One sync, as rank 0 saw it."""

    version: int
    tensors: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class TransportConfig:
    """How weights get from the trainers to the engines."""

    backend: str
    """"gloo", "nccl" or "ipc"."""
    address: str
    """Of rank 0."""
    receivers: int
    """Workers of all engines."""
    bucket_bytes: int
    """Largest message."""
    timeout: float
    """Of each operation of the gloo transport, in seconds."""


class WeightSender:
    """Sends the policy's weights and proves that they arrived.

    Args:
        weights: The weights of the policy.
        specs: Names, shapes and dtypes of `weights` as they are sent.
        client: Of the engines on rank 0; None on other ranks.
        rank: Of this process among the policy's ranks.
        transport: The same on all ranks.
    """

    def __init__(
        self,
        weights: Weights,
        specs: list[TensorSpec],
        client: EngineClient | None,
        rank: int,
        transport: TransportConfig,
    ) -> None:
        self._weights = weights
        self._specs = specs
        self._client = client
        self._checksums: dict[str, str] = {}
        self._transport: _GlooTransport | _VllmTransport
        if transport.backend == "gloo":
            self._transport = _GlooTransport(self._stream, specs, client, transport)
        else:
            self._transport = _VllmTransport(self._stream, specs, client, rank, transport)

    def send(self, version: int) -> SyncReport | None:
        """Send all weights. This is a collective operation.

        Returns the report on rank 0 and None on the others. Raises WeightSyncError unless every engine
        acknowledges the version and the checksums.
        """
        started = time.monotonic()
        self._checksums = {}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch declares it without types
            # The transports use other streams, which do not wait for the optimizer's last step.
            torch.cuda.synchronize()
        self._transport.send(str(version))
        if self._client is None:
            return None
        verify(self._checksums, version, self._client.acknowledge())
        total = sum(spec.bytes for spec in self._specs)
        return SyncReport(version, len(self._specs), total, time.monotonic() - started)

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights in the engines' precision. Rank 0 stores the checksum of each tensor."""
        for spec, (name, tensor) in zip(self._specs, self._weights(), strict=True):
            assert spec.name == name, f"weights come out of order: {name} where {spec.name} was declared"
            tensor = tensor.to(spec.dtype)
            if self._client is not None:
                self._checksums[name] = tensor_checksum(tensor)
                if failpoint("weight_sync.send", "alter") == "alter":
                    tensor = tensor.clone()
                    tensor.view(-1)[0] += 1
            yield name, tensor


class _GlooTransport:
    def __init__(
        self,
        stream: Weights,
        specs: list[TensorSpec],
        client: EngineClient | None,
        transport: TransportConfig,
    ) -> None:
        self._stream = stream
        self._specs = specs
        self._client = client
        self._bucket_bytes = transport.bucket_bytes
        if client is None:
            return
        address, size, timeout = transport.address, transport.receivers + 1, transport.timeout
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        info = {
            "address": address,
            "port": port,
            "rank_offset": 1,
            "size": size,
            "bucket_bytes": self._bucket_bytes,
            "timeout": timeout,
        }
        # In a thread: the engines' call only returns after rank 0 has joined as well.
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(client.init_weight_transfer_engine, info)
            self._group = GlooGroup(address, port, 0, size, timeout, listener)
            joined.result()

    def send(self, version: str) -> None:
        stream = self._stream()
        try:
            if self._client is not None:
                self._transmit(self._client, stream, version)
        finally:
            # Also if the engines failed: the other ranks wait for this one in the remaining collectives.
            for _ in stream:
                pass

    def _transmit(
        self, client: EngineClient, stream: Iterator[tuple[str, torch.Tensor]], version: str
    ) -> None:
        update: Mapping[str, Any] = {
            "names": [spec.name for spec in self._specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in self._specs],
            "shapes": [list(spec.shape) for spec in self._specs],
        }
        client.start_weight_update()
        pool = ThreadPoolExecutor(1)
        try:
            received = pool.submit(client.update_weights, dict(update))
            self._broadcast(stream, received)
            received.result()
        finally:
            # No wait: after a broken broadcast, the engines' call only ends with its timeout.
            pool.shutdown(wait=False)
        client.finish_weight_update(version)

    def _broadcast(self, stream: Iterator[tuple[str, torch.Tensor]], received: Future[None]) -> None:
        sending: tuple[Any, torch.Tensor] | None = None
        try:
            for bucket in cut(self._specs, self._bucket_bytes):
                buffer = pack([next(stream)[1].cpu() for _ in bucket])
                if sending is not None:
                    self._finish(sending[0], received)
                sending = (self._group.send(buffer), buffer)
            if sending is not None:
                self._finish(sending[0], received)
        except RuntimeError as error:
            # The connection breaks because an engine failed, and its own error arrives a moment later.
            with contextlib.suppress(FutureTimeout):
                received.result(timeout=5)
            raise WeightSyncError(f"the broadcast to the engines broke: {error}") from error
        for _ in stream:  # ends the last gathering context
            raise AssertionError("more weights than were declared")

    @staticmethod
    def _finish(sending: Any, received: Future[None]) -> None:
        """Wait until a bucket is sent. Raises the error of the engines if they fail while it waits."""
        while not sending.is_completed():
            if received.done():
                received.result()
            time.sleep(0.0005)
        sending.wait()


class _VllmTransport:
    """vLLM's own trainer engines for GPUs:
    `nccl` (packed, double-buffered broadcast) and `ipc` (same GPU).
    """

    def __init__(
        self,
        stream: Weights,
        specs: list[TensorSpec],
        client: EngineClient | None,
        rank: int,
        transport: TransportConfig,
    ) -> None:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        class Source(WeightSource):  # type: ignore[misc]
            def metadata(self) -> list[Any]:
                return [ParamMeta(spec.name, spec.dtype, spec.shape) for spec in specs]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return stream()

        self._client = _Versioned(client)
        self._engine: Any
        if transport.backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerInitInfo,
                NCCLTrainerWeightTransferEngine,
            )

            nccl = NCCLTrainerInitInfo(
                master_address=transport.address,
                master_port=free_port(),
                world_size=transport.receivers + 1,
                rank=rank,
                packed_buffer_size_bytes=transport.bucket_bytes,
            )
            # vLLM changes the current stream, but DeepSpeed needs the default stream.
            with torch.cuda.stream(torch.cuda.current_stream()):
                self._engine = NCCLTrainerWeightTransferEngine.trainer_init(
                    nccl, client=self._client, source=Source()
                )
        else:
            from vllm.distributed.weight_transfer.ipc_engine import (
                IPCTrainerInitInfo,
                IPCTrainerWeightTransferEngine,
            )

            # Unlike the other backends, it refuses tensors that are larger than a bucket.
            size = max(transport.bucket_bytes, *(spec.bytes for spec in specs))
            ipc = IPCTrainerInitInfo(packed=True, rank=rank, packed_buffer_size_bytes=size)
            self._engine = IPCTrainerWeightTransferEngine.trainer_init(
                ipc, client=self._client, source=Source()
            )

    def send(self, version: str) -> None:
        self._client.version = version
        self._engine.send_weights()


class _Versioned:
    """Adds the version to vLLM's `finish_weight_update`, whose trainer engines do not pass one."""

    def __init__(self, client: EngineClient | None) -> None:
        self._client = client
        self.version: str | None = None

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self._client is not None
        self._client.finish_weight_update(weight_version or self.version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)
