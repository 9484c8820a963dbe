"""In which order models are loaded, and what becomes of a call when a group of workers is lost; Ray is
scripted here (`tests/integration/test_stuck.py` has the real one).

- engines that share their devices with the trainers have loaded before these begin; elsewhere all load at
  once
- a group of frozen models is started anew and asked again, so often and no more
- one that trains, alone or beside it, fails the attempt; so does an error behind which nobody is lost
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import Group, Role, plan
from rlhf_core.errors import InfrastructureError, WorkerDied
from rlhf_core.ppo import fleet as module
from rlhf_core.ppo.fleet import FROZEN_RESTARTS, Fleet, WorkerGroup

Made = tuple[Fleet, list[str], list[str]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """(a fleet of one rank per role, names of the parts that are lost, what was done)"""
    config = PipelineConfig.model_validate({"ppo": {"colocate": "none"}})
    fleet = Fleet(config, plan(config.ppo), "cpu", {}, 0)
    lost: list[str] = []
    done: list[str] = []
    monitor: Any = SimpleNamespace(unhealthy=lambda: [SimpleNamespace(name=name) for name in lost])
    fleet._monitor = monitor

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


def test_one_that_only_ray_knows_to_be_gone_counts_as_well(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, lost, done = made
    monkeypatch.setattr(
        module, "gone", lambda actors: [a for a in actors if a in fleet.groups["reward"].actors]
    )
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


class _Actor:
    def __init__(self, name: str, asked: list[str]) -> None:
        self._name, self._asked = name, asked

    def __getattr__(self, method: str) -> Any:
        def remote(*_args: Any) -> str:
            self._asked.append(f"{method} {self._name}")
            return method

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize("together", [True, False])
def test_engines_measure_a_device_before_the_trainers_beside_them_allocate(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    config = PipelineConfig.model_validate({"ppo": {"colocate": "all" if together else "pairs"}})
    fleet = Fleet(config, plan(config.ppo), "cuda", {}, 0)
    done: list[str] = []

    def start(group: Group) -> None:
        fleet.groups.update(dict.fromkeys(group.roles, WorkerGroup(group, (_Actor("trainer", done),))))

    def wait(references: list[str], what: str) -> list[Any]:
        done.append(f"wait for {what}")
        return [("127.0.0.1", 1)] * len(references)

    engines = SimpleNamespace(handles=[_Actor("engine", done)])
    monkeypatch.setattr(module, "reserve", lambda *_args, **_kwargs: SimpleNamespace(together=together))
    monkeypatch.setattr(module, "Engines", lambda *_args: engines)
    monkeypatch.setattr(fleet, "_calls", None, raising=False)
    monkeypatch.setattr(fleet, "_start_group", start)
    monkeypatch.setattr(fleet, "wait", wait)
    fleet._start_actors()
    loading = [entry for entry in done if entry.startswith("load") or entry == "wait for all models to load"]
    if together:
        assert loading == [
            "load engine",
            "wait for all models to load",
            "load trainer",
            "wait for all models to load",
        ]
    else:
        assert loading == ["load trainer", "load trainer", "load engine", "wait for all models to load"]


@pytest.mark.parametrize(("answers", "packs"), [((True, True), True), ((True, False), False)])
def test_all_groups_use_one_layout_and_pad_where_the_model_of_one_does_not_bear_packed_rows(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[bool, bool], packs: bool
) -> None:
    config = PipelineConfig()
    fleet = Fleet(config, plan(config.ppo), "cpu", {}, 0)
    told: list[tuple[str, bool]] = []

    def group(name: str, answer: bool) -> WorkerGroup:
        actor = SimpleNamespace(
            listen=SimpleNamespace(remote=lambda *_: ("127.0.0.1", 1)),
            load=SimpleNamespace(remote=lambda *_: answer),
            choose_layout=SimpleNamespace(remote=lambda pack: told.append((name, pack))),
        )
        return WorkerGroup(Group(("policy",), 1), (actor,))

    monkeypatch.setattr(fleet, "wait", lambda references, what: references)
    fleet._load([group("policy", answers[0]), group("reward", answers[1])])
    assert fleet.packs is packs
    assert told == [("policy", packs), ("reward", packs)]
