"""`ppo.weight_sync.keep_requests` with scripted engines, which sample one token in each step.

- the queue gives prompts of the oldest batch first and none during a pause, and gives again what a lost
  engine had
- an engine that pauses returns what is finished; the other requests go on after the sync, and their tokens
  say which version sampled them
- an engine begins the next step before the last responses of a step are finished
- every step has each response once, also if an engine is lost; no token is older than `ppo.staleness` allows;
  a token of another version ends the run
- the rollouts have a mean staleness by token
- a checkpoint has no rollouts, and no score from a batch of several versions
- other settings that the field needs are named in one sentence; the default is in no key
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import check_consistency
from rlhf_core.config.keys import result_settings
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError, WeightSyncError
from rlhf_core.ppo.fleet.prompt_queue import Given, KeptRequests, PromptQueue
from rlhf_core.ppo.sampling.rollouts import Collector, prompts_of_step
from rlhf_core.ppo.sampling.schedule import RolloutsKept
from rlhf_core.ppo.training.batch import Places, RolloutBatch
from rlhf_core.testing import stage_context
from rlhf_core.testing.engines import Reply, Request, ScriptedEngine
from rlhf_core.testing.fleet import ScriptedEngineActor, ScriptedFleet, ScriptedQueue, scripted_actor
from rlhf_core.types import PromptExample, StageContext
from tests.unit.ppo.test_controller import FORTY, Controller, _Experience

PROMPTS = [PromptExample(f"p{i}", "", (1,) * (3 + i % 4)) for i in range(7)]
OPTIONS: Any = {"n": 1, "max_new_tokens": 99, "temperature": 1.0}
PER_STEP = 4


def respond(request: Request) -> Reply:
    """Responses have 2 to 6 tokens."""
    return Reply(tuple(range(10, 12 + request.seed % 5)))


def config(staleness: int = 1, steps: int = 6, **weight_sync: Any) -> PipelineConfig:
    ppo = {
        "staleness": staleness,
        "steps": steps,
        "prompts_per_step": PER_STEP,
        "minibatches": 1,
        "engine": {"dispatch": "queue"},
        "weight_sync": {"keep_requests": True, **weight_sync},
    }
    return config_from_tree({"ppo": ppo}, "test")


# -- the queue --


def test_the_oldest_batch_is_given_first_and_nothing_in_a_pause() -> None:
    queue = ScriptedQueue()
    queue.open(2, 3, 1)
    queue.open(1, 2, 1)
    assert queue.give(0, 3) == Given(False, [(1, 0), (1, 1), (2, 0)], [2])
    queue.pause(True)
    assert queue.give(0, 3) == Given(True, [], [2])
    queue.pause(False)
    assert queue.give(0, 9) == Given(False, [(2, 1), (2, 2)], [])


def test_what_a_lost_engine_had_is_given_again() -> None:
    queue = ScriptedQueue()
    queue.open(1, 6, 2)
    assert queue.give(0, 9).numbers == [(1, 0), (1, 1), (1, 2)], "an equal share at most"
    queue.give(1, 2)
    queue.give_back(0, {1: {1}})
    queue.give_back(0, {1: set()})
    assert [queue.give(1, 9).numbers for _ in range(2)] == [[(1, 0), (1, 2), (1, 5)], []]
    queue.close(1)
    queue.give_back(1, {})
    assert queue.give(1, 9) == Given(False, [], [])


# -- an engine --


def test_requests_go_on_after_a_pause_and_tokens_know_their_version() -> None:
    lengths = {"a": 2, "b": 5, "c": 3, "d": 1}
    engine = ScriptedEngine(lambda request: Reply(range(lengths[request.prompt.prompt_id])))
    kept = KeptRequests(engine, most=2, ask_seconds=0.0)
    prompts = [PromptExample(name, "", (1,)) for name in lengths]
    kept.open(1, prompts[:2], [0, 0], 1)
    kept.open(2, prompts[2:], [0, 0], 1)
    numbers = [(1, 0), (1, 1), (2, 0), (2, 1)]
    asked = 0

    def give(most: int) -> Given:
        nonlocal asked
        asked += 1
        if asked == 4:
            return Given(True, [], [2])
        given, numbers[:most] = numbers[:most], []
        return Given(False, given, sorted({batch for batch, _ in numbers}))

    engine.weight_version = 7
    assert {
        number: [r.spans for r in found] for number, found in kept.sample(1, give, **OPTIONS).items()
    } == {0: [()]}
    assert engine.kept == 2, "one of each batch"
    engine.weight_version = 8
    (b,) = kept.sample(1, give, **OPTIONS)[1]
    assert (b.policy_version, b.spans, b.response_ids) == (7, ((0, 7), (3, 8)), (0, 1, 2, 3, 4))
    later = kept.sample(2, give, **OPTIONS)
    assert {number: (found[0].policy_version, found[0].spans) for number, found in later.items()} == {
        0: (7, ((0, 7), (1, 8))),
        1: (8, ()),
    }


# -- all engines --


class Queue(ScriptedQueue):
    """Pauses an engine that has the oldest batch after some questions, as the driver does later."""

    sampled = 0
    """Batch of the present call of an engine."""
    patience = 3

    @override
    def pause(self, paused: bool) -> None:
        super().pause(paused)
        self.questions: Counter[int] = Counter()

    @override
    def give(self, engine: int, most: int) -> Given:
        if self.sampled > min(self._left):
            self.questions[engine] += 1
            if self.questions[engine] > self.patience:
                return Given(True, [], [batch for batch, left in self._left.items() if left])
        return super().give(engine, most)


class EngineActor(ScriptedEngineActor):
    queues: list[Any]

    @override
    def sample_kept(self, queue: Any, batch: int, parts: int, **options: Any) -> Any:
        self.queues[0].sampled = batch
        return super().sample_kept(queue, batch, parts, **options)


class Fleet(ScriptedFleet):
    @override
    def _start_engine(self, index: int, starts_before: int) -> Any:
        if starts_before:
            # The process of an engine that is restarted knows no requests.
            self.engine_actors = [*self.engine_actors]
            self.engine_actors[index] = actor = EngineActor(ScriptedEngine(respond), index)
            actor.queues = self.queues
        return super()._start_engine(index, starts_before)

    @override
    def start_helper(self, kind: Any, name: str, node: str | None = None) -> Any:
        assert kind is PromptQueue
        self.queues.append(Queue())
        return scripted_actor(self.queues[-1])


class Run:
    """Steps without training: wait for a batch, pause, sync."""

    def __init__(self, engines: int = 2, **settings: Any) -> None:
        self.config = config(**settings)
        self.engines = [ScriptedEngine(respond) for _ in range(engines)]
        actors = [EngineActor(engine, index) for index, engine in enumerate(self.engines)]
        self.fleet = Fleet(self.config, engines=actors)
        for actor in actors:
            actor.queues = self.fleet.queues
        composer: Any = None
        collector = Collector(self.config.ppo, self.fleet, PROMPTS, str, composer, 0)
        self.ahead = RolloutsKept(self.config.ppo, self.fleet, PROMPTS, collector)
        self.fleet.sync(0)

    def step(self, step: int) -> RolloutBatch:
        self.ahead.start(step - 1)
        batch = self.ahead.take(step)
        self.ahead.finish()
        assert not self.ahead.is_unfinished
        self.fleet.sync(step)
        return batch

    def check(self, step: int, batch: RolloutBatch) -> None:
        """Every prompt of the step has its whole response once, no token of which is too old."""
        used = prompts_of_step(len(PROMPTS), PER_STEP, 0, step)
        assert [prompt.prompt_id for prompt in batch.prompts] == [PROMPTS[i].prompt_id for i in used]
        assert len(set(batch.places)) == PER_STEP
        chunks = self.fleet.wait(batch.chunks, "rollouts")
        responses = [chunks[number].response(row).tolist() for number, row in batch.places]
        assert [len(response) for response in responses] == batch.lengths_B.tolist()
        for response in responses:
            assert response == list(range(10, 10 + len(response)))
        seen = {version for row in range(PER_STEP) for _, version in batch.spans_of(row)}
        assert step - 1 - self.config.ppo.staleness <= min(seen) <= max(seen) <= step - 1
        assert batch.version == min(seen)


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("engines", [1, 2, 3])
def test_responses_are_sampled_through_syncs(staleness: int, engines: int) -> None:
    run = Run(engines, staleness=staleness)
    batches = {step: run.step(step) for step in range(1, 7)}
    for step, batch in batches.items():
        run.check(step, batch)
    mixed = [len(batch.spans) for batch in batches.values()]
    assert mixed[0] == 0 and sum(mixed) > 0, "the first step is sampled before the first update"
    assert sum(len(engine.requests) for engine in run.engines) == 6 * PER_STEP, "nothing is sampled twice"
    assert len(run.fleet.queues) == 1 and not run.fleet.queues[0]._left
    assert run.fleet.synced == list(range(7))


@pytest.mark.parametrize("moment", ["in a step", "before a sync"])
def test_a_lost_engine_loses_no_response(moment: str) -> None:
    run = Run()
    run.check(1, run.step(1))
    if moment == "in a step":
        run.fleet.engines.lost = {1}
        run.check(2, run.step(2))
    else:
        batch = run.ahead.take(2)
        run.fleet.engines.lost = {1}
        run.ahead.finish()
        assert run.fleet.engines.serving == [0]
        run.fleet.sync(2)
        run.check(2, batch)
    for step in (3, 4, 5, 6):
        run.check(step, run.step(step))
    assert run.fleet.synced == ([0, 1, 1, 2, 3, 4, 5, 6] if moment == "in a step" else list(range(7)))


def test_a_token_of_another_version_ends_the_run() -> None:
    run = Run()
    run.step(1)
    for engine in run.engines:
        engine.weight_version = 4
    with pytest.raises(WeightSyncError, match=r"step 2 was sampled from policy version \[4\], not 0 or 1"):
        run.ahead.take(2)


def test_a_checkpoint_has_no_rollouts(tmp_path: Path) -> None:
    run = Run()
    run.step(1)
    run.ahead.save(tmp_path, 1)
    run.ahead.restore(tmp_path, 1)
    assert not list(tmp_path.iterdir()) and not run.ahead.finished
    other = Run()
    other.fleet.sync(1)
    other.check(2, other.step(2))


def test_the_mean_staleness_counts_tokens() -> None:
    lengths_B = np.array([4, 2], np.int32)
    places = Places(np.zeros(2, np.int64), np.arange(2))
    batch = RolloutBatch([], places, lengths_B, lengths_B > 0, [], versions_B=np.array([3, 5]))
    batch.spans = {0: ((0, 3), (3, 5))}
    assert batch.token_staleness(5) == pytest.approx((3 * 2 + 0 + 0) / 6)
    assert [batch.spans_of(row) for row in range(2)] == [((0, 3), (3, 5)), ((0, 5),)]


def test_a_batch_of_several_versions_has_no_score(tmp_path: Path) -> None:
    """The policy of version 3 has a checkpoint and sampled the first token of each of these batches."""
    versions_B = np.full(len(FORTY), 3)
    batches = {
        "of files": replace(FORTY, version=3),
        "one": replace(FORTY, version=3, versions_B=versions_B),
        "a later first token": replace(FORTY, version=3, versions_B=np.append(versions_B[1:], 4)),
        "spans": replace(FORTY, version=3, versions_B=versions_B, spans={0: ((0, 3), (1, 4))}),
    }
    scores = {}
    for name, batch in batches.items():
        run = Scored(stage_context(tmp_path / name), batch)
        run.completed_steps, run._last_checkpoint_step = 4, 3
        run.iterate()
        scores[name] = run._scores
    assert scores == {"of files": {3: 0.5}, "one": {3: 0.5}, "a later first token": {}, "spans": {}}


class Scored(Controller):
    """Its next step has this batch."""

    def __init__(self, context: StageContext, batch: RolloutBatch) -> None:
        super().__init__(context, evaluate_every=0)
        self.batch = batch

    @override
    def collect(self) -> RolloutBatch:
        return self.batch

    @override
    def score(self, batch: RolloutBatch) -> Any:
        return _Experience(objective__net_score=0.5)


# -- configuration --


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({"staleness": 0}, "ppo.staleness of at least 1"),
        ({"engine": {"dispatch": "fixed"}}, "ppo.engine.dispatch=queue"),
        ({"engine": {"dispatch": "queue", "prefix_caching": True}}, "ppo.engine.prefix_caching=false"),
        ({"importance": "none"}, "ppo.importance other than none"),
    ],
)
def test_what_the_field_needs_is_named(changed: dict[str, Any], missing: str) -> None:
    ppo = {"staleness": 1, "engine": {"dispatch": "queue"}, "weight_sync": {"keep_requests": True}}
    assert not [
        e for e in check_consistency(config_from_tree({"ppo": ppo}, "t")) if isinstance(e, ConfigError)
    ]
    (error,) = check_consistency(config_from_tree({"ppo": ppo | changed}, "t"))
    assert str(error).startswith(f"ppo.weight_sync.keep_requests: needs {missing}")


def test_the_default_is_in_no_key() -> None:
    sections = [result_settings(made.ppo)["weight_sync"] for made in (PipelineConfig(), config())]
    assert ["keep_requests" in section for section in sections] == [False, True]
