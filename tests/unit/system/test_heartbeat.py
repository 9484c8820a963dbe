"""The watch over a stage's processes, with real ones.

- one that stands still or is halted is late after its limit, and not before; one that moves, or is idle,
  never is
- the error names who is to blame, by name, process and what it was doing: the gone before the halted before
  the still
- stacks of all processes are saved; of a halted one it says so
- where nobody asks, `fail` is called, some seconds later
- who is killed is gone, halted or not, and never another process that has the number now
- who left is not missed; what was not written to is cleared away
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_core.errors import InfrastructureError, WorkerDied, WorkerStuck
from rlhf_core.system import heartbeat as watch_module
from rlhf_core.system.heartbeat import Watch, doing, leave_part, take_part
from rlhf_core.system.processes import ProcessId

LIMIT = 1.0
PART = """
import sys, time
from pathlib import Path
from rlhf_core.system.heartbeat import doing, idle, leave_part, take_part

def turning_the_crank(how):
    if how == "idle":
        idle()
    if how == "leaves":
        leave_part()
    for number in range(10**6):
        if how == "moves" or number == 0 and how == "still":
            doing(f"step {number}")
        time.sleep(0.1)

take_part(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
turning_the_crank(sys.argv[4])
"""

Start = Callable[[str, str], int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a part, `start(name, how)`; its pid once it is seen."""
    processes = []

    def one(name: str, how: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", PART, str(tmp_path / "stacks"), name, str(LIMIT), how]
        )
        processes.append(process)
        wait_until(lambda: _shown(tmp_path / "stacks", name, how))
        return process.pid

    yield one
    for process in processes:
        process.kill()
        process.wait()


def _shown(folder: Path, name: str, how: str) -> bool:
    file = folder / f"{name.replace(' ', '_')}.part"
    if how == "leaves":
        return file.with_suffix(".stacks").exists() and not file.exists()
    return file.exists() and file.stat().st_size > 0


def wait_until(true: Callable[[], object], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    with Watch(tmp_path / "stacks") as watch:
        yield watch


def test_who_stands_still_is_late_and_who_moves_or_is_idle_is_not(watch: Watch, start: Start) -> None:
    began = time.monotonic()
    still = start("training rank 1", "still")
    start("engine 0", "moves")
    start("engine 1", "idle")
    wait_until(watch.late)
    assert time.monotonic() - began > LIMIT / 2
    time.sleep(LIMIT)
    assert [part.name for part in watch.late()] == ["training rank 1"]
    error = watch.blame("the other training ranks", "run.timeouts.stall=1")
    assert isinstance(error, WorkerStuck)
    assert error.message.startswith(
        "while waiting for the other training ranks (run.timeouts.stall=1): training rank 1 "
        f'(process {still}) has stood still at "step 0" for '
    )
    for name in ("training_rank_1", "engine_0", "engine_1"):
        assert "turning_the_crank" in (watch.folder / f"{name}.stacks").read_text()


def test_a_halted_one_is_late_after_its_limit_even_if_idle_and_goes_before_a_still_one(
    watch: Watch, start: Start
) -> None:
    start("critic rank 0", "still")
    halted = start("policy rank 1", "idle")
    os.kill(halted, signal.SIGSTOP)
    wait_until(lambda: {part.name for part in watch.late()} == {"critic rank 0", "policy rank 1"})
    error = watch.blame("the update", "run.timeouts.stall=1")
    assert isinstance(error, WorkerStuck)
    assert f"policy rank 1 (process {halted}) has been halted (SIGSTOP) for " in error.message
    assert "critic" not in error.message
    assert "turning_the_crank" in (watch.folder / "critic_rank_0.stacks").read_text()
    assert "halted" in (watch.folder / "policy_rank_1.stacks").read_text()


def test_who_is_gone_is_named_at_once_and_before_all_others(watch: Watch, start: Start) -> None:
    gone, halted = start("engine 0", "moves"), start("engine 1", "moves")
    os.kill(halted, signal.SIGSTOP)
    os.kill(gone, signal.SIGKILL)
    wait_until(lambda: [part.name for part in watch.lost()] == ["engine 0", "engine 1"])
    error = watch.blame("rollouts", "")
    assert isinstance(error, WorkerDied)
    assert error.message.startswith(
        f"while waiting for rollouts: engine 0 (process {gone}) is gone; stacks of"
    )
    assert watch.late() == []


def test_where_nobody_asks_the_stage_is_failed(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "GRACE_SECONDS", 0.5)
    failures: list[InfrastructureError] = []
    with Watch(tmp_path / "stacks", failures.append):
        start("training rank 1", "still")
        wait_until(lambda: failures)
    assert "training rank 1" in failures[0].message


def test_the_killed_are_gone_halted_or_not_and_nobody_who_has_their_number(
    watch: Watch, start: Start
) -> None:
    halted, moving, other = start("engine 0", "moves"), start("engine 1", "moves"), start("engine 2", "moves")
    os.kill(halted, signal.SIGSTOP)
    wait_until(lambda: len(watch.lost()) == 1)
    seen = watch.part("engine 2")
    assert seen is not None
    # As if the process of engine 2 had ended and another one had been given its number.
    record = watch.folder / "engine_2.part"
    os.kill(other, signal.SIGSTOP)
    record.write_text(record.read_text().replace(str(seen.process.started), str(seen.process.started - 100)))
    wait_until(lambda: getattr(watch.part("engine 2"), "state", "") == "gone")
    watch.kill()
    assert not any(process.alive() for process in map(ProcessId.of, (halted, moving)) if process)
    survivor = ProcessId.of(other)
    assert survivor is not None and survivor.alive()
    assert watch.part("engine 0") is None


def test_who_left_is_not_missed_and_nothing_empty_stays(tmp_path: Path, start: Start) -> None:
    with Watch(tmp_path / "stacks") as watch:
        start("training rank 1", "leaves")
        take_part(watch.folder, "training rank 0", LIMIT)
        doing("step 1")
        wait_until(lambda: watch.part("training rank 0"))
        assert watch.lost() == []
        leave_part()
    assert not (tmp_path / "stacks").exists()
