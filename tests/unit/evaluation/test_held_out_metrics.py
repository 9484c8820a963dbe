"""The metrics of an evaluation during PPO, with scripted engines and models.

- each version is sampled once per prompt, as the step of its number, so that its seeds are its own
- the judge decides objective and wins if there is one, otherwise the training reward with its penalties
- a response whose reward failed is left out of means and wins
- measures by data source are there if there are several sources
- the correlation of reward model and judge is over the responses that have both scores
- wins are counted against the SFT model's scores, also after a restart
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.evaluation import held_out
from rlhf_core.evaluation.held_out import HeldOutEvaluation
from rlhf_core.ppo.model_scores import ModelScores
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.types import PromptExample, RewardInput

PROMPTS = [PromptExample(f"p{i}", "What is it?", (1,), source="ab"[i % 2]) for i in range(4)]
NAN = float("nan")


class Collector:
    """Returns the responses of a version: all finished but the last, with these rewards."""

    rewards_of: dict[int, list[float]]
    deviations: Sequence[float] = ()

    def __init__(self, ppo: Any, _fleet: Any, prompts: Any, *_other: Any) -> None:
        assert ppo.samples_per_prompt == 1 and prompts == PROMPTS

    def sample(self, prompts: Any, step: int, round_: int, version: int) -> Any:
        assert (prompts, step, round_) == (PROMPTS, version, 0)
        finished = np.array([True, True, True, False])
        return Batch(version=version, lengths_B=np.array([2, 2, 2, 4], np.int32), finished_B=finished)

    def rewards(self, batch: Any) -> RewardBatch:
        values = self.rewards_of[batch.version]
        usage = {"keywords": {"requests": 3.0, "unusable": 1.5}}
        return RewardBatch(values, dict.fromkeys(("keywords", "model"), values), usage, list(self.deviations))


KEYWORDS = {"type": "keywords", "words": ["x"], "weight": 2.0}


class Batch(SimpleNamespace):
    def __len__(self) -> int:
        return len(PROMPTS)


class Gathered(list[Any]):
    def gather(self, _name: str = "") -> list[Any]:
        return list(self)


def evaluation_of(
    monkeypatch: pytest.MonkeyPatch,
    rewards: dict[int, list[float]],
    judge: dict[int, list[float]] | None,
    source: Mapping[str, Any] = KEYWORDS,
) -> HeldOutEvaluation:
    monkeypatch.setattr(Collector, "rewards_of", rewards, raising=False)
    monkeypatch.setattr(held_out, "Collector", Collector)
    texts = [RewardInput(p.prompt_id, p.prompt, "a b a b", (1,), (2, 3), True) for p in PROMPTS]
    monkeypatch.setattr(held_out, "RewardInputs", lambda *_: texts)

    def logprobs(role: str, batch: Any, *, with_entropy: bool) -> Gathered:
        shift = 0.25 * batch.version if role == "policy" else 0.0
        return Gathered(np.full(n, -1.0 + shift, np.float32) for n in batch.lengths_B)

    groups = {"policy": None, "reference": None} | ({} if judge is None else {"judge": None})
    fleet: Any = SimpleNamespace(
        groups=groups,
        logprobs=logprobs,
        scores=lambda batch, role: SimpleNamespace(gather=lambda: ModelScores((judge or {})[batch.version])),
        retry_after_restart=lambda call, what: call(),
        turns=SimpleNamespace(sample=lambda: None, train=lambda: None),
    )
    tree = {
        "reward": {"enabled": source["type"] == "model"},
        "ppo": {
            "rewards": [source],
            "missing_eos_penalty": 0.5,
            "kl": {"coef": 0.1},
        },
    }
    nothing: Any = None
    return HeldOutEvaluation(config_from_tree(tree, "test"), fleet, PROMPTS, str, nothing)


def test_the_training_reward_decides_without_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = {0: [0.0, 1.0, 0.0, 0.0], 4: [1.0, 1.0, NAN, 1.0]}
    evaluation = evaluation_of(monkeypatch, rewards, None)
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
    assert result.independent == {}
    assert not any("judge" in name or "gold" in name for name in found)


def test_the_reward_models_score_is_without_weight_and_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = {0: [1.0, 1.0, 1.0, 1.0]}
    found = evaluation_of(monkeypatch, rewards, None, {"type": "model", "weight": 5.0}).evaluate(0).metrics
    assert (found["eval/reward_model"], found["eval/reward_model_error"]) == (1.0, 0.0)
    assert found["eval/score"] == pytest.approx((5 + 5 + 5 + 4.5) / 4)
    assert "eval/reward_model" not in evaluation_of(monkeypatch, rewards, None).evaluate(0).metrics
    assert "eval/ensemble_std" not in found
    monkeypatch.setattr(Collector, "deviations", [0.5, NAN, 0.25, 0.75])
    assert evaluation_of(monkeypatch, rewards, None).evaluate(0).metrics["eval/ensemble_std"] == 0.5


def test_the_judge_decides_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = {0: [0.0] * 4, 2: [5.0] * 4}
    judge = {0: [0.3] * 4, 2: [0.1, 0.2, 0.3, 0.4]}
    evaluation = evaluation_of(monkeypatch, rewards, judge)
    evaluation.evaluate(0)
    restarted = evaluation_of(monkeypatch, rewards, judge)
    restarted.load_state_dict(evaluation.state_dict())
    assert evaluation.evaluate(2).independent == {"eval/judge": judge[2]}
    for found in (evaluation.evaluate(2).metrics, restarted.evaluate(2).metrics):
        assert found["eval/judge"] == pytest.approx(0.25)
        assert found["eval/objective"] == pytest.approx(0.25 - 0.1 * 1.25)
        assert found["eval/win_rate"] == pytest.approx((0 + 0 + 0.5 + 1) / 4)
        assert found["eval/judge_error"] == pytest.approx(0.1290994449 / 2)


def test_agreement_of_reward_model_and_judge_is_their_correlation(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, judge = {0: [1.0, 2.0, 3.0, NAN]}, {0: [0.0, 0.0, 3.0, 9.0]}
    found = evaluation_of(monkeypatch, rewards, judge, {"type": "model"}).evaluate(0).metrics
    # Deviations -1, 0, 1 and -1, -1, 2; the response without a reward is left out.
    assert found["eval/judge_correlation"] == pytest.approx(3 / 12**0.5)
    assert found["eval/judge_correlation_error"] == pytest.approx((1 - 9 / 12) / 2**0.5)
