"""Typed calls of Ray actors, with timeouts.

    controller                                   actor
    ----------                                   -----
    worker.call(ModelWorker.values, ...)      -> `rpc`: sends a heartbeat (`rlhf_core.system.heartbeat`),
                                                 runs the method, becomes idle
    ActorClient.wait: polls once per second   <- a result, or an error of the project, which the actor itself
                                                 has classified: only there its original class is known

Every wait ends: a participant without progress beyond its limit is reported as an error, no matter which wait
is affected by it.
"""

from __future__ import annotations

import functools
import os
import resource
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.errors import InfrastructureError, OutOfMemory, RLHFError, WorkerDied, classified, classifying
from rlhf_core.system.heartbeat import Monitor, heartbeat, idle, register
from rlhf_core.system.processes import leave_out

POLL_SECONDS = 1.0
FEW = 16
"""Up to this number of results, each is fetched as soon as it arrives. More are fetched together."""

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
A_co = TypeVar("A_co", covariant=True)


# -- in the actor --


@dataclass(frozen=True)
class ParticipantSpec:
    """How an actor registers with the heartbeat monitor."""

    name: str
    """`critic+reward rank 0`, `engine 1`."""
    folder: Path
    """See `rlhf_core.system.heartbeat`."""
    timeouts: TimeoutsConfig


@dataclass(frozen=True)
class Usage:
    """Resources used by one process since it started."""

    cpu_seconds: float
    peak_bytes: int
    """Largest resident set size."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Counters of an actor, see `Actor.counters`."""
    gpu_memory: float | None = None
    """Largest share of the GPU's memory in use, by all processes, since an actor's usage was asked for last;
    None if it is not known.
    """


def process_usage() -> Usage:
    """Return CPU seconds and peak memory of this process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    # Linux counts `ru_maxrss` in KiB.
    return Usage(own.ru_utime + own.ru_stime, own.ru_maxrss * 1024)


def rpc(timeout: Literal["start", "stall", "sync"] = "stall") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method of an `Actor` that other processes call.

    Args:
        timeout: The field of `run.timeouts` after which the call counts as stalled if the method sends no
            heartbeat of its own.
    """

    def wrap(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            actor: Any = args[0]
            participant: ParticipantSpec = actor.participant
            heartbeat(method.__name__, getattr(participant.timeouts, timeout))
            started = time.monotonic()
            actor.running = method.__name__
            try:
                with classifying(f"{participant.name}, {method.__name__}"):
                    return method(*args, **kwargs)
            finally:
                actor.counters[f"seconds/{method.__name__}"] += time.monotonic() - started
                actor.running = ""
                idle()

        return run

    return wrap


class Actor:
    """Base class of all actors. It registers the process with the heartbeat monitor."""

    unused: tuple[str, ...] = ("mlflow", "sklearn")
    """Packages that no actor uses, as the stage's process tracks. DeepSpeed (for its autotuner) and
    transformers (for assisted generation) import them if they find them, in a quarter of a rank's imports.
    """
    running = ""
    """Name of the `rpc` method that runs, or ""."""
    _gpu: GpuSampler | None = None

    def __init__(self, participant: ParticipantSpec) -> None:
        leave_out(self.unused)
        self.participant = participant
        self.counters: Counter[str] = Counter()
        """Sums since the start: `seconds/<method>`, and what the methods count themselves."""
        register(participant.folder, participant.name, participant.timeouts.stall)
        heartbeat("start", participant.timeouts.start)

    @rpc()
    def address(self) -> str:
        """Return the address of this process's host in the Ray cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    @rpc()
    def visible_gpus(self) -> tuple[str, str]:
        """Return the variable in which Ray has set the GPUs of this process, and its value."""
        # The first one is AMD's.
        name = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
        return name, os.environ[name]

    @rpc()
    def usage(self) -> Usage:
        """Return CPU seconds, peak memory and counters of the actor's process, and of its GPU if it has one.
        The first call begins to sample the GPU.
        """
        usage = replace(process_usage(), counters=dict(self.counters))
        if self._gpu is None:
            # After the start, in which engines capture CUDA graphs.
            self._gpu = GpuSampler(lambda: self.running) if uses_gpu() else None
            return usage
        counters = {**usage.counters, **self._gpu.counters()}
        return replace(usage, counters=counters, gpu_memory=self._gpu.take_memory())


class ListeningActor(Actor):
    """An actor that can be rank 0 of a process group, which the other ranks connect to."""

    _listener: socket.socket | None = None
    """Listening socket, also of the sender of weights."""

    @rpc()
    def listen(self, local: bool) -> tuple[str, int]:
        """Start listening as rank 0, and return (address, port).

        The address is loopback if the whole Ray cluster runs on this host (`local`).
        """
        import ray

        host = "127.0.0.1" if local else str(ray.util.get_node_ip_address())
        self._listener = socket.create_server((host, 0))
        address, port = self._listener.getsockname()
        return address, port


# -- the GPU of an actor --


GPU_SAMPLE_SECONDS = 0.25
"""Between two samples. The driver's figure covers the last 0.17 to 1 s."""


@dataclass(frozen=True)
class GpuSample:
    """One reading."""

    busy: float
    """Share of the last sample period of the driver in which a kernel ran."""
    memory: float
    """Share of the memory that is in use."""


def read_gpu() -> GpuSample:
    """Read the figures of the current GPU. Raises what torch raises where the driver does not tell them."""
    import torch

    # Not `mem_get_info`, which is a call to CUDA and breaks the capture of a graph in another thread.
    total = torch.cuda.get_device_properties(0).total_memory
    return GpuSample(torch.cuda.utilization(0) / 100, torch.cuda.device_memory_used(0) / total)


def uses_gpu() -> bool:
    """Return whether this process has initialized a GPU, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


class GpuSampler:
    """Samples the GPU while methods run, until the process ends or the driver does not tell its figures.

    The figures are the driver's, for all processes on the GPU. A thread reads them through NVML (package
    `nvidia-ml-py`) or AMD SMI, which do not wait for the GPU.

    Args:
        running: Returns the name of the method that runs; "" for none.
        read: Reads the figures.
        seconds: Between two samples.
    """

    def __init__(
        self,
        running: Callable[[], str],
        read: Callable[[], GpuSample] = read_gpu,
        seconds: float = GPU_SAMPLE_SECONDS,
    ) -> None:
        self._running = running
        self._read = read
        self._counters: dict[str, float] = defaultdict(float)
        self._most_memory: float | None = None
        threading.Thread(target=self._sample, args=(seconds,), daemon=True, name="gpu-usage").start()

    def counters(self) -> dict[str, float]:
        """Return sums since the start: `gpu_samples/<method>`, and `gpu_busy/<method>` of their shares."""
        return dict(self._counters)

    def take_memory(self) -> float | None:
        """Return the largest share of memory in use since the last call; None without a sample."""
        most, self._most_memory = self._most_memory, None
        return most

    def _sample(self, seconds: float) -> None:
        while True:
            time.sleep(seconds)
            method = self._running()
            if not method:
                continue
            try:
                sample = self._read()
            # Without nvidia-ml-py, on virtual devices, or after the driver's library was lost: each library
            # has errors of its own, and nothing depends on the figures.
            except Exception:
                return
            self._counters[f"gpu_samples/{method}"] += 1
            self._counters[f"gpu_busy/{method}"] += sample.busy
            self._most_memory = max(self._most_memory or 0.0, sample.memory)


# -- in the caller --


class RayObjects:
    """The results of calls, in Ray.

    `tests.support.scripted_actors.LocalObjects` holds them in the process of a test.
    """

    def now(self) -> float:
        """Return the time in seconds, on the clock of all waits."""
        return time.monotonic()

    def wait(self, references: Sequence[Any], *, count: int, seconds: float) -> list[Any]:
        """Return at most `count` references whose objects are on this host.

        Returns as soon as there are `count` of them, or after `seconds`.
        """
        import ray

        ended: list[Any]
        ended, _ = ray.wait(list(references), num_returns=count, timeout=seconds, fetch_local=True)
        return ended

    def get(self, reference: Any, *, seconds: float) -> Any:
        """Return the object of a reference, or the list of objects of a list of references.

        Raises TimeoutError after `seconds`, and the error of a process.
        """
        import ray
        from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

        try:
            return ray.get(reference, timeout=seconds)
        except GetTimeoutError as error:
            raise TimeoutError(str(error)) from error
        except RayTaskError as error:
            # The cause is the exception of the actor. What Ray raises is of a class that it makes for each
            # error, from `RayTaskError` and the class of the cause.
            raise classified(error.cause if isinstance(error.cause, Exception) else error) from error
        except RayActorError as error:
            raise WorkerDied(f"a process died: {_first_line(error)}") from error
        except OutOfMemoryError as error:
            raise OutOfMemory(f"Ray killed a process, out of memory: {_first_line(error)}") from error
        except RayError as error:
            raise InfrastructureError(f"Ray: {_first_line(error)}") from error

    def kill(self, handle: Any) -> None:
        """End the process of an actor."""
        import ray

        ray.kill(handle)


RAY = RayObjects()


@dataclass(frozen=True)
class Pending(Generic[R_co]):
    """The result of a call that may still run."""

    reference: Any
    """Ray's object reference."""
    objects: RayObjects = field(default=RAY, repr=False, compare=False)
    """Objects among which the result will be."""


@dataclass(frozen=True)
class RemoteActor(Generic[A_co]):
    """A Ray actor of the class `A_co`."""

    handle: Any
    """Ray's actor handle."""
    objects: RayObjects = field(default=RAY, repr=False, compare=False)
    """Objects among which the results of its calls will be."""

    def call(
        self, method: Callable[Concatenate[A_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """Start `method`, such as `ModelWorker.values`, with these arguments in the actor's process.

        This is the only place where a method becomes a remote call, so that type checkers see all arguments.
        """
        return Pending(getattr(self.handle, method.__name__).remote(*args, **kwargs), self.objects)

    def call_parts(
        self,
        parts: int,
        method: Callable[Concatenate[A_co, P], tuple[R, *tuple[T, ...]]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[Pending[R], list[Pending[T]]]:
        """Start a `method` that returns `parts` objects, and return each as a result of its own: the first
        one, and the others.

        The caller owns the objects, so they outlive the actor, as long as the actor's node is alive.
        """
        first, *others = (
            getattr(self.handle, method.__name__).options(num_returns=parts).remote(*args, **kwargs)
        )
        return Pending(first, self.objects), [Pending(reference, self.objects) for reference in others]

    def kill(self) -> None:
        """End the process of the actor."""
        self.objects.kill(self.handle)


def as_argument(pending: Pending[R]) -> R:
    """Return a result as an argument of another call. Ray transfers it without the caller."""
    reference: R = pending.reference
    return reference


def fetch(pending: Sequence[Pending[R]], seconds: float) -> list[R]:
    """Return the results in order.

    Raises:
        TimeoutError: Not all results are there after `seconds`.
        WorkerDied: The process of an actor died.
        RLHFError: The error of an actor, as it was raised there.
    """
    received: dict[int, R] = {}
    receive(pending, received, seconds)
    missing = len(pending) - len(received)
    if missing:
        raise TimeoutError(f"{missing} of {len(pending)} results after {seconds:g} s")
    return [received[index] for index in range(len(pending))]


def settle(pending: Sequence[Pending[R]], seconds: float) -> list[R | RLHFError | TimeoutError]:
    """Return the result or the error of each call, after all have ended or `seconds` have passed.

    It is a TimeoutError for a call that has not ended, or whose result was evicted from this host.
    """
    settled: list[R | RLHFError | TimeoutError] = []
    for call, has_ended in zip(pending, ready(pending, seconds), strict=True):
        if not has_ended:
            settled.append(TimeoutError(f"no result after {seconds:g} s"))
            continue
        try:
            # Each by itself: an error would hide the results of the others.
            settled += fetch([call], POLL_SECONDS)
        except (RLHFError, TimeoutError) as error:
            settled.append(error)
    return settled


def receive(pending: Sequence[Pending[R]], received: dict[int, R], seconds: float) -> None:
    """Add the results that arrive within `seconds` to `received`, by their index in `pending`.

    Returns as soon as all are there, and raises the first error that arrives, as `fetch` does; of more than
    `FEW` results, an error can be found `POLL_SECONDS` later. Loading an object that is on this host can take
    longer.
    """
    if not pending:
        return
    objects = pending[0].objects
    deadline = objects.now() + seconds
    in_time = True
    while in_time and len(received) < len(pending):
        missing = {call.reference: index for index, call in enumerate(pending) if index not in received}
        # `ray.get` with a timeout cancels the transfer from another host at the timeout, so the next call
        # begins it again. `ray.wait` lets it continue. All objects that it returns are on this host.
        left = max(0.0, deadline - objects.now())
        # Each wait passes all references to Ray: waiting for one result after the other is quadratic.
        count = 1 if len(missing) <= FEW else len(missing)
        ended = objects.wait(list(missing), count=count, seconds=min(left, POLL_SECONDS))
        if ended and count == 1:
            ended = objects.wait(list(missing), count=len(missing), seconds=0)
        if len(ended) > FEW:
            # One call of Ray costs much less than many. If it fails, the loop below finds out why.
            with suppress(TimeoutError, RLHFError):
                values = objects.get(ended, seconds=min(seconds, POLL_SECONDS))
                received.update(zip((missing[reference] for reference in ended), values, strict=True))
                ended = []
        for reference in ended:
            try:
                received[missing[reference]] = objects.get(reference, seconds=min(seconds, POLL_SECONDS))
            except TimeoutError:
                # Under memory pressure Ray may have evicted the copy; then it arrives in a later call.
                if objects.now() >= deadline:
                    return
        in_time = objects.now() < deadline


def ready(pending: Sequence[Pending[Any]], seconds: float) -> list[bool]:
    """Return for each call whether it has ended, after all have ended or `seconds` have passed."""
    references = [call.reference for call in pending]
    if not references:
        return []
    ended = pending[0].objects.wait(references, count=len(references), seconds=seconds)
    return [reference in ended for reference in references]


def wait_for_first(pending: Sequence[Pending[Any]], seconds: float) -> None:
    """Return when the first call has ended, or after `seconds`."""
    if pending:
        pending[0].objects.wait([call.reference for call in pending], count=1, seconds=seconds)


class ActorClient:
    """Waits for results, finds out which actor is the reason if they do not arrive, and ends actors.

    Args:
        monitor: Observes the actors.
        timeouts: Section `run.timeouts`.
        objects: Objects of the actors.
    """

    def __init__(self, monitor: Monitor, timeouts: TimeoutsConfig, objects: RayObjects = RAY) -> None:
        self.monitor = monitor
        self.timeouts = timeouts
        self.clock = objects.now

    @property
    def start_seconds(self) -> float:
        """How long a call may be queued while no actor works: its actor starts, or the call was lost."""
        return max(self.timeouts.start, self.timeouts.stall)

    def wait(self, pending: Sequence[Pending[R]], what: str) -> list[R]:
        """Return the results in order. `what` names them in error messages.

        Raises:
            WorkerDied, WorkerStuck: A participant is dead, suspended or stalled. It is named, even where
                another actor raised an error because of it.
            RLHFError: The error of an actor in all other cases.
        """
        received: dict[int, R] = {}
        last_progress = self.clock()
        try:
            while True:
                # In each round: a wait may take longer than the limit, as long as the actors work.
                heartbeat(f"wait for {what}", self.timeouts.stall)
                try:
                    receive(pending, received, POLL_SECONDS)
                except OutOfMemory:
                    raise  # more specific than the name of the dead process
                except InfrastructureError as error:
                    # Where a process dies or is suspended, the others only see a broken connection.
                    if not self.monitor.unhealthy():
                        raise
                    raise self.monitor.diagnose(what, self._limits()) from error
                if len(received) == len(pending):
                    return [received[index] for index in range(len(pending))]
                if self.monitor.busy():
                    last_progress = self.clock()
                too_long = self.clock() - last_progress > self.start_seconds
                if self.monitor.stalled() or too_long:
                    raise self.monitor.diagnose(what, self._limits())
        finally:
            idle()

    def dead_actors(self, actors: Sequence[RemoteActor[Actor]]) -> list[RemoteActor[Actor]]:
        """Return the actors that Ray reports as dead. The monitor does not see deaths on other hosts.

        An actor that is busy with another call does not answer within 2 seconds and counts as alive.
        """
        answers = settle([actor.call(Actor.usage) for actor in actors], 2.0)
        is_dead = [isinstance(answer, WorkerDied | OutOfMemory) for answer in answers]
        return list(compress(actors, is_dead))

    def kill(self, actors: Mapping[str, RemoteActor[Actor]]) -> None:
        """End the processes of actors, by the names of their participants."""
        for actor in actors.values():
            actor.kill()
        self.monitor.kill(list(actors))  # Ray's kill does not reach a suspended process

    def _limits(self) -> str:
        limits = self.timeouts
        return f"run.timeouts: start={limits.start:g}, stall={limits.stall:g}, sync={limits.sync:g}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
