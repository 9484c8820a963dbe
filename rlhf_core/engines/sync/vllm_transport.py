"""Weight sync by vLLM's own trainer engines, for GPUs.

nccl    rank 0 broadcasts packed buckets
ipc     each rank shares its memory with the engine on the same GPU
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlhf_core.engines.sync.wire import EngineClient, TensorSpec, TransportConfig, Weights, plain_handles
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.system.processes import free_port

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
                world_size=len(transport.receivers) + 1,
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
