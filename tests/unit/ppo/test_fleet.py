"""The order in which models are loaded, and what happens if a group of workers dies or stalls. Ray is
scripted here, and is real in `tests/integration/test_stuck.py`.

- engines that share devices with trainers load before the trainers; otherwise all load at the same time
- a group of frozen models is restarted and its call repeated, for a limited number of times
- the loss of a group that trains fails the attempt; so does an error without an unhealthy process
- on GPUs, processes share the cores of their host, and only those without CUDA IPC have segments that grow
- an engine that is lost in a broadcast over NCCL ends the attempt: the sender may wait for it without limit
- an engine that no host has the GPUs for is refused
- the usage of all processes is known only if all answer at once; a dead or suspended one is no error
- the chunks of a batch are sent to an actor once; again after a restart or an error
- gathered values are in the order of the responses, for any number of ranks and size of chunks
- each queue of prompts is a participant of its own
- routes divide the work evenly, by whole chunks, with the same number of micro-batches on every rank
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.cluster.rpc import Pending, RemoteActor, Usage
from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import Group, PlacementPlan, Role, plan
from rlhf_core.errors import ConfigError, InfrastructureError, WorkerDied
from rlhf_core.ppo import fleet as module
from rlhf_core.ppo.batch import RolloutBatch, SentShare
from rlhf_core.ppo.columns import Places, RolloutColumns, columns_of, row_columns
from rlhf_core.ppo.fleet import ENGINES, FROZEN_RESTARTS, Fleet, WorkerGroup, reindex
from rlhf_core.ppo.placement import check_engine_size
from rlhf_core.ppo.routes import places_of, route
from rlhf_core.system.overriding import override
from rlhf_core.testing.fleet import ScriptedFleet, ScriptedRank, results, scripted_actor
from rlhf_core.types import PromptExample, Rollout
from rlhf_core.weight_sync.sender import SyncReport


class _Restarting(Fleet):
    """A fleet of one rank per role, which writes down what it starts, loads and kills."""

    def __init__(self) -> None:
        config = PipelineConfig.model_validate({"ppo": {"colocate": "none"}})
        super().__init__(config, plan(config.ppo), "cpu", {}, 0)
        self.lost: list[str] = []
        """Names of the unhealthy participants."""
        self.done: list[str] = []
        monitor: Any = SimpleNamespace(unhealthy=lambda: [SimpleNamespace(name=name) for name in self.lost])
        self._monitor = monitor
        for group in self._plan.groups:
            self._start_group(group)
        self.done.clear()

    @override
    def _start_group(self, group: Group) -> WorkerGroup:
        self.done.append(f"start {group.name}")
        workers = WorkerGroup(group, (RemoteActor(object()),))
        self.groups.update(dict.fromkeys(group.roles, workers))
        return workers

    @override
    def _kill(self, workers: WorkerGroup) -> None:
        self.done.append(f"kill {workers.group.name}")
        self.lost.clear()

    @override
    def _load(self, groups: Sequence[WorkerGroup] = (), engines: Sequence[Any] = ()) -> None:
        self.done += [f"load {group.group.name}" for group in groups]


Made = tuple[_Restarting, list[str], list[str]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """(a fleet, names of the unhealthy participants, what was done)"""
    monkeypatch.setattr(module, "dead_actors", lambda actors: [])
    fleet = _Restarting()
    return fleet, fleet.lost, fleet.done


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
    rounds: list[tuple[str, ...]] = [("reward rank 0",)] * (FROZEN_RESTARTS + 1)
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


def test_usage_is_known_only_if_all_processes_answer(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _, _ = made
    usage = Usage(1.0, 2)
    for workers in fleet.distinct_groups:
        actor = scripted_actor(SimpleNamespace(usage=lambda: usage))
        fleet.groups[workers.group.roles[0]] = WorkerGroup(workers.group, (actor,))
    fleet.engines = SimpleNamespace(actors=[actor] * 2)  # type: ignore[assignment]
    monkeypatch.setattr(module, "ready", lambda calls, _seconds: [True] * len(calls))
    monkeypatch.setattr(module, "fetch", lambda calls, _seconds: results(calls))
    names = [workers.group.name for workers in fleet.distinct_groups]
    assert fleet.usage_by_group() == {ENGINES: [usage] * 2, **{name: [usage] for name in names}}

    def dead(_calls: Any, _seconds: float) -> Any:
        raise WorkerDied("engine 1 has died")

    monkeypatch.setattr(module, "fetch", dead)
    assert fleet.usage_by_group() is None
    monkeypatch.setattr(module, "ready", lambda calls, _seconds: [True] * (len(calls) - 1) + [False])
    assert fleet.usage_by_group() is None


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
    done: list[str] = []

    class Loading(Fleet):
        _client: Any = None

        @override
        def _start_group(self, group: Group) -> WorkerGroup:
            workers = WorkerGroup(group, (RemoteActor(_Actor("trainer", done)),))
            self.groups.update(dict.fromkeys(group.roles, workers))
            return workers

        @override
        def wait(self, pending: Sequence[Pending[Any]], what: str) -> list[Any]:
            done.append(f"wait for {what}")
            return [("127.0.0.1", 1)] * len(pending)

    config = PipelineConfig.model_validate({"ppo": {"colocate": "all" if colocated else "pairs"}})
    fleet = Loading(config, plan(config.ppo), "cuda", {}, 0)
    engines = SimpleNamespace(actors=[RemoteActor(_Actor("engine", done))])
    placement = SimpleNamespace(colocated=colocated, describe_nodes=lambda: "")
    monkeypatch.setattr(module, "reserve_bundles", lambda *_args, **_kwargs: placement)
    monkeypatch.setattr(module, "EnginePool", lambda *_args: engines)
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


@pytest.mark.parametrize(("colocate", "fixed"), [("all", True), ("pairs", False)])
def test_processes_on_gpus_share_the_cores_of_the_host(
    colocate: str, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tree = {"run": {"threads": 16}, "ppo": {"colocate": colocate}}
    config = PipelineConfig.model_validate(tree)
    processes = plan(config.ppo)
    environment = Fleet(config, processes, "cuda", {}, 0)._environment()
    for variables in environment.values():
        assert variables["OMP_NUM_THREADS"] == str(16 // processes.processes)
    # CUDA IPC cannot share expandable segments.
    assert ("PYTORCH_ALLOC_CONF" in environment["worker"]) is fixed
    assert environment["engine"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"


@pytest.mark.parametrize(("device", "restarted"), [("cpu", True), ("cuda", False)])
def test_an_engine_lost_in_a_broadcast_over_nccl_ends_the_attempt(device: str, restarted: bool) -> None:
    report = SyncReport(3, 1, 1, 1.0)
    answers: list[Any] = [WorkerDied("engine 0 has died"), report]

    class Sending(Fleet):
        @override
        def _connect(self) -> None:
            """Do nothing."""

        @override
        def wait(self, pending: Sequence[Pending[Any]], what: str) -> list[Any]:
            answer = answers.pop(0)
            if isinstance(answer, WorkerDied):
                raise answer
            return [answer]

    config = PipelineConfig.model_validate({"ppo": {"colocate": "pairs"}})
    fleet = Sending(config, plan(config.ppo), device, {}, 0)
    fleet.groups["policy"] = WorkerGroup(Group(("policy",), 1), (RemoteActor(_Actor("policy", [])),))
    lost: list[str] = []
    fleet.engines = SimpleNamespace(  # type: ignore[assignment]
        mark_dead=lambda *_args, after_error: after_error,
        mark_all_dead=lost.append,
        restart=lambda: None,
        confirm_weights=lambda: None,
    )
    if restarted:
        assert fleet.sync(3) is report
        assert len(lost) == 1
    else:
        with pytest.raises(WorkerDied):
            fleet.sync(3)
        assert lost == []


@pytest.mark.parametrize(("answers", "packs"), [((True, True), True), ((True, False), False)])
def test_all_groups_pad_if_one_model_does_not_support_packing(
    answers: tuple[bool, bool], packs: bool
) -> None:
    class Rank(ScriptedRank):
        def __init__(self, supported: bool) -> None:
            super().__init__()
            self._supported = supported

        @override
        def listen(self, local: bool) -> tuple[str, int]:
            return "127.0.0.1", 1

        @override
        def load(self, rank: int, world_size: int, address: str, port: int, device: str) -> bool:
            return self._supported

        @override
        def choose_layout(self, pack: bool) -> None:
            layouts.append(pack)

    layouts: list[bool] = []
    fleet = ScriptedFleet(ranks={"policy": [Rank(answers[0])], "reward": [Rank(answers[1])]})
    fleet._load(fleet.distinct_groups)
    assert fleet.packs is packs
    assert layouts == [packs, packs]


def chunked(lengths: list[int], rows: int) -> RolloutBatch:
    """Return a batch of prompts with one token and chunks of `rows` responses, whose tokens are their row in
    the batch.
    """
    rollouts = [Rollout(f"p{i}", 0, (1,), (i,) * n, (-1.0,) * n, True, 0) for i, n in enumerate(lengths)]
    numbers = np.arange(len(lengths))
    return RolloutBatch(
        [Pending(columns_of(rollouts[k : k + rows], 1)) for k in range(0, len(lengths), rows)],
        Places(numbers // rows, numbers % rows),
        np.array(lengths, np.int32),
        np.ones(len(lengths), np.bool_),
        [PromptExample(r.prompt_id, "", r.prompt_ids) for r in rollouts],
    )


class _CriticRank(ScriptedRank):
    """Returns the response tokens as values."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.got: list[int] = []
        """Chunks of each call."""

    def values(self, share: SentShare | int, *chunks: RolloutColumns) -> Any:
        batch = self.received(share, chunks)
        self.got.append(len(chunks))
        self.rows += len(batch.share.places)
        indices = sorted(i for micro_batch in batch.share.micro_batches for i in micro_batch)
        assert indices == list(range(len(batch.share.places)))
        _, responses = batch.tokens()
        return None, row_columns([len(r) for r in responses], values=responses)


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("ranks", [1, 3])
def test_gather_restores_the_order_of_the_responses(ranks: int, rows: int) -> None:
    config = PipelineConfig.model_validate({"ppo": {"micro_batch_tokens": 12}})
    critic = [_CriticRank() for _ in range(ranks)]
    fleet = ScriptedFleet(config, ranks={"critic": critic})
    batch = chunked([1 + i % 4 for i in range(10)], rows)
    gathered = fleet.values(batch).gather("values")
    assert [row.tolist() for row in gathered] == [[float(i)] * (1 + i % 4) for i in range(10)]
    assert sum(rank.rows for rank in critic) == 10


def test_a_rank_gets_the_chunks_of_a_batch_once() -> None:
    rank, restarted = _CriticRank(), _CriticRank()
    fleet = ScriptedFleet(ranks={"critic": [rank]})
    batch, other = chunked([3, 4], 1), chunked([5], 1)
    for each in (batch, batch, other, batch, batch):
        assert len(fleet.values(each).gather("values")) == len(each)
    assert rank.got == [2, 0, 1, 2, 0]
    fleet.groups |= ScriptedFleet(ranks={"critic": [restarted]}).groups
    fleet.values(batch)
    assert restarted.got == [2]
    fleet._sent.forget()
    fleet.values(batch)
    assert restarted.got == [2, 2], "after an error the rank may not have them"


@pytest.mark.parametrize("pack", [True, False])
def test_routes_divide_the_work_by_whole_chunks(pack: bool) -> None:
    noise = random.Random(0)
    batch = chunked([noise.randint(1, 200) for _ in range(240)], 4)
    for ranks in (1, 2, 3, 7):
        shares = route(batch, ranks, 512, pack=pack)
        assert sorted(i for share in shares for i in share.indices.tolist()) == list(range(240))
        assert len({len(share.micro_batches) for share in shares}) == 1
        tokens = [int(batch.lengths_B[share.indices].sum()) for share in shares]
        assert max(tokens) < 1.1 * sum(tokens) / ranks
        homes = [{int(c) for c in batch.places.objects[share.indices]} for share in shares]
        assert sum(len(home) for home in homes) == len(batch.chunks), "no chunk is on two ranks"
        places = places_of(shares)
        for index, (rank, row) in enumerate(places):
            assert shares[rank].indices[row] == index
        for share in shares:
            lengths = 1 + batch.lengths_B[share.indices]
            assert all(lengths[m].sum() <= 512 for m in share.micro_batches if len(m) > 1)
            assert sorted(i for m in share.micro_batches for i in m) == list(range(len(share.indices)))


def test_each_queue_of_prompts_has_a_name_of_its_own(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collectors of training and of the held-out evaluation have one each."""
    fleet, _, _ = made
    monkeypatch.setattr(module, "start_queue", lambda participant: participant.name)
    monitor: Any = SimpleNamespace(folder=Path("none"))
    fleet._monitor = monitor
    queues: list[Any] = [fleet.start_queue() for _ in range(2)]
    assert queues == ["prompt queue 1", "prompt queue 2"]


def test_more_ranks_than_chunks_leave_ranks_without_responses() -> None:
    shares = route(chunked([3, 4], 1), 4, 16, pack=True)
    assert [share.indices.tolist() for share in shares] == [[1], [0], [], []]
    assert [share.micro_batches for share in shares] == [[[0]], [[0]], [[]], [[]]]


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
