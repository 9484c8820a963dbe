"""`ppo.engine.dispatch=queue`. Ray and vLLM are scripted.

- the queue gives each number of a batch once, at most an equal share at a time, and never more than asked for
- the rollouts are those of `dispatch=fixed`, in the order of the prompts, for any number of engines and
  ranks; the longest prompts are taken first
- what a lost engine has taken is sampled again
- an engine samples what it takes, and says in which chunk each prompt is
- a queue that does not answer ends the attempt, and no engine is replaced for it
- with responses of different lengths, the slowest engine needs fewer steps than with fixed shares
- the field is not part of the settings of stage keys
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import override

from rlhf_core.cluster.rpc import RemoteActor
from rlhf_core.config.keys import result_settings
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import InfrastructureError, WorkerDied
from rlhf_core.ppo.fleet.engine_actor import PromptQueue
from rlhf_core.ppo.training.batch import columns_of, header_of
from rlhf_core.testing.engines import Reply, ScriptedEngine
from rlhf_core.testing.fleet import NEVER, ScriptedEngineActor, ScriptedQueue, scripted_actor
from rlhf_core.types import PromptExample, Rollout
from tests.support.scripted_rollouts import PROMPTS, VERSION, FixedEngines, Request, collector, rollouts


@pytest.fixture
def queue() -> PromptQueue:
    return ScriptedQueue()


class Engines(FixedEngines):
    """All engines but the last take prompts once. The last one takes all others."""

    def actor(self, index: int) -> RemoteActor[Any]:
        def sample_from(
            queue: RemoteActor[PromptQueue],
            batch: int,
            parts: int,
            prompts: Sequence[PromptExample],
            *,
            seeds: Sequence[int],
            **options: Any,
        ) -> list[Any]:
            taken: list[int] = []
            while numbers := queue.call(PromptQueue.take, batch, 3).reference:
                taken += numbers
                if index != self.serving[-1]:
                    break
            request = Request([prompts[i] for i in taken], seeds=[seeds[i] for i in taken], **options)
            answer = self._answer(index, request)
            chunks = [taken[part::parts] for part in range(parts)]
            columns = []
            for part in range(parts):
                rows = [row for place in range(part, len(taken), parts) for row in self._rows(answer, place)]
                columns.append(columns_of(rows, request.n))
            ordered = [i for chunk in chunks for i in chunk]
            rows = [row for i in ordered for row in self._rows(answer, taken.index(i))]
            return [(request, (chunks, header_of(rows))), *columns]

        return scripted_actor(SimpleNamespace(sample_from=sample_from))

    @staticmethod
    def _rows(answer: Sequence[Rollout], place: int) -> Sequence[Rollout]:
        return answer[2 * place : 2 * place + 2]


def queued(engines: Engines, **changed: Any) -> Any:
    return collector(engines, engine={"dispatch": "queue"}, **changed)


def test_each_number_is_given_once_and_at_most_a_share_at_a_time(queue: PromptQueue) -> None:
    queue.open(3, 19, 2)
    assert [list(queue.take(3, 100)) for _ in range(3)] == [list(range(10)), list(range(10, 19)), []]


def test_an_engine_gets_no_more_than_it_asks_for_and_batches_are_apart(queue: PromptQueue) -> None:
    queue.open(3, 20, 2)
    queue.open(4, 1, 2)
    assert list(queue.take(3, 2)) == [0, 1]
    assert list(queue.take(4, 2)) == [0]
    assert list(queue.take(4, 2)) == []
    assert list(queue.take(3, 2)) == [2, 3]


@pytest.mark.parametrize("serving", [(0,), (0, 1, 2), range(12)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_rollouts_are_those_of_a_fixed_distribution(serving: Sequence[int], ranks: int) -> None:
    sizes: dict[str, Any] = {"prompts_per_step": 8, "policy_deepspeed": {"ranks": ranks}}
    engines = Engines(serving)
    made = queued(engines, **sizes)
    for step in (2, 3):
        fixed = collector(FixedEngines(), **sizes).collect(step, VERSION)
        assert rollouts(made.collect(step, VERSION)) == rollouts(fixed)
    lengths = [len(p.input_ids) for p in engines.calls[-1][serving[0]].prompts]
    assert lengths[0] == max(len(p.input_ids) for p in fixed.prompts)
    assert lengths == sorted(lengths, reverse=True)


def test_what_a_lost_engine_has_taken_is_sampled_again() -> None:
    engines = Engines((0, 1, 2))
    engines.lost = {1}
    made = queued(engines, prompts_per_step=8)
    undisturbed = collector(FixedEngines(), prompts_per_step=8).collect(2, VERSION)
    assert rollouts(made.collect(2, VERSION)) == rollouts(undisturbed)
    assert made._fleet.synced == [VERSION] and engines.serving == [0, 2]
    first, again = engines.calls
    taken = Counter(p.prompt_id for request in again.values() for p in request.prompts)
    assert taken == Counter(p.prompt_id for p in first[1].prompts)


# -- in an engine --


class _Greedy(ScriptedEngine):
    """Takes up to two prompts at a time."""

    @override
    def generate_from(self, take: Callable[[int], Any], **options: Any) -> list[list[Rollout]]:
        return super().generate_from(lambda most: take(2 * most), **options)


def actor() -> ScriptedEngineActor:
    """An engine that answers with the seed of each prompt."""
    made = ScriptedEngineActor(_Greedy(lambda request: Reply((request.seed,))))
    made.receive(VERSION)
    return made


def test_an_engine_returns_the_chunk_of_each_prompt(queue: PromptQueue) -> None:
    queue.open(1, 5, 2)
    options: Any = {"n": 2, "max_new_tokens": 4, "temperature": 1.0}
    message, *columns = actor().sample_from(
        scripted_actor(queue), 1, 3, PROMPTS[:5], seeds=[10, 11, 12, 13, 14], **options
    )
    chunks, header = message
    assert chunks == [[0, 1], [2, 3], [4]]
    assert [chunk.response_ids.tolist() for chunk in columns] == [
        [10, 10, 11, 11],
        [12, 12, 13, 13],
        [14, 14],
    ]
    assert header.lengths.tolist() == [1] * 10 and set(header.versions.tolist()) == {VERSION}


@pytest.mark.parametrize("answer", [WorkerDied("a process died"), NEVER])
def test_a_queue_that_does_not_answer_ends_the_attempt(answer: Any) -> None:
    class Queue(ScriptedQueue):
        @override
        def take(self, batch: int, most: int) -> range:
            if isinstance(answer, Exception):
                raise answer
            silent: range = answer
            return silent

    options: Any = {"n": 1, "max_new_tokens": 4, "temperature": 1.0}
    with pytest.raises(InfrastructureError, match="the queue of prompts does not answer") as raised:
        actor().sample_from(scripted_actor(Queue()), 1, 1, PROMPTS[:1], seeds=[0], **options)
    assert not isinstance(raised.value, WorkerDied), "the pool would replace the engine"


def test_the_field_is_not_part_of_keys() -> None:
    plain, changed = (
        config_from_tree({"ppo": {"engine": engine}}, "test")
        for engine in ({}, {"dispatch": "queue", "prefix_caching": True})
    )
    assert result_settings(plain.ppo) == result_settings(changed.ppo)


def decoding_steps(
    lengths: Sequence[int], engines: int, room: int, queue: PromptQueue | None, *, slow: bool
) -> int:
    """Return the steps of the slowest engine. Each step decodes a token of every response, `room` at a time.

    Without a queue, each engine has every `engines`-th response. A slow engine 0 pauses in each fifth step.
    """
    shares = [list(range(engine, len(lengths), engines)) for engine in range(engines)]
    running: list[list[int]] = [[] for _ in range(engines)]
    if queue is not None:
        queue.open(1, len(lengths), engines)
    steps = 0
    while True:
        for engine in range(engines):
            if slow and engine == 0 and steps % 5 == 4:
                continue
            free = room - len(running[engine])
            if queue is None:
                taken, shares[engine] = shares[engine][:free], shares[engine][free:]
            else:
                taken = list(queue.take(1, free))
            running[engine] = [left - 1 for left in running[engine] if left > 1] + [lengths[i] for i in taken]
        if not any(running):
            return steps
        steps += 1


@pytest.mark.parametrize(
    ("responses", "engines", "room", "slow", "most"),
    [
        (256, 2, 32, False, 1.0),
        (512, 8, 16, False, 0.97),
        (512, 8, 256, False, 1.0),
        (256, 2, 32, True, 0.95),
        (512, 8, 16, True, 0.92),
    ],
)
def test_engines_that_take_prompts_need_fewer_steps(
    queue: PromptQueue,
    summary_lines: list[str],
    responses: int,
    engines: int,
    room: int,
    slow: bool,
    most: float,
) -> None:
    """Lengths are lognormal (sigma 0.8), 150 tokens in the middle and at most 512."""
    fixed = taken = 0
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [min(512, 1 + round(150 * draw.lognormvariate(0, 0.8))) for _ in range(responses)]
        fixed += decoding_steps(lengths, engines, room, None, slow=slow)
        taken += decoding_steps(lengths, engines, room, queue, slow=slow)
    which = ", one with 0.8 of the speed" if slow else ""
    summary_lines.append(
        f"{responses} responses on {engines} engines with room for {room}{which}: {taken / fixed:.3f} of the"
        " steps if engines take them"
    )
    assert taken / fixed <= most
