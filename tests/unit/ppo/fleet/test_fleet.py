"""The order in which models are loaded, and the calls of all ranks. Ray is scripted here, and is real in
`tests/integration/test_stuck.py`.

- engines that share devices with trainers load before the trainers; otherwise all load at the same time
- on GPUs, processes share the cores of their host, and only those without CUDA IPC have segments that grow
- an engine that is lost in a broadcast over NCCL ends the attempt: the sender may wait for it without limit
- an engine that no host has the GPUs for is refused
- the usage of all processes is known only if all answer at once; a dead or suspended one is no error
- the chunks of a batch are sent to an actor once, and again to one that took its place
- gathered values are in the order of the responses, for any number of ranks and size of chunks
- each queue of prompts is a participant of its own
- routes divide the work evenly, by whole chunks, with the same number of micro-batches on every rank
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from rlhf_core.cluster.rpc import Pending, RemoteActor, Usage
from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import Group, PlacementPlan, PPOSettings, Role, plan
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.errors import ConfigError, WorkerDied
from rlhf_core.ppo.fleet.fleet import ENGINES, Fleet, WorkerGroup
from rlhf_core.ppo.fleet.placement import check_engine_size
from rlhf_core.ppo.training.batch import (
    Places,
    RolloutBatch,
    RolloutColumns,
    SentShare,
    columns_of,
    places_of,
    reindex,
    route,
    row_columns,
)
from rlhf_core.testing.engines import Reply, ScriptedEngine
from rlhf_core.types import PromptExample, Rollout
from tests.support.scripted_actors import NEVER, ended
from tests.support.scripted_fleet import ScriptedEngineActor, ScriptedFleet, ScriptedRank

ROLES: tuple[Role, ...] = ("policy", "reference", "critic", "reward")
USAGE = Usage(1.0, 2)


class _Rank(ScriptedRank):
    """Writes down that it loads."""

    def __init__(self, name: str, done: list[str]) -> None:
        super().__init__()
        self._name, self._done = name, done
        self.answer: Any = USAGE
        """Result of `usage`."""

    @override
    def load(self, *given: Any) -> bool:
        self._done.append(f"load {self._name}")
        return True

    @override
    def usage(self) -> Usage:
        usage: Usage = answered(self.answer)
        return usage


class _Engine(ScriptedEngineActor):
    """Writes down that it loads."""

    def __init__(self, done: list[str]) -> None:
        super().__init__(ScriptedEngine(lambda request: Reply(())))
        self._done = done
        self.answer: Any = USAGE
        """Result of `usage`."""

    @override
    def start_engine(self) -> None:
        self._done.append("load engine")

    @override
    def usage(self) -> Usage:
        usage: Usage = answered(self.answer)
        return usage


def answered(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


class _Whole(ScriptedFleet):
    """A fleet of one rank per role and two engines."""

    def __init__(self) -> None:
        done: list[str] = []
        self.two_engines = (_Engine(done), _Engine(done))
        super().__init__(ranks={role: [_Rank(role, done)] for role in ROLES}, engines=self.two_engines)


@pytest.fixture
def fleet() -> _Whole:
    return _Whole()


def test_usage_is_known_only_if_all_processes_answer(fleet: _Whole) -> None:
    # `ScriptedFleet` has its own.
    def usage() -> dict[str, list[Usage]] | None:
        return Fleet.usage_by_group(fleet)

    assert usage() == {role: [USAGE] for role in ROLES} | {ENGINES: [USAGE] * 2}
    fleet.two_engines[1].answer = WorkerDied("engine 1 has died")
    assert usage() is None
    fleet.two_engines[1].answer = NEVER
    assert usage() is None
    assert fleet.client.objects.seconds == 1.0, "it does not wait longer for a suspended process"


class _Actor:
    def __init__(self, name: str, asked: list[str]) -> None:
        self._name, self._asked = name, asked

    def __getattr__(self, method: str) -> Any:
        def remote(*_args: Any) -> str:
            self._asked.append(f"{method} {self._name}")
            return method

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize("colocated", [True, False])
def test_colocated_engines_load_before_the_trainers(colocated: bool) -> None:
    done: list[str] = []

    class Loading(ScriptedFleet):
        @override
        def wait(self, pending: Sequence[Pending[Any]], what: str) -> list[Any]:
            done.append(f"wait for {what}")
            return super().wait(pending, what)

    config = PipelineConfig.model_validate({"ppo": {"colocate": "all" if colocated else "pairs"}})
    ranks = {role: [_Rank("trainer", done)] for role in ROLES}
    fleet = Loading(config, ranks=ranks, engines=[_Engine(done)], device="cuda")
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
    environment = Fleet(PPOSettings.of(config), "cuda", {}, 0)._environment()
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
    fleet = Sending(PPOSettings.of(config), device, {}, 0)
    fleet.groups["policy"] = WorkerGroup(Group(("policy",), 1), (RemoteActor(_Actor("policy", [])),))
    lost: list[str] = []
    engines: Any = SimpleNamespace(
        mark_dead=lambda *_args, after_error: after_error,
        mark_all_dead=lost.append,
        restart=lambda: None,
        confirm_weights=lambda: None,
    )
    fleet.engines = engines
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
        [ended(columns_of(rollouts[k : k + rows], 1)) for k in range(0, len(lengths), rows)],
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
    for colocated in (False, True):
        plan = PlacementPlan((), 1, tensor_parallel, colocated)
        if fits:
            check_engine_size(plan, largest)
            continue
        with pytest.raises(ConfigError, match="an engine must be on one host; got 16"):
            check_engine_size(plan, largest)
