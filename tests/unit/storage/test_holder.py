"""Waiting for the process that holds a stage key.

- the second of two runs on a machine waits for the first and then fails with its pid and a fix
- a holder that ends during the wait, a dead one, one without a lease on another machine and the process
  itself do not block
- a holder on another machine is waited for while it renews its lease, whatever the clocks say, and superseded
  after three missed beats; time in which the observer was suspended does not count
- of several processes that wait for the same holder, one takes over
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.errors import StageHeld
from rlhf_core.storage.fencing import LeaseTimes, acquire, renewed
from rlhf_core.storage.store import Store
from rlhf_core.system.processes import ProcessId
from tests.support.claims import claim
from tests.support.scripted_machine import ManualClock

KEY = "0123456789abcdef"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def held(folder: Path, process: ProcessId, **changes: Any) -> Store:
    """A store in which `process` has claimed the key."""
    store = Store(str(folder))
    claim(store, KEY)
    file = folder / "checkpoints" / KEY / "attempts" / "000001.json"
    file.write_text(
        json.dumps(
            {**json.loads(file.read_text()), "pid": process.pid, "started": process.started, **changes}
        )
    )
    return store


def id_of(pid: int) -> ProcessId:
    found = ProcessId.of(pid)
    assert found is not None
    return found


def waited(store: Store) -> float:
    began = time.monotonic()
    acquire(store, KEY, "ppo", LeaseTimes(wait=20.0))
    return time.monotonic() - began


def test_a_living_holder_refuses_the_second(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    store = held(tmp_path, id_of(other.pid))
    message = rf"stage ppo .* is being made by process {other.pid} of this machine, .* or end its run"
    with pytest.raises(StageHeld, match=message):
        acquire(store, KEY, "ppo", LeaseTimes(wait=0.6))


def test_one_that_ends_meanwhile_is_followed(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    store = held(tmp_path, id_of(other.pid))
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {other.pid}"])
    assert 0.4 < waited(store) < 15


@pytest.mark.parametrize("changes", [{"started": 1.0}, {"started": None}, {"pid": "x"}])
def test_other_holders_are_not_waited_for(
    tmp_path: Path, other: subprocess.Popen[bytes], changes: dict[str, Any]
) -> None:
    assert waited(held(tmp_path, id_of(other.pid), **changes)) < 0.4


def test_own_or_missing_claim_is_not_waited_for(tmp_path: Path) -> None:
    assert waited(held(tmp_path / "own", id_of(os.getpid()))) < 0.4
    assert waited(Store(str(tmp_path / "nobody"))) < 0.4


# -- on another machine --


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Store:
    """A store whose key is held by a process of another machine, with a start time in the far future."""
    process = ProcessId(os.getpid(), 2e9)
    return held(tmp_path / "store", process, host="elsewhere", time="2040-01-01T00:00:00+00:00")


def beat(store: Store, content: str) -> Callable[[], None]:
    return lambda: store.put_bytes(f"checkpoints/{KEY}/attempts/000001.beat", content.encode())


RENEWAL, TAKEOVER = LeaseTimes().renewal, LeaseTimes().takeover


def test_silent_holder_is_superseded_after_three_missed_renewals(
    clock: ManualClock, elsewhere: Store
) -> None:
    assert acquire(elsewhere, KEY, "ppo", clock=clock).attempt == 2
    assert TAKEOVER <= clock.now - 1000.0 <= TAKEOVER + RENEWAL


def test_released_lease_is_taken_at_once(clock: ManualClock, elsewhere: Store) -> None:
    beat(elsewhere, "ended")()
    acquire(elsewhere, KEY, "ppo", clock=clock)
    assert clock.now == 1000.0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.1, TAKEOVER - 5.0), max_size=12))
def test_holder_is_waited_for_while_it_renews(pauses: list[float]) -> None:
    with TemporaryDirectory() as folder:
        clock = ManualClock()
        store = held(Path(folder), ProcessId(4711, 0.0), host="elsewhere")
        moment = clock.now
        for number, pause in enumerate(pauses):
            moment += pause
            clock.events.append((moment, beat(store, str(number))))
        acquire(store, KEY, "ppo", clock=clock)
        assert clock.events == [], "it was superseded between two renewals"
        assert TAKEOVER <= clock.now - moment + 2.0 <= TAKEOVER + RENEWAL


def test_time_in_which_the_observer_was_suspended_does_not_count(
    clock: ManualClock, elsewhere: Store
) -> None:
    def suspended() -> None:
        clock.now += 3600.0
        # The holder was suspended with it, and goes on five seconds later.
        clock.events.append((clock.now + 5.0, beat(elsewhere, "2")))
        clock.events.append((clock.now + 6.0, beat(elsewhere, "ended")))

    clock.events.append((1010.0, suspended))
    acquire(elsewhere, KEY, "ppo", clock=clock)
    assert clock.events == []
    assert clock.now < 1010.0 + 3600.0 + RENEWAL


def test_of_two_that_wait_one_takes_over(clock: ManualClock, elsewhere: Store) -> None:
    def other_takes_over() -> None:
        claim(elsewhere, KEY)
        file = Path(elsewhere.uri(f"checkpoints/{KEY}/attempts/000002.json"))
        file.write_text(json.dumps({**json.loads(file.read_text()), "host": "third"}))
        ended = f"checkpoints/{KEY}/attempts/000002.beat"
        clock.events.append((clock.now + 20.0, lambda: elsewhere.put_bytes(ended, b"ended")))

    clock.events.append((1000.0 + TAKEOVER - 1.0, other_takes_over))
    assert acquire(elsewhere, KEY, "ppo", clock=clock).attempt == 3
    assert clock.now >= 1000.0 + TAKEOVER + 19.0


HOLD = """
import os, socket, sys, time
from pathlib import Path
from rlhf_core.storage import fencing
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store

folder, host, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
socket.gethostname = lambda: host
times = fencing.LeaseTimes(renewal=0.5, remote_poll=0.1)
store = Store(folder / "store")
artifacts = ArtifactStore(store, folder / host)
fence = fencing.acquire(store, "0123456789abcdef", "ppo", times)
with fencing.renewed(fence, times):
    if artifacts.find("ppo", fence.stage_key) is not None:
        print("reused")
        sys.exit()
    print("holds", flush=True)
    time.sleep(seconds)
    out = folder / f"out-{host}"
    out.mkdir()
    (out / "x.json").write_text(host)
    artifacts.publish("ppo", fence.stage_key, out, Provenance(), fence=fence)
    print("made by", host)
"""


def hosts(folder: Path, name: str, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), name, str(seconds)], stdout=subprocess.PIPE, text=True
    )


def test_second_of_two_machines_waits_and_reuses(tmp_path: Path) -> None:
    with hosts(tmp_path, "one", 4.0) as first:
        assert first.stdout is not None and first.stdout.readline() == "holds\n"
        with hosts(tmp_path, "two", 4.0) as second:
            # Longer than three beats: the renewals alone keep the second waiting.
            assert second.communicate(timeout=60)[0] == "reused\n"
        assert first.communicate(timeout=60)[0] == "made by one\n"


def test_machine_that_loses_power_is_followed(tmp_path: Path) -> None:
    with hosts(tmp_path, "one", 60.0) as first:
        assert first.stdout is not None and first.stdout.readline() == "holds\n"
        first.kill()
        began = time.monotonic()
        with hosts(tmp_path, "two", 0.0) as second:
            assert second.communicate(timeout=60)[0] == "holds\nmade by two\n"
        assert time.monotonic() - began >= 1.5


def test_lease_is_released_at_the_end(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with renewed(claim(store, KEY)):
        pass
    assert store.read_bytes(f"checkpoints/{KEY}/attempts/000001.beat") == b"ended"
