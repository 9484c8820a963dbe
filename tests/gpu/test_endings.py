"""On GPUs, what ends leaves nothing that the next one would miss.

- an engine with compiled kernels and CUDA graphs gives the whole device back: a second one takes nearly all
  of it
- ranks over NCCL end together, in seconds; where one fails, its own error ends the stage while the others
  still wait
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.cluster.ranks import run_ranks
from rlhf_core.config.ppo_sections import EngineConfig
from rlhf_core.engines.vllm import Engine
from rlhf_core.errors import OutOfMemory, RLHFError
from rlhf_core.system.heartbeat import Monitor
from tests.support.small_ppo import save_small_model, small_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


def test_an_engine_that_has_ended_leaves_the_device_to_the_next(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path / "model", vocabulary=8192)
    settings = EngineConfig(dtype="bfloat16", gpu_memory_utilization=0.9, enforce_eager=False)
    for _ in range(2):
        engine = Engine(folder, settings, device="cuda", max_model_len=64, seed=0)
        prompts = small_prompts()[:2]
        engine.generate(prompts, n=1, max_new_tokens=4, temperature=1.0, seeds=[0, 1], policy_version=0)
        engine.shutdown()


def _sum_of_ranks(rank: Any, _context: Any) -> float:
    total = torch.tensor(float(rank.rank), device=rank.torch_device)
    torch.distributed.all_reduce(total)
    return float(total)


def _one_fails(rank: Any, _context: Any) -> float:
    if rank.rank == 1:
        raise OutOfMemory("80 GiB are not enough")
    return _sum_of_ranks(rank, None)


@NEEDS_TWO
def test_ranks_end_together() -> None:
    started = time.monotonic()
    assert run_ranks(_sum_of_ranks, 2, "cuda", context=None) == 1.0
    assert time.monotonic() - started < 120


@NEEDS_TWO
def test_the_error_of_a_rank_is_raised_while_the_others_wait_for_it(tmp_path: Path) -> None:
    errors: list[RLHFError] = []

    def fail(error: RLHFError) -> None:
        # As a stage does, which ends the process: here the collective is given up instead.
        errors.append(error)
        torch.distributed.distributed_c10d._abort_process_group()

    with Monitor(tmp_path / "stacks", fail) as monitor, pytest.raises((RuntimeError, OutOfMemory)):
        run_ranks(_one_fails, 2, "cuda", context=None, monitor=monitor)
    assert [type(error) for error in errors] == [OutOfMemory]
    assert "training rank 1: 80 GiB are not enough" in errors[0].message
