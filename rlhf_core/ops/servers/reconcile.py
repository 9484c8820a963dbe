"""The reconciler: resumes flow runs whose process was lost.

Prefect has no handler for zombie runs, its retries do not cover crashes, and automations lose events on
SQLite. The reconciler asks the operating system instead: is there a process on this machine whose environment
names this flow run?

    RUNNING, no process in two consecutive polls  -> CRASHED, then scheduled again
    PENDING for over 30 s, no process             -> the same (the run would block its deployment forever)
    CRASHED (the worker reported its end)         -> scheduled again
    CANCELLING for over 30 s, no process          -> CANCELLED
    CANCELLING, with a process for over 90 s      -> SIGTERM to the process
    lost `MAX_LOSSES` times in a row              -> FAILED, with the reason
    RUNNING, of a command (`rlhf run`) that ended -> CRASHED: the same command begins another flow run
    Late, and a later run of its schedule is Late -> CANCELLED: while a pipeline runs, the schedule of a
                                                     deployment would queue hundreds of runs

Prefect's worker stops the process of a cancelled run itself, but it can miss the cancellation if Prefect's
server was restarted before. Prefect then shows the run as CANCELLED after five minutes, while its process
runs to its end.

A run that has continued for ten minutes resets the count of losses, because a run of several days may be lost
often. The count is read from the server's history of the run, so it survives a restart of this process.

Of other runs, only those with the tag `auto-recover` are changed, and only runs of the worker on this
machine: Prefect labels a run with the name of its worker before it starts the run's process. The processes of
other workers may be on other hosts, where the reconciler cannot see them.
"""

from __future__ import annotations

import http.client
import json
import logging
import signal
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal

from rlhf_core.system.processes import ProcessId, RecordedProcess, processes_with_env
from rlhf_core.system.serving import get, post

log = logging.getLogger(__name__)

TAG = "auto-recover"
COMMAND_TAG = "command-line"
"""Tag of the flow runs of commands."""
PROCESS_LABEL = "rlhf.process"
"""Label of these runs: the fields of a `RecordedProcess` as JSON."""
WORKER_LABEL = "prefect.worker.name"
"""Set by Prefect's worker on each run that it starts."""
ENGINE_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Set by Prefect for the process that runs a flow. `executors.spec` removes it for the stages."""
# Without a limit, a run that always fails would continue for ever (decision 10).
MAX_LOSSES = 5
STABLE_SECONDS = 600.0
"""A run that continued for this time resets the count of losses."""
MISSING_POLLS = 2
"""A process must be missing in this many consecutive polls: the run may end between the response of the API
and the search for its process.
"""
_POLLS_AFTER_REFUSAL = 15
"""A run that Prefect refused to change is ignored for this many polls (half a minute)."""
START_SECONDS = 30.0
"""The time that a worker may need between taking a run and starting its process."""
CANCEL_SECONDS = 90.0
"""The time after which the reconciler stops a cancelled run. Prefect's worker sends SIGTERM within 13 s, or
40 s if it repeats a request, and SIGKILL 30 s later. After 300 s Prefect's server sets the run to CANCELLED.
"""
FLOW_STOP_SECONDS = 65.0
"""A stage may take 20 s to stop, and the job of a cluster 45 s before its flow cancels it (`Waits.stop`). The
flow needs some more time to report its state.
"""
MAX_CRASH_AGE = 24 * 3600.0
"""An older crash is not resumed, because the user does not expect it any more."""

_REQUEST_ERRORS = (urllib.error.URLError, http.client.HTTPException, OSError, ValueError, KeyError)
"""The server does not respond, sends an incomplete response, or refuses the request."""

Action = Literal["leave", "reschedule", "cancel", "give up"]


def count_losses(history: Sequence[tuple[datetime, str]], now: datetime) -> int:
    """Return how often a run that is lost at `now` was lost in a row, this time included.

    Args:
        history: Start time and state type of all states of the run.
        now: The current time.
    """
    # The order in which the API lists them is not documented.
    states = sorted(history)
    ends = [*(since for since, _ in states[1:]), now]
    losses = 0
    for (since, state), end in zip(states, ends, strict=True):
        if (state == "RUNNING" and (end - since).total_seconds() >= STABLE_SECONDS) or state == "FAILED":
            losses = 0
        elif state == "CRASHED":
            losses += 1
    if states and states[-1][1] != "CRASHED":  # this loss is not in the history yet
        losses += 1
    return losses


def decide(state: str, age: float, losses: int = 0) -> Action:
    """Return what to do with a flow run that has no process.

    Args:
        state: Prefect's state type, such as RUNNING.
        age: Seconds in this state.
        losses: See `count_losses`.
    """
    # A state that begins in the future is from before the clock was set back: its age is unknown.
    is_new = -START_SECONDS <= age <= START_SECONDS
    if state in ("CANCELLING", "PENDING") and is_new:
        return "leave"
    if state == "CANCELLING":
        return "cancel"
    if state == "CRASHED" and age > MAX_CRASH_AGE:
        return "leave"
    if state not in ("RUNNING", "PENDING", "CRASHED"):
        return "leave"
    if losses >= MAX_LOSSES:
        return "give up"
    return "reschedule"


class Reconciler:
    """Compares flow runs with processes at each `poll`.

    It only keeps counts and times of polls in memory, so a restart only delays what it does.

    Args:
        api: Address of Prefect's API.
        worker: Name of the worker whose flow runs have their processes on this machine.
        find_processes: Returns the processes of the flow runs on this machine. Default:
            `processes_of_flow_runs`.
        auth: Prefect's authentication string.
        clock: Returns seconds. A change of the system's time must not affect it.
    """

    def __init__(
        self,
        api: str,
        worker: str,
        find_processes: Callable[[], Mapping[str, Sequence[ProcessId]]] | None = None,
        auth: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._worker = worker
        self._auth = auth
        self._find_processes = find_processes or processes_of_flow_runs
        self._missing: dict[str, int] = {}
        """Flow run id -> consecutive polls without a process. Negative after a refusal."""
        self._clock = clock
        self._cancelled: dict[ProcessId, float] = {}
        """When processes of cancelled runs were seen first."""
        self._stopped: dict[ProcessId, float] = {}
        """When they got SIGTERM. They get no second one, which would kill the stage."""

    def poll(self) -> None:
        """Compare the server's runs with the processes of this machine, and act.

        If the server does not respond, nothing is changed.
        """
        try:
            self._cancel_overtaken()
            commands = self._runs(COMMAND_TAG, {"type": {"any_": ["RUNNING"]}})
            runs = [run for run in self._active_runs() if self._is_own(run)]
        except _REQUEST_ERRORS as error:
            log.debug("poll skipped: %s", error)
            return
        processes: Mapping[str, Sequence[ProcessId]] = {}
        if runs:  # the search reads the environment of all processes
            processes = self._find_processes()
        for run in runs:
            try:
                self._reconcile(run, processes.get(run["id"], ()))
            except _REQUEST_ERRORS as error:
                # Prefect may refuse to change this run only, so the other runs must still be examined.
                log.warning("flow run %s: %s", run.get("name"), error)
                # Otherwise each poll, every two seconds, would send what was refused. A 5xx is tried again.
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    self._missing[run["id"]] = -_POLLS_AFTER_REFUSAL
        for run in commands:
            try:
                self._end_command(run)
            except (*_REQUEST_ERRORS, TypeError) as error:  # TypeError: the label of another release
                log.debug("flow run %s: %s", run.get("name"), error)
        # What has ended is forgotten, so that a supervisor that runs for months does not grow.
        found = set(chain.from_iterable(processes.values()))
        self._cancelled = {process: at for process, at in self._cancelled.items() if process in found}
        self._stopped = {process: at for process, at in self._stopped.items() if process in found}
        self._missing = {run["id"]: self._missing[run["id"]] for run in runs if run["id"] in self._missing}

    def _reconcile(self, run: Mapping[str, Any], processes: Sequence[ProcessId]) -> None:
        """Do what `decide` returns for the flow run, which has these processes."""
        run_id = run["id"]
        self._missing[run_id] = 0 if processes else self._missing.get(run_id, 0) + 1
        if run["state"]["type"] == "CANCELLING":
            self._stop(run, processes)
        if self._missing[run_id] < MISSING_POLLS:
            return
        now, since = datetime.now(UTC), datetime.fromisoformat(run["state"]["timestamp"])
        state, age, losses = run["state"]["type"], (now - since).total_seconds(), 0
        action = decide(state, age)
        if action == "leave":
            return
        if action == "reschedule":
            # The history is a separate request, so it is only read for lost runs.
            losses = count_losses(self._history(run_id), now)
            action = decide(state, age, losses)
        log.warning("flow run %s (%s) is %s without a process: %s", run["name"], run_id, state, action)
        if action == "cancel":
            self._set_state(run_id, "CANCELLED", "Cancelled", "its process is gone")
        elif action == "give up":
            message = f"its process was lost {losses} times in a row; the logs of the last one say more"
            self._set_state(run_id, "FAILED", "Failed", message)
        else:
            # `count_losses` finds this loss in the history later.
            if state != "CRASHED":
                self._set_state(run_id, "CRASHED", "Crashed", "its process is gone")
            message = "its process was lost; continuing from the last checkpoint"
            self._set_state(run_id, "SCHEDULED", "AwaitingRetry", message)
        self._missing[run_id] = 0

    def _stop(self, run: Mapping[str, Any], processes: Sequence[ProcessId]) -> None:
        """Send SIGTERM to processes of a cancelled run after `CANCEL_SECONDS`, and SIGKILL after
        `FLOW_STOP_SECONDS` more: a flow that hangs would keep its stage and the GPUs.
        """
        now = self._clock()
        for process in processes:
            found = self._cancelled.setdefault(process, now)
            if process in self._stopped:
                if now - self._stopped[process] > FLOW_STOP_SECONDS:
                    log.warning("flow run %s (%s) has not stopped: SIGKILL", run["name"], run["id"])
                    process.send(signal.SIGKILL)
            elif now - found > CANCEL_SECONDS:
                log.warning("flow run %s (%s) is cancelled and still runs: SIGTERM", run["name"], run["id"])
                self._stopped[process] = now
                process.send(signal.SIGTERM)

    def _is_own(self, run: Mapping[str, Any]) -> bool:
        """Return whether the worker of this machine has taken the run."""
        worker = (run.get("labels") or {}).get(WORKER_LABEL)
        # A worker that is killed just after it took a run leaves it PENDING without the label.
        return worker == self._worker or (worker is None and run["state"]["type"] == "PENDING")

    def _active_runs(self) -> list[dict[str, Any]]:
        active = {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING", "CRASHED"]}}
        # Not the runs inside `rlhf-rounds` and `rlhf-retrain`: they have no process of their own, and Prefect
        # reschedules only runs of a deployment.
        return self._runs(TAG, active, parent_task_run_id={"is_null_": True})

    def _cancel_overtaken(self) -> None:
        """Cancel the late runs of each schedule but the newest one."""
        late = {"type": {"any_": ["SCHEDULED"]}, "name": {"any_": ["Late"]}}
        # A list, because the parameters are a dict, which no set can have.
        kept: list[tuple[Any, Any]] = []
        for run in self._runs(TAG, late):
            if not run.get("auto_scheduled"):
                continue  # a person has started it
            schedule = (run["deployment_id"], run["parameters"])
            if schedule in kept:
                self._set_state(run["id"], "CANCELLED", "Cancelled", "a later run of its schedule is due")
            else:
                kept.append(schedule)

    def _runs(self, tag: str, state: Mapping[str, Any], **more: Any) -> list[dict[str, Any]]:
        """Return the flow runs with a tag in some states, the newest first."""
        body = {
            "flow_runs": {"tags": {"all_": [tag]}, "state": state, **more},
            # `_cancel_overtaken` keeps the first late run of each schedule, which must be the newest.
            "sort": "EXPECTED_START_TIME_DESC",
            "limit": 50,
        }
        runs: list[dict[str, Any]] = self._post("/flow_runs/filter", body)
        return runs

    def _end_command(self, run: Mapping[str, Any]) -> None:
        """Set the run of a command to CRASHED if its process was killed."""
        label = (run.get("labels") or {}).get(PROCESS_LABEL)
        # `is False`: None is a process of another host, about which nothing is known here.
        if label is not None and RecordedProcess(*json.loads(label)).alive() is False:
            message = "its process is gone; the same command continues from the last checkpoint"
            self._set_state(run["id"], "CRASHED", "Crashed", message)

    def _history(self, run_id: str) -> list[tuple[datetime, str]]:
        states = get(f"{self._api}/flow_run_states/?flow_run_id={run_id}", auth=self._auth)
        return [(datetime.fromisoformat(state["timestamp"]), state["type"]) for state in states]

    def _set_state(self, run_id: str, state_type: str, name: str, message: str) -> None:
        # Without `force`, Prefect's rules refuse transitions that no longer apply to the current state.
        response = self._post(
            f"/flow_runs/{run_id}/set_state",
            {"state": {"type": state_type, "name": name, "message": message}, "force": False},
        )
        if response["status"] != "ACCEPT":
            log.warning("Prefect did not set flow run %s to %s: %s", run_id, name, response.get("details"))

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return post(f"{self._api}{path}", body, auth=self._auth)


def processes_of_flow_runs() -> dict[str, list[ProcessId]]:
    """Return the processes on this machine of each flow run, by its id."""
    processes: dict[str, list[ProcessId]] = {}
    for process, run_id in processes_with_env(ENGINE_VARIABLE):
        processes.setdefault(run_id, []).append(process)
    return processes
