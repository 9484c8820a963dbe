"""Ranks of one stage: what the stage hears when another rank fails. Real processes and gloo.

- an error of another rank arrives with its class and the rank's number, though rank 0 only sees a broken collective
- a rank that dies without a word, or before it is up, is named within seconds
- what rank 0 returns comes back when all went well
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from rlhf_core.errors import DataError, WorkerDied
from rlhf_core.training.launch import run_ranks


def _sum_of_ranks(rank: Any, _context: Any) -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(rank.rank))
    dist.all_reduce(total)
    return float(total)


def _one_raises(rank: Any, _context: Any) -> float:
    if rank.rank == 1:
        raise DataError("pairs.jsonl:7: no rejected response")
    return _sum_of_ranks(rank, None)


def _one_dies(rank: Any, _context: Any) -> float:
    if rank.rank == 1:
        os._exit(9)
    return _sum_of_ranks(rank, None)


class _KillsItsReader:
    """Dies where it is unpickled: before its rank is up."""

    def __reduce__(self) -> Any:
        return (os._exit, (7,))


def _takes_an_argument(_rank: Any, _argument: Any, _context: Any) -> None: ...


def test_rank_zeros_result_comes_back() -> None:
    assert run_ranks(_sum_of_ranks, 2, "cpu", rank_zero=None) == 1.0


def test_an_error_of_another_rank_arrives_as_itself() -> None:
    with pytest.raises(DataError, match=r"training rank 1: pairs.jsonl:7: no rejected response"):
        run_ranks(_one_raises, 2, "cpu", rank_zero=None)


def test_a_rank_that_dies_is_named_within_seconds() -> None:
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"training rank 1 died \(exit code 9\)"):
        run_ranks(_one_dies, 2, "cpu", rank_zero=None)
    assert time.monotonic() - started < 60


def test_a_rank_that_dies_before_it_is_up_does_not_hold_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"training rank 1 died \(exit code 7\)"):
        run_ranks(_takes_an_argument, 2, "cpu", _KillsItsReader(), rank_zero=None)
    assert time.monotonic() - started < 30
