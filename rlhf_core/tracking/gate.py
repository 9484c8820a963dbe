"""Whether a candidate becomes champion.

Each rule is a test at a level, never a comparison of two means. A registry tests again with every retraining, so the
levels get smaller: the k-th test against one champion has the level

    alpha / (k (k + 1))        k = 1, 2, ...; their sum is alpha

By that all candidates that are no better than the champion replace it with a probability of at most `alpha` together,
however many there are (a union bound: it holds for tests on the same prompts too).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from rlhf_core.errors import RLHFError
from rlhf_core.evaluation.statistics import Verdicts


@dataclass(frozen=True)
class Gate:
    """What is asked of a champion (section `register`)."""

    min_win_rate: float
    min_prompts: int = 50
    alpha: float = 0.05

    def level(self, number: int) -> float:
        """Of the test with this number, from 1."""
        return self.alpha / (number * (number + 1))


@dataclass(frozen=True)
class Evaluation:
    """What the gate knows of a policy."""

    win_rate: float
    """Against its SFT model, 0 to 1."""
    wins: int = 0
    losses: int = 0
    ties: int = 0
    judge: str | None = None
    """Who decided the wins; None in records of older code."""
    judge_digest: str | None = None
    """Which judge of that name."""
    sft_digest: str | None = None
    """The SFT model that it was compared with."""
    gold_reward: float | None = None
    """Mean true reward; None where the task has none."""
    gold_error: float | None = None
    """Its standard error."""
    gold_digest: str | None = None
    """Which true reward."""
    reward_model: float | None = None
    """Mean score of the reward model; None where there is none."""
    reward_model_error: float | None = None
    reward_model_digest: str | None = None
    """Which reward model: scores of different ones do not compare."""

    @property
    def verdicts(self) -> Verdicts:
        return Verdicts(self.wins, self.losses, self.ties)

    @classmethod
    def of(
        cls, content: Mapping[str, Any], reward_model_digest: str | None, sft_digest: str | None = None
    ) -> Evaluation:
        """From `evaluation.json`. Raises RLHFError if it has no win rate or no verdicts."""
        win_rate, verdicts = _mean(content.get("win_rate")), content.get("verdicts")
        if win_rate is None or not isinstance(verdicts, Mapping):
            raise RLHFError(
                "evaluation.json has no win_rate.mean or no verdicts; the evaluate stage must be run again."
            )
        confidence = float(content.get("confidence", 0.95))
        gold, gold_error = _measure(content, "gold_reward", confidence)
        score, score_error = _measure(content, "reward_model", confidence)
        if reward_model_digest is None:
            score = score_error = None
        judge = content.get("judge")
        digests = dict(content.get("judge_digests") or {}) | {"reward_model": reward_model_digest}
        return cls(
            win_rate=win_rate,
            **verdicts,
            judge=judge,
            judge_digest=digests.get(str(judge)),
            sft_digest=sft_digest,
            gold_reward=gold,
            gold_error=gold_error,
            gold_digest=digests.get("gold"),
            reward_model=score,
            reward_model_error=score_error,
            reward_model_digest=reward_model_digest if score is not None else None,
        )

    def to_json(self) -> str:
        """For a tag; `from_json` reads it back."""
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> Evaluation | None:
        """None if `text` is not such a record: the version was not registered by this pipeline."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Match:
    """The candidate against the champion on the same prompts."""

    win_rate: float
    """Of the candidate, 0 to 1."""
    low: float
    high: float
    """Its confidence interval."""
    prompts: int
    wins: int = 0
    losses: int = 0
    judge: str = ""
    away_win_rate: float | None = None
    """Of the candidate by the champion's own reward model; None where that does not judge or is not in the store."""

    @property
    def verdicts(self) -> Verdicts:
        return Verdicts(self.wins, self.losses, self.prompts - self.wins - self.losses)


@dataclass(frozen=True)
class Decision:
    """Whether the candidate becomes champion."""

    champion: bool
    rule: str
    """Which comparison decided."""
    reason: str
    """One sentence with the numbers."""
    tested: bool = False
    """Whether it was a test, which counts for the level of the next one."""


def decide(
    candidate: Evaluation, champion: Evaluation | None, match: Match | None = None, *, gate: Gate, number: int = 1
) -> Decision:
    """Good enough against its own SFT model, and better than the present champion: in a match, or without one by the first
    record that both have of the same judge: true reward, score of the same reward model, win rate over the same SFT model.

    `number`: of the test against this champion, from 1.
    """
    if candidate.win_rate < gate.min_win_rate:
        text = f"win rate {candidate.win_rate:.3f} is below register.min_win_rate={gate.min_win_rate:g}"
        return Decision(False, "min_win_rate", text)
    if champion is None:
        words = f"win rate {candidate.win_rate:.3f} over the SFT model on {candidate.verdicts.prompts} prompts"
        return _sign_test("first", candidate.verdicts, f"{words}, and there is no champion yet", gate, number)
    if match is not None:
        return _by_match(match, gate, number)
    return _by_records(candidate, champion, gate, number)


def _by_match(match: Match, gate: Gate, number: int) -> Decision:
    words = (
        f"won {match.win_rate:.3f} [{match.low:.3f}, {match.high:.3f}] of the match against the champion on "
        f"{match.prompts} held-out prompts"
    )
    if match.judge:
        words += f" (judge: {match.judge.replace('_', ' ')})"
    if match.judge == "reward_model" and match.away_win_rate is None:
        words += "; the champion's reward model is not in this store, so only the candidate's judged"
    if match.away_win_rate is not None:
        words += f", and {match.away_win_rate:.3f} by the champion's reward model"
    decision = _sign_test("match", match.verdicts, words, gate, number)
    if decision.champion and match.away_win_rate is not None and match.away_win_rate < 0.5:
        return Decision(False, "away", f"{decision.reason}; there it must not lose", tested=True)
    return decision


def _sign_test(rule: str, verdicts: Verdicts, words: str, gate: Gate, number: int) -> Decision:
    if verdicts.prompts < gate.min_prompts:
        text = f"{words}; register.min_prompts={gate.min_prompts} are needed"
        return Decision(False, "min_prompts", text)
    return _tested(rule, verdicts.p_value, words, gate, number)


def _tested(rule: str, p_value: float, words: str, gate: Gate, number: int) -> Decision:
    level = gate.level(number)
    text = f"{words}; p={p_value:.2g}, test {number} at level {level:.2g} (register.alpha={gate.alpha:g})"
    return Decision(p_value <= level, rule, text, tested=True)


def _by_records(candidate: Evaluation, champion: Evaluation, gate: Gate, number: int) -> Decision:
    fewest = min(candidate.verdicts.prompts, champion.verdicts.prompts)
    if fewest < gate.min_prompts:
        text = f"no match was played, and a recorded evaluation has {fewest} prompts; register.min_prompts={gate.min_prompts}"
        return Decision(False, "min_prompts", text)
    if candidate.gold_digest is not None and candidate.gold_digest == champion.gold_digest:
        values = (candidate.gold_reward, candidate.gold_error), (champion.gold_reward, champion.gold_error)
        if (decision := _difference("gold_reward", *values, gate, number)) is not None:
            return decision
    if candidate.reward_model_digest is not None and candidate.reward_model_digest == champion.reward_model_digest:
        values = (
            (candidate.reward_model, candidate.reward_model_error),
            (champion.reward_model, champion.reward_model_error),
        )
        if (decision := _difference("reward_model", *values, gate, number)) is not None:
            return decision
    same = (candidate.judge, candidate.judge_digest, candidate.sft_digest)
    if None not in same and same == (champion.judge, champion.judge_digest, champion.sft_digest):
        rates = (candidate.win_rate, _win_rate_error(candidate)), (champion.win_rate, _win_rate_error(champion))
        if (decision := _difference("win_rate", *rates, gate, number)) is not None:
            return decision
    text = (
        f"no match was played, and the evaluations do not compare: the candidate's by {_name(candidate)}, the champion's by "
        f"{_name(champion)}; set the alias yourself where you know better"
    )
    return Decision(False, "incomparable", text)


_Measured = tuple[float | None, float | None]
"""A mean and its standard error."""


def _difference(rule: str, candidate: _Measured, champion: _Measured, gate: Gate, number: int) -> Decision | None:
    """One-sided z-test of two means on different prompts; None where one has no error, or both have none to speak of."""
    (ours, our_error), (theirs, their_error) = candidate, champion
    if ours is None or theirs is None or our_error is None or their_error is None:
        return None
    error = math.hypot(our_error, their_error)
    if error == 0:
        return None
    p_value = 1 - NormalDist().cdf((ours - theirs) / error)
    words = f"{rule} {ours:.4f} +- {our_error:.4f} against {theirs:.4f} +- {their_error:.4f} of the champion"
    return _tested(rule, p_value, words, gate, number)


def _win_rate_error(record: Evaluation) -> float:
    """Binomial, with half a win and half a loss added so that it is never 0."""
    count = record.verdicts.prompts + 1
    share = (record.wins + 0.5 * record.ties + 0.5) / count
    return math.sqrt(share * (1 - share) / count)


def _name(record: Evaluation) -> str:
    return "an unknown judge" if record.judge is None else f"{record.judge} {(record.judge_digest or 'unknown')[:12]}"


def _measure(content: Mapping[str, Any], name: str, confidence: float) -> _Measured:
    """Mean of the policy, and the standard error that its interval tells."""
    interval = (content.get(name) or {}).get("ppo")
    mean = _mean(interval)
    if mean is None or not isinstance(interval, Mapping) or not {"low", "high"} <= set(interval):
        return mean, None
    return mean, (interval["high"] - interval["low"]) / (2 * NormalDist().inv_cdf((1 + confidence) / 2))


def _mean(value: Any) -> float | None:
    mean = value.get("mean") if isinstance(value, Mapping) else None
    return float(mean) if isinstance(mean, int | float) else None
