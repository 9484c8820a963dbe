"""Dynamic filtering of the groups of a step. Engines, reward ranks and rewards are scripted.

- it replaces the groups with equal scores (penalties included), for at most `max_rounds` rounds, with all
  that belongs to them, and changes no other group
- prompts and seeds of each round follow from seed, step and round; no two rounds, steps or positions share
  a seed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.ppo.training.batch import ModelScores
from rlhf_core.rewards.compose import RewardComposer, normalize
from rlhf_core.types import Rollout
from tests.support.scripted_rollouts import (
    PLACES,
    PROMPTS,
    SAMPLES,
    SEED,
    VERSION,
    Asked,
    FixedEngines,
    MarkRank,
    MarkRewards,
    Request,
    alike,
    collector,
    mark,
    rollouts,
)


def test_filtering_can_begin_after_the_training() -> None:
    whole = collector(FixedEngines(), MarkRewards(alike(1, 3), alike(0)), rounds=3).collect(3, VERSION)
    made = collector(FixedEngines(), MarkRewards(alike(1, 3), alike(0)), rounds=3)
    batch = made.finish(made.start(3, VERSION, ahead=True))
    assert (rollouts(batch), batch.replaced) == (rollouts(whole), whole.replaced)
    assert batch.rewards == whole.rewards


def test_uniform_groups_are_replaced_with_prompts_and_rewards() -> None:
    engines = FixedEngines()
    # The first round leaves places 1 and 3; of their replacements the first, which is place 1, is replaced
    # again.
    batch = collector(engines, MarkRewards(alike(1, 3), alike(0)), rounds=3).collect(3, VERSION)
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

    class Rewards(MarkRewards):
        def score(self, inputs: Any, *given: Any) -> Any:
            numbers.append(inputs.batch.number)
            return super().score(inputs, *given)

    batch = collector(FixedEngines(), Rewards(alike(1)), rounds=1).collect(3, VERSION)
    assert batch.replaced == 1
    assert batch.number not in numbers, "the ranks have the responses of the first round under the old number"


def test_filtering_does_not_change_other_groups() -> None:
    plain = collector(FixedEngines()).collect(3, VERSION)
    batch = collector(FixedEngines(), MarkRewards(alike(1)), rounds=3).collect(3, VERSION)
    kept = [0, 1, 4, 5, 6, 7]
    assert [rollouts(batch)[i] for i in kept] == [rollouts(plain)[i] for i in kept]
    assert [batch.prompts[i] for i in kept] == [plain.prompts[i] for i in kept]
    assert all(rollouts(batch)[i] != rollouts(plain)[i] for i in (2, 3))
    # What it cost to score responses that were replaced counts as well.
    assert batch.rewards.usage == {"value": {"requests": (PLACES + 1) * SAMPLES}}


def test_nothing_is_resampled_if_all_groups_differ() -> None:
    engines, rewards = FixedEngines(), MarkRewards()
    batch = collector(engines, rewards, rounds=3).collect(3, VERSION)
    assert (len(engines.calls), len(rewards.batches), batch.replaced) == (1, 1, 0)
    assert rollouts(batch) == rollouts(collector(FixedEngines()).collect(3, VERSION))


@pytest.mark.parametrize("rounds", [1, 2])
def test_groups_that_stay_uniform_are_kept_after_the_last_round(rounds: int) -> None:
    engines = FixedEngines()
    places = alike(*range(PLACES))
    batch = collector(engines, MarkRewards(*[places] * 9), rounds=rounds).collect(3, VERSION)
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
    engines = FixedEngines()
    engines.cut = {1}
    batch = collector(engines, MarkRewards({2: scores}), rounds=3, missing_eos_penalty=1.0).collect(
        3, VERSION
    )
    second_round = [1] if again else []
    assert [len(asked) for asked in engines.rounds] == [PLACES, *second_round]
    assert batch.replaced == again


def rounds_of(
    *values: Mapping[int, Sequence[float]], step: int = 3, seed: int = SEED, **changed: Any
) -> list[Asked]:
    engines = FixedEngines()
    collector(engines, MarkRewards(*values), rounds=3, seed=seed, **changed).collect(step, VERSION)
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
    engines = FixedEngines()
    script = MarkRewards(*[alike(*range(PLACES))] * 3)
    batch = collector(engines, script, rounds=3, prompts=PROMPTS[: PLACES + 1]).collect(1, VERSION)
    assert [len(asked) for asked in engines.rounds] == [PLACES, 1]
    assert batch.replaced == 1 and len(batch) == PLACES * SAMPLES


def test_score_before_filtering_is_that_of_the_first_round() -> None:
    values = {0: (0.0, 0.0), 1: (1.0, 0.0), 2: (1.0, 1.0), 3: (float("nan"), 3.0)}
    batch = collector(FixedEngines(), MarkRewards(values), rounds=1).collect(3, VERSION)
    assert batch.scores_before == pytest.approx(6.0 / 7)
    assert collector(FixedEngines()).collect(3, VERSION).scores_before is None


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
    once = collector(FixedEngines(), MarkRewards(*script), rounds=3).collect(3, VERSION)
    later = collector(FixedEngines((0, 2)), MarkRewards({}, {}, *script), rounds=3)
    for step in (1, 2):
        later.collect(step, VERSION)
    again = later.collect(3, VERSION)
    assert (rollouts(again), again.rewards, again.replaced) == (rollouts(once), once.rewards, once.replaced)


def test_deviations_of_an_ensemble_follow_their_responses_after_a_replacement() -> None:
    class Rank(MarkRank):
        def scores(self, *given: Any) -> ModelScores:
            values = super().scores(*given).values
            return ModelScores(values, [value / 8 for value in values])

    ranks = (Rank(), Rank())
    made = collector(FixedEngines(), MarkRewards(alike(1, 3), alike(0)), rounds=3, ranks={"reward": ranks})
    batch = made.collect(3, VERSION)
    assert batch.replaced == 3
    assert batch.rewards.ensemble_std == [mark(r.response_ids) / 8 for r in rollouts(batch)]


def test_scores_are_normalized_again_after_a_replacement() -> None:
    source = {"type": "token_share", "below": 50, "normalize": "batch"}
    rewards: Any = RewardComposer(config_from_tree({"ppo": {"rewards": [source]}}, "test").ppo.rewards)
    shares = [[0.0, 1.0, 0.5, 0.5, 0.2, 0.9, 0.1, 0.8], [0.50, 0.51]]

    class Engines(FixedEngines):
        def _answer(self, engine: int, request: Request) -> list[Rollout]:
            wanted = shares[len(self.calls)]
            return [
                replace(r, response_ids=(10,) * round(100 * share) + (60,) * round(100 - 100 * share))
                for r, share in zip(super()._answer(engine, request), wanted, strict=True)
            ]

    batch = collector(Engines(), rewards, rounds=1, max_new_tokens=100).collect(1, VERSION)
    assert batch.rewards.by_source["token_share"] == [0.0, 1.0, 0.50, 0.51, 0.2, 0.9, 0.1, 0.8]
    assert batch.rewards.total == normalize(batch.rewards.by_source["token_share"])
