"""Behaviours of the reconciler:

- a run with a process is not changed, in any state; its process is stopped 90 s after a poll found the run
  CANCELLING
- a lost run is resumed after two polls, PENDING and CANCELLING only after half a minute
- a run is resumed a bounded number of times in a row, then it fails with a message; a run that continued for
  some time resets the count
- a cancelled run is never resumed
- a flow is killed only after the time that it gives a job of a cluster to stop
- only runs of this machine's worker are changed
- a run of a command whose process was killed is set to CRASHED
- of the late runs of a schedule, only the newest is kept; those that a person has started are kept
- a server that does not respond, or not completely, changes nothing; if it refuses to change one run, the
  others are still resumed; the same holds for the run of a command
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlhf_core.executors.follow import Waits
from rlhf_core.ops.servers.reconcile import (
    CANCEL_SECONDS,
    FLOW_STOP_SECONDS,
    MAX_LOSSES,
    MISSING_POLLS,
    PROCESS_LABEL,
    STABLE_SECONDS,
    WORKER_LABEL,
    Reconciler,
    count_losses,
    decide,
    processes_of_flow_runs,
)
from rlhf_core.system.processes import ProcessId, RecordedProcess

OWN = ProcessId(os.getpid(), 0.0)
"""A process that gets no signal, because its start time is wrong."""
DAY = 24 * 3600.0


@pytest.mark.parametrize(
    ("state", "age", "losses", "action"),
    [
        ("RUNNING", 1.0, 1, "reschedule"),
        ("RUNNING", 100.0, MAX_LOSSES - 1, "reschedule"),
        ("RUNNING", 100.0, MAX_LOSSES, "give up"),
        ("PENDING", 5.0, 0, "leave"),
        ("PENDING", 31.0, 0, "reschedule"),
        ("PENDING", 31.0, MAX_LOSSES, "give up"),
        ("PENDING", -5.0, 0, "leave"),
        ("PENDING", -3600.0, 0, "reschedule"),  # the clock was set back by an hour
        ("CANCELLING", -3600.0, 0, "cancel"),
        ("CRASHED", 1.0, 1, "reschedule"),
        ("CRASHED", 1.0, MAX_LOSSES, "give up"),
        ("CRASHED", DAY + 1, 1, "leave"),
        ("CANCELLING", 5.0, 1, "leave"),
        ("CANCELLING", 31.0, 1, "cancel"),
        ("COMPLETED", 100.0, 1, "leave"),
        ("CANCELLED", 100.0, 1, "leave"),
    ],
)
def test_state_age_and_losses_decide_what_happens_to_a_run(
    state: str, age: float, losses: int, action: str
) -> None:
    assert decide(state, age, losses) == action


NOW = datetime(2026, 1, 1, tzinfo=UTC)
SHORT = ("SCHEDULED", 1.0), ("PENDING", 3.0), ("RUNNING", 60.0), ("CRASHED", 1.0)
NEVER = ("SCHEDULED", 1.0), ("PENDING", 31.0), ("CRASHED", 1.0)
LONG = ("SCHEDULED", 1.0), ("PENDING", 3.0), ("RUNNING", STABLE_SECONDS), ("CRASHED", 1.0)


@pytest.mark.parametrize(
    ("states", "count"),
    [
        (SHORT, 1),
        (SHORT[:-1], 1),  # lost now, and not in the history yet
        ((*SHORT, *NEVER, *NEVER, *SHORT), 4),
        ((*SHORT, *NEVER[:-1]), 2),
        ((*SHORT, *SHORT, *LONG), 1),
        ((*SHORT, *LONG, *SHORT, *NEVER), 3),
        ((*SHORT, *SHORT, *LONG[:-1]), 1),
        ((*SHORT, *SHORT, ("FAILED", 1.0), *SHORT), 1),  # given up, then started again by the user
    ],
)
def test_long_run_resets_the_count_of_losses(states: Sequence[tuple[str, float]], count: int) -> None:
    history, at = [], NOW
    for state, seconds in states:
        history.append((at, state))
        at += timedelta(seconds=seconds)
    assert count_losses(history[::-1], at) == count


class Server:
    """The calls of Prefect's API that the reconciler makes."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.sets: list[tuple[str, str]] = []
        self.down = self.incomplete = False
        """Whether connections are closed without an answer, and whether answers are cut off."""
        self.history: dict[str, list[dict[str, Any]]] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, server.history[self.path.partition("=")[2]])

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not server.down:
                    self.answer(*server.post(self.path, body))

            def answer(self, status: int, content: Any) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[:1] if server.incomplete else data)

            def log_message(self, *_: Any) -> None:
                """Write nothing to standard error."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.api = f"http://127.0.0.1:{self._http.server_port}/api"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def add(self, name: str, state: str, age: float = 60.0, worker: str | None = "here") -> None:
        since = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
        self.runs[name] = {
            "id": name,
            "name": name,
            "state": {"type": state, "timestamp": since},
            "labels": {} if worker is None else {WORKER_LABEL: worker},
        }
        self.history.setdefault(name, []).append(self.runs[name]["state"])

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Return status and content of the answer to a POST request."""
        if path.endswith("/filter"):
            wanted = body["flow_runs"]["state"]["type"]["any_"]
            return 200, [run for run in self.runs.values() if run["state"]["type"] in wanted]
        name = path.split("/")[-2]
        if name == "refused":
            return 409, {"detail": "Conflict"}
        self.sets.append((name, body["state"]["name"]))
        self.add(name, body["state"]["type"], age=0.0)
        return 200, {"status": "ACCEPT"}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_lost_run_is_crashed_and_scheduled_in_the_second_poll(server: Server) -> None:
    server.add("lost", "RUNNING")
    server.add("alive", "RUNNING")
    reconciler = Reconciler(server.api, "here", find_processes=lambda: {"alive": [OWN]})
    reconciler.poll()
    assert server.sets == []
    reconciler.poll()
    assert server.sets == [("lost", "Crashed"), ("lost", "AwaitingRetry")]


def test_late_runs_of_a_schedule_do_not_pile_up(server: Server) -> None:
    looks = {"deployment_id": "looks", "parameters": {"config": "a.yaml"}, "auto_scheduled": True}
    changes: dict[str, dict[str, Any]] = {
        "newest": {},
        "older": {},
        "other schedule": {"parameters": {"config": "b.yaml"}},
        "other deployment": {"deployment_id": "weekly"},
        "oldest": {},
        "of a person": {"auto_scheduled": False},
    }
    for name, change in changes.items():
        server.add(name, "SCHEDULED")
        server.runs[name] |= {**looks, **change}
    Reconciler(server.api, "here", find_processes=dict).poll()
    assert server.sets == [("older", "Cancelled"), ("oldest", "Cancelled")]


def test_a_command_that_was_killed_is_shown_as_crashed(server: Server) -> None:
    own = RecordedProcess.own()
    processes = {
        "alive": own,
        "killed": own._replace(started=own.started - 9),
        "elsewhere": own._replace(host="other"),
    }
    for name, process in processes.items():
        server.add(name, "RUNNING", worker=None)
        server.runs[name]["labels"] = {PROCESS_LABEL: json.dumps(process)}
    Reconciler(server.api, "here", find_processes=dict).poll()
    assert server.sets == [("killed", "Crashed")], "nothing else can start it again"


def test_a_command_that_cannot_be_ended_does_not_prevent_the_others(server: Server) -> None:
    own = RecordedProcess.own()
    killed = own._replace(started=own.started - 9)
    labels = {
        "refused": json.dumps(killed),
        "of a later release": json.dumps([*killed, "more"]),
        "no JSON": "{",
        "killed": json.dumps(killed),
    }
    for name, label in labels.items():
        server.add(name, "RUNNING", worker=None)
        server.runs[name]["labels"] = {PROCESS_LABEL: label}
    server.add("lost", "RUNNING")
    reconciler = Reconciler(server.api, "here", find_processes=dict)
    for _ in range(MISSING_POLLS):
        reconciler.poll()
    assert ("lost", "AwaitingRetry") in server.sets
    assert ("killed", "Crashed") in server.sets


def test_run_of_a_worker_on_another_host_is_never_changed(server: Server) -> None:
    for state in ("RUNNING", "PENDING", "CANCELLING", "CRASHED"):
        server.add(f"elsewhere-{state}", state, worker="there")
    server.add("without-a-worker", "RUNNING", worker=None)
    server.add("taken-by-a-worker-that-was-killed", "PENDING", worker=None)
    reconciler = Reconciler(server.api, "here", find_processes=dict)
    for _ in range(2 * MISSING_POLLS):
        reconciler.poll()
    assert {name for name, _ in server.sets} == {"taken-by-a-worker-that-was-killed"}


def test_process_of_a_cancelled_run_is_stopped_once_and_then_killed(server: Server) -> None:
    server.add("cancelled", "CANCELLING", age=3600.0)  # by the wall clock, which may have been set
    process = _Signals(1, 0.0)
    times = (0.0, CANCEL_SECONDS, CANCEL_SECONDS + 1, CANCEL_SECONDS + FLOW_STOP_SECONDS, 1000.0)
    found: dict[str, list[ProcessId]] = {"cancelled": [process]}
    reconciler = Reconciler(
        server.api, "here", find_processes=lambda: found, clock=iter((*times, 1001.0, 1003.0)).__next__
    )
    received = []
    for _ in times:
        reconciler.poll()
        received.append(tuple(process.received))
    once = (signal.SIGTERM,)
    assert received == [(), (), once, once, (*once, signal.SIGKILL)]
    assert server.sets == []
    del found["cancelled"]
    reconciler.poll()
    reconciler.poll()
    assert server.sets == [("cancelled", "Cancelled")]


def test_flow_has_the_time_that_it_gives_a_job_of_a_cluster_to_stop() -> None:
    assert Waits().stop + 15.0 < FLOW_STOP_SECONDS


def test_run_that_is_cancelled_again_gets_its_own_signal(server: Server) -> None:
    first, second = _Signals(1, 0.0), _Signals(2, 0.0)
    times = iter((0.0, 200.0, 300.0, 380.0, 400.0))
    server.add("run", "CANCELLING")
    found: dict[str, list[ProcessId]] = {"run": [first]}
    reconciler = Reconciler(server.api, "here", find_processes=lambda: found, clock=times.__next__)
    for _ in range(2):
        reconciler.poll()
    found["run"] = [second]
    for _ in range(3):
        reconciler.poll()
    assert first.received == second.received == [signal.SIGTERM]


@dataclass(frozen=True)
class _Signals(ProcessId):
    """A process that records the signals that are sent to it."""

    received: list[int] = field(default_factory=list, compare=False)

    def send(self, signum: int) -> None:
        self.received.append(signum)


def test_refused_run_does_not_prevent_the_others(
    server: Server,
) -> None:
    server.add("refused", "RUNNING")
    server.add("lost", "RUNNING")
    reconciler = Reconciler(server.api, "here", find_processes=dict)
    for _ in range(3):
        reconciler.poll()
    assert ("lost", "AwaitingRetry") in server.sets


def test_incomplete_response_changes_nothing(server: Server) -> None:
    server.add("lost", "RUNNING")
    reconciler = Reconciler(server.api, "here", find_processes=dict)
    server.incomplete = True
    reconciler.poll()
    server.incomplete = False
    reconciler.poll()
    reconciler.poll()
    assert ("lost", "AwaitingRetry") in server.sets


def test_poll_with_a_process_resets_the_count_of_polls(server: Server) -> None:
    server.add("run", "RUNNING")
    alive: dict[str, list[ProcessId]] = {}
    reconciler = Reconciler(server.api, "here", find_processes=lambda: alive)
    reconciler.poll()
    alive["run"] = [OWN]
    reconciler.poll()
    alive.clear()
    reconciler.poll()
    assert server.sets == []


def test_run_that_never_starts_is_given_up(server: Server) -> None:
    reconciler = Reconciler(server.api, "here", find_processes=dict)
    for _ in range(MAX_LOSSES - 1):
        server.add("stuck", "PENDING")  # a worker takes the run and loses it, each time
        reconciler.poll()
        reconciler.poll()
    assert server.sets.count(("stuck", "AwaitingRetry")) == MAX_LOSSES - 1
    server.add("stuck", "PENDING")
    reconciler = Reconciler(server.api, "here", find_processes=dict)  # the counts are in the server's history
    reconciler.poll()
    reconciler.poll()
    assert server.sets[-1] == ("stuck", "Failed")


def test_refused_run_is_ignored_for_some_polls(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.add("refused", "RUNNING")
    reconciler = Reconciler(server.api, "here", find_processes=dict)
    for _ in range(16):
        reconciler.poll()
    assert sum("HTTP Error 409" in record.getMessage() for record in caplog.records) == 1
    for _ in range(3):
        reconciler.poll()
    assert sum("HTTP Error 409" in record.getMessage() for record in caplog.records) == 2


def test_unreachable_server_changes_nothing(server: Server) -> None:
    server.add("lost", "RUNNING")
    reconciler = Reconciler(server.api, "here", find_processes=dict)
    reconciler.poll()
    server.down = True
    reconciler.poll()
    server.down = False
    reconciler.poll()
    assert ("lost", "AwaitingRetry") in server.sets


def test_flow_run_is_alive_while_a_process_has_its_id() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, "PREFECT__FLOW_RUN_ID": "test-run-7"},
    )
    try:
        deadline = time.monotonic() + 60
        while "test-run-7" not in processes_of_flow_runs() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "test-run-7" in processes_of_flow_runs()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie
        assert "test-run-7" not in processes_of_flow_runs()
    finally:
        process.kill()
        process.wait()
