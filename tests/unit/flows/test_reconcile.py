"""Behaviours of the reconciler:

- a run with a process is left alone, whatever its state
- a lost run is brought back only after two looks, PENDING and CANCELLING only after half a minute
- a run is brought back a bounded number of times in a row, then failed with a sentence; one that went on for
  a while in between starts a new count
- a cancelled run is never brought back
- a server that is away, or answers half, changes nothing; one run that it refuses stands in no other's way
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
import urllib.error
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.message import Message
from typing import Any

import pytest

from flows import reconcile
from flows.reconcile import (
    LOOKS,
    MAX_ATTEMPTS,
    MOST_LOSSES,
    SETTLED_SECONDS,
    Reconciler,
    Sighting,
    decide,
    flow_runs_alive,
    losses,
)

DAY = 24 * 3600.0


@pytest.mark.parametrize(
    ("state", "age", "attempts", "missing", "action"),
    [
        ("RUNNING", 100.0, 1, 0, "leave"),
        ("RUNNING", 100.0, 1, LOOKS - 1, "leave"),
        ("RUNNING", 1.0, 1, LOOKS, "reschedule"),
        ("RUNNING", 100.0, MAX_ATTEMPTS - 1, LOOKS, "reschedule"),
        ("RUNNING", 100.0, MAX_ATTEMPTS, LOOKS, "give up"),
        ("PENDING", 5.0, 0, 10, "leave"),
        ("PENDING", 31.0, 0, LOOKS, "reschedule"),
        ("PENDING", 31.0, MAX_ATTEMPTS, LOOKS, "give up"),
        ("CRASHED", 1.0, 1, LOOKS, "reschedule"),
        ("CRASHED", 1.0, 1, 0, "leave"),  # wrongly declared dead: its process lives
        ("CRASHED", 1.0, MAX_ATTEMPTS, LOOKS, "give up"),
        ("CRASHED", DAY + 1, 1, LOOKS, "leave"),
        ("CANCELLING", 5.0, 1, LOOKS, "leave"),
        ("CANCELLING", 31.0, 1, LOOKS, "cancel"),
        ("COMPLETED", 100.0, 1, LOOKS, "leave"),
        ("CANCELLED", 100.0, 1, LOOKS, "leave"),
    ],
)
def test_what_is_done_with_a_run(state: str, age: float, attempts: int, missing: int, action: str) -> None:
    assert decide(Sighting(state, age, attempts, missing)) == action


NOW = datetime(2026, 1, 1, tzinfo=UTC)
SHORT = ("SCHEDULED", 1.0), ("PENDING", 3.0), ("RUNNING", 60.0), ("CRASHED", 1.0)
NEVER = ("SCHEDULED", 1.0), ("PENDING", 31.0), ("CRASHED", 1.0)
LONG = ("SCHEDULED", 1.0), ("PENDING", 3.0), ("RUNNING", SETTLED_SECONDS), ("CRASHED", 1.0)


@pytest.mark.parametrize(
    ("states", "count"),
    [
        (SHORT, 1),
        (SHORT[:-1], 1),  # lost now, and nobody has said so yet
        ((*SHORT, *NEVER, *NEVER, *SHORT), 4),
        ((*SHORT, *NEVER[:-1]), 2),
        ((*SHORT, *SHORT, *LONG), 1),
        ((*SHORT, *LONG, *SHORT, *NEVER), 3),
        ((*SHORT, *SHORT, *LONG[:-1]), 1),
        ((*SHORT, *SHORT, ("FAILED", 1.0), *SHORT), 1),  # given up, and started again by somebody
    ],
)
def test_losses_in_a_row_are_counted_from_the_last_time_that_the_run_went_on(
    states: Sequence[tuple[str, float]], count: int
) -> None:
    history, at = [], NOW
    for state, seconds in states:
        history.append((at, state))
        at += timedelta(seconds=seconds)
    assert losses(history[::-1], at)[0] == count


def test_one_that_seems_to_go_on_each_time_is_given_up_as_well() -> None:
    turns = (("RUNNING", 0), ("CRASHED", 30))
    history = [(NOW + timedelta(hours=n, minutes=m), state) for n in range(MOST_LOSSES) for state, m in turns]
    for lost in (MOST_LOSSES - 1, MOST_LOSSES):
        row, total = losses(history[: 2 * lost], NOW + timedelta(days=9))
        assert (row, total) == (1, lost)
        seen = Sighting("CRASHED", 1.0, 1, LOOKS, losses=total)
        assert decide(seen) == ("reschedule" if lost < MOST_LOSSES else "give up")


class Server:
    """The three calls of Prefect's API that the reconciler makes, with its own runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.sets: list[tuple[str, str]] = []
        self.down = self.half = False
        self.history: dict[str, list[dict[str, Any]]] = {}
        monkeypatch.setattr(reconcile, "post", self.post)
        monkeypatch.setattr(reconcile, "get", lambda url, login: self.history[url.partition("=")[2]])

    def add(self, name: str, state: str, age: float = 60.0) -> None:
        since = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
        self.runs[name] = {
            "id": name,
            "name": name,
            "state": {"type": state, "timestamp": since},
        }
        self.history.setdefault(name, []).append(self.runs[name]["state"])

    def post(self, url: str, body: Mapping[str, Any], seconds: float = 10.0, login: str | None = None) -> Any:
        if self.half:
            raise http.client.IncompleteRead(b"{")
        if self.down:
            raise urllib.error.URLError("refused")
        if url.endswith("/filter"):
            wanted = body["flow_runs"]["state"]["type"]["any_"]
            return [run for run in self.runs.values() if run["state"]["type"] in wanted]
        name = url.split("/")[-2]
        if name == "refused":
            raise urllib.error.HTTPError(url, 409, "Conflict", Message(), None)
        self.sets.append((name, body["state"]["name"]))
        self.add(name, body["state"]["type"], age=0.0)
        return {"status": "ACCEPT"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_a_lost_run_is_crashed_and_scheduled_in_the_second_look(server: Server) -> None:
    server.add("lost", "RUNNING")
    server.add("alive", "RUNNING")
    watcher = Reconciler("http://x/api", alive=lambda: {"alive"})
    watcher.look()
    assert server.sets == []
    watcher.look()
    assert server.sets == [("lost", "Crashed"), ("lost", "AwaitingRetry")]


def test_a_run_that_the_server_refuses_to_change_keeps_no_other_from_being_brought_back(
    server: Server,
) -> None:
    server.add("refused", "RUNNING")
    server.add("lost", "RUNNING")
    watcher = Reconciler("http://x/api", alive=set)
    for _ in range(3):
        watcher.look()
    assert ("lost", "AwaitingRetry") in server.sets


def test_half_an_answer_of_a_dying_server_is_none(server: Server) -> None:
    server.add("lost", "RUNNING")
    watcher = Reconciler("http://x/api", alive=set)
    server.half = True
    watcher.look()
    server.half = False
    watcher.look()
    watcher.look()
    assert ("lost", "AwaitingRetry") in server.sets


def test_one_look_with_a_process_starts_the_count_again(server: Server) -> None:
    server.add("run", "RUNNING")
    alive: set[str] = set()
    watcher = Reconciler("http://x/api", alive=lambda: alive)
    watcher.look()
    alive.add("run")
    watcher.look()
    alive.clear()
    watcher.look()
    assert server.sets == []


def test_a_run_that_never_starts_is_given_up_in_the_end(server: Server) -> None:
    watcher = Reconciler("http://x/api", alive=set)
    for _ in range(MAX_ATTEMPTS - 1):
        server.add("stuck", "PENDING")  # a worker that takes it and loses it, each time
        watcher.look()
        watcher.look()
    assert server.sets.count(("stuck", "AwaitingRetry")) == MAX_ATTEMPTS - 1
    server.add("stuck", "PENDING")
    Reconciler("http://x/api", alive=set).look()  # a new one knows no more than the server
    watcher.look()
    watcher.look()
    assert server.sets[-1] == ("stuck", "Failed")


def test_a_run_that_prefect_refuses_to_change_is_not_asked_for_in_every_look(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.add("refused", "RUNNING")
    watcher = Reconciler("http://x/api", alive=set)
    for _ in range(16):
        watcher.look()
    assert sum("HTTP Error 409" in record.getMessage() for record in caplog.records) == 1
    for _ in range(3):
        watcher.look()
    assert sum("HTTP Error 409" in record.getMessage() for record in caplog.records) == 2


def test_a_server_that_is_away_changes_nothing(server: Server) -> None:
    server.add("lost", "RUNNING")
    watcher = Reconciler("http://x/api", alive=set)
    watcher.look()
    server.down = True
    watcher.look()
    server.down = False
    watcher.look()
    assert ("lost", "AwaitingRetry") in server.sets


def test_a_flow_run_is_alive_while_a_process_carries_its_id() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, "PREFECT__FLOW_RUN_ID": "test-run-7"},
    )
    try:
        deadline = time.monotonic() + 5
        while "test-run-7" not in flow_runs_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "test-run-7" in flow_runs_alive()
        process.kill()
        time.sleep(0.2)  # a zombie until it is waited for
        assert "test-run-7" not in flow_runs_alive()
    finally:
        process.kill()
        process.wait()
