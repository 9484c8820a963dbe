"""Training ranks of one stage on one host: rank 0 is the stage's own process, the others are spawned beside
it.

rank 0    waits until every other rank is up, then works; a broken collective is explained by the rank that broke it,
          one that timed out by the rank that is stuck (`rlhf_core.system.heartbeat`)
rank r    "up" through its pipe, works, and sends its error, if any, before it ends
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rlhf_core.config.devices import leads_to_gpu
from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.engines.distributed import Rank, join, leave
from rlhf_core.errors import ConfigError, RLHFError, WorkerDied, WorkerStuck, from_record, to_record
from rlhf_core.system.heartbeat import Monitor, current_activity, heartbeat, idle, register, unregister
from rlhf_core.system.stopping import EXIT_STOPPED

_LOOK_SECONDS = 0.5
_NOTICE_SECONDS = 5.0
"""In which rank 0 sees by itself that another has failed, where it can."""
_LAST_WORD_SECONDS = 5.0
"""How long a rank's own error may follow the collective that it broke."""


def resolve_device(wanted: str) -> str:
    """ "cuda" or "cpu": what `wanted` (auto, cuda, cpu) leads to, as it did for keys and precision. Raises
    ConfigError where that is a GPU and torch cannot use one.
    """
    import torch

    if not leads_to_gpu(wanted):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {wanted} leads to a GPU here, but torch cannot use any: mend the driver (`nvidia-smi`"
            " tells), or say that the device is cpu"
        )
    return "cuda"


def run_ranks(
    work: Callable[..., Any],
    ranks: int,
    device: str,
    *args: Any,
    rank_zero: Any,
    timeouts: TimeoutsConfig | None = None,
    monitor: Monitor | None = None,
) -> Any:
    """Call `work(rank, *args, context)` on every rank and return what rank 0 returned.

    `context` is `rank_zero` on rank 0 and None elsewhere: only rank 0 tracks, commits and reports. `work` and
    `args` must be picklable. An error of another rank is raised here with its class and the rank's number; a
    rank that dies without a word is a WorkerDied, one that does not move a WorkerStuck. `monitor`: the stage's,
    entered; None: one's own.
    """
    limits = timeouts or TimeoutsConfig()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        nullcontext(monitor) if monitor is not None else Monitor() as seen,
    ):
        address, port = listener.getsockname()
        own = Rank(0, ranks, 0, address, port, device, limits.start, limits.stall, listener)
        register(seen.folder, _name(own), limits.stall)
        heartbeat("start", limits.start)
        others = [
            _Other.start(work, replace(own, rank=r, local_rank=r, listener=None), args, seen.folder, limits)
            for r in range(1, ranks)
        ]
        try:
            _await_start(others, limits.start)
            join(own)
            with _told_of_failures(others, seen):
                result = work(own, *args, rank_zero)
                # Before the others are waited for: the end of NCCL's communicators takes all of their ranks.
                leave()
            _await_end(others, limits.stall)
            return result
        except RuntimeError as error:
            raise _explained(error, others, seen, limits) from error
        finally:
            for other in others:
                other.process.kill()
                other.process.join()
            if device == "cpu":  # after an error NCCL would wait for ranks that are gone
                leave()
            unregister()


def _name(rank: Rank) -> str:
    return f"training rank {rank.rank}"


@dataclass(frozen=True)
class _Other:
    """A rank beside rank 0."""

    rank: int
    process: Any
    pipe: Connection

    @staticmethod
    def start(
        work: Callable[..., Any], rank: Rank, args: tuple[Any, ...], folder: Path, limits: TimeoutsConfig
    ) -> _Other:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_other_rank, args=(work, rank, args, there, folder, limits), daemon=True
        )
        process.start()
        there.close()
        return _Other(rank.rank, process, here)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, and neither well nor because all were asked to stop."""
        return self.process.exitcode not in (None, 0, EXIT_STOPPED)

    @cached_property
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


def _await_start(others: list[_Other], seconds: float) -> None:
    """Every rank is up, or the error of the first that is not: before a rendezvous that would wait for it."""
    deadline = time.monotonic() + seconds
    for other in others:
        wait([other.pipe, other.process.sentinel], timeout=max(0.0, deadline - time.monotonic()))
        up = other.pipe.poll() and _receives_up(other.pipe)
        if not up and other.process.exitcode is None and time.monotonic() >= deadline:
            raise WorkerStuck(
                f"training rank {other.rank} was not up after {seconds:g} s (run.timeouts.start)"
            )
        if not up:
            other.process.join(_LAST_WORD_SECONDS)
            raise other.error


@contextmanager
def _told_of_failures(others: list[_Other], monitor: Monitor) -> Iterator[None]:
    """While it lasts, the stage fails with the error of a rank that ends with one, if rank 0 does not notice:
    a collective of gloo breaks when a peer is gone, one of NCCL waits for it.
    """
    over = threading.Event()

    def look() -> None:
        patience = _NOTICE_SECONDS
        while not over.wait(_LOOK_SECONDS):
            failed = next((other for other in others if other.has_failed), None)
            # What rank 0 commits is worth having, and it waits for nobody there.
            if failed is not None and current_activity() != "commit":
                patience -= _LOOK_SECONDS
            if failed is not None and patience <= 0:
                monitor.abort(failed.error)
                return

    thread = threading.Thread(target=look, name="other-ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LAST_WORD_SECONDS)


def _await_end(others: list[_Other], seconds: float) -> None:
    for other in others:
        other.process.join(seconds)
        if other.process.exitcode is None:
            raise WorkerStuck(
                f"training rank {other.rank} did not end within {seconds:g} s (run.timeouts.stall)"
            )
        if other.process.exitcode != 0:
            raise other.error


def _explained(
    error: RuntimeError, others: list[_Other], monitor: Monitor, limits: TimeoutsConfig
) -> Exception:
    """The error of the rank that made rank 0 raise `error`, which is its own if no other rank is to blame."""
    idle()  # rank 0 has moved: it raised
    stuck = any(
        participant.state == "suspended" or participant.stalled for participant in monitor.unhealthy()
    )
    culprit = None if stuck else _first_dead(others, _LAST_WORD_SECONDS)
    if culprit is not None:
        return culprit.error
    if stuck or (others and "timed out" in str(error).lower()):
        return monitor.diagnose("the other training ranks", f"run.timeouts.stall={limits.stall:g}")
    return error


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


def _other_rank(
    work: Callable[..., Any],
    rank: Rank,
    args: tuple[Any, ...],
    pipe: Connection,
    folder: Path,
    limits: TimeoutsConfig,
) -> None:
    register(folder, _name(rank), limits.stall)
    heartbeat("start", limits.start)
    try:
        pipe.send("up")
        join(rank)
        work(rank, *args, None)
        leave()
        code = 0
    except Exception as error:
        traceback.print_exc()
        pipe.send(to_record(error))
        code = 1
    finally:
        unregister()
    # Where Python takes itself apart while torch's threads still run, it aborts now and then, or waits for
    # other ranks.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
