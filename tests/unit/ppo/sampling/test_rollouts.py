"""Rollouts of a step. Engines, reward ranks and rewards are scripted.

- the steps use every prompt once before any is repeated; prompts go to the engine with the fewest tokens
- a share that is sampled again stays whole, and stays with its engine unless that was given up
- rollouts are in the order of prompts, the samples of a prompt consecutive, for any number of engines and if
  one of them is lost; a rollout of another policy version is a WeightSyncError
- while the policy is trained, a lost share goes to an engine that still has the version; without one, the
  attempt ends
- rewards get each rollout with its own prompt, and the reward model's scores are in the order of the rollouts
- no response is fetched for the reward model's scores alone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import WeightSyncError, WorkerDied
from rlhf_core.ppo.sampling.rollouts import assign, prompts_of_step, reassign
from rlhf_core.ppo.training.batch import ModelScores
from rlhf_core.rewards.compose import RewardComposer
from tests.support.scripted_rollouts import (
    PROMPTS,
    SAMPLES,
    SEED,
    VERSION,
    FixedEngines,
    MarkRank,
    MarkRewards,
    alike,
    collector,
    mark,
    rollouts,
)

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
    engines = FixedEngines(serving)
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
    assert rollouts(batch) == rollouts(collector(FixedEngines(), prompts_per_step=8).collect(2, VERSION))
    assert batch.rewards is None and batch.replaced == 0


def test_a_lost_engine_does_not_change_the_rollouts() -> None:
    engines = FixedEngines((0, 1, 2))
    engines.lost = {1}
    made = collector(engines, prompts_per_step=8)
    undisturbed = collector(FixedEngines(), prompts_per_step=8).collect(2, VERSION)
    assert rollouts(made.collect(2, VERSION)) == rollouts(undisturbed)
    assert len(engines.calls) == 2 and engines.serving == [0, 2]


def test_rollouts_are_sampled_between_start_and_finish() -> None:
    made, undisturbed = collector(FixedEngines((0, 1))), collector(FixedEngines((0, 1))).collect(2, VERSION)
    sampling = made.start(2, VERSION, ahead=True)
    batch = made.finish(sampling)
    assert rollouts(batch) == rollouts(undisturbed) and batch.version == VERSION


def test_an_engine_lost_while_the_policy_is_trained_does_not_change_the_rollouts() -> None:
    engines = FixedEngines((0, 1, 2))
    made = collector(engines, prompts_per_step=8)
    sampling = made.start(2, VERSION, ahead=True)
    engines.lost = {1}
    engines.serving.remove(1)
    undisturbed = collector(FixedEngines(), prompts_per_step=8).collect(2, VERSION)
    assert rollouts(made.finish(sampling)) == rollouts(undisturbed)
    assert sorted(engines.calls[1]) == [0]
    assert made._fleet.synced == [], "the weights have changed"


def test_without_an_engine_that_has_the_version_the_attempt_ends() -> None:
    engines = FixedEngines((0,))
    made = collector(engines)
    sampling = made.start(7, VERSION, ahead=True)
    engines.lost = {0}
    engines.serving.clear()
    with pytest.raises(WorkerDied, match=r"policy version 5, from which step 7 is sampled"):
        made.finish(sampling)


def test_sampling_uses_the_configured_length_and_temperature() -> None:
    engines = FixedEngines((0, 1))
    collector(engines, max_new_tokens=33, temperature=0.75).collect(1, VERSION)
    options = [(r.n, r.max_new_tokens, r.temperature) for r in engines.calls[0].values()]
    assert options == [(SAMPLES, 33, 0.75)] * 2


@pytest.mark.parametrize(("call", "engine"), [(0, 1), (1, 0)])
def test_a_stale_rollout_is_an_error_in_each_round(call: int, engine: int) -> None:
    engines = FixedEngines((0, 1))
    engines.stale = (call, engine)
    with pytest.raises(WeightSyncError, match=r"step 3 was sampled from policy version \[4\], not 5"):
        collector(engines, MarkRewards(alike(2)), rounds=1).collect(3, VERSION)


# -- rewards --


def test_rewards_get_each_rollout_with_its_prompt() -> None:
    engines, rewards = FixedEngines(), MarkRewards(alike(1, 3))
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


def test_model_scores_keep_the_order_of_the_batch() -> None:
    rewards, ranks = MarkRewards(), (MarkRank(), MarkRank())
    made = collector(FixedEngines((0, 1)), rewards, ranks={"reward": ranks})
    batch = made.collect(3, VERSION)
    made.rewards(batch)
    assert rewards.model_scores == [mark(r.response_ids) for r in rollouts(batch)]
    assert [rank.calls for rank in ranks] == [1, 1]
    made.rewards(batch, ModelScores([0.0] * len(batch)))
    assert rewards.model_scores == [0.0] * len(batch)
    assert [rank.calls for rank in ranks] == [1, 1], "scores that are given are not asked for"


def test_no_response_is_fetched_if_only_the_reward_model_scores() -> None:
    source = [{"type": "model"}]
    composer: Any = RewardComposer(config_from_tree({"ppo": {"rewards": source}}, "test").ppo.rewards)
    made = collector(FixedEngines(), composer)
    batch = made.collect(3, VERSION)
    made._fleet.waits.clear()
    assert made.rewards(batch, ModelScores([0.25] * len(batch))).total == [0.25] * len(batch)
    assert made._fleet.waits == [], "a chunk was fetched"
