"""The ranks of a stage: one rank in this process, several as Ray actors.

    one rank, this host   the target runs in the stage's own process; Ray is not started
    otherwise             an actor for each rank, on this host or on the cluster at RAY_ADDRESS; rank 0 calls
                          the stage's process for metrics, progress and checkpoints (`cluster.mailbox`)

The stage's process waits for all ranks. If one fails, it raises the error of the rank that caused it, and not
of one whose collective broke as a result; if one makes no progress, an error that names it
(`rlhf_core.system.heartbeat`). All ranks end with the call.
"""

from __future__ import annotations

import logging
import math
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_core.cluster.connect import connect, on_cluster
from rlhf_core.cluster.mailbox import (
    END,
    CallReply,
    CallRequest,
    ContextServer,
    LogForwarder,
    Mailbox,
    portable,
)
from rlhf_core.cluster.placement import RAY_CLUSTER, reserve_ranks
from rlhf_core.cluster.rpc import (
    POLL_SECONDS,
    ActorClient,
    ListeningActor,
    ParticipantSpec,
    Pending,
    RemoteActor,
    rpc,
    settle,
    wait_for_first,
)
from rlhf_core.config.pipeline import RunConfig, TimeoutsConfig
from rlhf_core.engines.distributed import Rank, join, leave
from rlhf_core.errors import InfrastructureError, RLHFError, WorkerDied, WorkerStuck, classified
from rlhf_core.system.heartbeat import Monitor, current_activity, heartbeat, idle, register, unregister
from rlhf_core.system.processes import EXIT_STOPPED
from rlhf_core.types import Nodes, StageContext

_ERROR_SECONDS = 5.0
"""Time for the rank that caused the error of another one to be found."""
_STALL_SECONDS = 4.0
"""Time for the collectives of the other ranks to fail, so that only the stalled rank is named. Shorter than
`heartbeat.GRACE_SECONDS`.
"""

Target = Callable[..., Any]


@dataclass(frozen=True)
class RankLayout:
    """The processes of one call."""

    ranks: int
    device: str
    label: str = "training rank"
    gpus_per_rank: int = 1
    neighbours: int = 1
    """Each group of this number of consecutive ranks is on one host."""
    process_group: bool = True
    """Whether the ranks join one torch.distributed world."""

    def name(self, rank: int) -> str:
        """Return the name of a rank in messages and for the heartbeat monitor."""
        return f"{self.label} {rank}"


def needs_actors(ranks: int) -> bool:
    """Return whether `ranks` ranks are Ray actors: several are, and on a cluster a single one is, too."""
    return ranks > 1 or on_cluster()


def run_ranks(
    target: Target,
    ranks: int,
    device: str,
    *args: Any,
    context: StageContext | None,
    run: RunConfig | None = None,
    monitor: Monitor | None = None,
    neighbours: int = 1,
) -> Any:
    """Call `target(rank, *args, context)` on every rank and return what rank 0 returned.

    Args:
        target: Runs on each rank. It must be picklable.
        ranks: Number of ranks.
        device: "cpu" or "cuda".
        args: Further arguments of `target`. They must be picklable.
        context: Context of the stage. Only rank 0 gets it, because only rank 0 tracks, commits and reports.
            The others get None.
        run: Section `run`, see `connect`; None for the defaults.
        monitor: An entered heartbeat monitor; None for that of the context, or a new one.
        neighbours: Each group of this number of consecutive ranks is on one host.

    Raises:
        WorkerDied: A rank died without an error.
        WorkerStuck: A rank stalled.
        RLHFError: The error of another rank than 0, with its class and the number of the rank.
    """
    layout = RankLayout(ranks, device, neighbours=neighbours)
    return _run(layout, target, args, context, run, monitor)[0]


def map_ranks(
    target: Target,
    ranks: int,
    device: str,
    *args: Any,
    context: StageContext | None,
    label: str,
    gpus_per_rank: int = 1,
    run: RunConfig | None = None,
    monitor: Monitor | None = None,
) -> list[Any]:
    """Call `target(rank, *args, context)` in a process of its own for each rank, without a process group, and
    return all results by rank.

    Args:
        target: Runs on each rank. It must be picklable.
        ranks: Number of ranks.
        device: "cpu" or "cuda".
        args: Further arguments of `target`. They must be picklable.
        context: Context of the stage. Only rank 0 gets it; the others get None.
        label: Names the ranks in messages: `engine`.
        gpus_per_rank: GPUs that each rank sees, with "cuda".
        run: Section `run`, see `connect`; None for the defaults.
        monitor: An entered heartbeat monitor; None for that of the context, or a new one.

    Raises the same errors as `run_ranks`.
    """
    layout = RankLayout(ranks, device, label, gpus_per_rank, process_group=False)
    return _run(layout, target, args, context, run, monitor)


def _limits(run: RunConfig | None) -> TimeoutsConfig:
    return (run or RunConfig()).timeouts


def _run(
    layout: RankLayout,
    target: Target,
    args: tuple[Any, ...],
    context: StageContext | None,
    run: RunConfig | None,
    monitor: Monitor | None,
) -> list[Any]:
    limits, nodes = _limits(run), None
    if context is not None:
        nodes, monitor = context.nodes, monitor or context.monitor
    with nullcontext(monitor) if monitor is not None else Monitor() as seen:
        # Without a process group each rank has a process of its own, also a single one.
        if layout.process_group and not needs_actors(layout.ranks):
            return [_run_here(layout, target, args, context, limits, seen)]
        with ray_session(layout.ranks, layout.device, run, seen, nodes):
            group = RankGroup(layout, limits, seen)
            try:
                return group.run(target, args, context)
            finally:
                group.end()


def _run_here(
    layout: RankLayout,
    target: Target,
    args: tuple[Any, ...],
    context: StageContext | None,
    limits: TimeoutsConfig,
    monitor: Monitor,
) -> Any:
    # torch gets the open socket: by the number alone, another process could take the port before torch
    # listens.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, port = listener.getsockname()
        rank = Rank(0, 1, 0, address, port, layout.device, limits.start, limits.stall, listener)
        register(monitor.folder, layout.name(0), limits.stall)
        heartbeat("start", limits.start)
        try:
            join(rank)
            return target(rank, *args, context)
        finally:
            leave()
            unregister()


# -- in the actor --


@dataclass(frozen=True)
class RankOutcome:
    """How the target ended on one rank."""

    value: Any = None
    error: RLHFError | None = None
    broken: bool = False
    """Whether `error` is that of a collective, which also breaks if another rank failed."""
    stopped: bool = False
    """Whether the rank left because the stage was asked to stop."""


class RankActor(ListeningActor):
    """One rank. It has two threads: one for the target, and one for the mailbox."""

    def __init__(self, participant: ParticipantSpec) -> None:
        super().__init__(participant)
        self._mailbox = Mailbox()

    @rpc("start")
    def prepare(self) -> None:
        """Return after the process has started."""

    def run(
        self,
        rank: Rank,
        target: Target,
        args: tuple[Any, ...],
        context: StageContext | None,
        *,
        process_group: bool,
    ) -> RankOutcome:
        """Run the target and return its value or its error.

        Args:
            rank: The rank that this actor is.
            target: What to run.
            args: The target's arguments between the rank and the context.
            context: The stage's context for rank 0 (`mailbox.portable`), None for the others.
            process_group: Whether the rank joins a process group first.
        """
        heartbeat("start", rank.start)
        if rank.rank == 0:
            logging.basicConfig(level=logging.INFO, handlers=[LogForwarder(self._mailbox)])
        try:
            if process_group:
                join(replace(rank, listener=self._listener))
            value = target(rank, *args, None if context is None else self._mailbox.context(context))
            # Before any rank ends: NCCL ends its communicators on all ranks together.
            leave()
            return RankOutcome(value)
        except SystemExit as stop:
            if stop.code != EXIT_STOPPED:
                raise
            return RankOutcome(stopped=True)
        except Exception as error:
            # Into the log of the rank: the error that is returned loses its traceback on the way.
            traceback.print_exc()
            sys.stderr.flush()
            ours = classified(error)
            # torch raises a RuntimeError for a broken collective, and also if memory is exhausted.
            broken = isinstance(error, RuntimeError) and type(ours) is InfrastructureError
            return RankOutcome(error=ours, broken=broken)
        finally:
            unregister()
            # Last: the stage's process asks for no more requests after it.
            self._mailbox.post(END)

    def next_request(self, reply: CallReply | None, stop: bool) -> tuple[CallRequest | None, str]:
        """Return the next call of the context, if there is one, and the activity of this rank.

        Args:
            reply: Reply to the request that was returned before.
            stop: Whether the stage was asked to stop.
        """
        return self._mailbox.exchange(reply, stop, POLL_SECONDS), current_activity()


# -- in the stage's process --


@contextmanager
def ray_session(
    processes: int,
    device: str,
    run: RunConfig | None,
    monitor: Monitor,
    nodes: Nodes | None = None,
) -> Iterator[None]:
    """Do what `new_ray_session` does, and nothing in the body of another session.

    Args:
        processes, device, run, monitor, nodes: See `new_ray_session`.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    with new_ray_session(processes, device, run, monitor, nodes):
        yield


@contextmanager
def new_ray_session(
    processes: int,
    device: str,
    run: RunConfig | None,
    monitor: Monitor,
    nodes: Nodes | None = None,
) -> Iterator[None]:
    """Connect to Ray for the body, and end all participants and the connection after it.

    Args:
        processes: Number of actors that a Ray started here has to hold.
        device: "cpu" or "cuda".
        run: Section `run`, see `connect`; None for the defaults.
        monitor: The heartbeat monitor of the stage, already entered.
        nodes: The other hosts of the stage, which it leaves at the end.
    """
    import ray

    heartbeat("start Ray", _limits(run).start)
    try:
        connect(processes, device, run, nodes)
        idle()  # the body may do anything
        yield
    except BaseException:
        # First, because a suspended rank does not react to Ray's daemons, which would wait for it.
        monitor.kill()
        raise
    finally:
        try:
            if nodes is not None:
                nodes.leave()
        finally:
            # Also if a host cannot be left: Ray's processes of this host must not outlive the stage.
            ray.shutdown()
            # What is left: Ray's end does not reach suspended processes.
            monitor.kill()
            idle()


class RankGroup:
    """The actors of all ranks."""

    def __init__(self, layout: RankLayout, limits: TimeoutsConfig, monitor: Monitor) -> None:
        self._layout = layout
        self._limits = limits
        self._monitor = monitor
        self._client = ActorClient(monitor, limits)
        self._placement = reserve_ranks(
            layout.ranks,
            layout.label,
            gpus_per_rank=layout.gpus_per_rank if layout.device == "cuda" else 0,
            neighbours=layout.neighbours,
            wait=self._client.wait,
        )
        self._names = [layout.name(rank) for rank in range(layout.ranks)]
        """Names of the ranks in messages."""
        if on_cluster():
            nodes = RAY_CLUSTER.node_names()
            for rank, node_id in enumerate(self._placement.nodes):
                self._names[rank] += f" on {nodes[node_id]}"
        self._actors = [self._start(rank) for rank in range(layout.ranks)]

    def _start(self, rank: int) -> RemoteActor[RankActor]:
        import ray

        name = self._layout.name(rank)
        participant = ParticipantSpec(name, self._monitor.folder.resolve(), self._limits)
        options = {"max_concurrency": 2, **self._placement.options(rank)}
        return RemoteActor(ray.remote(RankActor).options(**options).remote(participant))

    def run(self, target: Target, args: tuple[Any, ...], context: StageContext | None) -> list[Any]:
        """Run the target on all ranks, and return the results."""
        self._await_start()
        nodes = None if context is None else context.nodes
        if nodes is not None:
            nodes.join(self._placement.ranks_by_node())
            for folder in folders_in(args):
                nodes.share(folder)
        layout, limits, address, port = self._layout, self._limits, "", 0
        if layout.process_group:
            listening = self._actors[0].call(RankActor.listen, not on_cluster())
            try:
                address, port = self._client.wait([listening], "rank 0")[0]
            except WorkerDied as error:
                raise _death_of(self._names[0]) from error
        sent = None if context is None else portable(context)
        calls = []
        for number, actor in enumerate(self._actors):
            # The local rank is 0 on all: Ray shows each actor its own GPUs only.
            rank = Rank(number, layout.ranks, 0, address, port, layout.device, limits.start, limits.stall)
            own = sent if number == 0 else None
            calls.append(
                actor.call(RankActor.run, rank, target, args, own, process_group=layout.process_group)
            )
        outcomes = _Outcomes(self._names, calls)
        server = ContextServer(context)
        _Follower(outcomes, layout.label, self._actors[0], server, self._monitor, limits).follow()
        if outcomes.ended[0].stopped:
            raise SystemExit(EXIT_STOPPED)
        if context is not None and nodes is not None:
            nodes.gather(context.output)
        return [outcomes.ended[rank].value for rank in range(layout.ranks)]

    def end(self) -> None:
        """End all ranks at once."""
        from ray.util import remove_placement_group

        # Ranks that have not ended. Ray's kill does not reach a suspended process.
        self._monitor.kill([self._layout.name(rank) for rank in range(self._layout.ranks)])
        for actor in self._actors:
            actor.kill()
        remove_placement_group(self._placement.placement_group)

    def _await_start(self) -> None:
        """Wait until all ranks have started. Raises the error of the first that did not."""
        outcomes = _Outcomes(self._names, [actor.call(RankActor.prepare) for actor in self._actors])
        deadline = time.monotonic() + self._limits.start
        while outcomes.pending:
            heartbeat("wait for the ranks to start", self._limits.start)
            outcomes.collect()
            if outcomes.failed:
                error = outcomes.failed[0].error
                assert error is not None
                raise error
            if outcomes.pending and time.monotonic() >= deadline:
                raise WorkerStuck(
                    f"{self._names[min(outcomes.pending)]} was not up after {self._limits.start:g} s"
                    " (run.timeouts.start)"
                )


def _death_of(name: str) -> WorkerDied:
    return WorkerDied(f"{name} died; the stage continues from its last checkpoint")


def folders_in(args: Sequence[Any]) -> list[Path]:
    """Return the existing folders among the arguments of a target, in tuples and in their fields."""
    values: list[Any] = []
    for arg in args:
        values += arg if isinstance(arg, tuple) else (arg,)
    for arg in tuple(values):
        if is_dataclass(arg):
            values += [getattr(arg, field.name) for field in fields(arg)]
    return [value for value in values if isinstance(value, Path) and value.is_dir()]


class _Outcomes:
    """The results of one call of each rank."""

    def __init__(self, names: Sequence[str], calls: Sequence[Pending[Any]]) -> None:
        self.names = names
        self.pending = dict(enumerate(calls))
        self.ended: dict[int, RankOutcome] = {}
        """Outcomes by rank, in the order in which the ranks ended."""

    def collect(self, also: Sequence[Pending[Any]] = ()) -> None:
        """Wait until a rank or one of `also` has ended, for at most `POLL_SECONDS`."""
        wait_for_first([*self.pending.values(), *also], POLL_SECONDS)
        for rank, result in zip(list(self.pending), settle(list(self.pending.values()), 0), strict=True):
            if not isinstance(result, TimeoutError):
                self.ended[rank] = self._outcome(rank, result)
                del self.pending[rank]

    @property
    def failed(self) -> list[RankOutcome]:
        """Those with an error, the first one first."""
        return [outcome for outcome in self.ended.values() if outcome.error is not None]

    def _outcome(self, rank: int, result: Any) -> RankOutcome:
        name = self.names[rank]
        if isinstance(result, WorkerDied):
            return RankOutcome(error=_death_of(name))
        if isinstance(result, RLHFError):
            outcome = RankOutcome(error=result)
        else:
            # `prepare` returns None.
            outcome = result or RankOutcome()
        if outcome.error is not None and rank:
            # The errors of rank 0 are those of the stage.
            return replace(outcome, error=type(outcome.error)(f"{name}: {outcome.error.message}"))
        return outcome


class _Follower:
    """Waits for the target to end on all ranks, and executes the calls of rank 0."""

    def __init__(
        self,
        outcomes: _Outcomes,
        label: str,
        rank_zero: RemoteActor[RankActor],
        server: ContextServer,
        monitor: Monitor,
        limits: TimeoutsConfig,
    ) -> None:
        self._outcomes = outcomes
        self._label = label
        self._rank_zero = rank_zero
        self._server = server
        self._monitor = monitor
        self._limits = limits
        self._request: Pending[tuple[CallRequest | None, str]] | None = self._next_request(None)
        """The call that returns the next request of rank 0; None after its end."""
        self._activity = ""
        """What rank 0 did when it was last asked."""
        self._ended_at: float | None = None
        """When rank 0 had ended."""

    def follow(self) -> None:
        """Return when all ranks have ended. Raises the error of the rank that failed first."""
        error_deadline = stall_deadline = math.inf
        while self._outcomes.pending or self._request is not None:
            # Never stalled: the ranks have timeouts of their own, and so has each call of the context.
            heartbeat("wait for the ranks", math.inf)
            had_failed = bool(self._outcomes.failed)
            self._outcomes.collect([self._request] if self._request is not None else [])
            has_answered = self._serve()
            if self._outcomes.failed:
                error_deadline = min(error_deadline, time.monotonic() + _ERROR_SECONDS)
                # Only an answer after the failure shows what rank 0 does now.
                is_current = self._request is None or (had_failed and has_answered)
                if self._must_end(error_deadline, is_current=is_current):
                    raise self._error()
            elif self._monitor.stalled():
                stall_deadline = min(stall_deadline, time.monotonic() + _STALL_SECONDS)
                if time.monotonic() >= stall_deadline:
                    raise self._stuck()
            elif 0 in self._outcomes.ended:
                self._await_others()
            else:
                stall_deadline = math.inf

    def _must_end(self, deadline: float, *, is_current: bool) -> bool:
        """Return whether the stage ends now, after a rank has failed.

        A commit does not depend on the other ranks, and is completed first.
        """
        if self._activity == "commit":
            return False
        if any(not outcome.broken for outcome in self._outcomes.failed):
            return is_current
        return time.monotonic() >= deadline or self._is_stuck()

    def _is_stuck(self) -> bool:
        return any(each.state == "suspended" or each.stalled for each in self._monitor.unhealthy())

    def _next_request(self, reply: CallReply | None) -> Pending[tuple[CallRequest | None, str]]:
        return self._rank_zero.call(RankActor.next_request, reply, self._server.stop_requested)

    def _serve(self) -> bool:
        """Execute the next call of rank 0, and ask for another. Return whether rank 0 answered."""
        if self._request is None:
            return False
        [answer] = settle([self._request], 0)
        if isinstance(answer, TimeoutError):
            return False
        if isinstance(answer, InfrastructureError):
            # It died. Its outcome is the error.
            self._request, self._activity = None, ""
            return True
        if isinstance(answer, RLHFError):
            raise answer
        request, self._activity = answer
        if request == END:
            self._request = None
        else:
            self._request = self._next_request(None if request is None else self._server.execute(request))
        return True

    def _await_others(self) -> None:
        """Raise WorkerStuck if the others do not end within the limit after rank 0."""
        self._ended_at = self._ended_at or time.monotonic()
        if self._outcomes.pending and time.monotonic() - self._ended_at > self._limits.stall:
            name = self._outcomes.names[min(self._outcomes.pending)]
            raise WorkerStuck(f"{name} did not end within {self._limits.stall:g} s (run.timeouts.stall)")

    def _error(self) -> RLHFError:
        """Return the error of the rank that failed by itself, if there is one."""
        failed = self._outcomes.failed
        for outcome in failed:
            if outcome.error is not None and not outcome.broken:
                return outcome.error
        error = failed[0].error
        assert error is not None
        # gloo raises "Timed out waiting ..." if another rank did not join a collective in time.
        if self._is_stuck() or "timed out" in error.message.lower():
            return self._stuck()
        return error

    def _stuck(self) -> InfrastructureError:
        limit = f"run.timeouts.stall={self._limits.stall:g}"
        return self._monitor.diagnose(f"the {self._label}s", limit)
