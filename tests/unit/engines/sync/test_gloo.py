"""The sender and engines over real gloo groups.

- every engine receives the same tensors, also in a second sync
- a bucket that is altered on the way is noticed
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlhf_core.engines.sync.sender import WeightSender
from rlhf_core.engines.sync.wire import (
    Acknowledgement,
    GlooSource,
    TensorSpec,
    TransportConfig,
    receive_buckets,
    tensor_checksum,
)
from rlhf_core.errors import WeightSyncError

torch.manual_seed(0)
WEIGHTS = {
    "matrix": torch.randn(6, 5),
    "odd": torch.randn(7).bfloat16(),
    "one": torch.randn(1),
    "large": torch.randn(33, 3).bfloat16(),
    "last": torch.randn(2, 2, 3),
}
SPECS = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()]
BUCKET = 150
"""Bytes: three buckets."""


class Engines:
    """Engines with one worker each, in threads of this process."""

    def __init__(self, count: int, source: type[GlooSource] = GlooSource) -> None:
        self.hosts = ("127.0.0.1",) * count
        self._class = source
        self._version = -1
        self._sources: dict[int, GlooSource] = {}
        self._pool = ThreadPoolExecutor(count)
        self.received: list[dict[str, torch.Tensor]] = []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        list(self._pool.map(self._join, range(len(self.hosts)), [info] * len(self.hosts)))

    def _join(self, engine: int, info: dict[str, Any]) -> None:
        address, port = info["sender"]
        rank = info["rank_offset"] + engine
        self._sources[engine] = self._class(address, port, rank, info["world_size"], info["timeout"])

    def start_weight_update(self) -> None:
        self.received = [{} for _ in self.hosts]

    def update_weights(self, update_info: Any) -> None:
        for call in [self._pool.submit(self._receive, engine) for engine in range(len(self.hosts))]:
            call.result(timeout=60)

    def _receive(self, engine: int) -> None:
        for tensors in receive_buckets(self._sources[engine], SPECS, BUCKET):
            self.received[engine].update(tensors)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._version = int(str(weight_version))

    def acknowledge(self) -> list[Acknowledgement]:
        return [
            Acknowledgement(index, self._version, {n: tensor_checksum(t) for n, t in tensors.items()})
            for index, tensors in enumerate(self.received)
        ]


def whole_weights() -> Iterator[tuple[str, torch.Tensor]]:
    yield from WEIGHTS.items()


def sender_to(engines: Engines) -> WeightSender:
    listener = socket.create_server(("127.0.0.1", 0))
    transport = TransportConfig("gloo", listener.getsockname(), engines.hosts, 1, BUCKET, 60.0)
    return WeightSender(whole_weights, SPECS, engines, 0, transport, listener=listener)


@pytest.mark.parametrize("count", [2, 4])
def test_engines_receive_the_tensors_that_are_sent(count: int) -> None:
    engines = Engines(count)
    sender = sender_to(engines)
    for _ in range(2):
        report = sender.send(3)
        assert report is not None
        assert report.bytes == sum(spec.bytes for spec in SPECS)
        for received in engines.received:
            assert list(received) == list(WEIGHTS)
            for name, tensor in WEIGHTS.items():
                assert torch.equal(received[name], tensor)
                assert received[name].dtype == tensor.dtype


class AlteringSource(GlooSource):
    """A connection that changes a bit of each bucket."""

    def finish(self, arriving: tuple[Any, torch.Tensor]) -> torch.Tensor:
        buffer = super().finish(arriving)
        buffer[0] ^= 1
        return buffer


def test_a_bucket_altered_on_the_way_is_named() -> None:
    sender = sender_to(Engines(2, AlteringSource))
    with pytest.raises(
        WeightSyncError, match=r"other weights than version 3 sent: \d of 5 tensors differ \(matrix"
    ):
        sender.send(3)
