"""Weight sync by vLLM's own trainer engines, for GPUs.

nccl        rank 0 broadcasts packed buckets
ipc         each rank shares its memory with the engine on the same GPU
nccl_m2n    every rank sends what it holds, and NCCL distributes it
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

import torch

from rlhf_core.engines.distributed import rendezvous
from rlhf_core.errors import ConfigError
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.system.processes import free_port
from rlhf_core.weight_sync.sender_group import SenderGroup
from rlhf_core.weight_sync.transport import EngineClient, TransportConfig, Weights
from rlhf_core.weight_sync.wire import TensorSpec, plain_handles

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

    sends_parts = False

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
                # The iterator from which `drain` takes what vLLM has left.
                return sending.current

        self.senders = SenderGroup(None, 0, transport.sender_names[:1], transport.timeout)
        self._sending = sending = _Sending(stream)
        self._client = _Versioned(client, ipc=transport.backend == "ipc")
        self._engine: Any
        if transport.backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerInitInfo,
                NCCLTrainerWeightTransferEngine,
            )

            nccl = NCCLTrainerInitInfo(
                master_address=transport.senders[0][0],
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
        self._sending.start()
        try:
            self._engine.send_weights()
        finally:
            self._sending.drain()
        self._client.raise_deferred()


def _ipc_buffer(bucket_bytes: int, specs: list[TensorSpec]) -> int:
    """Return the size of the buffer that a rank shares with its engine, which vLLM allocates as a whole.

    Unlike the other backends, IPC refuses tensors that are larger than a bucket.
    """
    sizes = [spec.bytes for spec in specs]
    return max(*sizes, min(bucket_bytes, sum(sizes)))


def row_blocks(specs: list[TensorSpec], ranks: int) -> frozenset[str]:
    """Return the tensors whose ZeRO-3 shards are blocks of rows, which `nccl_m2n` sends without a gather."""
    from vllm.distributed.weight_transfer.m2n_common import MAX_SOURCE_SHARDS

    # Each engine receives whole tensors, and NCCL cannot join one from more shards.
    if ranks > MAX_SOURCE_SHARDS:
        return frozenset()
    return frozenset(spec.name for spec in specs if spec.shape and spec.shape[0] % ranks == 0)


class M2NTransport:
    """The backend `nccl_m2n`. Every policy rank is a sender.

    Args:
        stream: The blocks of rows of the tensors in `sharded`, and the other tensors as a whole.
        specs: Whole tensors.
        sharded: Names of tensors of which each rank sends its block of rows.
        client: On rank 0.
        index: Index of this sender.
        transport: The same on all ranks.
        listener: Listening socket at the address of this sender.
    """

    sends_parts = False

    def __init__(
        self,
        stream: Weights,
        specs: list[TensorSpec],
        sharded: Collection[str],
        client: EngineClient | None,
        index: int,
        transport: TransportConfig,
        listener: socket.socket,
    ) -> None:
        from vllm.distributed.weight_transfer.m2n_common import REPLICATE, M2NMesh, M2NParamMeta
        from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource
        from vllm.distributed.weight_transfer.m2n_trainer import (
            M2NTrainerInitInfo,
            M2NTrainerWeightTransferEngine,
        )

        _refuse_untransferable(specs)
        ranks = len(transport.senders)
        self._sending = sending = _Sending(stream)

        def group() -> Any:
            return self._engine.group

        class Source(M2NWeightSource):  # type: ignore[misc]
            def mesh(self) -> Any:
                # A mesh has two axes. All ranks are on the first one, which divides the rows of a tensor.
                return M2NMesh((ranks, 1), 0)

            def metadata(self) -> list[Any]:
                placements = [(0, REPLICATE) if spec.name in sharded else None for spec in specs]
                return [
                    M2NParamMeta(spec.name, spec.dtype, spec.shape, placement)
                    for spec, placement in zip(specs, placements, strict=True)
                ]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                for spec, (name, tensor) in zip(specs, sending.current, strict=True):
                    rows = spec.shape[0] // ranks if name in sharded else spec.shape[0]
                    # With `offload: all`, the shards are in host memory, which NCCL does not send.
                    yield name, tensor.reshape(rows, *spec.shape[1:]).to(group().device)

        address, port = transport.senders[0]
        if index > 0:
            listener.close()
        store = rendezvous(
            address,
            port,
            ranks,
            timeout=timedelta(seconds=transport.timeout),
            listener=listener if index == 0 else None,
        )
        self.senders = SenderGroup(store, index, transport.sender_names, transport.timeout)
        if index == 0:
            store.set("nccl_port", str(free_port()))
        info = M2NTrainerInitInfo(
            rank=index,
            master_address=address,
            # `get` waits until rank 0 has set it.
            master_port=int(store.get("nccl_port")),
            world_size=ranks + len(transport.receivers),
            num_trainer_ranks=ranks,
        )
        self._client = _Versioned(client, ipc=False)
        # vLLM changes the current stream, but DeepSpeed needs the default stream.
        with torch.cuda.stream(torch.cuda.current_stream()):
            self._engine: Any = M2NTrainerWeightTransferEngine.trainer_init(
                info, client=self._client, source=Source()
            )

    def send(self, version: str) -> None:
        """Send all weights to the engines, which then have this version."""
        self.senders.start()
        self._client.start(version)
        self._sending.start()
        try:
            self._engine.send_weights()
        except BaseException as error:
            self.senders.report(error)
            raise
        finally:
            self._sending.drain()


def _refuse_untransferable(specs: list[TensorSpec]) -> None:
    """Raise ConfigError if a tensor has a shape or a dtype that `nccl_m2n` does not send."""
    from vllm.distributed.weight_transfer.m2n_common import check_transferable

    for spec in specs:
        try:
            check_transferable(spec.name, spec.dtype, spec.shape)
        except ValueError as error:
            raise ConfigError(f"ppo.weight_sync.backend: {error}; use nccl") from error
        assert math.prod(spec.shape) > 0, f"{spec.name} is empty"


class _Sending:
    """The weights of the present update."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.current: Iterator[tuple[str, torch.Tensor]] = iter(())

    def start(self) -> None:
        """Begin with the first tensor."""
        self.current = self._weights()

    def drain(self) -> None:
        """Take the weights that were not sent: the other ranks wait for this one in their gathers."""
        for _ in self.current:
            pass


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
