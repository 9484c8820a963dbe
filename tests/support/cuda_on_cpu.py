"""The functions of CUDA that weight sync calls, on a machine without a GPU. All tensors are on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch


def replace_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the functions do nothing. Returns the list to which each wait for the whole device is added."""
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("queue done"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _tensor, _stream: None)
    return waits
