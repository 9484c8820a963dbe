"""What becomes of a call when a group of workers is lost; Ray is scripted here (`tests/integration/test_stuck.py` has the
real one).

- a group of frozen models is started anew and asked again, so often and no more
- one that trains, alone or beside it, fails the attempt; so does an error behind which nobody is lost
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.cluster import fleet as module
from rlhf_core.cluster.fleet import FROZEN_RESTARTS, Fleet, WorkerGroup
from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import Group, Role, plan
from rlhf_core.errors import InfrastructureError, WorkerDied

Made = tuple[Fleet, list[str], list[str]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """(a fleet of one rank per role, names of the parts that are lost, what was done)"""
    config = PipelineConfig.model_validate({"ppo": {"colocate": "none"}})
    fleet = Fleet(config, plan(config.ppo), "cpu", {}, 0)
    lost: list[str] = []
    done: list[str] = []
    watch: Any = SimpleNamespace(lost=lambda: [SimpleNamespace(name=name) for name in lost])
    fleet._watch = watch

    def start(group: Group) -> WorkerGroup:
        done.append(f"start {group.name}")
        workers = WorkerGroup(group, (object(),))
        fleet.groups.update(dict.fromkeys(group.roles, workers))
        return workers

    def end(workers: WorkerGroup) -> None:
        done.append(f"end {workers.group.name}")
        lost.clear()

    monkeypatch.setattr(fleet, "_start_group", start)
    monkeypatch.setattr(fleet, "_end", end)
    monkeypatch.setattr(fleet, "_load", lambda groups: done.extend(f"load {g.group.name}" for g in groups))
    monkeypatch.setattr(module, "gone", lambda actors: [])
    for group in plan(config.ppo).groups:
        start(group)
    done.clear()
    return fleet, lost, done


def failing(lost: list[str], rounds: list[tuple[str, ...]]) -> Callable[[], str]:
    """Loses these parts, round by round; after them it answers."""

    def ask() -> str:
        if rounds:
            lost.extend(rounds.pop(0))
            raise WorkerDied("a process died")
        return "answer"

    return ask


@pytest.mark.parametrize("role", ["reference", "reward"])
def test_a_group_of_frozen_models_is_started_anew_and_asked_again(made: Made, role: Role) -> None:
    fleet, lost, done = made
    before = fleet.groups[role]
    assert fleet.insist(failing(lost, [(f"{role} rank 0",)]), "the scoring") == "answer"
    assert done == [f"end {role}", f"start {role}", f"load {role}"]
    assert fleet.groups[role] is not before


def test_one_that_only_ray_knows_to_be_gone_counts_as_well(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, lost, done = made
    monkeypatch.setattr(module, "gone", lambda actors: [a for a in actors if a in fleet.groups["reward"].actors])
    assert fleet.insist(failing(lost, [()]), "the scoring") == "answer"
    assert done == ["end reward", "start reward", "load reward"]


def test_it_is_started_anew_so_often_and_no_more(made: Made) -> None:
    fleet, lost, done = made
    rounds = [("reward rank 0",)] * (FROZEN_RESTARTS + 1)
    with pytest.raises(WorkerDied):
        fleet.insist(failing(lost, rounds), "the scoring")
    assert done.count("start reward") == FROZEN_RESTARTS


@pytest.mark.parametrize(
    "parts", [("policy rank 0",), ("critic rank 0",), ("reward rank 0", "policy rank 0"), ("engine 0",), ()]
)
def test_what_else_is_lost_fails_the_attempt(made: Made, parts: tuple[str, ...]) -> None:
    fleet, lost, done = made
    with pytest.raises(InfrastructureError):
        fleet.insist(failing(lost, [parts]), "the scoring")
    assert done == []
