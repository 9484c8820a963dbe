"""One other host of a stage, as its driver sees it, and the calls of its agent."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlhf_core.cluster.agent import NodeAgent
from rlhf_core.cluster.rpc import Pending, RemoteActor, fetch, ready
from rlhf_core.errors import InfrastructureError, RLHFError
from rlhf_core.system.heartbeat import Participant

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""Longest wait for the results of calls that may have ended."""

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class HostCall(Pending[R_co]):
    """A call of the agent on `host`."""

    host: Host = field(kw_only=True)


@dataclass
class Host:
    """One node other than the driver's."""

    node_id: str
    actor: RemoteActor[NodeAgent]
    name: str
    files_of: str = ""
    """The id of the node whose files it has: its own, unless hosts share the folder of the run."""
    inputs: list[Path] = field(default_factory=list)
    """Folders of the stage's inputs there, which it has verified, in the order of the inputs."""
    participants: list[Participant] = field(default_factory=list)
    """Participants of the last report. Their seconds are counted on from there."""
    silent: float = 0.0
    """Seconds since the last report."""
    asked: float = math.inf
    """Seconds since the last request for a report."""
    pending: Pending[list[Participant]] | None = None
    lost: bool = False

    @property
    def has_files(self) -> bool:
        """Whether it has files of its own."""
        return self.files_of == self.node_id

    def call(
        self, method: Callable[Concatenate[NodeAgent, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> HostCall[R]:
        call = self.actor.call(method, *args, **kwargs)
        return HostCall(call.reference, call.objects, host=self)

    def ask(self) -> None:
        """Request a report, unless one is under way."""
        if self.pending is None and not self.lost:
            self.pending, self.asked = self.call(NodeAgent.report), 0.0

    def take(self, participants: list[Participant]) -> None:
        """Replace what is known by a report."""
        self.participants, self.silent, self.pending = participants, 0.0, None

    def receive(self, report: Pending[list[Participant]]) -> None:
        """Take a report that has come."""
        try:
            self.take(fetch([report], POLL_SECONDS)[0])
        except TimeoutError:
            return  # the next time
        except RLHFError as error:
            log.warning("host %s is lost: %s", self.name, error)
            self.lose()

    def advance(self, seconds: float) -> None:
        """Count the time since the last report, also for the participants."""
        self.silent += seconds
        self.asked += seconds
        # In place: there may be thousands of them, twice per second.
        for participant in self.participants:
            participant.seconds += seconds

    def lose(self) -> None:
        """Mark the host and its participants as lost. This is final."""
        self.lost = True
        for participant in self.participants:
            participant.state = "lost"


def of_host(error: InfrastructureError, calls: Sequence[HostCall[Any]]) -> InfrastructureError:
    """Return the error of one of several calls with the name of its host. Ray's own errors have none."""
    for call, has_ended in zip(calls, await_calls(calls, POLL_SECONDS), strict=True):
        if not has_ended:
            continue
        try:
            fetch([call], POLL_SECONDS)
        except InfrastructureError as own:
            named = f"host {call.host.name}"
            return own if named in own.message else type(own)(f"{named}: {own.message}")
        except (TimeoutError, RLHFError):
            continue
    return error


def await_calls(calls: Sequence[Pending[R]], seconds: float) -> list[bool]:
    """Return for each call whether it has ended; `ready` needs at least one."""
    return ready(calls, seconds) if calls else []
