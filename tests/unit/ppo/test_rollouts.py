"""Rollouts of a step. Engines, reward ranks and rewards are scripted.

- the steps use every prompt once before any is repeated; prompts go to the engine with the fewest tokens
- a share that is sampled again stays whole, and stays with its engine unless that was given up
- rollouts are in the order of prompts, the samples of a prompt consecutive, for any number of engines and if
  one of them is lost; a rollout of another policy version is a WeightSyncError
- while the policy is trained, a lost share goes to an engine that still has the version; without one, the
  attempt ends
- dynamic filtering replaces the groups with equal scores (penalties included), for at most `max_rounds`
  rounds, with all that belongs to them, and changes no other group
- prompts and seeds of each round follow from seed, step and round; no two rounds, steps or positions share a
  seed
- rewards get each rollout with its own prompt, and the reward model's scores are in the order of the rollouts
- no response is fetched for the reward model's scores alone
- the cache returns exactly the batch that was written, without pickle; another step or a damaged file gives
  nothing
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

from rlhf_core.cluster.rpc import Pending, RemoteActor
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.placement import Role
from rlhf_core.errors import WeightSyncError, WorkerDied
from rlhf_core.ppo.batch import RolloutBatch, SentShare
from rlhf_core.ppo.columns import Places, RolloutColumns, RolloutHeader, columns_of, header_of
from rlhf_core.ppo.model_scores import ModelScores
from rlhf_core.ppo.rollout_cache import RolloutCache
from rlhf_core.ppo.rollouts import (
    Collector,
    assign,
    prompts_of_step,
    reassign,
)
from rlhf_core.rewards.compose import RewardBatch, RewardComposer, normalize
from rlhf_core.system.overriding import override
from rlhf_core.testing.fleet import ScriptedFleet, ScriptedRank, scripted_actor
from rlhf_core.types import PromptExample, RewardInput, Rollout
from rlhf_core.weight_sync.sender import SyncReport

SEED, VERSION, PLACES, SAMPLES = 7, 5, 4, 2
PROMPTS = [PromptExample(f"p{i}", f"question {i}", (i,) * (1 + 3 * i % 7), {"answer": i}) for i in range(30)]

Asked = list[tuple[str, int]]
"""(prompt id, seed) of one round, in the order of the places."""


@dataclass(frozen=True)
class _Request:
    """One call of `EngineActor.sample`."""

    prompts: Sequence[PromptExample]
    n: int
    max_new_tokens: int
    temperature: float
    seeds: Sequence[int]


class _Engines:
    """Answer at once, with tokens that follow from the index of the sample and the seed."""

    def __init__(self, serving: Sequence[int] = (0,)) -> None:
        self.serving = list(serving)
        self.calls: list[dict[int, _Request]] = []
        """The requests of each round, by engine."""
        self.lost: set[int] = set()
        """Engines that do not answer the next call."""
        self.dead: set[int] = set()
        """Engines that did not answer. A sync gives them up."""
        self.stale: tuple[int, int] | None = None
        """(call, engine) that holds the previous version."""
        self.cut: set[int] = set()
        """Indices of the samples that the length limit cuts."""

    def actor(self, index: int) -> RemoteActor[Any]:
        assert index in self.serving

        def sample(chunks: Sequence[Sequence[PromptExample]], **options: Any) -> list[Any]:
            request = _Request([prompt for chunk in chunks for prompt in chunk], **options)
            answer = self._answer(index, request)
            sizes = [len(chunk) * request.n for chunk in chunks]
            columns = [
                columns_of(answer[end - size : end], request.n)
                for size, end in zip(sizes, accumulate(sizes), strict=True)
            ]
            return [(request, header_of(answer)), *columns]

        return scripted_actor(SimpleNamespace(sample=sample))

    def collect(self, pending: Mapping[int, Pending[Any]], _what: str) -> dict[int, RolloutHeader]:
        lost, self.lost = self.lost, set()
        self.dead |= lost
        self.calls.append({engine: call.reference[0] for engine, call in pending.items()})
        return {engine: call.reference[1] for engine, call in pending.items() if engine not in lost}

    def give_up(self) -> None:
        self.serving = [index for index in self.serving if index not in self.dead]

    def _answer(self, engine: int, request: _Request) -> list[Rollout]:
        version = VERSION - (self.stale == (len(self.calls), engine))
        return [
            Rollout(p.prompt_id, k, p.input_ids, (k, seed % 9973), (-1.0, -1.0), k not in self.cut, version)
            for p, seed in zip(request.prompts, request.seeds, strict=True)
            for k in range(request.n)
        ]

    @property
    def rounds(self) -> list[Asked]:
        """Prompts and seeds of a single engine, which gets all prompts in order."""
        return [
            [(p.prompt_id, s) for p, s in zip(call[0].prompts, call[0].seeds, strict=True)]
            for call in self.calls
        ]


class _Fleet(ScriptedFleet):
    """A fleet with engines of a script."""

    def __init__(
        self, config: PipelineConfig, engines: _Engines, ranks: Mapping[Role, Sequence[ScriptedRank]] | None
    ) -> None:
        super().__init__(config, ranks=ranks)
        pool: Any = engines
        self.engines = pool
        self._script = engines
        self.waits: list[str] = []
        """What was waited for."""

    @override
    def wait(self, pending: Sequence[Pending[Any]], what: str) -> list[Any]:
        self.waits.append(what)
        return super().wait(pending, what)

    @override
    def sync(self, version: int) -> SyncReport:
        """Give up lost engines."""
        self._script.give_up()
        self.synced.append(version)
        return SyncReport(version, tensors=1, bytes=1, seconds=1.0)


def rollouts(batch: RolloutBatch) -> list[Rollout]:
    """Return the rows of a batch."""
    made = []
    for index, ((number, row), prompt) in enumerate(zip(batch.places, batch.prompts, strict=True)):
        chunk: RolloutColumns = batch.chunks[number].reference
        response = tuple(chunk.response(row).tolist())
        assert len(response) == batch.lengths_B[index]
        made.append(
            Rollout(
                prompt.prompt_id,
                row % chunk.samples,
                tuple(chunk.prompt(row).tolist()),
                response,
                tuple(chunk.rollout_logprobs(row).tolist()),
                bool(batch.finished_B[index]),
                VERSION,
            )
        )
    return made


def mark(response_ids: Sequence[int]) -> float:
    """A number of this response alone, which float32 holds."""
    return response_ids[1] + response_ids[0] / 4


class _Rewards:
    """Three sources: the response's mark, its double, and what counts: the mark, but `values` by round, place
    and sample.
    """

    def __init__(self, *values: Mapping[int, Sequence[float]]) -> None:
        self._values = values
        self.batches: list[list[RewardInput]] = []
        self.model_scores: Sequence[float] | None = None

    def score(self, batch: Sequence[RewardInput], model_scores: Sequence[float] | None) -> RewardBatch:
        values = self._values[len(self.batches)] if len(self.batches) < len(self._values) else {}
        self.batches.append(list(batch))
        self.model_scores = model_scores
        marks = [mark(sample.response_ids) for sample in batch]
        total = [
            values[i // SAMPLES][i % SAMPLES] if i // SAMPLES in values else m for i, m in enumerate(marks)
        ]
        values_of = {"mark": marks, "double": [2 * m for m in marks], "value": total}
        return RewardBatch(list(total), values_of, {"value": {"requests": float(len(batch))}})

    def total(self, by_source: Mapping[str, Sequence[float]], count: int) -> list[float]:
        assert len(by_source["value"]) == count
        return list(by_source["value"])


def alike(*places: int) -> dict[int, Sequence[float]]:
    return dict.fromkeys(places, (0.5,) * SAMPLES)


def collector(
    engines: _Engines,
    rewards: _Rewards | None = None,
    *,
    rounds: int = 0,
    seed: int = SEED,
    ranks: Mapping[Role, Sequence[ScriptedRank]] | None = None,
    **changed: Any,
) -> Any:
    """`rounds`: of dynamic filtering, 0 for none."""
    prompts = changed.pop("prompts", PROMPTS)
    composer: Any = rewards or _Rewards()
    tree: dict[str, Any] = {"algorithm": "grpo", "prompts_per_step": PLACES, "samples_per_prompt": SAMPLES}
    tree |= {
        "minibatches": 1,
        "score_clip": None,
        "dynamic_filtering": {"max_rounds": rounds} if rounds else None,
        **changed,
    }
    config = config_from_tree({"ppo": tree}, "test")
    fleet = _Fleet(config, engines, ranks)
    return Collector(config.ppo, fleet, prompts, lambda ids: f"text {ids}", composer, seed)


# -- which engine samples which prompt --


def test_every_prompt_is_used_once_before_any_repeats() -> None:
    # 6 prompts, 4 per step: three steps are two passes.
    drawn = [i for step in (1, 2, 3) for i in prompts_of_step(6, 4, 0, step)]
    assert sorted(drawn[:6]) == list(range(6))
    assert sorted(drawn[6:]) == list(range(6))
    assert drawn[:6] != drawn[6:]


def test_prompts_depend_only_on_seed_and_step() -> None:
    late = prompts_of_step(50, 8, 3, 9)
    prompts_of_step(50, 8, 4, 1)
    assert prompts_of_step(50, 8, 3, 9) == late
    assert prompts_of_step(50, 8, 4, 9) != late


def test_the_least_loaded_engine_gets_the_longest_prompt() -> None:
    # 9 to engine 0, 5 to engine 1, 4 to engine 1 (5 < 9), 1 to engine 0 (9 = 9, the first).
    assert assign([1, 9, 5, 4], 2) == [[0, 1], [2, 3]]


def test_one_engine_gets_all_prompts_in_order() -> None:
    assert assign([3, 1, 2], 1) == [[0, 1, 2]]


def test_a_share_stays_with_its_restarted_engine() -> None:
    assert reassign({1: [0, 2], 2: [1]}, serving=[0, 1, 2]) == {1: [0, 2], 2: [1]}


def test_share_of_a_lost_engine_moves_as_a_whole() -> None:
    # Engine 0 has answered and is free; then 2 has fewer prompts than 0.
    assert reassign({1: [0, 2], 2: [1]}, serving=[0, 2]) == {0: [0, 2], 2: [1]}
    assert reassign({1: [0, 2], 3: [3], 2: [1]}, serving=[0, 2]) == {0: [0, 2], 2: [1, 3]}


# -- sampling --


@pytest.mark.parametrize("serving", [(0,), (0, 1, 2), (1, 3), range(12)])
def test_rollouts_are_in_the_order_of_the_prompts(
    serving: Sequence[int],
) -> None:
    engines = _Engines(serving)
    batch = collector(engines, prompts_per_step=8).collect(2, VERSION)
    drawn = [PROMPTS[i] for i in prompts_of_step(len(PROMPTS), 8, SEED, 2)]
    dealt = [p.prompt_id for asked in engines.calls[0].values() for p in asked.prompts]
    assert (dealt == [p.prompt_id for p in drawn]) == (len(serving) == 1), "several engines change the order"
    assert [(r.prompt_id, r.sample_index) for r in rollouts(batch)] == [
        (p.prompt_id, k) for p in drawn for k in (0, 1)
    ]
    assert all(
        prompt is p
        for prompt, p in zip(batch.prompts, [p for p in drawn for _ in range(SAMPLES)], strict=True)
    )
    assert rollouts(batch) == rollouts(collector(_Engines(), prompts_per_step=8).collect(2, VERSION))
    assert batch.rewards is None and batch.replaced == 0


def test_a_lost_engine_does_not_change_the_rollouts() -> None:
    engines = _Engines((0, 1, 2))
    engines.lost = {1}
    made = collector(engines, prompts_per_step=8)
    undisturbed = collector(_Engines(), prompts_per_step=8).collect(2, VERSION)
    assert rollouts(made.collect(2, VERSION)) == rollouts(undisturbed)
    assert len(engines.calls) == 2 and engines.serving == [0, 2]


def test_rollouts_are_sampled_between_start_and_finish() -> None:
    made, undisturbed = collector(_Engines((0, 1))), collector(_Engines((0, 1))).collect(2, VERSION)
    sampling = made.start(2, VERSION, ahead=True)
    batch = made.finish(sampling)
    assert rollouts(batch) == rollouts(undisturbed) and batch.version == VERSION


def test_an_engine_lost_while_the_policy_is_trained_does_not_change_the_rollouts() -> None:
    engines = _Engines((0, 1, 2))
    made = collector(engines, prompts_per_step=8)
    sampling = made.start(2, VERSION, ahead=True)
    engines.lost = {1}
    engines.serving.remove(1)
    undisturbed = collector(_Engines(), prompts_per_step=8).collect(2, VERSION)
    assert rollouts(made.finish(sampling)) == rollouts(undisturbed)
    assert sorted(engines.calls[1]) == [0]
    assert made._fleet.synced == [], "the weights have changed"


def test_without_an_engine_that_has_the_version_the_attempt_ends() -> None:
    engines = _Engines((0,))
    made = collector(engines)
    sampling = made.start(7, VERSION, ahead=True)
    engines.lost = {0}
    engines.serving.clear()
    with pytest.raises(WorkerDied, match=r"policy version 5, from which step 7 is sampled"):
        made.finish(sampling)


def test_filtering_can_begin_after_the_training() -> None:
    whole = collector(_Engines(), _Rewards(alike(1, 3), alike(0)), rounds=3).collect(3, VERSION)
    made = collector(_Engines(), _Rewards(alike(1, 3), alike(0)), rounds=3)
    batch = made.finish(made.start(3, VERSION, ahead=True))
    assert (rollouts(batch), batch.replaced) == (rollouts(whole), whole.replaced)
    assert batch.rewards == whole.rewards


def test_sampling_uses_the_configured_length_and_temperature() -> None:
    engines = _Engines((0, 1))
    collector(engines, max_new_tokens=33, temperature=0.75).collect(1, VERSION)
    options = [(r.n, r.max_new_tokens, r.temperature) for r in engines.calls[0].values()]
    assert options == [(SAMPLES, 33, 0.75)] * 2


@pytest.mark.parametrize(("call", "engine"), [(0, 1), (1, 0)])
def test_a_stale_rollout_is_an_error_in_each_round(call: int, engine: int) -> None:
    engines = _Engines((0, 1))
    engines.stale = (call, engine)
    with pytest.raises(WeightSyncError, match=r"step 3 was sampled from policy version \[4\], not 5"):
        collector(engines, _Rewards(alike(2)), rounds=1).collect(3, VERSION)


# -- dynamic filtering --


def test_uniform_groups_are_replaced_with_prompts_and_rewards() -> None:
    engines = _Engines()
    # The first round leaves places 1 and 3; of their replacements the first, which is place 1, is replaced
    # again.
    batch = collector(engines, _Rewards(alike(1, 3), alike(0)), rounds=3).collect(3, VERSION)
    first, second, third = engines.rounds
    assert [len(first), len(second), len(third)] == [4, 2, 1]
    places = [first[0], third[0], first[2], second[1]]
    expected = [(prompt, k, (k, seed % 9973)) for prompt, seed in places for k in range(SAMPLES)]
    assert [(r.prompt_id, r.sample_index, r.response_ids) for r in rollouts(batch)] == expected
    assert [p.prompt_id for p in batch.prompts] == [prompt for prompt, *_ in expected]
    assert [p.input_ids for p in batch.prompts] == [r.prompt_ids for r in rollouts(batch)]
    marks = [mark(r.response_ids) for r in rollouts(batch)]
    assert batch.rewards.total == marks
    assert batch.rewards.by_source == {"mark": marks, "double": [2 * m for m in marks], "value": marks}
    assert batch.replaced == 3


def test_a_batch_is_sent_again_after_a_replacement() -> None:
    numbers = []

    class Rewards(_Rewards):
        def score(self, inputs: Any, *given: Any) -> Any:
            numbers.append(inputs.batch.number)
            return super().score(inputs, *given)

    batch = collector(_Engines(), Rewards(alike(1)), rounds=1).collect(3, VERSION)
    assert batch.replaced == 1
    assert batch.number not in numbers, "the ranks have the responses of the first round under the old number"


def test_filtering_does_not_change_other_groups() -> None:
    plain = collector(_Engines()).collect(3, VERSION)
    batch = collector(_Engines(), _Rewards(alike(1)), rounds=3).collect(3, VERSION)
    kept = [0, 1, 4, 5, 6, 7]
    assert [rollouts(batch)[i] for i in kept] == [rollouts(plain)[i] for i in kept]
    assert [batch.prompts[i] for i in kept] == [plain.prompts[i] for i in kept]
    assert all(rollouts(batch)[i] != rollouts(plain)[i] for i in (2, 3))
    # What it cost to score responses that were replaced counts as well.
    assert batch.rewards.usage == {"value": {"requests": (PLACES + 1) * SAMPLES}}


def test_nothing_is_resampled_if_all_groups_differ() -> None:
    engines, rewards = _Engines(), _Rewards()
    batch = collector(engines, rewards, rounds=3).collect(3, VERSION)
    assert (len(engines.calls), len(rewards.batches), batch.replaced) == (1, 1, 0)
    assert rollouts(batch) == rollouts(collector(_Engines()).collect(3, VERSION))


@pytest.mark.parametrize("rounds", [1, 2])
def test_groups_that_stay_uniform_are_kept_after_the_last_round(rounds: int) -> None:
    engines = _Engines()
    places = alike(*range(PLACES))
    batch = collector(engines, _Rewards(*[places] * 9), rounds=rounds).collect(3, VERSION)
    assert [len(asked) for asked in engines.rounds] == [PLACES] * (1 + rounds)
    assert [r.prompt_id for r in rollouts(batch)[::SAMPLES]] == [prompt for prompt, _ in engines.rounds[-1]]
    assert batch.rewards.total == [0.5] * PLACES * SAMPLES
    assert batch.replaced == rounds * PLACES


# Sample 1 of each group is cut, and pays 1 for it; the other groups score by marks, which no penalty makes
# equal.
@pytest.mark.parametrize(
    ("scores", "again"),
    [((0.5, 0.5), False), ((0.5, 1.5), True), ((float("nan"),) * 2, True), ((float("nan"), 0.5), True)],
)
def test_filtering_uses_scores_with_penalties_and_ignores_missing_ones(
    scores: tuple[float, float], again: bool
) -> None:
    engines = _Engines()
    engines.cut = {1}
    batch = collector(engines, _Rewards({2: scores}), rounds=3, missing_eos_penalty=1.0).collect(3, VERSION)
    assert [len(asked) for asked in engines.rounds] == ([PLACES, 1] if again else [PLACES])
    assert batch.replaced == again


# -- prompts and seeds --


def rounds_of(
    *values: Mapping[int, Sequence[float]], step: int = 3, seed: int = SEED, **changed: Any
) -> list[Asked]:
    engines = _Engines()
    collector(engines, _Rewards(*values), rounds=3, seed=seed, **changed).collect(step, VERSION)
    return engines.rounds


def test_first_rounds_use_every_prompt_before_any_repeats() -> None:
    rounds = [rounds_of(alike(0), step=step, prompts=PROMPTS[:8])[0] for step in (1, 2)]
    assert sorted(prompt for round_ in rounds for prompt, _ in round_) == sorted(
        p.prompt_id for p in PROMPTS[:8]
    )


def test_a_round_does_not_depend_on_the_replaced_groups() -> None:
    some, others = rounds_of(alike(0, 1), alike(0)), rounds_of(alike(1, 3), alike(1))
    assert some == others
    assert some[1] == rounds_of(alike(1, 2, 3), alike(2))[1][:2]


@pytest.mark.parametrize("step", range(1, 8))
def test_no_prompt_occurs_twice_in_a_step(step: int) -> None:
    rounds = rounds_of(*[alike(*range(PLACES))] * 3, step=step, prompts=PROMPTS[: 4 * PLACES])
    asked = [prompt for round_ in rounds for prompt, _ in round_]
    assert len(asked) == len(set(asked)) == 4 * PLACES


def test_groups_are_kept_if_no_unused_prompt_remains() -> None:
    engines = _Engines()
    script = _Rewards(*[alike(*range(PLACES))] * 3)
    batch = collector(engines, script, rounds=3, prompts=PROMPTS[: PLACES + 1]).collect(1, VERSION)
    assert [len(asked) for asked in engines.rounds] == [PLACES, 1]
    assert batch.replaced == 1 and len(batch) == PLACES * SAMPLES


def test_score_before_filtering_is_that_of_the_first_round() -> None:
    values = {0: (0.0, 0.0), 1: (1.0, 0.0), 2: (1.0, 1.0), 3: (float("nan"), 3.0)}
    batch = collector(_Engines(), _Rewards(values), rounds=1).collect(3, VERSION)
    assert batch.scores_before == pytest.approx(6.0 / 7)
    assert collector(_Engines()).collect(3, VERSION).scores_before is None


def test_each_round_step_and_seed_has_its_own_seeds() -> None:
    every = [alike(*range(PLACES))] * 3
    rounds = [*rounds_of(*every), *rounds_of(*every, step=4), *rounds_of(*every, seed=SEED + 1)]
    seeds = [seed for round_ in rounds for _, seed in round_]
    assert len(rounds) == 12 and len(set(seeds)) == len(seeds) == 12 * PLACES
    assert len({tuple(prompt for prompt, _ in round_) for round_ in rounds}) == len(rounds)


def test_repeated_prompts_get_different_seeds() -> None:
    every = [alike(*range(PLACES))] * 3
    rounds = [*rounds_of(*every, prompts=PROMPTS[:1]), *rounds_of(*every, prompts=PROMPTS[:1], step=4)]
    assert {prompt for round_ in rounds for prompt, _ in round_} == {"p0"}
    assert len({seed for round_ in rounds for _, seed in round_}) == 2 * PLACES


def test_collecting_a_step_again_gives_the_same_batch() -> None:
    script = (alike(1, 3), alike(0))
    once = collector(_Engines(), _Rewards(*script), rounds=3).collect(3, VERSION)
    later = collector(_Engines((0, 2)), _Rewards({}, {}, *script), rounds=3)
    for step in (1, 2):
        later.collect(step, VERSION)
    again = later.collect(3, VERSION)
    assert (rollouts(again), again.rewards, again.replaced) == (rollouts(once), once.rewards, once.replaced)


# -- rewards --


def test_rewards_get_each_rollout_with_its_prompt() -> None:
    engines, rewards = _Engines(), _Rewards(alike(1, 3))
    engines.cut = {1}
    collector(engines, rewards, rounds=1).collect(3, VERSION)
    for round_, batch in zip(engines.rounds, rewards.batches, strict=True):
        assert [sample.prompt_id for sample in batch] == [
            prompt for prompt, _ in round_ for _ in range(SAMPLES)
        ]
        assert [sample.response_ids for sample in batch] == [
            (k, s % 9973) for _, s in round_ for k in range(SAMPLES)
        ]
        assert [sample.finished for sample in batch] == [True, False] * len(round_)
        for s, p in ((sample, PROMPTS[int(sample.prompt_id[1:])]) for sample in batch):
            assert (s.prompt, s.prompt_ids, s.meta) == (p.prompt, p.input_ids, p.meta)
            assert s.response == f"text {s.response_ids}"


class _RewardRank(ScriptedRank):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def scores(self, role: str, share: SentShare | int, *chunks: RolloutColumns) -> ModelScores:
        assert role == "reward"
        self.calls += 1
        batch = self.received(share, chunks)
        assert sorted(chain(*batch.share.micro_batches)) == list(range(len(batch.share.places)))
        return ModelScores([mark(response) for response in batch.tokens()[1]])


def test_model_scores_keep_order_and_are_requested_again_after_a_restart() -> None:
    class Dying(_RewardRank):
        """Dies in its first call."""

        def scores(self, *given: Any) -> ModelScores:
            found = super().scores(*given)
            if self.calls == 1:
                raise WorkerDied("a process died")
            return found

    rewards, ranks = _Rewards(), (_RewardRank(), Dying())
    made = collector(_Engines((0, 1)), rewards, ranks={"reward": ranks})
    batch = made.collect(3, VERSION)
    made._fleet.client.monitor.report("reward rank 1", "dead")
    made.rewards(batch)
    assert made._fleet.client.killed == ["reward rank 0", "reward rank 1"]
    assert rewards.model_scores == [mark(r.response_ids) for r in rollouts(batch)]
    assert [rank.calls for rank in ranks] == [2, 2]
    made.rewards(batch, ModelScores([0.0] * len(batch)))
    assert rewards.model_scores == [0.0] * len(batch)
    assert [rank.calls for rank in ranks] == [2, 2], "scores that are given are not asked for"


def test_deviations_of_an_ensemble_follow_their_responses_after_a_replacement() -> None:
    class Rank(_RewardRank):
        def scores(self, *given: Any) -> ModelScores:
            values = super().scores(*given).values
            return ModelScores(values, [value / 8 for value in values])

    ranks = (Rank(), Rank())
    made = collector(_Engines(), _Rewards(alike(1, 3), alike(0)), rounds=3, ranks={"reward": ranks})
    batch = made.collect(3, VERSION)
    assert batch.replaced == 3
    assert batch.rewards.ensemble_std == [mark(r.response_ids) / 8 for r in rollouts(batch)]


def test_no_response_is_fetched_if_only_the_reward_model_scores() -> None:
    source = [{"type": "model"}]
    composer: Any = RewardComposer(config_from_tree({"ppo": {"rewards": source}}, "test").ppo.rewards)
    made = collector(_Engines(), composer)
    batch = made.collect(3, VERSION)
    made._fleet.waits.clear()
    assert made.rewards(batch, ModelScores([0.25] * len(batch))).total == [0.25] * len(batch)
    assert made._fleet.waits == [], "a chunk was fetched"


def test_scores_are_normalized_again_after_a_replacement() -> None:
    source = {"type": "token_share", "below": 50, "normalize": "batch"}
    rewards: Any = RewardComposer(config_from_tree({"ppo": {"rewards": [source]}}, "test").ppo.rewards)
    shares = [[0.0, 1.0, 0.5, 0.5, 0.2, 0.9, 0.1, 0.8], [0.50, 0.51]]

    class Engines(_Engines):
        def _answer(self, engine: int, request: _Request) -> list[Rollout]:
            wanted = shares[len(self.calls)]
            return [
                replace(r, response_ids=(10,) * round(100 * share) + (60,) * round(100 - 100 * share))
                for r, share in zip(super()._answer(engine, request), wanted, strict=True)
            ]

    batch = collector(Engines(), rewards, rounds=1, max_new_tokens=100).collect(1, VERSION)
    assert batch.rewards.by_source["token_share"] == [0.0, 1.0, 0.50, 0.51, 0.2, 0.9, 0.1, 0.8]
    assert batch.rewards.total == normalize(batch.rewards.by_source["token_share"])


# -- rollouts of an interrupted step --

REPEATED = [
    PromptExample(f"p{i // 2}", f"prompt {i // 2}", (1, 2 + i // 2), {"answer": str(i)}) for i in range(4)
]
"""Each prompt occurs twice, with different answers."""


def cached_batch(rewards: RewardBatch | None = None) -> RolloutBatch:
    noise = random.Random(0)
    sampled = [
        Rollout(p.prompt_id, i, p.input_ids, (5, 6), (-noise.random(), -1e-17 * noise.random()), i == 0, 4)
        for p in REPEATED
        for i in range(2)
    ]
    header = header_of(sampled)
    return RolloutBatch(
        [Pending(columns_of(sampled[:6], 2)), Pending(columns_of(sampled[6:], 2))],
        Places(np.array([0] * 6 + [1] * 2), np.array([4, 5, 2, 3, 0, 1, 0, 1])),
        header.lengths,
        header.finished,
        [p for p in REPEATED for _ in range(2)],
        rewards,
        1,
        0.25,
        version=4,
    )


def cache_in(folder: Path) -> RolloutCache:
    return RolloutCache(folder, REPEATED, ScriptedFleet())


@pytest.mark.parametrize(
    "rewards",
    [None, RewardBatch([0.1, float("nan")], {"length": [0.1, 0.3]}, {"length": {"requests": 2.0}})],
)
def test_the_cache_returns_what_was_written(tmp_path: Path, rewards: RewardBatch | None) -> None:
    cache, written = cache_in(tmp_path / "new"), cached_batch(rewards)
    cache.write(3, cached_batch())
    cache.write(5, written)
    read = cache_in(tmp_path / "new").read(5)
    assert read is not None
    assert (rollouts(read), read.prompts, read.replaced) == (rollouts(written), written.prompts, 1)
    assert (read.scores_before, read.version) == (0.25, 4)
    assert read.from_cache and not written.from_cache
    assert repr(read.rewards) == repr(rewards)
    assert cache.read(3) is None and cache.read(6) is None
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["rollouts"]


def test_without_files_the_cache_is_empty(tmp_path: Path) -> None:
    assert cache_in(tmp_path).read(1) is None


@pytest.mark.parametrize("name", ["manifest.json", "chunk-00001.safetensors", "batch.safetensors"])
def test_the_cache_detects_every_damaged_byte(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    cache = cache_in(tmp_path)
    cache.write(1, cached_batch())
    file = tmp_path / "rollouts" / name
    whole = file.read_bytes()
    damaged = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(0, len(whole), 23)]
    damaged += [whole[:i] for i in range(0, len(whole), 97)]
    with caplog.at_level(logging.ERROR):
        for content in damaged:
            file.write_bytes(content)
            assert cache.read(1) is None
        file.unlink()
        assert cache.read(1) is None
    assert len(caplog.records) == len(damaged) + 1
    assert "is damaged; step 1 is sampled again" in caplog.text


def test_nothing_in_the_cache_is_unpickled(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    cache.write(1, cached_batch())
    folder = tmp_path / "rollouts"
    (folder / "batch.safetensors").write_bytes(pickle.dumps({"objects": np.arange(3)}))
    checksum, content = (folder / "manifest.json").read_text().split("\n", 1)
    manifest = json.loads(content)
    manifest["files"]["batch.safetensors"] = hashlib.sha256(
        (folder / "batch.safetensors").read_bytes()
    ).hexdigest()
    content = json.dumps(manifest)
    checksum = hashlib.sha256(content.encode()).hexdigest()
    (folder / "manifest.json").write_text(f"{checksum}\n{content}")
    with pytest.raises(SafetensorError):
        cache.read(1)
