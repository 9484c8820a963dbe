"""What is known of the health of engines and workers, as a small state machine. Pure: it starts and kills
nothing.

    stale --synced--> healthy <--answered-- suspect --died--> dead --restart--> restarting --loaded--> stale
                         |                     ^
                         +-------silent--------+          died leads to dead, from wherever

Only a healthy member is asked for anything: one that was started again holds old weights until a sync has
completed. A suspect one has been asked, does not move, and may still answer. An answer makes up for the
restarts before it. One that is dead and has no restart left stays so; the run stops when so many are that
less than the floor remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlhf_core.errors import WorkerDied

State = Literal["stale", "healthy", "suspect", "dead", "restarting"]
Event = Literal["synced", "answered", "silent", "died", "restart", "loaded"]

TRANSITIONS: dict[tuple[State, Event], State] = {
    ("stale", "synced"): "healthy",
    ("stale", "died"): "dead",
    ("healthy", "synced"): "healthy",
    ("healthy", "answered"): "healthy",
    ("healthy", "silent"): "suspect",
    ("healthy", "died"): "dead",
    ("suspect", "answered"): "healthy",
    ("suspect", "silent"): "suspect",
    ("suspect", "died"): "dead",
    ("dead", "died"): "dead",
    ("dead", "restart"): "restarting",
    ("restarting", "loaded"): "stale",
    ("restarting", "died"): "dead",
}
"""Everything else is a mistake of the caller: an engine that answers while it is stale was asked too early.
"""


class Health:
    """Of `members`, all of one kind. They start stale: loaded, with weights that nobody has confirmed."""

    def __init__(self, members: Sequence[str], *, max_restarts: int, floor: int) -> None:
        """`max_restarts`: of each member, in a row without an answer. `floor`: how many must remain; the
        others may be given up.
        """
        self._states: dict[str, State] = dict.fromkeys(members, "stale")
        self._restarts = dict.fromkeys(members, 0)
        self._max_restarts = max_restarts
        self._floor = floor

    def __getitem__(self, member: str) -> State:
        return self._states[member]

    def note(self, member: str, event: Event) -> State:
        """What `event` makes of `member`. Raises WorkerDied where a death leaves less than the floor, or
        where a member without restarts left is to be restarted.
        """
        state = self._states[member]
        if (state, event) not in TRANSITIONS:
            raise AssertionError(f"{member} is {state}; {event} cannot happen to it")
        if event == "restart":
            if not self.may_restart(member):
                raise WorkerDied(f"{member} has been started again {self._max_restarts} times already")
            self._restarts[member] += 1
        if event == "answered":
            self._restarts[member] = 0
        self._states[member] = TRANSITIONS[state, event]
        if event == "died":
            self._check_floor(member)
        return self._states[member]

    def may_restart(self, member: str) -> bool:
        return self._restarts[member] < self._max_restarts

    def restarts(self, member: str) -> int:
        """How often it was started again since its last answer."""
        return self._restarts[member]

    def members(self, *states: State) -> list[str]:
        """Those in one of `states`, in their order."""
        return [member for member, state in self._states.items() if state in states]

    def remaining(self) -> list[str]:
        """Those that serve, or will again."""
        return [
            member for member, state in self._states.items() if state != "dead" or self.may_restart(member)
        ]

    def _check_floor(self, member: str) -> None:
        left = len(self.remaining())
        if left < self._floor:
            raise WorkerDied(
                f"{member} is lost after {self._restarts[member]} restarts: {left} of {len(self._states)}"
                f" remain, {self._floor} are needed"
            )
