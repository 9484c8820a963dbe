"""Training ranks of one stage on one host: rank 0 is the stage's own process, the others are spawned beside it.

rank 0    waits until every other rank is up, then works; a broken collective is explained by the rank that broke it
rank r    "up" through its pipe, works, and sends its error, if any, before it ends
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from rlhf_core.errors import ConfigError, RLHFError, WorkerDied, from_record, to_record
from rlhf_core.training.distributed import Rank, free_port, join, leave

_START_SECONDS = 300.0
"""How long a rank may take to import what it needs."""
_LAST_WORD_SECONDS = 5.0
"""How long a rank's own error may follow the collective that it broke."""


def resolve_device(wanted: str) -> str:
    """ "cuda" or "cpu"; `auto` takes CUDA where there is any."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device=cuda, but torch sees no CUDA device; use run.device=auto or cpu")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def run_ranks(work: Callable[..., Any], ranks: int, device: str, *args: Any, rank_zero: Any) -> Any:
    """Call `work(rank, *args, context)` on every rank and return what rank 0 returned.

    `context` is `rank_zero` on rank 0 and None elsewhere: only rank 0 tracks, commits and reports. `work` and `args`
    must be picklable. An error of another rank is raised here with its class and the rank's number; a rank that dies
    without a word is a WorkerDied.
    """
    port = free_port()
    own = Rank(0, ranks, 0, "127.0.0.1", port, device)
    others = [_Other.start(work, Rank(r, ranks, r, "127.0.0.1", port, device), args) for r in range(1, ranks)]
    try:
        _await_start(others)
        join(own)
        result = work(own, *args, rank_zero)
        for other in others:
            other.process.join(60)
            if other.process.exitcode != 0:
                raise other.error()
        return result
    except RuntimeError as error:
        culprit = _first_dead(others, _LAST_WORD_SECONDS)
        if culprit is not None:
            raise culprit.error() from error
        raise
    finally:
        leave()
        for other in others:
            other.process.kill()
            other.process.join()


@dataclass(frozen=True)
class _Other:
    """A rank beside rank 0."""

    rank: int
    process: Any
    pipe: Connection

    @staticmethod
    def start(work: Callable[..., Any], rank: Rank, args: tuple[Any, ...]) -> _Other:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_other_rank, args=(work, rank, args, there), daemon=True)
        process.start()
        there.close()
        return _Other(rank.rank, process, here)

    def error(self) -> RLHFError:
        """What it said before it ended, or that it said nothing."""
        try:
            while self.pipe.poll():
                word = self.pipe.recv()
                if isinstance(word, dict):
                    error = from_record(word)
                    return type(error)(f"training rank {self.rank}: {error.message}")
        except EOFError:
            pass
        code = self.process.exitcode
        return WorkerDied(
            f"training rank {self.rank} died (exit code {code}); the stage continues from its last checkpoint"
        )


def _await_start(others: list[_Other]) -> None:
    """Every rank is up, or the error of the first that is not: before a rendezvous that would wait for it."""
    deadline = time.monotonic() + _START_SECONDS
    for other in others:
        wait([other.pipe, other.process.sentinel], timeout=max(0.0, deadline - time.monotonic()))
        up = other.pipe.poll() and _receives_up(other.pipe)
        if not up and other.process.exitcode is None and time.monotonic() >= deadline:
            raise WorkerDied(f"training rank {other.rank} was not up after {_START_SECONDS:g} s")
        if not up:
            other.process.join(_LAST_WORD_SECONDS)
            raise other.error()


def _receives_up(pipe: Connection) -> bool:
    try:
        return bool(pipe.recv() == "up")
    except EOFError:
        return False


def _first_dead(others: list[_Other], seconds: float) -> _Other | None:
    ended = wait([other.process.sentinel for other in others], timeout=seconds) if others else []
    for other in others:
        if other.process.sentinel in ended:
            other.process.join(1.0)  # its end is seen a moment before its exit code
            if other.process.exitcode != 0:
                return other
    return None


def _other_rank(work: Callable[..., Any], rank: Rank, args: tuple[Any, ...], pipe: Connection) -> None:
    try:
        pipe.send("up")
        join(rank)
        work(rank, *args, None)
        leave()
    except Exception as error:
        pipe.send(to_record(error))
        raise
