"""Training ranks of one stage on one host. Rank 0 is the process of the stage, which spawns the others.

rank 0    waits until all other ranks have started, and runs the target. If a collective fails, it raises the
          error of the rank that failed; if one times out, an error that names the stalled rank
          (`rlhf_core.system.heartbeat`)
rank r    sends "up" through its pipe, runs the target, and sends its error, if any, before it ends
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

from rlhf_core.config.devices import uses_gpu
from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.engines.distributed import Rank, join, leave
from rlhf_core.errors import ConfigError, RLHFError, WorkerDied, WorkerStuck, from_record, to_record
from rlhf_core.system.heartbeat import Monitor, current_activity, heartbeat, idle, register, unregister
from rlhf_core.system.stopping import EXIT_STOPPED

_POLL_SECONDS = 0.5
_DETECTION_SECONDS = 5.0
"""Time for rank 0 to detect the failure of another rank itself, before the stage is aborted."""
_ERROR_SECONDS = 5.0
"""Time in which a rank that failed sends its error and ends, after its collective broke."""


def resolve_device(wanted: str, setting: str = "run.device") -> str:
    """Return "cuda" or "cpu" for `wanted` (auto, cuda, cpu).

    The decision is the one that keys and precision are based on. Raises ConfigError, which names `setting`,
    if it is a GPU and torch cannot use one.
    """
    import torch

    if not uses_gpu(wanted):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{setting}={wanted} resolves to cuda on this host, but torch.cuda is not available; fix the"
            f" driver (see `nvidia-smi`), or set {setting}=cpu"
        )
    return "cuda"


def run_ranks(
    target: Callable[..., Any],
    ranks: int,
    device: str,
    *args: Any,
    rank_zero: Any,
    timeouts: TimeoutsConfig | None = None,
    monitor: Monitor | None = None,
) -> Any:
    """Call `target(rank, *args, context)` on every rank and return what rank 0 returned.

    Args:
        target: Runs on each rank. It must be picklable.
        ranks: Number of ranks.
        device: "cpu" or "cuda".
        args: Further arguments of `target`. They must be picklable.
        rank_zero: `context` on rank 0, which is the only one that tracks, commits and reports. It is None on
            the others.
        timeouts: Section `run.timeouts`.
        monitor: The heartbeat monitor of the stage, already entered; None for a new one.

    Raises:
        WorkerDied: A rank died without an error.
        WorkerStuck: A rank stalled.
        RLHFError: The error of another rank, with its class and the number of the rank.
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
            _Other.start(target, replace(own, rank=r, local_rank=r, listener=None), args, seen.folder, limits)
            for r in range(1, ranks)
        ]
        try:
            _await_start(others, limits.start)
            join(own)
            with _abort_on_failure(others, seen):
                result = target(own, *args, rank_zero)
                # Before the wait for the others: NCCL ends its communicators on all ranks together.
                leave()
            _await_end(others, limits.stall)
            return result
        except RuntimeError as error:
            raise _error_of_failed_rank(error, others, seen, limits) from error
        finally:
            for other in others:
                other.process.kill()
                other.process.join()
            if device == "cpu":  # after an error NCCL would wait for dead ranks
                leave()
            unregister()


def _name(rank: Rank) -> str:
    return f"training rank {rank.rank}"


@dataclass(frozen=True)
class _Other:
    """A rank other than rank 0, as rank 0 sees it."""

    rank: int
    process: Any
    pipe: Connection

    @staticmethod
    def start(
        target: Callable[..., Any], rank: Rank, args: tuple[Any, ...], folder: Path, limits: TimeoutsConfig
    ) -> _Other:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_other_rank, args=(target, rank, args, there, folder, limits), daemon=True
        )
        process.start()
        there.close()
        return _Other(rank.rank, process, here)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error. A requested stop is not an error."""
        return self.process.exitcode not in (None, 0, EXIT_STOPPED)

    @cached_property
    def error(self) -> RLHFError:
        """The error that it sent, or a WorkerDied if it sent none."""
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, dict):
                    error = from_record(message)
                    return type(error)(f"training rank {self.rank}: {error.message}")
        except EOFError:
            pass
        code = self.process.exitcode
        return WorkerDied(
            f"training rank {self.rank} died (exit code {code}); the stage continues from its last checkpoint"
        )


def _await_start(others: list[_Other], seconds: float) -> None:
    """Wait until all ranks have started. Raises the error of the first that did not.

    Without this, rank 0 would wait in the rendezvous until its timeout.
    """
    deadline = time.monotonic() + seconds
    for other in others:
        wait([other.pipe, other.process.sentinel], timeout=max(0.0, deadline - time.monotonic()))
        up = other.pipe.poll() and _receives_up(other.pipe)
        if not up and other.process.exitcode is None and time.monotonic() >= deadline:
            raise WorkerStuck(
                f"training rank {other.rank} was not up after {seconds:g} s (run.timeouts.start)"
            )
        if not up:
            other.process.join(_ERROR_SECONDS)
            raise other.error


@contextmanager
def _abort_on_failure(others: list[_Other], monitor: Monitor) -> Iterator[None]:
    """In this context, abort the stage if another rank fails and rank 0 does not detect it.

    A collective of gloo fails if a rank dies. A collective of NCCL waits for it.
    """
    closed = threading.Event()

    def poll() -> None:
        seconds_left = _DETECTION_SECONDS
        while not closed.wait(_POLL_SECONDS):
            failed = next((other for other in others if other.has_failed), None)
            # A commit does not depend on the other ranks, and should be completed.
            if failed is not None and current_activity() != "commit":
                seconds_left -= _POLL_SECONDS
            if failed is not None and seconds_left <= 0:
                monitor.abort(failed.error)
                return

    thread = threading.Thread(target=poll, name="other-ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(_ERROR_SECONDS)


def _await_end(others: list[_Other], seconds: float) -> None:
    for other in others:
        other.process.join(seconds)
        if other.process.exitcode is None:
            raise WorkerStuck(
                f"training rank {other.rank} did not end within {seconds:g} s (run.timeouts.stall)"
            )
        if other.process.exitcode != 0:
            raise other.error


def _error_of_failed_rank(
    error: RuntimeError, others: list[_Other], monitor: Monitor, limits: TimeoutsConfig
) -> Exception:
    """Return the error of the rank that caused `error` on rank 0, or `error` itself."""
    idle()  # rank 0 itself is not stalled
    stuck = any(
        participant.state == "suspended" or participant.stalled for participant in monitor.unhealthy()
    )
    culprit = None if stuck else _first_dead(others, _ERROR_SECONDS)
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
            other.process.join(1.0)  # the exit code is available a moment after the sentinel
            if other.process.exitcode != 0:
                return other
    return None


def _other_rank(
    target: Callable[..., Any],
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
        target(rank, *args, None)
        leave()
        code = 0
    except Exception as error:
        traceback.print_exc()
        pipe.send(to_record(error))
        code = 1
    finally:
        unregister()
    # Python's own shutdown sometimes aborts or waits for other ranks, because torch's threads still run.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
