"""The backend of the training ranks' collectives.

- gloo on the CPU, NCCL on GPUs, under which name torch has RCCL in builds for ROCm
- a build for GPUs without NCCL uses gloo for ranks and for the weight sync, and says so once
- a build for CPUs says nothing about the GPUs of other hosts
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf_core.engines.distributed import lacks_nccl, training_backend
from rlhf_core.ppo.fleet import Fleet


def build(
    monkeypatch: pytest.MonkeyPatch, nccl: bool, cuda: str | None = None, hip: str | None = None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)


@pytest.mark.parametrize(
    ("cuda", "hip", "nccl", "backend"),
    [
        ("13.0", None, True, "nccl"),
        (None, "7.1", True, "nccl"),
        ("13.0", None, False, "gloo"),
        (None, "7.1", False, "gloo"),
        (None, None, False, "nccl"),
    ],
)
def test_gpus_use_nccl_unless_torch_was_built_without(
    cuda: str | None,
    hip: str | None,
    nccl: bool,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    build(monkeypatch, nccl, cuda, hip)
    assert training_backend("cuda") == backend
    assert lacks_nccl() is (backend == "gloo")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == (1 if backend == "gloo" else 0)
    assert all("built for GPUs but without NCCL" in text and "install" in text for text in said)


def test_ranks_on_the_cpu_use_gloo_and_say_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build(monkeypatch, nccl=False, cuda="13.0")
    assert training_backend("cpu") == "gloo" and not caplog.records


@pytest.mark.parametrize(
    ("colocate", "nccl", "backend"),
    [("pairs", True, "nccl"), ("pairs", False, "gloo"), ("all", False, "ipc")],
)
def test_weights_reach_engines_on_gpus_without_nccl(
    colocate: str, nccl: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(monkeypatch, nccl, cuda="13.0")
    ppo = SimpleNamespace(weight_sync=SimpleNamespace(backend="auto"), colocate=colocate)
    fleet: Any = SimpleNamespace(_config=SimpleNamespace(ppo=ppo), _device="cuda")
    assert Fleet.sync_backend.__get__(fleet) == backend
