"""The backend `nccl_m2n` with vLLM's own trainer and worker classes; only NCCL and CUDA are replaced.

- ZeRO-3 shards that are blocks of rows are sent as they are, other tensors as a whole; engines with several
  workers receive every tensor as a whole and acknowledge the checksums
- shards that are in host memory are copied to the device
- a tensor altered on the way is named
- layouts that the library does not support are refused before anything is sent, or gathered
"""

from __future__ import annotations

import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.distributed.weight_transfer import nccl_common
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import reload

from rlhf_core.errors import ConfigError, WeightSyncError
from rlhf_core.weight_sync import receiver as _registers_the_backend  # noqa: F401
from rlhf_core.weight_sync.sender import WeightSender
from rlhf_core.weight_sync.transport import TransportConfig
from rlhf_core.weight_sync.vllm_transport import row_blocks
from rlhf_core.weight_sync.wire import Acknowledgement, TensorSpec
from tests.support.cuda_on_cpu import replace_cuda

RANKS, ENGINES, WORKERS = 2, 2, 2
torch.manual_seed(0)
WEIGHTS = {
    "rows": torch.randn(6, 5),
    "odd": torch.randn(7, 3),
    "norm": torch.randn(4),
    "cube": torch.randn(2, 3, 2),
}
SPECS = [TensorSpec(name, torch.bfloat16, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()]


class InHostMemory(torch.Tensor):
    """Stands for a tensor that is not on the GPU."""

    def to(self, target: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
        if isinstance(target, torch.dtype):
            return super().to(target, **options)
        with torch._C.DisableTorchFunctionSubclass():  # otherwise the result has this class again
            return self.as_subclass(torch.Tensor)


class Network:
    """Moves tensors between the threads that stand for ranks, as NCCL and `nccl.m2n` do between GPUs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: dict[tuple[str, int], dict[int, torch.Tensor]] = defaultdict(dict)
        self._calls: dict[tuple[str, int], int] = defaultdict(int)
        self.sizes: list[int] = []
        """Elements that each source rank sent, for each tensor."""
        self.alter = False

    def exchange(self, kind: str, rank: int, tensor: torch.Tensor | None, sources: set[int]) -> Any:
        """Return what the source ranks passed in their calls with the same number."""
        with self._changed:
            self._calls[kind, rank] += 1
            number = self._calls[kind, rank]
            if tensor is not None:
                self._sent[kind, number][rank] = tensor.clone()
                self._changed.notify_all()
            assert self._changed.wait_for(lambda: sources <= self._sent[kind, number].keys(), 30)
            return self._sent[kind, number]

    def reshard(self, source: Any, target: Any, comm: int, _stream: Any, **layout: Any) -> None:
        mesh, placements = layout["src_mesh"], layout["src_placements"]
        sources = set(range(mesh.start, mesh.start + mesh.dims[0] * mesh.dims[1]))
        if source is not None:
            assert type(source) is torch.Tensor, "not on the device"
            self.sizes.append(source.numel())
            self.exchange("reshard", comm - 1, source, set())
            return
        sent = self.exchange("reshard", comm - 1, None, sources)
        assert layout["dst_placements"] == ["replicate", 0], "every tensor arrives whole"
        parts = [sent[rank] for rank in sorted(sources)]
        sharded = placements[0] == 0
        target.copy_(torch.cat(parts) if sharded else parts[-1])
        if self.alter:
            target.view(-1)[0] += 1


class Communicator:
    """Stands for vLLM's `PyNcclCommunicator`."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self.rank = rank
        self.comm = rank + 1
        self.device = "cpu"

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        sent = self._network.exchange("broadcast", self.rank, tensor if self.rank == src else None, {src})
        tensor.copy_(sent[src])


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    made = Network()
    m2n: Any = ModuleType("nccl.m2n")
    m2n.Mesh = lambda dims, start_rank: SimpleNamespace(dims=dims, start=start_rank)
    m2n.Shard = lambda dim: dim
    m2n.Replicate = lambda: "replicate"
    m2n.Config = lambda max_cta: None
    m2n.Handle = SimpleNamespace(create=lambda config: object())
    m2n.reshard = made.reshard
    replace_cuda(monkeypatch)
    monkeypatch.setattr(
        nccl_common,
        "stateless_init_process_group",
        lambda _address, _port, rank, _size, device: Communicator(made, rank),
    )
    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda _model: None)
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda _model, _config: None)
    with mock.patch.dict(sys.modules, {"nccl": SimpleNamespace(m2n=m2n), "nccl.m2n": m2n}):
        yield made


class Model(torch.nn.Module):
    """Has a parameter that vLLM could receive directly; here all go through `load_weights`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(4))
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.loaded.update(weights)


class Engines:
    """The client of two engines with two workers each, in threads."""

    def __init__(self) -> None:
        self.models = [[Model() for _ in range(WORKERS)] for _ in range(ENGINES)]
        self.backends = []
        for models in self.models:
            for worker, model in enumerate(models):
                parallel = SimpleNamespace(
                    rank=worker, world_size=WORKERS, data_parallel_index=0, pipeline_parallel_size=1
                )
                config = SimpleNamespace(parallel_config=parallel, model_config=None, lora_config=None)
                backend = WeightTransferEngineFactory._registry["rlhf_nccl_m2n"]()
                self.backends.append(backend(None, config, torch.device("cpu"), model))
        self._pool = ThreadPoolExecutor(ENGINES * WORKERS)
        self._version = ""

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        def join(number: int) -> None:
            backend = self.backends[number]
            backend.init_transfer_engine(backend.parse_init_info({**info, "position": number // WORKERS}))

        list(self._pool.map(join, range(ENGINES * WORKERS)))

    def start_weight_update(self) -> None:
        for backend in self.backends:
            backend.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        list(self._pool.map(lambda backend: backend.update_weights(update_info), self.backends))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._version = str(weight_version)

    def acknowledge(self) -> list[Acknowledgement]:
        return [
            Acknowledgement(number // WORKERS, int(self._version), dict(backend.inbox.checksums))
            for number, backend in enumerate(self.backends)
        ]


def connect(
    engines: Engines, specs: list[TensorSpec], *, zero3: bool, offloaded: bool = False
) -> list[WeightSender]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(RANKS)]
    addresses = {rank: listener.getsockname() for rank, listener in enumerate(listeners)}
    transport = TransportConfig("nccl_m2n", addresses, ("127.0.0.1",) * ENGINES, WORKERS, 1 << 20, 30.0)
    sharded = row_blocks(specs, RANKS) if zero3 else frozenset()

    def start(rank: int) -> WeightSender:
        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for spec in specs:
                tensor = WEIGHTS[spec.name]
                if spec.name in sharded:
                    tensor = tensor.flatten()[spec.part(rank, RANKS)]
                    tensor = tensor.as_subclass(InHostMemory) if offloaded else tensor
                yield spec.name, tensor

        client: Any = engines if rank == 0 else None
        return WeightSender(
            weights, specs, client, rank, transport, listener=listeners[rank], sharded=sharded
        )

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(start, range(RANKS)))


def send(senders: list[WeightSender]) -> Any:
    with ThreadPoolExecutor(RANKS) as pool:
        calls = [pool.submit(sender.send, 7) for sender in senders]
        reports = [call.result(timeout=60) for call in calls]
    return reports[0]


@pytest.mark.parametrize(("zero3", "offloaded"), [(True, False), (True, True), (False, False)])
def test_every_rank_sends_what_it_holds(network: Network, zero3: bool, offloaded: bool) -> None:
    engines = Engines()
    report = send(connect(engines, SPECS, zero3=zero3, offloaded=offloaded))
    assert report.tensors == len(SPECS)
    for models in engines.models:
        for model in models:
            assert list(model.loaded) == list(WEIGHTS)
            for name, tensor in WEIGHTS.items():
                assert torch.equal(model.loaded[name], tensor.bfloat16())
    # Seven rows are not two blocks.
    assert sorted(network.sizes) == sorted(2 * ([15, 21, 2, 6] if zero3 else [30, 21, 4, 12]))


def test_an_altered_tensor_is_named(network: Network) -> None:
    network.alter = True
    with pytest.raises(WeightSyncError, match=r"engine 0 .* version 7 sent: 4 of 4 tensors differ \(rows"):
        send(connect(Engines(), SPECS, zero3=True))


def test_unsupported_layouts_are_refused_or_gathered(network: Network) -> None:
    assert row_blocks(SPECS, 2) == {"rows", "norm", "cube"}
    assert row_blocks([TensorSpec("many", torch.float32, (34, 2))], 17) == frozenset()
    four = TensorSpec("convolution", torch.float32, (2, 2, 2, 2))
    with pytest.raises(
        ConfigError, match=r"ppo.weight_sync.backend: parameter 'convolution' has rank 4.*use nccl"
    ):
        connect(Engines(), [four], zero3=False)
