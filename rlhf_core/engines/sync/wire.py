"""How weights travel: tensors packed into buckets, sent through a gloo group, and checked by checksums.

    sender (policy rank 0)              receivers (one per engine worker)
      pack bucket k+1  |  broadcast bucket k  ->   join, checksum, load bucket k

Both sides cut the same buckets from names, dtypes and shapes alone. The gloo group of sender and receivers is
for CPUs and for hardware without NCCL. It is separate from the training group, and each of its operations has
a timeout.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as _dist
from safetensors import safe_open

from rlhf_core.engines.distributed import rendezvous
from rlhf_core.errors import WeightSyncError
from rlhf_core.models.folder import ModelFolder

dist: Any = _dist
"""torch's type stubs lack the stores and the operations of a separate process group."""

_CHUNKS = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Elements that a checksum reads at a time. The result does not depend on it. On the CPU they fit the cache,
which is ten times faster than 4 M of them. On a GPU the peak is 128 MiB, 16 bytes for each element, in
addition to the engine's share.
"""
# Half of it is a prime near 2^32 divided by the golden ratio (Knuth, multiplicative hashing), so that the
# weights of neighbours are far apart.
_ODD = 2 * 2654435761
"""Difference of the weights of adjacent elements in a checksum."""
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# -- buckets --


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def cut(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Group consecutive specs into buckets of at most `limit` bytes.

    A larger tensor is a bucket of its own.
    """
    buckets: list[list[TensorSpec]] = []
    used = 0
    for spec in specs:
        if not buckets or used + spec.bytes > limit:
            buckets.append([])
            used = 0
        buckets[-1].append(spec)
        used += spec.bytes
    return buckets


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the bytes of tensors to one tensor of shape (bytes,) and dtype uint8."""
    return torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors])


def unpack(buffer: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return the tensors of a bucket.

    They are copies, because a view may be misaligned for its dtype.
    """
    parts = torch.split(buffer, [spec.bytes for spec in specs])
    return [part.clone().view(spec.dtype).view(spec.shape) for part, spec in zip(parts, specs, strict=True)]


# -- handles of CUDA IPC --

_TYPES: tuple[Any, ...] = (torch.Tensor, torch.storage.TypedStorage, torch.UntypedStorage, torch.uint8)
"""The types in a handle of a bucket."""


def plain_handles(handles: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return the handles of `torch.multiprocessing.reductions` by GPU, with numbers in place of types.

    An engine with several GPUs has a process that passes messages to its workers, as msgpack without types.
    """

    def plain(value: Any) -> Any:
        for number, known in enumerate(_TYPES):
            if value is known:
                return {"type": number}
        return value

    return {gpu: [plain(value) for value in handle] for gpu, handle in handles.items()}


def typed_handles(handles: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Return the handles of which `plain_handles` has made these."""

    def typed(value: Any) -> Any:
        if isinstance(value, dict):
            return _TYPES[value["type"]]
        return tuple(value) if isinstance(value, list) else value

    return {gpu: tuple(typed(value) for value in handle) for gpu, handle in handles.items()}


# -- checksums --


@dataclass(frozen=True)
class Acknowledgement:
    """The answer of one engine after a sync."""

    engine: int
    version: int
    checksums: Mapping[str, str]
    """Checksums of the received tensors by name."""


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return two 64-bit sums of the elements' bits, the second with odd weights that depend on the position.

    Any single altered element changes both sums, and swapped elements change the second. The arithmetic is
    modulo 2^64, so the result does not depend on the order of summation and on the device. vLLM's own
    checksums hash the fused parameters, which are empty on the CPU.
    """
    bits = tensor.detach().contiguous().flatten()
    # As integers: numbers would not tell -0.0 from 0.0, and NaN would be in every sum.
    bits = bits.view(_VIEWS[bits.element_size()])
    chunk = _CHUNKS[bits.device.type]
    # An odd number has an inverse modulo 2^64, so a difference in one element is never multiplied to 0.
    weights = torch.arange(min(chunk, bits.numel()), device=bits.device).mul_(_ODD).add_(1)
    sums = []
    for part in torch.split(bits, chunk):
        # A copy also of int64, which `mul_` would otherwise change in the model.
        values = part.to(torch.int64, copy=True)
        # Sums and products of int64 wrap around, which is arithmetic modulo 2^64.
        sums.append(torch.stack([values.sum(), values.mul_(weights[: len(values)]).sum()]))
        del values  # before the next part is converted
    # A GPU is only waited for once.
    found = torch.stack(sums).tolist()
    weighted = sum(own + _ODD * i * chunk * plain for i, (plain, own) in enumerate(found))
    sums_of_all = (sum(plain for plain, _ in found), weighted)
    return "".join(f"{each & (2**64 - 1):016x}" for each in sums_of_all)


def verify(sent: Mapping[str, str], version: int, acknowledgements: Sequence[Acknowledgement]) -> None:
    """Raise a WeightSyncError that names engine and tensor unless every engine has exactly what was sent."""
    for ack in acknowledgements:
        if ack.version != version:
            raise WeightSyncError(
                f"engine {ack.engine} acknowledged policy version {ack.version}, but {version} was sent; the"
                " run stops so that nothing is sampled from unknown weights"
            )
        wrong = [name for name in sent if ack.checksums.get(name) != sent[name]]
        extra = [name for name in ack.checksums if name not in sent]
        if wrong or extra:
            names = ", ".join((wrong + extra)[:3])
            raise WeightSyncError(
                f"engine {ack.engine} received other weights than version {version} sent:"
                f" {len(wrong) + len(extra)} of {len(sent)} tensors differ ({names}); the run stops, nothing"
                " was sampled from them"
            )


# -- model folders --


def folder_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and values of each tensor of a model folder. One at a time is in memory."""
    for file in ModelFolder(folder).weight_files():
        # "pread", as in models.sharded: a mapped file counts as memory of the process as a whole.
        with safe_open(file, framework="pt", backend="pread") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def folder_checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of each tensor of a model folder by name."""
    return {name: tensor_checksum(tensor) for name, tensor in folder_tensors(folder)}


def are_interchangeable(one: Path, other: Path) -> bool:
    """Return whether an engine of the model in `one` can get the weights of the model in `other`.

    Their configurations must be equal, and so must names, types and shapes of their tensors, which this host
    must have. Weights that are quantized in the files are never replaced.
    """
    first, second = ModelFolder(one), ModelFolder(other)
    if not (first.has_config and second.has_config):
        return False
    if first.config != second.config or "quantization_config" in first.config:
        return False
    kinds = _tensor_kinds(first)
    return bool(kinds) and kinds == _tensor_kinds(second)


def _tensor_kinds(folder: ModelFolder) -> dict[str, tuple[Any, Any]]:
    """Return type and shape of each tensor by name, from the headers of the files."""
    return {name: (entry["dtype"], entry["shape"]) for name, entry in folder.tensors.items()}


# -- transport --


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
    def processes(self) -> int:
        """The sender and the workers of all engines."""
        return 1 + len(self.engines) * self.workers


class GlooSender:
    """The sender in its group, whose other ranks receive.

    Args:
        listener: Socket of this sender.
        size: Ranks of the group.
        timeout: Time limit of each operation, in seconds.
    """

    def __init__(self, listener: socket.socket, size: int, timeout: float) -> None:
        address, port = listener.getsockname()
        limit = timedelta(seconds=timeout)
        store = rendezvous(address, port, size, timeout=limit, listener=listener)
        self._group = _group(store, 0, size, timeout)

    def send(self, buffer: torch.Tensor) -> Any:
        """Start to broadcast a buffer (bytes,) of uint8.

        Call `wait()` on the result before the buffer is used again. It is None for an empty buffer.
        """
        return _broadcast(self._group, buffer)


class GlooSource:
    """What one receiver gets.

    Args:
        address: Address of the sender.
        port: Port of the sender.
        rank: Rank of this receiver in the sender's group.
        size: Number of processes in the group.
        timeout: Time limit of each operation, in seconds.
    """

    def __init__(self, address: str, port: int, rank: int, size: int, timeout: float) -> None:
        store = rendezvous(address, port, size, timeout=timedelta(seconds=timeout))
        self._group = _group(store, rank, size, timeout)

    def start(self, size: int) -> tuple[Any, torch.Tensor]:
        """Start to receive a buffer (size,) of uint8. `finish` waits for it."""
        buffer = torch.empty(size, dtype=torch.uint8)
        return _broadcast(self._group, buffer), buffer

    def finish(self, arriving: tuple[Any, torch.Tensor]) -> torch.Tensor:
        """Wait for a buffer."""
        work, buffer = arriving
        if work is not None:
            work.wait()
        return buffer


def _group(store: Any, rank: int, size: int, timeout: float) -> Any:
    # Not `new_group`: engines are not in the trainers' default group.
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))


def _broadcast(group: Any, buffer: torch.Tensor) -> Any:
    """Start to send a buffer from rank 0 of the group to the others. Gloo has no broadcast of nothing."""
    return group.broadcast(buffer, 0) if len(buffer) else None


def receive_buckets(
    source: GlooSource, specs: Sequence[TensorSpec], limit: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield the named tensors of each bucket.

    The next bucket is requested before: gloo sends nothing until the receiver asks for it.

    Args:
        source: Receives from the sender.
        specs: All tensors.
        limit: Size of a bucket in bytes.
    """
    buckets = cut(specs, limit)
    arriving = source.start(sum(spec.bytes for spec in buckets[0]))
    for bucket, following in zip(buckets, [*buckets[1:], []], strict=True):
        next_one = source.start(sum(spec.bytes for spec in following))
        buffer = source.finish(arriving)
        tensors = unpack(buffer, bucket)
        # A suspended generator keeps its local variables: the buffer of this bucket would stay in memory
        # while the model loads its tensors.
        arriving = next_one
        del buffer
        yield list(zip((spec.name for spec in bucket), tensors, strict=True))
