"""The order in which models are loaded, and what happens if a group of workers dies or stalls. Ray is
scripted here, and is real in `tests/integration/test_stuck.py`.

- engines that share devices with trainers load before the trainers; otherwise all load at the same time
- a group of frozen models is restarted and its call repeated, for a limited number of times
- the loss of a group that trains fails the attempt; so does an error without an unhealthy process
- an engine that no host has the GPUs for is refused
- scatter and gather return one value per sequence in the original order
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.cluster.rpc import Pending, RemoteActor
from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import Group, PlacementPlan, Role, plan
from rlhf_core.errors import ConfigError, InfrastructureError, WorkerDied
from rlhf_core.ppo import fleet as module
from rlhf_core.ppo.fleet import FROZEN_RESTARTS, Fleet, WorkerGroup, reindex
from rlhf_core.ppo.placement import check_engine_size

Made = tuple[Fleet, list[str], list[str]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """(a fleet of one rank per role, names of the unhealthy participants, what was done)"""
    config = PipelineConfig.model_validate({"ppo": {"colocate": "none"}})
    fleet = Fleet(config, plan(config.ppo), "cpu", {}, 0)
    lost: list[str] = []
    done: list[str] = []
    monitor: Any = SimpleNamespace(unhealthy=lambda: [SimpleNamespace(name=name) for name in lost])
    fleet._monitor = monitor

    def start(group: Group) -> WorkerGroup:
        done.append(f"start {group.name}")
        workers = WorkerGroup(group, (RemoteActor(object()),))
        fleet.groups.update(dict.fromkeys(group.roles, workers))
        return workers

    def kill(workers: WorkerGroup) -> None:
        done.append(f"kill {workers.group.name}")
        lost.clear()

    monkeypatch.setattr(fleet, "_start_group", start)
    monkeypatch.setattr(fleet, "_kill", kill)
    monkeypatch.setattr(fleet, "_load", lambda groups: done.extend(f"load {g.group.name}" for g in groups))
    monkeypatch.setattr(module, "dead_actors", lambda actors: [])
    for group in plan(config.ppo).groups:
        start(group)
    done.clear()
    return fleet, lost, done


def failing(lost: list[str], rounds: list[tuple[str, ...]]) -> Callable[[], str]:
    """Return a call in which these participants are lost, round by round, and which then succeeds."""

    def call() -> str:
        if rounds:
            lost.extend(rounds.pop(0))
            raise WorkerDied("a process died")
        return "answer"

    return call


@pytest.mark.parametrize("role", ["reference", "reward"])
def test_frozen_models_are_restarted_and_the_call_repeated(made: Made, role: Role) -> None:
    fleet, lost, done = made
    before = fleet.groups[role]
    assert fleet.retry_after_restart(failing(lost, [(f"{role} rank 0",)]), "the scoring") == "answer"
    assert done == [f"kill {role}", f"start {role}", f"load {role}"]
    assert fleet.groups[role] is not before


def test_a_death_that_only_ray_reports_counts(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, lost, done = made
    monkeypatch.setattr(
        module, "dead_actors", lambda actors: [a for a in actors if a in fleet.groups["reward"].workers]
    )
    assert fleet.retry_after_restart(failing(lost, [()]), "the scoring") == "answer"
    assert done == ["kill reward", "start reward", "load reward"]


def test_the_restarts_of_frozen_models_are_limited(made: Made) -> None:
    fleet, lost, done = made
    rounds = [("reward rank 0",)] * (FROZEN_RESTARTS + 1)
    with pytest.raises(WorkerDied):
        fleet.retry_after_restart(failing(lost, rounds), "the scoring")
    assert done.count("start reward") == FROZEN_RESTARTS


@pytest.mark.parametrize(
    "parts", [("policy rank 0",), ("critic rank 0",), ("reward rank 0", "policy rank 0"), ("engine 0",), ()]
)
def test_any_other_loss_fails_the_attempt(made: Made, parts: tuple[str, ...]) -> None:
    fleet, lost, done = made
    with pytest.raises(InfrastructureError):
        fleet.retry_after_restart(failing(lost, [parts]), "the scoring")
    assert done == []


class _Actor:
    def __init__(self, name: str, asked: list[str]) -> None:
        self._name, self._asked = name, asked

    def __getattr__(self, method: str) -> Any:
        def remote(*_args: Any) -> str:
            self._asked.append(f"{method} {self._name}")
            return method

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize("colocated", [True, False])
def test_colocated_engines_load_before_the_trainers(monkeypatch: pytest.MonkeyPatch, colocated: bool) -> None:
    config = PipelineConfig.model_validate({"ppo": {"colocate": "all" if colocated else "pairs"}})
    fleet = Fleet(config, plan(config.ppo), "cuda", {}, 0)
    done: list[str] = []

    def start(group: Group) -> None:
        workers = WorkerGroup(group, (RemoteActor(_Actor("trainer", done)),))
        fleet.groups.update(dict.fromkeys(group.roles, workers))

    def wait(pending: list[Pending[Any]], what: str) -> list[Any]:
        done.append(f"wait for {what}")
        return [("127.0.0.1", 1)] * len(pending)

    engines = SimpleNamespace(actors=[RemoteActor(_Actor("engine", done))])
    placement = SimpleNamespace(colocated=colocated)
    monkeypatch.setattr(module, "reserve_bundles", lambda *_args, **_kwargs: placement)
    monkeypatch.setattr(module, "EnginePool", lambda *_args: engines)
    monkeypatch.setattr(fleet, "_client", None, raising=False)
    monkeypatch.setattr(fleet, "_start_group", start)
    monkeypatch.setattr(fleet, "wait", wait)
    fleet._start_actors()
    loading = [entry for entry in done if entry.startswith("load") or entry == "wait for all models to load"]
    if colocated:
        assert loading == [
            "load engine",
            "wait for all models to load",
            "load trainer",
            "wait for all models to load",
        ]
    else:
        assert loading == ["load trainer", "load trainer", "load engine", "wait for all models to load"]


@pytest.mark.parametrize(("answers", "packs"), [((True, True), True), ((True, False), False)])
def test_all_groups_pad_if_one_model_does_not_support_packing(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[bool, bool], packs: bool
) -> None:
    config = PipelineConfig()
    fleet = Fleet(config, plan(config.ppo), "cpu", {}, 0)
    layouts: list[tuple[str, bool]] = []

    def group(name: str, answer: bool) -> WorkerGroup:
        actor = SimpleNamespace(
            listen=SimpleNamespace(remote=lambda *_: ("127.0.0.1", 1)),
            load=SimpleNamespace(remote=lambda *_: answer),
            choose_layout=SimpleNamespace(remote=lambda pack: layouts.append((name, pack))),
        )
        return WorkerGroup(Group(("policy",), 1), (RemoteActor(actor),))

    monkeypatch.setattr(fleet, "wait", lambda pending, what: [call.reference for call in pending])
    fleet._load([group("policy", answers[0]), group("reward", answers[1])])
    assert fleet.packs is packs
    assert layouts == [("policy", packs), ("reward", packs)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_gather_restores_the_order_of_the_sequences(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    config = PipelineConfig.model_validate({"ppo": {"micro_batch_tokens": 12}})
    fleet = Fleet(config, plan(config.ppo), "cpu", {}, 0)
    shares: list[int] = []

    def values(sequences: list[Any], micro_batches: list[list[int]]) -> list[list[int]]:
        shares.append(len(sequences))
        assert [i for micro_batch in micro_batches for i in micro_batch] == list(range(len(sequences)))
        return [list(response) for _, response in sequences]

    actor = SimpleNamespace(values=SimpleNamespace(remote=values))
    fleet.groups["critic"] = WorkerGroup(Group(("critic",), ranks), (RemoteActor(actor),) * ranks)
    monkeypatch.setattr(fleet, "wait", lambda pending, what: [call.reference for call in pending])
    sequences = [((1,), (i,) * (1 + i % 4)) for i in range(10)]
    assert fleet.values(sequences).gather(list) == [list(response) for _, response in sequences]
    assert len(shares) == ranks and sum(shares) == 10


def test_reindex_counts_through_all_micro_batches() -> None:
    assert reindex([[7, 3], [], [5]], start=4) == [[4, 5], [], [6]]


@pytest.mark.parametrize(
    ("tensor_parallel", "largest", "fits"), [(8, 8, True), (16, 8, False), (16, None, True)]
)
def test_an_engine_must_fit_on_one_host(tensor_parallel: int, largest: float | None, fits: bool) -> None:
    plan = PlacementPlan((), 1, tensor_parallel, colocated=False)
    if fits:
        check_engine_size(plan, largest)
        return
    with pytest.raises(ConfigError, match="an engine must be on one host; got 16"):
        check_engine_size(plan, largest)
