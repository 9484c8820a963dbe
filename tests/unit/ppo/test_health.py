"""The state machine of engines and workers, without any.

- every state under every event: where it leads, or that it cannot happen
- only a completed sync makes a restarted member healthy, on every path
- restarts are counted for each member; the run stops exactly when less than the floor remain
- random histories: no state but dead and healthy is ever left without a reason, counts never exceed their
  bounds
"""

from __future__ import annotations

import itertools
import random
from typing import get_args

import pytest

from rlhf_core.errors import WorkerDied
from rlhf_core.ppo.health import TRANSITIONS, Event, Health, State

STATES: tuple[State, ...] = get_args(State)
EVENTS: tuple[Event, ...] = get_args(Event)
PATHS: dict[State, tuple[Event, ...]] = {
    "stale": (),
    "healthy": ("synced",),
    "suspect": ("synced", "silent"),
    "dead": ("died",),
    "restarting": ("died", "restart"),
}
"""How a member gets into each state."""
LEADS = {
    "stale": {"synced": "healthy", "died": "dead"},
    "healthy": {"synced": "healthy", "answered": "healthy", "silent": "suspect", "died": "dead"},
    "suspect": {"answered": "healthy", "silent": "suspect", "died": "dead"},
    "dead": {"died": "dead", "restart": "restarting"},
    "restarting": {"loaded": "stale", "died": "dead"},
}


def _in(state: State, *, max_restarts: int = 5) -> Health:
    health = Health(["engine 0"], max_restarts=max_restarts, floor=1)
    for event in PATHS[state]:
        health.note("engine 0", event)
    assert health["engine 0"] == state
    return health


@pytest.mark.parametrize(("state", "event"), itertools.product(STATES, EVENTS))
def test_every_event_in_every_state_leads_somewhere_or_cannot_happen(state: State, event: Event) -> None:
    health = _in(state)
    if event in LEADS[state]:
        assert health.note("engine 0", event) == health["engine 0"] == LEADS[state][event]
    else:
        with pytest.raises(AssertionError, match=f"engine 0 is {state}; {event} cannot happen"):
            health.note("engine 0", event)
        assert health["engine 0"] == state


def test_after_a_death_no_way_leads_to_healthy_but_by_a_sync_after_a_load() -> None:
    for history in itertools.product(EVENTS, repeat=5):
        state: State = "dead"
        seen: list[Event] = []
        for event in history:
            if (state, event) not in TRANSITIONS:
                break
            state = TRANSITIONS[state, event]
            seen.append(event)
            if state == "healthy":
                assert "loaded" in seen and seen[-1] == "synced"
                break


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_a_member_is_restarted_so_often_and_then_the_run_stops(allowed: int) -> None:
    health = Health(["engine 0"], max_restarts=allowed, floor=1)
    for number in range(1, allowed + 1):
        health.note("engine 0", "died")
        health.note("engine 0", "restart")
        assert health.restarts("engine 0") == number
        health.note("engine 0", "loaded")
        health.note("engine 0", "synced")
    with pytest.raises(
        WorkerDied, match=rf"engine 0 is lost after {allowed} restarts: 0 of 1 remain, 1 are needed"
    ):
        health.note("engine 0", "died")


def test_the_run_goes_on_without_a_lost_member_down_to_the_floor() -> None:
    health = Health(["engine 0", "engine 1", "engine 2"], max_restarts=0, floor=2)
    for name in ("engine 0", "engine 1", "engine 2"):
        health.note(name, "synced")
    health.note("engine 1", "died")
    assert health.remaining() == health.members("healthy") == ["engine 0", "engine 2"]
    with pytest.raises(WorkerDied, match="engine 1 has been started again 0 times already"):
        health.note("engine 1", "restart")
    with pytest.raises(WorkerDied, match="1 of 3 remain, 2 are needed"):
        health.note("engine 2", "died")


def test_a_death_within_the_restarts_does_not_count_against_the_floor() -> None:
    health = Health(["engine 0", "engine 1"], max_restarts=1, floor=2)
    for name in ("engine 0", "engine 1"):
        health.note(name, "died")
    assert health.remaining() == ["engine 0", "engine 1"]
    assert health.members("dead") == ["engine 0", "engine 1"]


def test_random_histories_keep_every_bound() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        names = [f"engine {i}" for i in range(chance.randint(1, 4))]
        allowed, floor = chance.randint(0, 2), chance.randint(1, len(names))
        health = Health(names, max_restarts=allowed, floor=floor)
        for _ in range(60):
            name = chance.choice(names)
            possible = [event for event in EVENTS if (health[name], event) in TRANSITIONS]
            event = chance.choice([e for e in possible if e != "restart" or health.may_restart(name)])
            try:
                health.note(name, event)
            except WorkerDied:
                assert event == "died" and len(health.remaining()) < floor
                break
            assert len(health.remaining()) >= floor
            assert all(health.restarts(n) <= allowed for n in names)


def test_an_answer_makes_up_for_the_restarts_before_it() -> None:
    health = Health(["engine 0"], max_restarts=1, floor=1)
    again: tuple[Event, ...] = ("died", "restart", "loaded", "synced")
    for _ in range(5):
        for event in (*again, "answered"):
            health.note("engine 0", event)
    assert health.restarts("engine 0") == 0
    for event in again:
        health.note("engine 0", event)
    with pytest.raises(WorkerDied, match="after 1 restarts"):
        health.note("engine 0", "died")
