"""Ranks of one stage: what the stage hears when another rank fails. Real processes and gloo.

- an error of another rank arrives with its class and the rank's number, though rank 0 only sees a broken
  collective
- so it does where rank 0 sees nothing, as in NCCL's collectives; and all ranks leave their group together
- a rank that dies without a word, or before it is up, is named within seconds
- a rank that is suspended or stalled is named within its timeout and 10 s, in the groups that DeepSpeed
  makes, too; stacks are saved, and no rank is left
- what rank 0 returns comes back when all went well
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.engines import ranks as launch
from rlhf_core.engines.distributed import bound_collectives
from rlhf_core.engines.ranks import run_ranks
from rlhf_core.errors import DataError, OutOfMemory, RLHFError, WorkerDied, WorkerStuck
from rlhf_core.system.heartbeat import Monitor, heartbeat
from rlhf_core.system.stopping import EXIT_STOPPED


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


_told: list[RLHFError] = []


def _one_fails_unnoticed(rank: Any, _context: Any) -> None:
    """As under NCCL, whose collectives do not break when a peer is gone."""
    if rank.rank == 1:
        raise OutOfMemory("80 GiB are not enough")
    deadline = time.monotonic() + 60
    while not _told and time.monotonic() < deadline:
        time.sleep(0.1)


def _all_are_asked_to_stop(rank: Any, context: Any) -> None:
    """The others leave; rank 0 still commits."""
    if rank.rank == 1:
        raise SystemExit(EXIT_STOPPED)
    time.sleep(8)
    raise SystemExit(EXIT_STOPPED)


def _one_fails_during_a_commit(rank: Any, committed: Any) -> None:
    if rank.rank == 1:
        raise OutOfMemory("80 GiB are not enough")
    heartbeat("commit")
    time.sleep(8)
    committed.append(list(_told))
    heartbeat("the next step")
    deadline = time.monotonic() + 60
    while not _told and time.monotonic() < deadline:
        time.sleep(0.1)


def _one_dies(rank: Any, _context: Any) -> float:
    if rank.rank == 1:
        os._exit(9)
    return _sum_of_ranks(rank, None)


def _one_is_suspended(rank: Any, _context: Any) -> float:
    bound_collectives(rank.collective_seconds)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return _sum_of_ranks(rank, None)


def _one_stalls(rank: Any, _context: Any) -> float:
    import torch
    import torch.distributed as dist

    # As ZeRO does it: without a timeout of its own.
    group = dist.new_group(range(2))
    bound_collectives(rank.collective_seconds)
    heartbeat("optimizer step 7")
    if rank.rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.zeros(1), group=group)
    return 0.0


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


def test_unnoticed_error_of_another_rank_ends_the_stage(tmp_path: Path) -> None:
    _told.clear()
    with Monitor(tmp_path / "stacks", _told.append) as monitor, pytest.raises(OutOfMemory):
        run_ranks(_one_fails_unnoticed, 2, "cpu", rank_zero=None, monitor=monitor)
    (error,) = _told
    assert type(error) is OutOfMemory and error.message == "training rank 1: 80 GiB are not enough"


def test_ranks_that_leave_because_they_were_asked_to_have_not_failed(tmp_path: Path) -> None:
    failures: list[RLHFError] = []
    with Monitor(tmp_path / "stacks", failures.append) as monitor, pytest.raises(SystemExit):
        run_ranks(_all_are_asked_to_stop, 2, "cpu", rank_zero=None, monitor=monitor)
    assert failures == []


def test_a_commit_is_finished_before_a_failed_rank_ends_the_stage(tmp_path: Path) -> None:
    committed: list[list[RLHFError]] = []
    _told.clear()
    with Monitor(tmp_path / "stacks", _told.append) as monitor, pytest.raises(OutOfMemory):
        run_ranks(_one_fails_during_a_commit, 2, "cpu", rank_zero=committed, monitor=monitor)
    assert committed == [[]] and len(_told) == 1


def test_rank_zero_leaves_the_group_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await_end, joined = launch._await_end, []

    def waits(*arguments: Any) -> None:
        joined.append(torch.distributed.is_initialized())
        await_end(*arguments)

    monkeypatch.setattr(launch, "_await_end", waits)
    run_ranks(_sum_of_ranks, 2, "cpu", rank_zero=None)
    assert joined == [False], "the end of NCCL's communicators is a collective"


def test_a_rank_that_dies_is_named_within_seconds() -> None:
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"training rank 1 died \(exit code 9\)"):
        run_ranks(_one_dies, 2, "cpu", rank_zero=None)
    assert time.monotonic() - started < 60


def test_rank_that_dies_at_start_does_not_block_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"training rank 1 died \(exit code 7\)"):
        run_ranks(_takes_an_argument, 2, "cpu", _KillsItsReader(), rank_zero=None)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("work", "said", "inside"),
    [
        (_one_is_suspended, r"has been suspended \(SIGSTOP\)", "suspended"),
        (_one_stalls, r'has made no progress in "optimizer step 7"', "_one_stalls"),
    ],
    ids=["suspended", "stalled"],
)
def test_a_rank_that_does_not_move_is_named_within_its_timeout(
    work: Any, said: str, inside: str, tmp_path: Path
) -> None:
    limits = TimeoutsConfig(stall=3.0)
    began: list[float] = []
    with Monitor(tmp_path / "stacks") as monitor:
        seen = threading.Thread(target=_note_start, args=(monitor, began), daemon=True)
        seen.start()
        with pytest.raises(
            WorkerStuck, match=rf"\(run.timeouts.stall=3\): training rank 1 \(process \d+\) {said}"
        ):
            run_ranks(work, 2, "cpu", rank_zero=None, timeouts=limits, monitor=monitor)
        assert time.monotonic() - began[0] < 3 + 10
        assert "run_ranks" in (monitor.folder / "training_rank_0.stacks").read_text()
        assert inside in (monitor.folder / "training_rank_1.stacks").read_text()
    assert multiprocessing.active_children() == []


def _note_start(monitor: Monitor, began: list[float]) -> None:
    """When rank 1 was through with its start."""
    while not began:
        participant = monitor.participant("training rank 1")
        if participant is not None and (
            participant.state == "suspended" or participant.activity not in ("", "start")
        ):
            began.append(time.monotonic())
        time.sleep(0.1)
