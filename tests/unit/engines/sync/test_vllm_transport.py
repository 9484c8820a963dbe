"""Weight sync by vLLM's own trainer engines, with CUDA and NCCL scripted.

- buckets are sent on one stream, in order
- an engine that fails leaves no rank in a gather, over NCCL or IPC; rank 0 raises the error of the engine
- over IPC, the buffer holds a bucket or all tensors, and the engine releases it after each update, also that
  of an adapter
- over IPC, each worker of an engine takes the buffer on its own GPU; the handles pass through vLLM's messages
- while a broadcast without its engine hangs, the failure is reported with a limit of seconds
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from rlhf_core.engines.sync import receiver
from rlhf_core.engines.sync.sender import VllmTransport, _Versioned
from rlhf_core.engines.sync.wire import Acknowledgement, TensorSpec, TransportConfig
from rlhf_core.system.heartbeat import Monitor, register, unregister
from tests.support.cuda_on_cpu import replace_cuda

NAMES = ("a", "b", "c", "d")
SPECS = [TensorSpec(name, torch.float32, (4,)) for name in NAMES]


class _Engines:
    """The client of engines that fail when they have received `good` buckets."""

    def __init__(self, good: int = 99) -> None:
        self.good = good
        self.calls: list[str] = []
        self.init: Any = None
        self.update: Any = None
        """What the last bucket was announced with."""

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self.init = init_info

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        self.update = update_info
        self.good -= 1
        if self.good < 0:
            raise ValueError("the engine cannot take this tensor")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")

    def acknowledge(self) -> list[Acknowledgement]:
        return []


class _Group:
    """NCCL's communicator. It waits for the engines as little as the test says."""

    def __init__(self, waits: threading.Event | None = None) -> None:
        self.sent: list[int] = []
        self._waits = waits

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.sent.append(tensor.numel())
        if self._waits is not None:
            assert self._waits.wait(20)
            raise RuntimeError("NCCL: the communicator is broken")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> _Group:
    made = _Group()
    replace_cuda(monkeypatch)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: made)
    monkeypatch.setattr(nccl_engine, "worker_init_payload", lambda info: info)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda index, count: (stream,) * count)
    return made


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> threading.Barrier:
    """Return what stands for the collective in which all ranks meet after each bucket."""
    meeting = threading.Barrier(2, timeout=10)

    def chunks(iterator: Iterator[tuple[str, torch.Tensor]], **_options: Any) -> Iterator[Any]:
        for name, tensor in iterator:
            yield SimpleNamespace(
                ipc_handle={}, names=[name], dtype_names=["float32"], shapes=[list(tensor.shape)],
                tensor_sizes=[16],
            )  # fmt: skip

    def gather(_engine: Any, handles: list[Any]) -> list[Any]:
        meeting.wait()
        return handles

    engine = ipc_engine.IPCTrainerWeightTransferEngine
    replace_cuda(monkeypatch)
    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", chunks)
    monkeypatch.setattr(engine, "_all_gather_and_merge_handles", gather)
    monkeypatch.setattr(engine, "_post_send_sync", staticmethod(lambda: meeting.wait() and None))
    return meeting


def transport(backend: str, rank: int, client: _Engines | None, gather: threading.Barrier) -> VllmTransport:
    """A rank whose weights are gathered with those of the other rank, tensor by tensor."""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in NAMES:
            gather.wait()
            yield name, torch.zeros(4)

    config = TransportConfig(backend, ("127.0.0.1", 1), ("127.0.0.1",), 1, 20, 10.0)
    return VllmTransport(weights, SPECS, client, rank, config)


def send_on_two_ranks(backend: str, engines: _Engines) -> list[Exception | None]:
    gather = threading.Barrier(2, timeout=10)
    ranks = [transport(backend, rank, engines if rank == 0 else None, gather) for rank in (0, 1)]
    errors: list[Exception | None] = [None, None]

    def run(rank: int) -> None:
        try:
            ranks[rank].send("7")
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return errors


def test_buckets_are_sent_on_one_stream(group: _Group) -> None:
    engines = _Engines()
    assert send_on_two_ranks("nccl", engines) == [None, None]
    assert engines.init.packed_num_buffers == 1
    assert engines.calls == ["start", "update", "finish 7"]
    assert sum(group.sent) == 4 * 16


def test_an_engine_that_fails_leaves_no_rank_in_a_gather_over_nccl(
    group: _Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensor: torch.Tensor, src: int) -> None:
        raise RuntimeError("NCCL: the communicator is broken")

    monkeypatch.setattr(group, "broadcast", refuse)
    first, second = send_on_two_ranks("nccl", _Engines(good=0))
    assert first is not None and second is None


def test_an_engine_that_fails_leaves_no_rank_in_a_collective_over_ipc(ipc: threading.Barrier) -> None:
    engines = _Engines(good=1)
    first, second = send_on_two_ranks("ipc", engines)
    assert "cannot take this tensor" in str(first) and second is None
    assert engines.calls == ["start", "update", "update"]


def test_the_ranks_are_ready_for_another_update_after_an_error(ipc: threading.Barrier) -> None:
    gather = threading.Barrier(1)
    engines = _Engines(good=0)
    sender = transport("ipc", 0, engines, gather)
    for _ in range(3):
        ipc.reset()
        other = threading.Thread(target=lambda: [ipc.wait() for _ in range(2 * len(NAMES) + 1)])
        other.start()
        if engines.good <= 0:
            with pytest.raises(ValueError, match="cannot take"):
                sender.send("1")
            engines.good = 99
        else:
            sender.send("2")
        other.join(20)
    assert engines.calls[-1] == "finish 2"


@pytest.mark.parametrize(("bucket", "size"), [(512 << 20, 64), (40, 40), (4, 16)])
def test_a_buffer_over_ipc_holds_a_bucket_or_all_tensors(
    bucket: int, size: int, ipc: threading.Barrier
) -> None:
    config = TransportConfig("ipc", ("127.0.0.1", 1), ("127.0.0.1",), 1, bucket, 10.0)
    sender = VllmTransport(lambda: iter(()), SPECS, _Engines(), 0, config)
    assert sender._engine.packed_buffer_size_bytes == size


class _Receives(ipc_engine.IPCWeightTransferEngine):  # type: ignore[misc]  # vLLM has no types here
    """Gets one tensor, in a buffer on the CPU."""

    def receive_weights(self, _update: Any) -> None:
        self._packed_importer._entry = (), torch.zeros(1)
        self.model.load_weights([("a", torch.ones(4))])


class _Worker(ipc_engine.IPCWeightTransferEngine):  # type: ignore[misc]  # vLLM has no types here
    """A worker of an engine on the GPU with this number."""

    def __init__(self, gpu: int) -> None:
        self.device, self.packed = torch.device("cuda", gpu), True
        self._packed_importer = packed_tensor.PackedBufferImporter()
        self.model, self.vllm_config = torch.nn.Module(), SimpleNamespace(lora_config=object())


def test_each_worker_of_an_engine_takes_the_buffer_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(gpu: int) -> tuple[Any, ...]:
        # As of `reduce_tensor`: class, size, stride, offset, storage, dtype, device, handle, ...
        kinds = torch.storage.TypedStorage, torch.uint8
        return (
            torch.Tensor,
            torch.Size([16]),
            (1,),
            0,
            *kinds,
            gpu,
            bytes([gpu]),
            16,
            0,
            False,
            b"c",
            0,
            b"e",
            True,
        )

    def rebuild(*args: Any) -> torch.Tensor:
        assert (*args[:6], *args[8:]) == (*handle(0)[:6], *handle(0)[8:])
        return torch.full((4,), 10.0 * args[7][0] + args[6]).view(torch.uint8)

    def properties(device: int) -> Any:
        return SimpleNamespace(uuid=f"GPU-{4 + device}")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    engines = _Engines()
    client = _Versioned(engines, ipc=True)
    handles = {f"GPU-{gpu}": handle(gpu) for gpu in range(4, 8)}
    client.update_weights(
        {"names": ["a"], "dtype_names": ["float32"], "shapes": [[4]], "tensor_sizes": [16],
         "ipc_handles": handles}
    )  # fmt: skip
    # An engine of several GPUs has a process of its own that passes messages to the workers.
    received = MsgpackDecoder().decode(MsgpackEncoder().encode(engines.update))
    for device in (0, 1):
        worker = receiver._ipc_receiver(_Worker)(device)
        worker.start_weight_update()
        worker.update_weights(received)
        assert worker.inbox.adapter["a"].tolist() == [10.0 * (4 + device) + device] * 4


def test_an_engine_releases_the_buffer_after_an_update_of_an_adapter() -> None:
    receiver_class = receiver._ipc_receiver(_Receives)
    engine = receiver_class.__new__(receiver_class)
    engine._packed_importer = packed_tensor.PackedBufferImporter()
    engine.model, engine.vllm_config = torch.nn.Module(), SimpleNamespace(lora_config=object())
    engine.start_weight_update()
    engine.receive_weights(None)
    assert engine._packed_importer._entry is not None
    engine.finish_weight_update()
    assert engine._packed_importer._entry is None
    assert list(engine.inbox.adapter) == ["a"]


def test_a_broadcast_that_hangs_without_its_engine_is_reported(group: _Group, tmp_path: Path) -> None:
    group._waits = threading.Event()
    register(tmp_path, "policy rank 0", 600.0)
    with Monitor(tmp_path) as monitor, ThreadPoolExecutor(1) as pool:
        try:
            sending = pool.submit(send_on_two_ranks, "nccl", _Engines(good=0))
            reported = None
            for _ in range(100):
                reported = monitor.participant("policy rank 0")
                if reported is not None and reported.activity:
                    break
                time.sleep(0.1)
            group._waits.set()
            sending.result(30)
        finally:
            unregister()
    assert reported is not None and "cannot take this tensor" in reported.activity
    assert reported.stall_after < 30
