"""Brings lost flow runs back: the small loop beside the worker.

Prefect has no zombie handler, its retries do not cover crashes, and automations lose events on SQLite. This
loop asks the operating system instead: is there a process on this machine whose environment names this flow
run?

    RUNNING, no process in two looks        -> CRASHED, then scheduled again
    PENDING for over 30 s, no process       -> the same (such a run would block its deployment for ever)
    CRASHED (the worker saw it die)         -> scheduled again
    CANCELLING for over 30 s, no process    -> CANCELLED
    lost `MAX_ATTEMPTS` times in a row, or
    `MOST_LOSSES` times in all              -> FAILED, with a sentence that says so

A run that has gone on for ten minutes starts a new count: one of days outlives many failures. The count is
read from the server's own history of the run, so that nothing is lost with this process. How long a run went
on is known only up to the look that missed it, so that a machine which is away after each start seems to go
on; hence the second bound.

Only runs with the tag `auto-recover` are touched. It holds for one machine: server, worker and flows on
loopback.
"""

from __future__ import annotations

import http.client
import logging
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from flows.local_http import get, post
from rlhf_core.system.processes import carriers

log = logging.getLogger(__name__)

TAG = "auto-recover"
ENGINE_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Set by Prefect for the process that runs a flow; `rlhf_core.run.environment` keeps it from that process's children.
"""
MAX_ATTEMPTS = 5
"""Losses in a row after which a run is given up."""
MOST_LOSSES = 50
"""Losses in all after which it is."""
SETTLED_SECONDS = 600.0
"""A run that went on for so long starts a new row."""
LOOKS = 2
"""A process must be missing so many times in a row: it may end between the answer of the API and the look."""
_LOOKS_AFTER_REFUSAL = 15
"""A run that Prefect refuses to change is tried again half a minute later."""
SLOW_SECONDS = 30.0
"""A worker needs time between taking a run and the start of its process."""
TOO_OLD_SECONDS = 24 * 3600.0
"""A crash of yesterday is not continued behind the user's back."""

_AWAY = (urllib.error.URLError, http.client.HTTPException, OSError, ValueError, KeyError)
"""The server does not answer, answers half, or refuses."""

Action = Literal["leave", "reschedule", "cancel", "give up"]


@dataclass(frozen=True)
class Sighting:
    """What is known of one flow run at one look."""

    state: str
    """Prefect's state type, such as RUNNING."""
    age: float
    """Seconds in this state."""
    attempts: int
    """How often in a row it was started and lost, this time included; see `losses`."""
    missing: int
    """Looks in a row in which no process had it; 0: there is one."""
    losses: int = 0
    """How often in all."""


def losses(history: Sequence[tuple[datetime, str]], now: datetime) -> tuple[int, int]:
    """How often in a row, and in all, a run was lost that is lost `now`; `history`: (since when, state type)
    of all its states. One that was given up and that somebody started again begins anew.
    """
    states = sorted(history)
    ends = [*(since for since, _ in states[1:]), now]
    row = total = 0
    for (since, state), end in zip(states, ends, strict=True):
        if state == "RUNNING" and (end - since).total_seconds() >= SETTLED_SECONDS:
            row = 0
        if state == "FAILED":
            row = total = 0
        row, total = row + (state == "CRASHED"), total + (state == "CRASHED")
    unsaid = bool(states and states[-1][1] != "CRASHED")
    return row + unsaid, total + unsaid


def decide(seen: Sighting) -> Action:
    """What to do with a flow run."""
    if seen.missing < LOOKS:
        return "leave"
    if seen.state == "CANCELLING":
        return "cancel" if seen.age > SLOW_SECONDS else "leave"
    if seen.state == "PENDING" and seen.age <= SLOW_SECONDS:
        return "leave"
    if seen.state == "CRASHED" and seen.age > TOO_OLD_SECONDS:
        return "leave"
    if seen.state not in ("RUNNING", "PENDING", "CRASHED"):
        return "leave"
    return "give up" if seen.attempts >= MAX_ATTEMPTS or seen.losses >= MOST_LOSSES else "reschedule"


class Reconciler:
    """Looks once per `look`; keeps only a count of looks in memory, so it may be restarted at any time."""

    def __init__(
        self, api: str, alive: Callable[[], set[str]] | None = None, login: str | None = None
    ) -> None:
        self._api = api
        self._login = login
        self._alive = alive or flow_runs_alive
        self._missing: dict[str, int] = {}

    def look(self) -> None:
        """Compare the server's runs with the machine's processes and act. A server that is away changes
        nothing.
        """
        try:
            runs = self._runs()
        except _AWAY as error:
            log.debug("look skipped: %s", error)
            return
        alive = self._alive() if runs else set()
        for run in runs:
            try:
                self._judge(run, alive)
            except _AWAY as error:  # also what Prefect refuses for this run alone: the others come next
                log.warning("flow run %s: %s", run.get("name"), error)
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    self._missing[run["id"]] = -_LOOKS_AFTER_REFUSAL
        self._missing = {run["id"]: self._missing[run["id"]] for run in runs if run["id"] in self._missing}

    def _judge(self, run: Mapping[str, Any], alive: set[str]) -> None:
        name = run["id"]
        self._missing[name] = 0 if name in alive else self._missing.get(name, 0) + 1
        if self._missing[name] < LOOKS:
            return
        now, since = datetime.now(UTC), datetime.fromisoformat(run["state"]["timestamp"])
        seen = Sighting(
            run["state"]["type"], (now - since).total_seconds(), attempts=0, missing=self._missing[name]
        )
        action = decide(seen)
        if action == "leave":
            return
        if action == "reschedule":
            row, total = losses(self._history(name), now)
            seen = replace(seen, attempts=row, losses=total)
            action = decide(seen)
        log.warning("flow run %s (%s) is %s without a process: %s", run["name"], name, seen.state, action)
        if action == "cancel":
            self._set(name, "CANCELLED", "Cancelled", "its process is gone")
        elif action == "give up":
            text = (
                f"its process was lost {seen.losses} times, {seen.attempts} in a row; the logs of the last"
                " one say more"
            )
            self._set(name, "FAILED", "Failed", text)
        else:
            if seen.state != "CRASHED":
                self._set(name, "CRASHED", "Crashed", "its process is gone")
            self._set(
                name,
                "SCHEDULED",
                "AwaitingRetry",
                "its process was lost; continuing from the last checkpoint",
            )
        self._missing[name] = 0

    def _runs(self) -> list[dict[str, Any]]:
        body = {
            "flow_runs": {
                "tags": {"all_": [TAG]},
                "state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING", "CRASHED"]}},
                "parent_task_run_id": {"is_null_": True},
            },
            "sort": "EXPECTED_START_TIME_DESC",
            "limit": 50,
        }
        runs: list[dict[str, Any]] = self._post("/flow_runs/filter", body)
        return runs

    def _history(self, run: str) -> list[tuple[datetime, str]]:
        states = get(f"{self._api}/flow_run_states/?flow_run_id={run}", login=self._login)
        return [(datetime.fromisoformat(state["timestamp"]), state["type"]) for state in states]

    def _set(self, run: str, kind: str, name: str, message: str) -> None:
        answer = self._post(
            f"/flow_runs/{run}/set_state",
            {"state": {"type": kind, "name": name, "message": message}, "force": False},
        )
        if answer["status"] != "ACCEPT":
            log.warning("Prefect did not set flow run %s to %s: %s", run, name, answer.get("details"))

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return post(f"{self._api}{path}", body, login=self._login)


def flow_runs_alive() -> set[str]:
    """Ids of the flow runs that have a process on this machine."""
    return {run for _, run in carriers(ENGINE_VARIABLE)}
