"""The backend of the training ranks' collectives.

- gloo on the CPU, NCCL on GPUs, under which name torch has RCCL in builds for ROCm
- a build for GPUs without NCCL uses gloo for ranks and for the weight sync, and says so once
- a build for CPUs says nothing about the GPUs of other hosts
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch.distributed as dist

from rlhf_core.engines.distributed import lacks_nccl, training_backend
from rlhf_core.ppo.fleet.fleet import Fleet
from tests.support.scripted_machine import ScriptedMachine, on_machine

Torch = Literal["cpu", "cuda", "rocm"]


@contextmanager
def build(monkeypatch: pytest.MonkeyPatch, torch: Torch, nccl: bool) -> Iterator[None]:
    """Have a build of torch, with NCCL or without, whatever is installed."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    with on_machine(ScriptedMachine(torch=torch)):
        yield


@pytest.mark.parametrize(
    ("torch", "nccl", "backend"),
    [
        ("cuda", True, "nccl"),
        ("rocm", True, "nccl"),
        ("cuda", False, "gloo"),
        ("rocm", False, "gloo"),
        ("cpu", False, "nccl"),
    ],
)
def test_gpus_use_nccl_unless_torch_was_built_without(
    torch: Torch,
    nccl: bool,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with build(monkeypatch, torch, nccl):
        assert training_backend("cuda") == backend
        assert lacks_nccl() is (backend == "gloo")
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == (1 if backend == "gloo" else 0)
    assert all("built for GPUs but without NCCL" in text and "install" in text for text in messages)


def test_ranks_on_the_cpu_use_gloo_and_say_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with build(monkeypatch, "cuda", nccl=False):
        assert training_backend("cpu") == "gloo" and not caplog.records


@pytest.mark.parametrize(
    ("colocate", "nccl", "backend"),
    [("pairs", True, "nccl"), ("pairs", False, "gloo"), ("all", False, "ipc")],
)
def test_weights_reach_engines_on_gpus_without_nccl(
    colocate: str, nccl: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ppo = SimpleNamespace(weight_sync=SimpleNamespace(backend="auto"), colocate=colocate)
    fleet: Any = SimpleNamespace(settings=SimpleNamespace(ppo=ppo), _device="cuda")
    with build(monkeypatch, "cuda", nccl):
        assert Fleet.sync_backend.__get__(fleet) == backend
