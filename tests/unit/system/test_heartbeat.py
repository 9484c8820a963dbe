"""The heartbeat monitor, with real processes.

- a participant without progress, or suspended, is stalled after its limit and not before; one that makes
  progress or is idle never is
- the error names the cause by name, process and activity: dead before suspended before stalled
- the stacks of all processes are saved; those of a suspended one are replaced by a note
- if nothing reports a stall, `fail` is called some seconds later
- `kill` ends running and suspended participants, and never another process with the same number
- a participant on another host, also one with the same hostname, is not taken for this process; its host's
  monitor observes it, saves its stacks and kills it
- an unregistered participant is not reported, and empty files are removed
- a record with an activity in any script can be read, and so can the next one
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_core.errors import RLHFError, WorkerDied, WorkerStuck
from rlhf_core.system import heartbeat as heartbeat_module
from rlhf_core.system.heartbeat import Monitor, Participant, State, heartbeat, register, unregister
from rlhf_core.system.processes import ProcessId, this_machine

LIMIT = 1.0
PARTICIPANT = """
import sys, time
from pathlib import Path
from rlhf_core.system.heartbeat import heartbeat, idle, register, unregister

def known_function(behaviour):
    if behaviour == "idle":
        idle()
    if behaviour == "unregisters":
        unregister()
    for number in range(10**6):
        if behaviour == "progresses" or number == 0 and behaviour == "stalls":
            heartbeat(f"step {number}")
        time.sleep(0.1)

register(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
known_function(sys.argv[4])
"""

Start = Callable[[str, str], int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a participant, `start(name, behaviour)`; return its pid once it is registered."""
    processes = []

    def one(name: str, behaviour: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", PARTICIPANT, str(tmp_path / "stacks"), name, str(LIMIT), behaviour]
        )
        processes.append(process)
        wait_until(lambda: _shown(tmp_path / "stacks", name, behaviour))
        return process.pid

    yield one
    for process in processes:
        process.kill()
        process.wait()


def _shown(folder: Path, name: str, behaviour: str) -> bool:
    file = folder / f"{name.replace(' ', '_')}.heartbeat"
    if behaviour == "unregisters":
        return file.with_suffix(".stacks").exists() and not file.exists()
    return file.exists() and file.stat().st_size > 0


def wait_until(true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)


def wait_until_shown(stacks: Path) -> None:
    # On a busy machine, a process that is alive writes it after `diagnose` has stopped to wait.
    wait_until(lambda: "known_function" in stacks.read_text())


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Monitor]:
    with Monitor(tmp_path / "stacks") as monitor:
        yield monitor


def test_only_a_participant_without_progress_is_stalled(monitor: Monitor, start: Start) -> None:
    began = time.monotonic()
    stalled = start("training rank 1", "stalls")
    start("engine 0", "progresses")
    start("engine 1", "idle")
    wait_until(monitor.stalled)
    assert time.monotonic() - began > LIMIT / 2
    time.sleep(LIMIT)
    assert [each.name for each in monitor.stalled()] == ["training rank 1"]
    error = monitor.diagnose("the other training ranks", "run.timeouts.stall=1")
    assert isinstance(error, WorkerStuck)
    assert error.message.startswith(
        "while waiting for the other training ranks (run.timeouts.stall=1): training rank 1 "
        f'(process {stalled}) has made no progress in "step 0" for '
    )
    for name in ("training_rank_1", "engine_0", "engine_1"):
        wait_until_shown(monitor.folder / f"{name}.stacks")


def test_suspended_participant_is_reported_before_stalled_one(monitor: Monitor, start: Start) -> None:
    start("critic rank 0", "stalls")
    suspended = start("policy rank 1", "idle")
    os.kill(suspended, signal.SIGSTOP)
    wait_until(lambda: {each.name for each in monitor.stalled()} == {"critic rank 0", "policy rank 1"})
    error = monitor.diagnose("the update", "run.timeouts.stall=1")
    assert isinstance(error, WorkerStuck)
    assert f"policy rank 1 (process {suspended}) has been suspended (SIGSTOP) for " in error.message
    assert "critic" not in error.message
    wait_until_shown(monitor.folder / "critic_rank_0.stacks")
    assert "suspended" in (monitor.folder / "policy_rank_1.stacks").read_text()


def test_dead_participant_is_reported_first_and_at_once(monitor: Monitor, start: Start) -> None:
    dead, suspended = start("engine 0", "progresses"), start("engine 1", "progresses")
    os.kill(suspended, signal.SIGSTOP)
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: [each.name for each in monitor.unhealthy()] == ["engine 0", "engine 1"])
    error = monitor.diagnose("rollouts", "")
    assert isinstance(error, WorkerDied)
    assert error.message.startswith(
        f"while waiting for rollouts: engine 0 (process {dead}) has died; stacks of"
    )
    assert monitor.stalled() == []


def test_unreported_stall_fails_the_stage(tmp_path: Path, start: Start) -> None:
    failures: list[RLHFError] = []
    with Monitor(tmp_path / "stacks", failures.append, grace_seconds=0.5):
        start("training rank 1", "stalls")
        wait_until(lambda: failures)
    assert "training rank 1" in failures[0].message


def test_a_full_disk_does_not_hide_a_stall(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[RLHFError] = []
    stacks = tmp_path / "stacks" / "training_rank_1.stacks"
    stacks.parent.mkdir()
    stacks.symlink_to("/dev/full")  # a write fails as on a full disk
    with Monitor(stacks.parent, failures.append, grace_seconds=0.5):
        os.kill(start("training rank 1", "progresses"), signal.SIGSTOP)
        wait_until(lambda: failures)
    assert "training rank 1" in failures[0].message
    assert f"{stacks} cannot be written: No space left on device" in caplog.text


def test_kill_ends_participants_and_no_process_with_reused_pid(monitor: Monitor, start: Start) -> None:
    suspended, running, other = (
        start("engine 0", "progresses"),
        start("engine 1", "progresses"),
        start("engine 2", "progresses"),
    )
    os.kill(suspended, signal.SIGSTOP)
    wait_until(lambda: len(monitor.unhealthy()) == 1)
    seen = monitor.participant("engine 2")
    assert seen is not None
    # As if the process of engine 2 had ended and another one had been given its number.
    record = monitor.folder / "engine_2.heartbeat"
    os.kill(other, signal.SIGSTOP)
    record.write_text(record.read_text().replace(str(seen.process.started), str(seen.process.started - 100)))
    wait_until(lambda: getattr(monitor.participant("engine 2"), "state", "") == "dead")
    monitor.kill()
    assert not any(process.alive() for process in map(ProcessId.of, (suspended, running)) if process)
    survivor = ProcessId.of(other)
    assert survivor is not None and survivor.alive()
    assert monitor.participant("engine 0") is None


def test_unregistered_participant_is_not_reported(tmp_path: Path, start: Start) -> None:
    with Monitor(tmp_path / "stacks") as monitor:
        start("training rank 1", "unregisters")
        register(monitor.folder, "training rank 0", LIMIT)
        heartbeat("step 1")
        wait_until(lambda: monitor.participant("training rank 0"))
        assert monitor.unhealthy() == []
        unregister()
    assert not (tmp_path / "stacks").exists()


@pytest.mark.parametrize("character", ["x", "ß", "\U0001f600", "\0"])
def test_records_can_be_read_after_a_long_activity(tmp_path: Path, character: str) -> None:
    register(tmp_path, "engine 0", math.inf)
    try:
        for activity in (character * 200, "step 2"):
            heartbeat(activity)
            seen = heartbeat_module._read(tmp_path / "engine_0.heartbeat", "engine 0")
            assert seen is not None and seen.activity == activity[:100]
    finally:
        unregister()


@pytest.mark.parametrize(
    ("host", "machine"),
    [("another-host", this_machine()), pytest.param(socket.gethostname(), "another", id="same-hostname")],
)
def test_participant_of_another_host_with_this_process_id_is_busy(
    monitor: Monitor, host: str, machine: str
) -> None:
    record = [os.getpid(), 0.0, host, machine, 1, LIMIT, "step 1"]
    monitor.folder.mkdir()
    (monitor.folder / "engine_0.heartbeat").write_text(json.dumps(record))
    wait_until(monitor.busy)
    monitor.kill()
    assert monitor.participant("engine 0") is None, "forgotten, as all but this process"


class OtherHost:
    """Another host with one rank, whose monitor reports `participant`."""

    def __init__(self, participant: Participant) -> None:
        self.participant = participant
        self.killed: list[object] = []

    def participants(self, passed: float, *, fresh: bool) -> list[Participant]:
        return [self.participant]

    def save_stacks(self) -> dict[str, str]:
        return {self.participant.name: "stacks of the other host"}

    def kill(self, names: object) -> None:
        self.killed.append(names)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (
            "suspended",
            WorkerStuck,
            r"rank 1 \(process 7 on host two\) has been suspended \(SIGSTOP\) for 5 s",
        ),
        (
            "running",
            WorkerStuck,
            r'rank 1 \(process 7 on host two\) has made no progress in "step 3" for 5 s',
        ),
        ("dead", WorkerDied, r"rank 1 \(process 7 on host two\) has died"),
        ("lost", WorkerDied, r"rank 1 \(process 7 on host two\) is lost, its host does not answer"),
    ],
)
def test_process_of_another_host_is_named_with_its_host(
    tmp_path: Path, state: State, error: type[Exception], message: str
) -> None:
    rank = Participant("rank 1", ProcessId(7, 0.0), "two", 1, 4.0, "step 3", state, 5.0)
    with Monitor(tmp_path / "stacks") as monitor:
        host = OtherHost(rank)
        monitor.include(host)
        assert [each.name for each in monitor.unhealthy()] == ["rank 1"]
        with pytest.raises(error, match=message):
            raise monitor.diagnose("a step", "run.timeouts")
        assert "stacks of the other host" in (tmp_path / "stacks" / "rank_1.stacks").read_text()
        monitor.kill(["rank 1"])
        assert host.killed == [["rank 1"]]
