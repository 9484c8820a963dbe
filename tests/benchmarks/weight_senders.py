"""Seconds of one weight sync with one sender and with two, on hosts with limited links.

    python -m tests.benchmarks.weight_senders --rate 200mbit

Two policy ranks on hosts 1 and 2, two engines:

    apart     both engines on host 3
    beside    one engine on host 1, one on host 2

Weights: `replicated` (as of ZeRO 0 to 2) and `zero3` (DeepSpeed shards them; one sender has to gather them).
The senders, the receivers' loop and the checksums are the real ones; a thread takes the place of vLLM's
loader. The limit applies to what hosts 1 and 2 send. Needs root, to make the hosts.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from rlhf_core.engines.sync.sender import WeightSender
from rlhf_core.engines.sync.transport import TransportConfig
from rlhf_core.engines.sync.wire import (
    Acknowledgement,
    GlooSource,
    Route,
    TensorSpec,
    receive_buckets,
    tensor_checksum,
)
from tests.support.arguments import positive
from tests.support.hosts import missing_right, start_hosts, wait_until
from tests.support.tiny_llama import save_tiny_llama

RANKS = 2
TRAINING_PORT, ENGINE_PORT, SENDER_PORT = 6100, 6200, 6300
TOPOLOGIES = {"apart": (3, 3), "beside": (1, 2)}
"""Host of each engine."""
SECONDS = 300.0
"""Limit of each wait."""
_KEY = b"benchmark"
_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """What is measured."""

    topology: str
    senders: int


@dataclass(frozen=True)
class Measured:
    """Result of one case."""

    case: Case
    seconds: float
    """Median of the syncs."""
    bytes: int
    checksums: dict[str, str]
    """The same on every engine, else the sync has failed."""


@dataclass(frozen=True)
class Job:
    """What the processes on the hosts do."""

    weights: str
    """"plain" (random tensors), "replicated" or "zero3"."""
    model: str
    """Folder of the model; for "plain", the size of the weights in MiB."""
    cases: list[tuple[str, int]]
    syncs: int
    """Counted syncs of each case, after one that is not."""
    bucket_mib: int = 4


def address(host: int) -> str:
    return f"10.77.0.{host}"


# -- engines --


class Engine:
    """One engine: its side of weight sync without a model."""

    def __init__(self) -> None:
        self._sources: list[GlooSource] = []
        self._info: dict[str, Any] = {}
        self._received: dict[str, str] = {}
        self._version = -1

    def connect(self, info: dict[str, Any], position: int) -> None:
        self._info = info
        self._sources = []
        for (host, port), engines in zip(info["senders"], info["routes"], strict=True):
            self._sources.append(GlooSource(host, port, Route(*engines[position][0]), info["timeout"]))

    def update(self, update: dict[str, Any]) -> None:
        specs = [
            TensorSpec(name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(update["names"], update["dtypes"], update["shapes"], strict=True)
        ]
        self._received = {}
        for tensors in receive_buckets(self._sources, specs, self._info["bucket_bytes"]):
            self._received.update((name, tensor_checksum(tensor)) for name, tensor in tensors)

    def finish(self, version: str) -> None:
        self._version = int(version)

    def acknowledge(self) -> tuple[int, dict[str, str]]:
        return self._version, self._received


def serve_engine(host: int, number: int) -> None:
    """Answer the calls of the client, one connection after the other."""
    engine = Engine()
    with Listener((address(host), ENGINE_PORT + number), authkey=_KEY) as listener:
        while True:
            with listener.accept() as connection:
                try:
                    while True:
                        method, arguments = connection.recv()
                        connection.send(getattr(engine, method)(*arguments))
                except EOFError:
                    continue


class RemoteEngines:
    """An `EngineClient` of engines on other hosts."""

    def __init__(self, hosts: tuple[int, ...]) -> None:
        self._connections = [_connect(host, number) for number, host in enumerate(hosts)]
        self._pool = ThreadPoolExecutor(len(hosts))

    def _call(self, method: str, *arguments: Any, numbered: bool = False) -> list[Any]:
        def call(number: int, connection: Connection) -> Any:
            connection.send((method, (*arguments, number) if numbered else arguments))
            return connection.recv()

        return list(self._pool.map(call, range(len(self._connections)), self._connections))

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._call("connect", info, numbered=True)

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None:
        self._call("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish", weight_version)

    def acknowledge(self) -> list[Acknowledgement]:
        return [Acknowledgement(number, *answer) for number, answer in enumerate(self._call("acknowledge"))]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._pool.shutdown()


def _connect(host: int, number: int) -> Connection:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return Client((address(host), ENGINE_PORT + number), authkey=_KEY)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


# -- policy ranks --


def run_rank(rank: int, job: Job) -> list[Measured]:
    """Send the weights in every case. Rank 0 returns the results."""
    specs, whole, shards = _weights(rank, job)
    measured = []
    for number, (topology, senders) in enumerate(job.cases):
        addresses = {r: (address(r + 1), SENDER_PORT + number) for r in range(senders)}
        client = RemoteEngines(TOPOLOGIES[topology]) if rank == 0 else None
        sharded = shards is not None and senders == RANKS
        sender = WeightSender(
            shards if sharded else whole,
            specs,
            client,
            rank,
            TransportConfig(
                "gloo",
                addresses,
                tuple(address(host) for host in TOPOLOGIES[topology]),
                1,
                job.bucket_mib << 20,
                SECONDS,
            ),
            listener=socket.create_server(addresses[rank]) if rank in addresses else None,
            sharded=sharded,
        )
        reports = [sender.send(version) for version in range(job.syncs + 1)][1:]
        if client is not None:
            seconds = [report.seconds for report in reports if report is not None]
            checksums = dict(client.acknowledge()[0].checksums)
            size = sum(spec.bytes for spec in specs)
            measured.append(Measured(Case(topology, senders), statistics.median(seconds), size, checksums))
            client.close()
    return measured


def _weights(rank: int, job: Job) -> tuple[list[TensorSpec], Any, Any]:
    """Return specs, the source of whole weights, and that of shards (None: every rank has whole weights)."""
    if job.weights == "plain":
        generator = torch.Generator().manual_seed(0)
        rows = int(job.model) << 8
        tensors = {f"layer.{i}": torch.randn(rows // 8, 1024, generator=generator) for i in range(8)}
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        return specs, lambda: iter(tensors.items()), lambda: _parts(tensors, specs, rank)
    from rlhf_core.config.training import DeepSpeedConfig
    from rlhf_core.engines.deepspeed import TrainingEngine
    from rlhf_core.engines.distributed import Rank, join
    from rlhf_core.models.policy import load_policy

    self = Rank(rank, RANKS, 0, address(1), TRAINING_PORT)
    join(self)
    policy = load_policy(job.model, dtype="float32", attention="eager", device="cpu", pack=False)
    stage: Literal[0, 3] = 3 if job.weights == "zero3" else 0
    engine = TrainingEngine(policy, DeepSpeedConfig(ranks=RANKS, zero_stage=stage), None, self)
    specs = [TensorSpec(name, torch.float32, shape) for name, shape in engine.shapes()]
    return specs, engine.weights, engine.shards if engine.is_sharded else None


def _parts(
    tensors: dict[str, torch.Tensor], specs: list[TensorSpec], rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in specs:
        yield spec.name, tensors[spec.name].flatten()[spec.part(rank, RANKS)]


# -- hosts --


def measure(job: Job, rate: str, shared: Path) -> list[Measured]:
    """Run the job on three hosts, of which the first two send at most at `rate`.

    `shared` is a folder that the hosts see as /tmp/shared.
    """
    with start_hosts(3, shared=shared) as hosts:
        for host in hosts[:RANKS]:
            host.limit(rate)
        script = (sys.executable, "-m", "tests.benchmarks.weight_senders")
        for topology in {topology for topology, _ in job.cases}:
            for number, place in enumerate(TOPOLOGIES[topology]):
                hosts[place - 1].start(
                    *script, "--engine", place, number, log=f"engine-{number}", **_ENVIRONMENT
                )
        result = shared / "result.json"
        ranks = []
        for rank, host in enumerate(hosts[:RANKS]):
            arguments = ("--rank", rank, "--job", json.dumps(asdict(job)))
            ranks.append(host.start(*script, *arguments, log="rank", **_ENVIRONMENT))
        wait_until(
            lambda: result.exists() or any(process.poll() for process in ranks),
            SECONDS,
            lambda: "\n".join(host.output("rank") for host in hosts),
        )
        assert result.exists(), "\n".join(host.output("rank") for host in hosts)
        rows = json.loads(result.read_text())
        result.unlink()
    return [Measured(Case(**row.pop("case")), **row) for row in rows]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="200mbit", help="what hosts 1 and 2 send at most")
    parser.add_argument("--syncs", type=positive, default=3, help="counted syncs of each case")
    parser.add_argument("--engine", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        serve_engine(*options.engine)
    if options.rank is not None:
        measured = run_rank(options.rank, Job(**json.loads(options.job)))
        if options.rank == 0:
            unfinished = Path("/tmp/shared/unfinished.json")
            unfinished.write_text(json.dumps([asdict(row) for row in measured]))
            unfinished.rename("/tmp/shared/result.json")
        return
    if reason := missing_right():
        sys.exit(f"weight_senders: {reason}")
    _print(options.rate, options.syncs)


def _print(rate: str, syncs: int) -> None:
    cases = [(topology, senders) for topology in TOPOLOGIES for senders in (1, RANKS)]
    table = Table(title=f"Weight sync, two policy ranks on two hosts that send at most {rate} each")
    for column in ("weights", "engines", "1 sender", "2 senders", "faster", "checksums"):
        table.add_column(column, justify="left" if column in ("weights", "engines") else "right")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        model = save_tiny_llama(
            Path(folder) / "model",
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=8,
            vocab_size=4096,
            dtype="float32",
            tie_word_embeddings=False,
        )
        size = 0
        for weights in ("replicated", "zero3"):
            rows = measure(Job(weights, f"/tmp/shared/{model.name}", cases, syncs), rate, Path(folder))
            by_case = {(row.case.topology, row.case.senders): row for row in rows}
            for topology in TOPOLOGIES:
                one, two = by_case[topology, 1], by_case[topology, RANKS]
                same = one.checksums == two.checksums
                size = one.bytes
                table.add_row(
                    weights,
                    topology,
                    f"{one.seconds:.2f} s",
                    f"{two.seconds:.2f} s",
                    f"{one.seconds / two.seconds:.2f}x",
                    f"{len(one.checksums)} equal" if same else "DIFFERENT",
                )
    table.caption = f"{size / 1e6:.1f} MB of weights; medians of {syncs} syncs"
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
