"""Who holds stage keys, observed without claiming them.

- a living process of this machine holds its key, a dead one and one that has released its lease do not
- attempts on other machines are observed all at once: those that renew their lease hold their keys
- a claim after an observation succeeds once, and not if an attempt has begun since then
- an unreadable record has no start and no inputs; a deletion is no start
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.storage.fencing import Claim, LeaseTimes, acquire, claim_next, observe, renewed
from rlhf_core.storage.store import Store
from rlhf_core.system.processes import ProcessId
from tests.support.claims import claim
from tests.support.scripted_machine import ManualClock

KEYS = [f"{number:016x}" for number in range(4)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def change(store: Store, key: str, **changes: Any) -> None:
    """Change the record of the first claim."""
    name = f"checkpoints/{key}/attempts/000001.json"
    content = json.loads(store.read_bytes(name) or b"")
    store.put_bytes(name, json.dumps({**content, **changes}).encode())


def beat(store: Store, key: str, content: str) -> Callable[[], None]:
    return lambda: store.put_bytes(f"checkpoints/{key}/attempts/000001.beat", content.encode())


def test_processes_of_this_machine(store: Store, clock: ManualClock) -> None:
    parent = ProcessId.of(os.getppid())
    assert parent is not None
    for key in KEYS[:3]:
        acquire(store, key, "ppo", inputs={"sft/1", "data/2"})
    change(store, KEYS[0], pid=parent.pid, started=parent.started)
    change(store, KEYS[1], pid=parent.pid, started=parent.started + 1)
    found = observe(store, KEYS, clock=clock)
    assert [found[key].held for key in KEYS] == [True, False, False, False]
    assert [found[key].attempt for key in KEYS] == [1, 1, 1, 0]
    assert found[KEYS[0]].inputs == frozenset({"sft/1", "data/2"})
    assert found[KEYS[3]] == Claim(0, False, math.inf, frozenset())
    assert clock.now == 1000.0, "nothing is waited for"


def test_other_machines_are_observed_at_the_same_time(store: Store, clock: ManualClock) -> None:
    for key in KEYS:
        claim(store, key)
        change(store, key, host="elsewhere")
    beat(store, KEYS[0], "ended")()
    clock.events.append((1009.0, beat(store, KEYS[1], "1")))
    clock.events.append((1029.0, beat(store, KEYS[2], "1")))
    found = observe(store, KEYS, clock=clock)
    assert [found[key].held for key in KEYS] == [False, True, True, False]
    takeover = LeaseTimes().takeover
    assert takeover <= clock.now - 1000.0 <= takeover + LeaseTimes().remote_poll


def test_a_claim_after_an_observation_succeeds_once(store: Store) -> None:
    claim(store, KEYS[0])
    observed = observe(store, KEYS)
    fence = claim_next(store, KEYS[0], observed[KEYS[0]])
    assert fence is not None and fence.attempt == 2
    assert claim_next(store, KEYS[0], observed[KEYS[0]]) is None
    claim(store, KEYS[1])
    assert claim_next(store, KEYS[1], observed[KEYS[1]]) is None
    fence.check()


def test_what_records_say(store: Store) -> None:
    for key in KEYS[:3]:
        acquire(store, key, "ppo", inputs={"sft/1"})
    change(store, KEYS[0], time="2026-01-01T00:00:00+00:00")
    change(store, KEYS[1], time=None, inputs=None)
    store.put_bytes(f"checkpoints/{KEYS[2]}/attempts/000001.json", b"[1]")
    found = observe(store, KEYS)
    begun = 1767225600.0
    assert found[KEYS[0]] == Claim(1, False, begun, frozenset({"sft/1"}))
    assert found[KEYS[1]] == Claim(1, False, math.inf, frozenset()) == found[KEYS[2]]
    for _ in range(2):
        fence = claim_next(store, KEYS[0], observe(store, KEYS)[KEYS[0]])
        assert fence is not None
        with renewed(fence):
            pass
    assert observe(store, KEYS)[KEYS[0]] == Claim(3, False, begun, frozenset())
