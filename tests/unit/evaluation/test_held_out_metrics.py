"""The metrics of an evaluation during PPO, with scripted engines and models.

- each version is sampled once per prompt, as the step of its number, so that its seeds are its own
- the judge decides objective and wins if there is one, otherwise the training reward with its penalties
- a response whose reward failed is left out of means and wins
- measures by data source are there if there are several sources
- the correlation of reward model and judge is over the responses that have both scores
- wins are counted against the SFT model's scores, also after a restart
- a reward that compares sees the SFT model's response as well, also after a restart, and its agreement with
  the judge is a metric
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.placement import Role
from rlhf_core.evaluation.during_ppo import HeldOutEvaluation
from rlhf_core.ppo.sampling.reward_actor import DecodedElsewhere, RewardActors, RewardSettings
from rlhf_core.ppo.training.batch import ModelScores, RolloutColumns, row_columns
from rlhf_core.ppo.watching.selection import HeldOutResult
from rlhf_core.rewards.compose import RewardBatch, RewardComposer
from rlhf_core.seeds import derive_seed
from rlhf_core.testing.engines import Reply, Request, ScriptedEngine
from rlhf_core.types import PromptExample, RewardInput
from tests.support.scripted_fleet import ScriptedEngineActor, ScriptedFleet, ScriptedRank

PROMPTS = [PromptExample(f"p{i}", "What is it?", (1,), source="ab"[i % 2]) for i in range(4)]
NAN = float("nan")


KEYWORDS = {"type": "keywords", "words": ["x"], "weight": 2.0}


def respond(request: Request) -> Reply:
    """The first token is the number of the prompt. Responses have 2, 2, 2 and 4 tokens."""
    number = PROMPTS.index(request.prompt)
    return Reply((number,) * (4 if number == 3 else 2), finished=number != 3)


class Models(ScriptedRank):
    """The log-probability of a token is -1, and 0.25 more with each version of the policy."""

    version = 0

    def __init__(self, judge: Mapping[int, list[float]]) -> None:
        super().__init__()
        self._judge = judge

    @override
    def logprobs(self, role: str, with_entropy: bool, share: Any, *chunks: RolloutColumns) -> Any:
        shift = 0.25 * self.version if role == "policy" else 0.0
        lengths = [len(response) for response in self.received(share, chunks).tokens()[1]]
        return None, row_columns(lengths, logprobs=[np.full(n, -1.0 + shift, np.float32) for n in lengths])

    @override
    def scores(self, role: str, share: Any, *chunks: RolloutColumns) -> ModelScores:
        assert role == "judge"
        values = self._judge[self.version]
        return ModelScores([values[response[0]] for response in self.received(share, chunks).tokens()[1]])


class Composer(RewardComposer):
    """Gives the rewards of a version."""

    version = 0

    def __init__(self, rewards: Mapping[int, list[float]], deviations: Sequence[float]) -> None:
        self._rewards, self._deviations = rewards, list(deviations)

    @override
    def score(
        self,
        batch: Sequence[RewardInput],
        model_scores: Sequence[float] | None,
        opponents: Sequence[RewardInput] = (),
    ) -> RewardBatch:
        assert [sample.prompt_id for sample in batch] == [prompt.prompt_id for prompt in PROMPTS]
        self.opponents = opponents
        values = self._rewards[self.version]
        usage = {"keywords": {"requests": 3.0, "unusable": 1.5}}
        names = ("keywords", "model", "language_model")
        return RewardBatch(values, dict.fromkeys(names, values), usage, self._deviations)


class Evaluation(HeldOutEvaluation):
    """With a scripted fleet.

    Args:
        rewards: (n,) of the responses of each version.
        judge: (n,) scores of each version; None for a run without a judge.
        source: The only reward.
        deviations: (n,) of the members of an ensemble.
        elsewhere: Whether other nodes decode the responses.
    """

    def __init__(
        self,
        rewards: dict[int, list[float]],
        judge: dict[int, list[float]] | None,
        source: Mapping[str, Any] = KEYWORDS,
        deviations: Sequence[float] = (),
        *,
        elsewhere: bool = False,
    ) -> None:
        self._engine = ScriptedEngine(respond)
        self._models = Models(judge or {})
        self._composer = Composer(rewards, deviations)
        roles: tuple[Role, ...] = ("policy", "reference") + (() if judge is None else ("judge",))
        tree = {
            "reward": {"enabled": source["type"] == "model"},
            "ppo": {
                "rewards": [source],
                "missing_eos_penalty": 0.5,
                "kl": {"coef": 0.1},
                "samples_per_prompt": 2,
            },
        }
        config = config_from_tree(tree, "test")
        self._scripted_fleet = ScriptedFleet(
            config,
            ranks={role: [self._models] for role in roles},
            engines=[ScriptedEngineActor(self._engine)],
        )
        composer: Any = self._composer
        if elsewhere:
            actors = RewardActors(self._scripted_fleet, RewardSettings((), self._decode_version))
            composer = DecodedElsewhere(actors, self._composer)
        super().__init__(config, self._scripted_fleet, PROMPTS, self._decode_version, composer)
        self._seed = derive_seed(config.run.seed, "ppo", "evaluation")

    def _decode_version(self, _ids: Sequence[int]) -> str:
        return "a b a b" if self._against is None else f"of version {self._composer.version}"

    @override
    def evaluate(self, version: int) -> HeldOutResult:
        """Return the result, with engines that hold `version`."""
        self._scripted_fleet.sync(version)
        self._models.version = self._composer.version = version
        self._engine.requests.clear()
        result = super().evaluate(version)
        seeds = [derive_seed(self._seed, "rollout", version, f"p{i}", i) for i in range(len(PROMPTS))]
        assert [request.seed for request in self._engine.requests] == seeds
        return result


def test_the_training_reward_decides_without_a_judge() -> None:
    rewards = {0: [0.0, 1.0, 0.0, 0.0], 4: [1.0, 1.0, NAN, 1.0]}
    evaluation = Evaluation(rewards, None)
    first = evaluation.evaluate(0).metrics
    assert (first["eval/win_rate"], first["eval/kl"]) == (0.5, 0.0)
    result = evaluation.evaluate(4)
    found = result.metrics
    # Twice the reward, and 0.5 less for the response without EOS; the third is left out.
    assert found["eval/score"] == pytest.approx((2 + 2 + 1.5) / 3)
    # Each token's log-ratio is 4 x 0.25; responses have 2, 2, 2 and 4 tokens.
    assert found["eval/kl"] == pytest.approx(2.5)
    assert found["eval/objective"] == pytest.approx(5.5 / 3 - 0.25)
    assert result.objectives == pytest.approx([2 - 0.2, 2 - 0.2, NAN, 1.5 - 0.4], nan_ok=True)
    assert found["eval/win_rate"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert found["eval/rewards/keywords"] == 1.0
    assert (found["eval/rewards/keywords/requests"], found["eval/rewards/keywords/unusable"]) == (3.0, 0.5)
    assert (found["eval/length"], found["eval/eos_rate"]) == (2.5, 0.75)
    assert found["eval/by_source/a/score"] == 2.0 and found["eval/by_source/b/kl"] == pytest.approx(3.0)
    assert found["eval/distinct_2"] == pytest.approx(2 / 12)
    by_source = {source: found[f"eval/by_source/{source}/win_rate"] for source in "ab"}
    assert by_source == {"a": 1.0, "b": 0.75}
    assert found["eval/by_source/a/distinct_2"] == pytest.approx(2 / 6)
    assert result.columns["score"] == pytest.approx([2.0, 2.0, NAN, 1.5], nan_ok=True)
    assert list(result.columns["length"]) == [2.0, 2.0, 2.0, 4.0]
    assert not {"judge", "gold"} & set(result.columns)
    assert not any("judge" in name or "gold" in name for name in found)


def test_the_reward_models_score_is_without_weight_and_penalties() -> None:
    rewards = {0: [1.0, 1.0, 1.0, 1.0]}
    found = Evaluation(rewards, None, {"type": "model", "weight": 5.0}).evaluate(0).metrics
    assert (found["eval/reward_model"], found["eval/reward_model_error"]) == (1.0, 0.0)
    assert found["eval/score"] == pytest.approx((5 + 5 + 5 + 4.5) / 4)
    assert "eval/reward_model" not in Evaluation(rewards, None).evaluate(0).metrics
    assert "eval/ensemble_std" not in found
    ensemble = Evaluation(rewards, None, deviations=[0.5, NAN, 0.25, 0.75])
    assert ensemble.evaluate(0).metrics["eval/ensemble_std"] == 0.5


def test_the_judge_decides_if_there_is_one() -> None:
    rewards = {0: [0.0] * 4, 2: [5.0] * 4}
    judge = {0: [0.3] * 4, 2: [0.1, 0.2, 0.3, 0.4]}
    evaluation = Evaluation(rewards, judge)
    evaluation.evaluate(0)
    restarted = Evaluation(rewards, judge)
    restarted.load_state_dict(evaluation.state_dict())
    assert evaluation.evaluate(2).columns["judge"] == judge[2]
    for found in (evaluation.evaluate(2).metrics, restarted.evaluate(2).metrics):
        assert found["eval/judge"] == pytest.approx(0.25)
        assert found["eval/objective"] == pytest.approx(0.25 - 0.1 * 1.25)
        assert found["eval/win_rate"] == pytest.approx((0 + 0 + 0.5 + 1) / 4)
        assert found["eval/judge_error"] == pytest.approx(0.1290994449 / 2)


def test_agreement_of_reward_model_and_judge_is_their_correlation() -> None:
    rewards, judge = {0: [1.0, 2.0, 3.0, NAN]}, {0: [0.0, 0.0, 3.0, 9.0]}
    found = Evaluation(rewards, judge, {"type": "model"}).evaluate(0).metrics
    # Deviations -1, 0, 1 and -1, -1, 2; the response without a reward is left out.
    assert found["eval/judge_correlation"] == pytest.approx(3 / 12**0.5)
    assert found["eval/judge_correlation_error"] == pytest.approx((1 - 9 / 12) / 2**0.5)
    rewards, judge = {0: [1.0, 2.0, 30.0, NAN]}, {0: [0.0, 0.0, 1.0, 9.0]}
    found = Evaluation(rewards, judge, {"type": "model"}).evaluate(0).metrics
    # Ranks 1, 2, 3 and 1.5, 1.5, 3.
    assert found["eval/judge_rank_correlation"] == pytest.approx(1.5 / 3**0.5)


def test_a_reward_that_compares_sees_the_response_of_the_sft_model_as_well() -> None:
    compares: dict[str, Any] = {"type": "language_model", "url": "http://one/v1", "model": "m"}
    compares |= {"compare": "pairs", "max_tokens": 64}
    rewards = {0: [0.5] * 4, 2: [1.0, 0.75, 0.0, 0.5]}
    judge = {0: [0.3] * 4, 2: [0.4, 0.2, 0.2, 0.3]}
    evaluation = Evaluation(rewards, judge, compares)
    first = evaluation.evaluate(0).metrics
    assert first["eval/rewards/language_model/judge_agreement"] == 0.5
    restarted = Evaluation(rewards, judge, compares, elsewhere=True)
    restarted.load_state_dict(evaluation.state_dict())
    for each in (evaluation, restarted):
        found = each.evaluate(2).metrics
        assert [sample.response for sample in each._composer.opponents] == ["of version 0"] * 4
        assert [sample.prompt_id for sample in each._composer.opponents] == ["p0", "p1", "p2", "p3"]
        # The judge prefers the policy, the SFT model twice, and none.
        assert found["eval/rewards/language_model/judge_agreement"] == (1 + 0 + 1 + 0.5) / 4
        assert found["eval/rewards/language_model"] == 2.25 / 4
    assert "eval/rewards/keywords/judge_agreement" not in Evaluation(rewards, judge).evaluate(0).metrics
