"""Waiting for the process that holds a stage key.

- the second of two runs on a machine waits for the first and then fails with its pid and a fix
- a holder that ends during the wait, a dead one, one of another machine and the process itself do not block
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import StageHeld
from rlhf_core.storage.fencing import await_holder, claim
from rlhf_core.storage.store import Store
from rlhf_core.system.processes import ProcessId

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
    there_was_one = await_holder(store, KEY, "ppo", 20.0)
    seconds = time.monotonic() - began
    assert there_was_one == (seconds > 0.4)
    return seconds


def test_a_living_holder_refuses_the_second(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    store = held(tmp_path, id_of(other.pid))
    message = rf"stage ppo .* is being made by process {other.pid} of this machine, .* \(kill {other.pid}\)"
    with pytest.raises(StageHeld, match=message):
        await_holder(store, KEY, "ppo", 0.6)


def test_one_that_ends_meanwhile_is_followed(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    store = held(tmp_path, id_of(other.pid))
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {other.pid}"])
    assert 0.4 < waited(store) < 15


@pytest.mark.parametrize(
    "changes", [{"host": "elsewhere"}, {"started": 1.0}, {"started": None}, {"pid": "x"}]
)
def test_others_keep_nobody_waiting(
    tmp_path: Path, other: subprocess.Popen[bytes], changes: dict[str, Any]
) -> None:
    assert waited(held(tmp_path, id_of(other.pid), **changes)) < 0.4


def test_own_or_missing_claim_is_not_waited_for(tmp_path: Path) -> None:
    assert waited(held(tmp_path / "own", id_of(os.getpid()))) < 0.4
    assert waited(Store(str(tmp_path / "nobody"))) < 0.4
