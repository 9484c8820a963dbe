"""Several senders over real gloo groups.

- whatever the number of senders, and whether each holds whole weights or its shard, every engine receives the
  same tensors, and acknowledges the same checksums
- checksums of parts add up to that of the whole; parts that are exchanged, shifted or missing change it
- a failure of an engine or of one sender ends the sync of all senders at once, with the error of the cause
- the weights enter each host once, and are forwarded there to the other engines
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlhf_core.engines.sync.sender import SyncReport, WeightSender
from rlhf_core.engines.sync.transport import TransportConfig, sender_ranks
from rlhf_core.engines.sync.wire import (
    Acknowledgement,
    GlooSource,
    TensorSpec,
    add_checksums,
    pack,
    receive_buckets,
    routes,
    tensor_checksum,
    unpack,
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
    """Engines with one worker each, in threads of this process, on `hosts`."""

    def __init__(
        self,
        error: Exception | None = None,
        hosts: tuple[str, ...] = ("127.0.0.1",) * 2,
        sources: list[type[GlooSource]] | None = None,
    ) -> None:
        self.hosts = hosts
        self._classes = sources
        self._error = error
        self._version = -1
        self._sources: list[list[GlooSource]] = [[] for _ in hosts]
        self._pool = ThreadPoolExecutor(len(hosts))
        self.received: list[dict[str, torch.Tensor]] = []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        list(self._pool.map(self._join, range(len(self.hosts)), [info] * len(self.hosts)))

    def _join(self, engine: int, info: dict[str, Any]) -> None:
        classes = self._classes or [GlooSource] * len(info["senders"])
        for (address, port), paths, source in zip(info["senders"], info["routes"], classes, strict=True):
            self._sources[engine].append(source(address, port, paths[engine][0], info["timeout"]))

    def start_weight_update(self) -> None:
        self.received = [{} for _ in self.hosts]

    def update_weights(self, update_info: Any) -> None:
        if self._error is not None:
            raise self._error
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


def shards(rank: int, ranks: int) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in SPECS:
        yield spec.name, WEIGHTS[spec.name].flatten()[spec.part(rank, ranks)]


def failing_weights() -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(WEIGHTS.items())[:2]
    raise ArithmeticError("the weights of this rank are gone")


def start_senders(
    engines: Engines,
    senders: int,
    *,
    sharded: bool = False,
    failing: int | None = None,
    timeout: float = 60.0,
) -> tuple[ThreadPoolExecutor, list[WeightSender]]:
    """Connect the senders to the engines, each in a thread as its process would."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(senders)]
    addresses = {rank: listener.getsockname() for rank, listener in enumerate(listeners)}
    transport = TransportConfig("gloo", addresses, engines.hosts, 1, BUCKET, timeout)
    pool = ThreadPoolExecutor(senders)

    def connect(rank: int) -> WeightSender:
        weights: Any = whole_weights
        if sharded:
            weights = lambda: shards(rank, senders)  # noqa: E731
        if rank == failing:
            weights = failing_weights
        return WeightSender(
            weights,
            SPECS,
            engines if rank == 0 else None,
            rank,
            transport,
            listener=listeners[rank],
            sharded=sharded,
        )

    return pool, list(pool.map(connect, range(senders)))


def sync(pool: ThreadPoolExecutor, senders: list[WeightSender]) -> list[Future[SyncReport | None]]:
    return [pool.submit(sender.send, 3) for sender in senders]


ONE_HOST = ("127.0.0.1",) * 2
THREE_HOSTS = ("b", "127.0.0.1", "b", "c")
"""Hosts of the engines, as the senders know them. Only the routes depend on them."""


@pytest.mark.parametrize("hosts", [ONE_HOST, THREE_HOSTS])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("senders", [1, 2, 3])
def test_engines_receive_the_same_tensors_from_any_number_of_senders(
    senders: int, sharded: bool, hosts: tuple[str, ...]
) -> None:
    engines = Engines(hosts=hosts)
    pool, connected = start_senders(engines, senders, sharded=sharded)
    for _ in range(2):
        report, *others = [call.result(timeout=60) for call in sync(pool, connected)]
        assert report is not None
        assert report.bytes == sum(spec.bytes for spec in SPECS)
        assert others == [None] * (senders - 1)
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


@pytest.mark.parametrize("sender", [0, 1])
def test_a_part_altered_on_the_way_is_named(sender: int) -> None:
    engines = Engines(sources=[AlteringSource if index == sender else GlooSource for index in range(2)])
    pool, connected = start_senders(engines, 2)
    with pytest.raises(
        WeightSyncError, match=r"other weights than version 3 sent: \d of 5 tensors differ \(matrix"
    ):
        sync(pool, connected)[0].result(timeout=60)


def test_a_failing_engine_ends_the_sync_of_all_senders() -> None:
    pool, connected = start_senders(Engines(ValueError("the engine cannot take this tensor")), 3)
    started = time.monotonic()
    first, *others = sync(pool, connected)
    with pytest.raises(ValueError, match="cannot take this tensor"):
        first.result(timeout=60)
    # Rank 0 has the error of the engines, and the others leave it to it.
    assert [call.result(timeout=60) for call in others] == [None, None]
    assert time.monotonic() - started < 15


def test_a_failing_sender_ends_the_sync_of_all_senders() -> None:
    pool, connected = start_senders(Engines(), 3, failing=2, timeout=8.0)
    started = time.monotonic()
    first, second, failing = sync(pool, connected)
    with pytest.raises(ArithmeticError):
        failing.result(timeout=60)
    with pytest.raises(WeightSyncError, match=r"policy rank 2 on .*: the weights of this rank are gone"):
        first.result(timeout=60)
    assert second.result(timeout=60) is None
    assert time.monotonic() - started < 7.5, "before the timeout of the groups"


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_checksums_of_parts_add_up_to_the_whole(parts: int) -> None:
    sums = []
    for index in range(parts):
        slices = {spec.name: spec.part(index, parts) for spec in SPECS}
        sums.append({n: tensor_checksum(WEIGHTS[n].flatten()[s], s.start) for n, s in slices.items()})
    assert add_checksums(sums) == {name: tensor_checksum(tensor) for name, tensor in WEIGHTS.items()}


def test_exchanged_shifted_and_missing_parts_change_the_checksum() -> None:
    spec = TensorSpec("a", torch.float32, (4, 2))
    tensor = torch.randn(4, 2)
    parts = [pack([tensor.flatten()[spec.part(index, 2)]]) for index in range(2)]
    assert tensor_checksum(unpack(parts, [spec])[0]) == tensor_checksum(tensor)
    shifted = pack([tensor.flatten().roll(1)])
    wrong = [[parts[1], parts[0]], [parts[0], parts[0]], [shifted[:16], shifted[16:]]]
    for buffers in wrong:
        assert tensor_checksum(unpack(buffers, [spec])[0]) != tensor_checksum(tensor)


def test_on_one_host_all_receive_from_the_sender_in_order() -> None:
    found = routes("a", ["a"] * 3)
    assert [(route.rank, route.size, route.relay) for route in found] == [(1, 4, ""), (2, 4, ""), (3, 4, "")]


def test_weights_enter_each_other_host_once() -> None:
    hosts = ["b", "a", "b", "c", "a", "b"]
    found = routes("a", hosts)
    # The first on b and c, and both on a.
    assert [route.rank for route in found] == [1, 2, 0, 3, 4, 0]
    assert {route.size for route in found} == {5}
    relayed = {index: route.relay_rank for index, route in enumerate(found) if route.relay == "b"}
    assert relayed == {0: 0, 2: 1, 5: 2}
    assert [route.relay for route in found] == ["b", "", "b", "", "", "b"]


def test_senders_are_spread_over_the_ranks() -> None:
    assert sender_ranks(8, 1) == [0]
    assert sender_ranks(8, 2) == [0, 4]
    assert sender_ranks(3, 3) == [0, 1, 2]
