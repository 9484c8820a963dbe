"""Decides whether a candidate becomes champion.

Each rule is a statistical test at a fixed level, and never only a comparison of two means. Each retraining
adds a test, so the levels decrease. The k-th test against the same champion has the level

    alpha / (k (k + 1))        k = 1, 2, ...; their sum is alpha

If no candidate is better than the champion, the probability that any of them replaces it is therefore at most
`alpha`, for any number of candidates. This follows from the union bound and also holds for tests on the same
prompts.
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
    """Requirements for a champion (section `register`)."""

    min_win_rate: float
    min_prompts: int = 50
    alpha: float = 0.05

    def level(self, number: int) -> float:
        """Return the level of the test with this number, starting at 1."""
        return self.alpha / (number * (number + 1))


@dataclass(frozen=True)
class Evaluation:
    """The evaluation results of a policy that the gate uses."""

    win_rate: float
    """Win rate against its SFT model, 0 to 1."""
    wins: int = 0
    losses: int = 0
    ties: int = 0
    judge: str | None = None
    """The judge of the wins; None in records of older versions."""
    judge_digest: str | None = None
    """Digest of the judge."""
    sft_digest: str | None = None
    """Digest of the SFT model that the policy was compared with."""
    gold_reward: float | None = None
    """Mean true reward; None if the task has none."""
    gold_error: float | None = None
    """Standard error of the mean true reward."""
    gold_digest: str | None = None
    """Digest of the true reward."""
    reward_model: float | None = None
    """Mean score of the reward model; None if there is none."""
    reward_model_error: float | None = None
    reward_model_digest: str | None = None
    """Digest of the reward model. Scores of different reward models are not comparable."""

    @property
    def verdicts(self) -> Verdicts:
        return Verdicts(self.wins, self.losses, self.ties)

    @classmethod
    def of(
        cls, content: Mapping[str, Any], reward_model_digest: str | None, sft_digest: str | None = None
    ) -> Evaluation:
        """Create the record from `evaluation.json`. Raises RLHFError if it has no win rate or no verdicts."""
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
        """Return the record as text for a tag. `from_json` reads it."""
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> Evaluation | None:
        """Read the record, or return None if `text` is not a record. Then another program registered the
        version.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Match:
    """Result of a match between candidate and champion on the same prompts."""

    win_rate: float
    """Win rate of the candidate, 0 to 1."""
    low: float
    high: float
    """Confidence interval of the win rate."""
    prompts: int
    wins: int = 0
    losses: int = 0
    judge: str = ""
    away_win_rate: float | None = None
    """Win rate of the candidate, judged by the champion's reward model. None if that model is not a judge or
    is missing.
    """

    @property
    def verdicts(self) -> Verdicts:
        return Verdicts(self.wins, self.losses, self.prompts - self.wins - self.losses)


@dataclass(frozen=True)
class Decision:
    """The decision whether the candidate becomes champion."""

    champion: bool
    rule: str
    """The comparison that decided."""
    reason: str
    """One sentence with the numbers."""
    tested: bool = False
    """Whether a test was made, which reduces the level of the next test."""


def decide(
    candidate: Evaluation,
    champion: Evaluation | None,
    match: Match | None = None,
    *,
    gate: Gate,
    number: int = 1,
) -> Decision:
    """Decide whether the candidate becomes champion.

    The candidate must be good enough compared with its own SFT model, and better than the current champion.
    The champion is compared in a match. Without a match, the first measure with the same judge in both
    records is used: true reward, score of the same reward model, or win rate against the same SFT model.

    Args:
        candidate: Evaluation of the new model.
        champion: Evaluation of the present champion, or None.
        match: Comparison of both by the same judge, or None.
        gate: Limits of the configuration.
        number: Number of the test against this champion, starting at 1.
    """
    if candidate.win_rate < gate.min_win_rate:
        text = f"win rate {candidate.win_rate:.3f} is below register.min_win_rate={gate.min_win_rate:g}"
        return Decision(False, "min_win_rate", text)
    if champion is None:
        words = (
            f"win rate {candidate.win_rate:.3f} over the SFT model on {candidate.verdicts.prompts} prompts"
        )
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
        words += (
            "; the champion's reward model is not in this store, so only the candidate's judged the match"
        )
    if match.away_win_rate is not None:
        words += f", and {match.away_win_rate:.3f} by the champion's reward model"
    decision = _sign_test("match", match.verdicts, words, gate, number)
    if decision.champion and match.away_win_rate is not None and match.away_win_rate < 0.5:
        return Decision(
            False, "away", f"{decision.reason}; the candidate must not lose by that judge", tested=True
        )
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
        text = (
            f"there was no match, and a recorded evaluation has only {fewest} prompts;"
            f" register.min_prompts={gate.min_prompts}"
        )
        return Decision(False, "min_prompts", text)
    if candidate.gold_digest is not None and candidate.gold_digest == champion.gold_digest:
        values = (candidate.gold_reward, candidate.gold_error), (champion.gold_reward, champion.gold_error)
        decision = _difference("gold_reward", *values, gate, number)
        if decision is not None:
            return decision
    if (
        candidate.reward_model_digest is not None
        and candidate.reward_model_digest == champion.reward_model_digest
    ):
        values = (
            (candidate.reward_model, candidate.reward_model_error),
            (champion.reward_model, champion.reward_model_error),
        )
        decision = _difference("reward_model", *values, gate, number)
        if decision is not None:
            return decision
    same = (candidate.judge, candidate.judge_digest, candidate.sft_digest)
    if None not in same and same == (champion.judge, champion.judge_digest, champion.sft_digest):
        rates = (
            (candidate.win_rate, _win_rate_error(candidate)),
            (champion.win_rate, _win_rate_error(champion)),
        )
        decision = _difference("win_rate", *rates, gate, number)
        if decision is not None:
            return decision
    text = (
        "there was no match, and the evaluations are not comparable: the candidate's is by"
        f" {_name(candidate)}, the champion's by {_name(champion)}; set the alias manually if necessary"
    )
    return Decision(False, "incomparable", text)


_Measured = tuple[float | None, float | None]
"""A mean and its standard error."""


def _difference(
    rule: str, candidate: _Measured, champion: _Measured, gate: Gate, number: int
) -> Decision | None:
    """One-sided z-test of two means on different prompts.

    None if a standard error is missing or both are 0.
    """
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
    """Binomial standard error with half a win and half a loss added, so that it is never 0."""
    count = record.verdicts.prompts + 1
    share = (record.wins + 0.5 * record.ties + 0.5) / count
    return math.sqrt(share * (1 - share) / count)


def _name(record: Evaluation) -> str:
    return (
        "an unknown judge"
        if record.judge is None
        else f"{record.judge} {(record.judge_digest or 'unknown')[:12]}"
    )


def _measure(content: Mapping[str, Any], name: str, confidence: float) -> _Measured:
    """Return the mean of the policy and the standard error derived from its interval."""
    interval = (content.get(name) or {}).get("ppo")
    mean = _mean(interval)
    if mean is None or not isinstance(interval, Mapping) or not {"low", "high"} <= set(interval):
        return mean, None
    return mean, (interval["high"] - interval["low"]) / (2 * NormalDist().inv_cdf((1 + confidence) / 2))


def _mean(value: Any) -> float | None:
    mean = value.get("mean") if isinstance(value, Mapping) else None
    return float(mean) if isinstance(mean, int | float) else None
