"""The gloo sender against a real group whose receiver misbehaves, and what comes before anything is sent.

- an engine that fails during the update is named at once, not after the sync's timeout
- an engine whose process goes away breaks the broadcast at once
- on a GPU no weight is read before all that was queued there is done, the optimizer's last step too
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlhf_core.engines.sync.sender import WeightSender
from rlhf_core.engines.sync.wire import GlooSource, TensorSpec, TransportConfig
from rlhf_core.errors import WeightSyncError
from tests.support.cuda_on_cpu import replace_cuda

BIG = 3 << 20
"""Float32 numbers of each tensor: beyond what sockets buffer, so that a broadcast needs somebody to read it.
"""


class _Engine:
    """One engine in this process: joins the group and then does what the test asks for."""

    def __init__(self, leaves: bool) -> None:
        self._leaves = leaves
        self.group: Any = None

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        address, port = info["sender"]
        self.group = GlooSource(address, port, info["rank_offset"], info["world_size"], info["timeout"])

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None:
        if self._leaves:
            self.group = None
            time.sleep(1.0)
        raise ValueError("the engine cannot take this tensor")

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def acknowledge(self) -> list[Any]:
        return []


def _weights() -> Iterator[tuple[str, torch.Tensor]]:
    for name in "abcd":
        yield name, torch.zeros(BIG)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_failing_engine_is_reported_immediately(leaves: bool) -> None:
    specs = [TensorSpec(name, torch.float32, (BIG,)) for name in "abcd"]
    listener = socket.create_server(("127.0.0.1", 0))
    transport = TransportConfig("gloo", listener.getsockname(), ("127.0.0.1",), 1, 12 << 20, 60.0)
    sender = WeightSender(_weights, specs, _Engine(leaves), 0, transport, listener=listener)
    started = time.monotonic()
    with pytest.raises((ValueError, WeightSyncError), match=r"cannot take this tensor|broke"):
        sender.send(1)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("gpu", [True, False])
def test_weights_are_read_after_gpu_synchronization(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    done = replace_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        done.append("read")
        yield "a", torch.zeros(1)

    sender = WeightSender(
        weights,
        [TensorSpec("a", torch.float32, (1,))],
        None,
        1,
        TransportConfig("gloo", ("127.0.0.1", 1), ("127.0.0.1",), 1, 1 << 20, 1.0),
    )
    assert sender.send(1) is None
    assert done == (["queue done", "read"] if gpu else ["read"])
