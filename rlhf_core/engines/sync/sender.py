"""The trainers' side of weight sync. Every policy rank calls `send`, because gathering the weights is a
collective operation. Rank 0 transmits them and calls the engines.

start  ->  update (engines receive while rank 0 sends)  ->  finish(version)  ->  compare acknowledgements

gloo    rank 0 sends buckets through a process group of its own (`wire`)
nccl    rank 0 broadcasts packed buckets, by vLLM's trainer engine
ipc     each rank shares its memory with the engine on the same GPU, by vLLM's trainer engine
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_core.engines.sync.wire import (
    EngineClient,
    GlooSender,
    TensorSpec,
    TransportConfig,
    Weights,
    cut,
    pack,
    plain_handles,
    tensor_checksum,
    verify,
)
from rlhf_core.errors import WeightSyncError
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.files import json_sha256
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.system.processes import free_port


@dataclass(frozen=True)
class SyncReport:
    """One sync, as rank 0 saw it."""

    version: int
    tensors: int
    bytes: int
    seconds: float
    checksum: str = ""
    """Digest of the checksums of all tensors, as they were sent; 16 hex digits."""


class WeightSender:
    """Sends the policy's weights and proves that they arrived.

    Args:
        weights: The weights of the policy.
        specs: Names, shapes and dtypes of the weights as they are sent.
        client: Client of the engines on rank 0; None on other ranks.
        rank: Rank of this process among the policy's ranks.
        transport: The same on all ranks.
        listener: Socket at the address of `transport.sender`, on rank 0.
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
    ) -> None:
        self._weights = weights
        self._specs = specs
        self._client = client
        self._checksums: dict[str, str] = {}
        self._transport: _GlooTransport | VllmTransport
        if transport.backend == "gloo":
            self._transport = _GlooTransport(self._stream, specs, client, transport, listener)
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
        # Checksums prove that the tensors arrived. Whether the engines use them, the canary of a step tells.
        self._transport.send(str(version))
        if self._client is None:
            return None
        verify(self._checksums, version, self._client.acknowledge())
        total = sum(spec.bytes for spec in self._specs)
        checksum = json_sha256(self._checksums)[:16]
        return SyncReport(version, len(self._specs), total, time.monotonic() - started, checksum)

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights in the engines' precision. Rank 0 stores the checksums of what it sends."""
        for spec, (name, tensor) in zip(self._specs, self._weights(), strict=True):
            assert spec.name == name, f"weights come out of order: {name} where {spec.name} was declared"
            tensor = tensor.to(spec.dtype)
            if self._client is not None:
                self._checksums[name] = tensor_checksum(tensor)
                if failpoint("weight_sync.send", "alter") == "alter":
                    # The weights of the policy itself must stay as they are.
                    tensor = tensor.clone()
                    tensor.view(-1)[:1] += 1
            yield name, tensor


class _GlooTransport:
    def __init__(
        self,
        stream: Weights,
        specs: list[TensorSpec],
        client: EngineClient | None,
        transport: TransportConfig,
        listener: socket.socket | None,
    ) -> None:
        self._stream = stream
        self._specs = specs
        self._client = client
        self._bucket_bytes = transport.bucket_bytes
        if client is None:
            return
        assert listener is not None, "rank 0 listens"
        try:
            self._connect(client, transport, listener)
        except RuntimeError as error:  # torch's class of broken and late connections
            raise WeightSyncError(
                f"policy rank 0 on {transport.sender[0]} did not connect to the engines on"
                f" {', '.join(sorted(set(transport.engines)))} within {transport.timeout:g} s"
                f" (run.timeouts.sync): {error}"
            ) from error

    def _connect(self, client: EngineClient, transport: TransportConfig, listener: socket.socket) -> None:
        """Join the engines."""
        info = {
            "sender": transport.sender,
            # Rank 0 is the sender. Each engine adds the workers before its own.
            "rank_offset": 1,
            "world_size": transport.processes,
            "bucket_bytes": self._bucket_bytes,
            "timeout": transport.timeout,
        }
        # In a thread: the engines' call only returns after the sender has joined as well.
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(client.init_weight_transfer_engine, info)
            self._group = GlooSender(listener, transport.processes, transport.timeout)
            joined.result()

    def send(self, version: str) -> None:
        stream = self._stream()
        try:
            if self._client is not None:
                self._transmit(self._client, stream, version)
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
            self._broadcast(stream, received)
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

    def _broadcast(self, stream: Iterator[tuple[str, torch.Tensor]], received: Future[None]) -> None:
        sending: Any = None
        # gloo reads the memory of a buffer until it is sent, so this one is held until the next one.
        held: torch.Tensor | None = None
        try:
            for bucket in cut(self._specs, self._bucket_bytes):
                # While the bucket before is being sent.
                buffer = pack([next(stream)[1].cpu() for _ in bucket])
                self._finish(sending, received)
                sending, held = self._group.send(buffer), buffer
            self._finish(sending, received)
            del held
        except RuntimeError as error:
            raise WeightSyncError(f"the broadcast to the engines broke: {error}") from error
        for _ in stream:  # ends the last gathering context
            raise AssertionError("more weights than were declared")

    def _finish(self, sending: Any, received: Future[None]) -> None:
        """Wait until a bucket is sent. Raises the error of the engines if they fail while it waits.

        `sending` is None for an empty bucket, and before the first one.
        """
        if sending is None:
            return
        while not sending.is_completed():
            if received.done():
                received.result()
            time.sleep(0.0005)
        # `is_completed` does not raise the error of a broadcast that has failed.
        sending.wait()


_FAILED_SECONDS = 5.0
"""Time for a broadcast to end by itself after an engine has failed."""


class VllmTransport:
    """The backends `nccl` and `ipc`.

    Args:
        stream: The weights, gathered one bucket at a time.
        specs: Names, types and shapes of the weights, in order.
        client: Calls the engines; None on other ranks than the sender.
        rank: This policy rank.
        transport: Addresses, sizes and limits of time.
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
                return transport_of_source._current

        # Inside of `Source`, `self` is another object.
        transport_of_source = self
        self._stream = stream
        self._current: Iterator[tuple[str, torch.Tensor]] = iter(())
        """The weights of the present update that were not sent yet."""
        self._client = _Versioned(client, ipc=transport.backend == "ipc")
        self._engine: Any
        if transport.backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerInitInfo,
                NCCLTrainerWeightTransferEngine,
            )

            nccl = NCCLTrainerInitInfo(
                master_address=transport.sender[0],
                # Only the port of rank 0 is used.
                master_port=free_port(),
                world_size=transport.processes,
                rank=rank,
                packed_buffer_size_bytes=transport.bucket_bytes,
                # With more, vLLM alternates between streams, and memory that DeepSpeed frees on one of them
                # may be used again while the other still reads it.
                packed_num_buffers=1,
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

            ipc = IPCTrainerInitInfo(
                packed=True, rank=rank, packed_buffer_size_bytes=_ipc_buffer(transport.bucket_bytes, specs)
            )
            self._engine = IPCTrainerWeightTransferEngine.trainer_init(
                ipc, client=self._client, source=Source()
            )

    def send(self, version: str) -> None:
        """Send all weights to the engines, which then have this version."""
        self._client.start(version)
        self._current = self._stream()
        try:
            self._engine.send_weights()
        finally:
            # What vLLM has left after an error: the other ranks wait for this one in their gathers.
            for _ in self._current:
                pass
        self._client.raise_deferred()


def _ipc_buffer(bucket_bytes: int, specs: list[TensorSpec]) -> int:
    """Return the size of the buffer that a rank shares with its engine, which vLLM allocates as a whole.

    Unlike the other backends, IPC refuses tensors that are larger than a bucket.
    """
    sizes = [spec.bytes for spec in specs]
    return max(*sizes, min(bucket_bytes, sum(sizes)))


class _Versioned:
    """The client of the engines, with what vLLM's trainer engines lack.

    It adds the version to `finish_weight_update`. An error of the engines is reported at once, because a
    broadcast over NCCL does not end without them.

    With `ipc`, all ranks meet after each bucket, also after an engine has failed: the calls after an error do
    nothing, and `raise_deferred` raises it when all ranks have ended. The handles are sent without types
    (`wire.plain_handles`).
    """

    def __init__(self, client: EngineClient | None, *, ipc: bool) -> None:
        self._client = client
        self._ipc = ipc
        self._version: str | None = None
        self._error: Exception | None = None

    def start(self, version: str) -> None:
        """Begin the update to a version."""
        self._version = version
        self._error = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        assert self._client is not None
        self._client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        assert self._client is not None
        self._call(self._client.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        assert self._client is not None
        if self._ipc:
            update_info = {**update_info, "ipc_handles": plain_handles(update_info["ipc_handles"])}
        self._call(self._client.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self._client is not None
        self._call(self._client.finish_weight_update, weight_version or self._version)

    def raise_deferred(self) -> None:
        if self._error is not None:
            raise self._error

    def _call(self, method: Callable[..., None], *args: Any) -> None:
        if self._error is not None:
            return
        try:
            method(*args)
        except Exception as error:
            if not self._ipc:
                # Another thread may wait in NCCL for ever. With this limit, the monitor reports it.
                heartbeat(f"broadcast weights after an engine failed: {error}", _FAILED_SECONDS)
                raise
            self._error = error
