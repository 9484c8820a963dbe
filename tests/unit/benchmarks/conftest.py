"""Surroundings of the benchmark programs, whose `main` the tests call in their own process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import transformers

from tests.support.tiny_llama import save_tiny_benchmark_model


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """Restore what a program changes in its process: variables, threads, and what transformers logs."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    shows_progress = transformers.logging.is_progress_bar_enabled()
    with mock.patch.dict(os.environ):
        yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)
    if shows_progress:
        transformers.logging.enable_progress_bar()


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the programs measure a model of one small layer."""
    for program in ("ppo_iteration_bare", "bfloat16"):
        monkeypatch.setattr(f"tests.benchmarks.{program}.make_model", save_tiny_benchmark_model)
