"""Who decides a win, and the comparison of two models by a judge.

A judge sees two responses in an order and may have a taste for a position. Each pair is therefore judged in
both orders: the preferences are averaged, and verdicts that name another winner when the order changes are
counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhf_core.errors import DataError
from rlhf_core.evaluation.statistics import Interval, Verdicts, preference, win_rate
from rlhf_core.types import RewardInput

TIE = 1e-6
"""Scores closer than this are a tie: one text scored in two batches may differ in the last bits."""


@dataclass(frozen=True)
class Answer:
    """One model's response to one held-out prompt, with what it scored."""

    sample: RewardInput
    scores: Mapping[str, float] = field(default_factory=dict)
    """By measure: `gold`, `reward_model`, `rules`, `rule/<name>`."""


class Judge(Protocol):
    """Preference for `first` over `second`, in [0, 1]; 0.5 is a tie."""

    def __call__(self, prompt: str, first: Answer, second: Answer) -> float: ...


@dataclass(frozen=True)
class ScoreJudge:
    """The response with the higher score of one measure wins."""

    measure: str

    def __call__(self, prompt: str, first: Answer, second: Answer) -> float:
        return preference(first.scores[self.measure], second.scores[self.measure], TIE)


@dataclass(frozen=True)
class Comparison:
    """Model `a` against model `b`."""

    win_rate: Interval
    """Of `a`, in [0, 1]; ties count half."""
    preferences: tuple[float, ...]
    """(n,) for `a`, averaged over both orders."""
    inconsistent: float
    """Share of prompts, in [0, 1], on which the order decided."""

    @property
    def verdicts(self) -> Verdicts:
        return Verdicts.of(self.preferences)


def compare(
    judge: Judge,
    answers_a: Sequence[Answer],
    answers_b: Sequence[Answer],
    *,
    resamples: int,
    confidence: float,
    seed: int,
) -> Comparison:
    """Judges `a` against `b`, paired by prompt (n,), in both orders.

    Raises `DataError` if the answers do not pair up, there are none, or a preference is outside [0, 1].
    """
    if [a.sample.prompt_id for a in answers_a] != [b.sample.prompt_id for b in answers_b]:
        raise DataError(
            f"a win rate compares answers to the same prompts in the same order; got {len(answers_a)} and"
            f" {len(answers_b)} others"
        )
    preferences: list[float] = []
    inconsistent = 0
    for a, b in zip(answers_a, answers_b, strict=True):
        prompt = a.sample.prompt
        first, second = _checked(judge(prompt, a, b), a), 1.0 - _checked(judge(prompt, b, a), a)
        preferences.append((first + second) / 2)
        inconsistent += _winner(first) != _winner(second)
    interval = win_rate(preferences, resamples=resamples, confidence=confidence, seed=seed)
    return Comparison(interval, tuple(preferences), inconsistent / len(preferences))


def _checked(value: float, answer: Answer) -> float:
    if not 0.0 <= value <= 1.0:
        raise DataError(
            f"the judge's preference must lie in [0, 1]; got {value} for prompt {answer.sample.prompt_id}"
        )
    return value


def _winner(value: float) -> int:
    return (value > 0.5) - (value < 0.5)
