"""Decides whether a candidate becomes champion.

The first champion must beat its SFT model in an exact sign test. Every later one must beat the present
champion in a match, by an anytime-valid test (`log_evidence`). If the champion was judged by another
reward model, the same test is made with that one, and both must succeed. The levels of the tests in any 365
days add up to at most `alpha`. If no candidate is better than its champion under both judges, the probability
that any of them becomes champion within a year is therefore at most `alpha`, for any number of candidates and
champions. Related prompts (`PromptExample.group`) are one outcome of a test, their mean. The prompts of a
match must not have been used to choose its candidate (docs/promotion.md).

Without a match the champion stays: numbers of different prompts or different judges are not compared. A
candidate for which a regression set failed, against its SFT model or in the match, is refused. So is one that
loses by the votes of people, or has none, if the configuration has a margin for them (`votes_margin`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from rlhf_core.errors import RLHFError
from rlhf_core.evaluation.measures import NOT_IDENTIFIED, results_of
from rlhf_core.evaluation.statistics import Verdicts, failed_sets, regression_differences, units
from rlhf_core.pipeline import PolicyStage

BETS = (0.1, 0.2, 0.4)
"""Values of lambda. Each is the best bet on a win rate of (1 + lambda) / 2 among prompts without a tie."""

YEAR = 365 * 86400.0
"""Seconds in which all levels add up to at most the budget."""

_AT_ONCE = 0.2
"""Share of the year's budget that is available at once. The rest accrues evenly over the year."""

_PER_TEST = 0.25
"""Share of what is available that one test spends. With weekly tests it converges to 1/65 of the budget."""


@dataclass(frozen=True)
class Spent:
    """A test that was made."""

    time: float
    """Seconds since 1970."""
    level: float


def log_evidence(outcomes: Sequence[float]) -> float:
    """Return the anytime-valid evidence that one policy beats another, max_n log E_n of `outcomes` (n,), each
    in [-1, 1]; 0 if there are none. Ties do not change the evidence.

    A match gives one outcome for each prompt: x_i = 1 if the candidate wins, -1 if it loses, 0 for a tie. The
    null hypothesis is that the candidate is not better: E[x_i | x_1 ... x_(i-1)] <= 0. The capital of a
    gambler who bets the share lambda on each win, as a mean over several lambda, is

        E_n = mean over lambda of  prod_(i <= n) (1 + lambda x_i)

    This is a test supermartingale with E_0 = 1, so that P(max_n E_n >= 1 / level) <= level for any number of
    prompts (Ville 1939; Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by
    betting"; Ramdas et al. 2023, "Game-theoretic statistics and safe anytime-valid inference"). A match can
    therefore be continued with further prompts at the same level.

    Levels of different matches add up (union bound), also where matches use the same prompts. `next_level`
    assigns them.
    """
    x = np.asarray(outcomes, dtype=np.float64)
    if not x.size:
        return 0.0
    # In logarithms, because the capital of a long match exceeds the range of a float.
    capitals = np.stack([np.log1p(bet * x).cumsum() for bet in BETS])
    mixture = np.logaddexp.reduce(capitals, axis=0) - math.log(len(BETS))
    # 0 is the logarithm of E_0, which the maximum includes.
    return max(0.0, float(mixture.max()))


def prompts_for_evidence(win_rate: float, level: float) -> int | None:
    """Return the number of prompts with which this win rate has evidence of 1 / level; None if no number has.
    Both are without ties.

    The capital of the bet that suits the win rate best must be 1 / level times the number of bets, because
    the evidence is their mean.
    """
    gain = max(win_rate * math.log1p(bet) + (1 - win_rate) * math.log1p(-bet) for bet in BETS)
    return math.ceil((math.log(len(BETS)) - math.log(level)) / gain) if gain > 0 else None


def prompts_for_level(rate: float, level: float) -> int | None:
    """Return the number of prompts without a tie with which a win rate can be significant; None if it is not
    above one half.

    A win rate w increases the logarithm of the evidence by at most w ln 2w + (1 - w) ln 2(1 - w) for each
    prompt. With so many prompts, the p-value of an exact sign test is at most the level (Chernoff).
    """
    if rate <= 0.5:
        return None
    gain = sum(share * math.log(2 * share) for share in (rate, 1 - rate) if share > 0)
    return math.ceil(math.log(1 / level) / gain)


def next_level(spent: Iterable[Spent], now: float, budget: float) -> float:
    """Return the level of a test at time `now`, in seconds.

    The levels in any 365 days add up to at most `budget`, for any number of tests: a fifth of it is available
    at once, the rest accrues evenly, and each test spends a quarter of what is available.

    Args:
        spent: All earlier tests.
        now: Seconds since 1970.
        budget: Probability of a false rejection in a year.
    """
    capacity = _AT_ONCE * budget
    per_second = (1 - _AT_ONCE) * budget / YEAR
    available, last = capacity, -math.inf
    # A test of a host whose clock is ahead counts as made now. Otherwise the time until then would accrue.
    for tested, level in sorted((min(test.time, now), test.level) for test in spent):
        if last > -math.inf:
            available = min(capacity, available + (tested - last) * per_second)
        available = max(0.0, available - level)
        last = tested
    if last > -math.inf:
        available = min(capacity, available + max(0.0, now - last) * per_second)
    return _PER_TEST * available


# -- the decision --

_NOT_INDEPENDENT = "which is not independent of the policy's training"
_BETTER = "train a better policy"
_MORE_PROMPTS = "data.eval_fraction, data.max_eval and evaluate.prompts"
_AFTER_REGRESSION = (
    "read the answers, and train with data of this kind, or raise the margin (evaluate.regression)"
)
_AFTER_VOTES = "read the pairs that it lost, and change the rewards or the data"
BY_A_PERSON = "a person can decide with `rlhf promote`"
"""What to do after a refusal (`Decision.advice`)."""

Votes = Mapping[str, float]
"""Win rate of the policy by the votes of people (`evaluation.review.win_rate_by_people`)."""


@dataclass(frozen=True)
class Gate:
    """Requirements for a champion (section `register`)."""

    min_win_rate: float
    min_prompts: int = 50
    alpha: float = 0.05
    votes_margin: float | None = None
    independent_judge: bool = False

    def first_level(self, number: int) -> float:
        """Return the level of the test with this number, starting at 1, while there is no champion.

        The levels add up to `alpha`.
        """
        # The sum of 1 / (n (n + 1)) over all n is 1.
        return self.alpha / (number * (number + 1))

    def lost(self, votes: Votes | None) -> bool:
        """Return whether people may prefer the opponent by more than the margin. Without a margin, or without
        votes, they do not.
        """
        if votes is None or self.votes_margin is None:
            return False
        # By Wilson's bound (decision 37): a bootstrap of wins and ties has a
        # lower bound of at least 0.5, so that two votes would pass every margin.
        return votes["low"] <= 0.5 - self.votes_margin


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
    judge_trained_on: bool = False
    """Whether the policy was trained on the judge. Not part of the record."""
    regression: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Differences to the SFT model on the regression sets (`statistics.regression_differences`)."""
    votes: Votes | None = None
    """Votes of people, against the SFT model. Not part of the record."""
    grouped_prompts: int = 0
    """Number of prompts, if wins, losses and ties are those of fewer groups of them; else 0."""

    @property
    def verdicts(self) -> Verdicts:
        return Verdicts(self.wins, self.losses, self.ties)

    @classmethod
    def of(cls, content: Mapping[str, Any], policy: PolicyStage) -> Evaluation:
        """Create the record of a policy from `evaluation.json`. Raises RLHFError if it has no win rate or no
        verdicts.
        """
        own = results_of(content, policy)
        win_rate, verdicts = _mean(own.get("win_rate")), own.get("verdicts")
        if win_rate is None or not isinstance(verdicts, Mapping):
            raise RLHFError(
                "evaluation.json has no win_rate.mean or no verdicts; the evaluate stage must be run again."
            )
        judge, prompts = content.get("judge"), content.get("prompts", 0)
        return cls(
            win_rate=win_rate,
            **verdicts,
            judge=judge,
            judge_digest=content.get("judge_digests", {}).get(judge),
            judge_trained_on=bool(own.get("judge_trained_on")),
            regression=regression_differences(content.get("regression") or {}, policy),
            grouped_prompts=prompts if sum(verdicts.values()) < prompts else 0,
        )

    def to_json(self) -> str:
        """Return the record as text for a tag. `from_json` reads it."""
        record = asdict(self)
        del record["votes"]  # they come later, and are no other outcome of the test
        del record["judge_trained_on"]  # it follows from the judge
        # So that the text is that of versions without them.
        for name in ("regression", "grouped_prompts"):
            if not record[name]:
                del record[name]
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> Evaluation | None:
        """Read the record, or return None if `text` is not a record. Then another program registered the
        version.
        """
        names = {each.name for each in fields(cls)}
        try:
            content = json.loads(text)
            # Records of other versions have other fields.
            return cls(**{name: value for name, value in content.items() if name in names})
        except (ValueError, TypeError, AttributeError):
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
    """Prompts, or groups of related ones. Each is one outcome of the test; so are `wins` and `losses`."""
    wins: int = 0
    losses: int = 0
    judge: str = ""
    judge_digest: str | None = None
    """Digest of the judge."""
    log_evidence: float = 0.0
    """Natural logarithm of the evidence that the candidate is better (`log_evidence`)."""
    away_win_rate: float | None = None
    """Win rate of the candidate, judged by the champion's reward model. None if that model is not another
    judge or is missing.
    """
    away_ties: int = 0
    """Ties by the champion's reward model. 0 in records of older versions."""
    away_log_evidence: float = 0.0
    """`log_evidence` by the champion's reward model, if there is `away_win_rate`."""
    outcomes: tuple[str, ...] = ()
    """Prompt and outcomes, by one or both judges, of each prompt (of each group those of all its prompts), in
    order. Not part of the record.
    """
    length_controlled: Mapping[str, float] = field(default_factory=dict)
    """`mean`, `low` and `high` of the win rate with answers of equal length. Empty in records of older
    versions. It is shown and decides nothing.
    """
    regression: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Differences to the champion on the regression sets (`statistics.regression_differences`)."""
    votes: Votes | None = None
    """Votes of people, against the champion."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """Win rate of the candidate by data source. Empty if there is only one."""
    grouped_prompts: int = 0
    """Number of prompts, if `prompts` is that of fewer groups of them; else 0."""

    @property
    def smaller_log_evidence(self) -> float:
        """The smaller of `log_evidence` and `away_log_evidence`, if the champion's reward model judged."""
        if self.away_win_rate is None:
            return self.log_evidence
        return min(self.log_evidence, self.away_log_evidence)

    def digest(self, prompts: int) -> str | None:
        """Return the digest of the first prompts or groups and their outcomes; None if there are fewer."""
        if prompts > len(self.outcomes):
            return None
        return hashlib.sha256("\n".join(self.outcomes[:prompts]).encode()).hexdigest()[:16]

    def record(self) -> dict[str, Any]:
        """Return the fields for a tag. `Match(**record)` reads them."""
        record = asdict(self)
        # They are a line for each prompt, and MLflow 3.17 allows 100,000 characters in a tag of a version.
        del record["outcomes"]
        if not self.grouped_prompts:
            del record["grouped_prompts"]  # so that the record is that of versions without groups
        return record


@dataclass(frozen=True)
class NoMatch:
    """The match was not possible."""

    reason: str


@dataclass(frozen=True)
class Decision:
    """The decision whether the candidate becomes champion."""

    champion: bool
    rule: str
    """The comparison that decided."""
    reason: str
    """One sentence with the numbers."""
    tested: bool = False
    """Whether a test was made, which spends its level."""
    advice: str = ""
    """What to do after a refusal, for those who run the pipeline. It is not published."""

    @property
    def text(self) -> str:
        """Reason and advice."""
        return f"{self.reason}; {self.advice}" if self.advice else self.reason


def decide(
    candidate: Evaluation,
    champion: Evaluation | None,
    match: Match | NoMatch | None = None,
    *,
    gate: Gate,
    level: float,
) -> Decision:
    """Decide whether the candidate becomes champion.

    Args:
        candidate: Evaluation of the new model.
        champion: Evaluation of the present champion, or None.
        match: Comparison of both, or why there is none. None if it is not needed.
        gate: Limits of the configuration.
        level: Level of the test.
    """
    # First, because a refusal without a match spends no level (decision 37).
    if refusal := refused_alone(candidate, gate):
        return refusal
    if champion is None:
        return _first(candidate, gate, level)
    if not isinstance(match, Match):
        why = match.reason if match else "it was not run"
        text = (
            f"there is no match against the champion ({why}), and numbers of other prompts are not compared"
        )
        return Decision(False, "no_match", text, advice=BY_A_PERSON)
    return _by_match(candidate, match, champion, gate, level)


def refused_alone(candidate: Evaluation, gate: Gate) -> Decision | None:
    """Return the refusal of a candidate that needs no test and no match; None if there is none."""
    if candidate.win_rate < gate.min_win_rate:
        text = f"win rate {candidate.win_rate:.3f} is below register.min_win_rate={gate.min_win_rate:g}"
        return Decision(False, "min_win_rate", text, advice=f"{_BETTER}, or lower it")
    if failed := failed_sets(candidate.regression):
        text = f"regression sets failed against the SFT model: {', '.join(failed)}"
        return Decision(False, "regression", text, advice=_AFTER_REGRESSION)
    if gate.lost(candidate.votes):
        text = f"people may prefer the SFT model{_by_people(candidate.votes, gate)}"
        return Decision(False, "votes", text, advice=_AFTER_VOTES)
    if gate.independent_judge and candidate.judge_trained_on:
        text = (
            f"the judge is {_judge_name(candidate)}, {_NOT_INDEPENDENT}, and register.independent_judge is"
            " true"
        )
        return Decision(False, "judge", text, advice="add reward.judge={} or evaluate.language_model")
    return None


def _first(candidate: Evaluation, gate: Gate, level: float) -> Decision:
    verdicts = candidate.verdicts
    words = (
        f"win rate {candidate.win_rate:.3f} over the SFT model on"
        f" {units(verdicts.prompts, candidate.grouped_prompts)}, and there is no champion yet"
    )
    if candidate.judge_trained_on:
        words += f" (judge: {_judge_name(candidate)}, {_NOT_INDEPENDENT})"
    words += _by_people(candidate.votes, gate)
    if verdicts.prompts < gate.min_prompts:
        return _too_few(words, gate)
    text = f"{words}; p={verdicts.p_value:.2g} at level {level:.2g} (register.alpha={gate.alpha:g})"
    if verdicts.p_value > level:
        needed = _needed(prompts_for_level, candidate.win_rate, verdicts.prompts, verdicts.ties, level)
        advice = _more_prompts(needed, candidate.grouped_prompts)
        return Decision(False, "first", text, tested=True, advice=advice)
    return _with_votes("first", text, candidate.regression, candidate.votes, gate)


def _by_match(
    candidate: Evaluation, match: Match, champion: Evaluation, gate: Gate, level: float
) -> Decision:
    """Return the decision about a candidate that has played a match against the champion."""
    words = (
        f"won {match.win_rate:.3f} [{match.low:.3f}, {match.high:.3f}] of the match against the champion on "
        f"{units(match.prompts, match.grouped_prompts, 'held-out prompts')}"
    )
    if match.judge:
        trained = f", {_NOT_INDEPENDENT}" if candidate.judge_trained_on else ""
        words += f" (judge: {match.judge.replace('_', ' ')}{trained})"
    if controlled := match.length_controlled:
        mean, low, high = (controlled[name] for name in ("mean", "low", "high"))
        words += f", length-controlled {mean:.3f} [{low:.3f}, {high:.3f}]"
        if "identified" in controlled:
            words += f" ({NOT_IDENTIFIED})"
    if match.away_win_rate is not None:
        words += f", and {match.away_win_rate:.3f} by the champion's reward model"
    words += _by_people(match.votes, gate)
    if match.prompts < gate.min_prompts:
        return _too_few(words, gate)
    if not _asked_champions_judge(match, champion):
        other = f"another judge ({_judge_name(champion)}), which did not judge this match"
        text = f"{words}; the champion was judged by {other}"
        return Decision(False, "judge", text, advice=BY_A_PERSON)
    text = f"{words}; evidence {_evidence(match.log_evidence)}"
    if match.away_win_rate is not None:
        text += f", and {_evidence(match.away_log_evidence)} by the champion's reward model,"
    text += f" of the {1 / level:.3g} needed (level {level:.2g}, register.alpha={gate.alpha:g} in a year)"
    if match.smaller_log_evidence < -math.log(level):
        is_own = match.log_evidence < -math.log(level)
        rule = "match" if is_own else "away"
        advice = _more_prompts(_needed_by_both(match, level), match.grouped_prompts)
        return Decision(False, rule, text, tested=True, advice=advice)
    # The evidence is its maximum over the prompts, so that the match can be lost in the end.
    if match.win_rate <= 0.5:
        text += "; the candidate must win more than half of the match"
        return Decision(False, "match", text, tested=True, advice=_BETTER)
    if match.away_win_rate is not None and match.away_win_rate <= 0.5:
        text += "; the candidate must win more than half of the match by the champion's reward model as well"
        return Decision(False, "away", text, tested=True, advice=_BETTER)
    if failed := failed_sets(match.regression):
        text += f"; regression sets failed against the champion: {', '.join(failed)}"
        return Decision(False, "regression", text, tested=True, advice=_AFTER_REGRESSION)
    return _with_votes("match", text, match.regression, match.votes, gate)


def _needed_by_both(match: Match, level: float) -> int | None:
    """Return the number of prompts of a match that is enough for each of its judges; None if none is."""
    judges = [(match.win_rate, match.prompts - match.wins - match.losses)]
    if match.away_win_rate is not None:
        judges.append((match.away_win_rate, match.away_ties))
    numbers = [_needed(prompts_for_evidence, rate, match.prompts, ties, level) for rate, ties in judges]
    known = [number for number in numbers if number is not None]
    return max(known) if len(known) == len(numbers) else None


def _needed(
    without_ties: Callable[[float, float], int | None], rate: float, prompts: int, ties: int, level: float
) -> int | None:
    """Return the number of prompts that is enough at this win rate and share of ties; None if none is.

    Ties count as half a win in the rate, and nothing in the test.

    Args:
        without_ties: Returns the number of prompts without a tie, from the win rate among them and the level.
        rate: Win rate, 0 to 1.
        prompts: Number of prompts, with ties.
        ties: Number of ties.
        level: Level of the test.
    """
    decided = prompts - ties
    if not decided:
        return None
    number = without_ties((rate * prompts - ties / 2) / decided, level)
    return None if number is None else math.ceil(number * prompts / decided)


def _more_prompts(needed: int | None, grouped_prompts: int) -> str:
    """Return what to do if there is too little evidence. The number of groups that are needed is that of
    groups of one prompt, so fewer larger ones can be enough.
    """
    if needed is None:
        return f"at this win rate no number of prompts is enough; {_BETTER}"
    unit = "groups of prompts" if grouped_prompts else "prompts"
    return f"at this win rate about {needed:,} {unit} are needed: raise {_MORE_PROMPTS}, or {_BETTER}"


def _evidence(logarithm: float) -> str:
    # math.exp raises OverflowError above 709.
    return f"{math.exp(min(logarithm, 700)):.3g}"


def _with_votes(
    rule: str, text: str, regression: Mapping[str, Any], votes: Votes | None, gate: Gate
) -> Decision:
    """Return the decision about a candidate that passed everything else."""
    if regression:
        text += f"; regression sets passed: {', '.join(regression)}"
    if gate.votes_margin is not None and votes is None:
        page = "rlhf review --against champion" if rule == "match" else "rlhf review"
        text += "; register.votes_margin needs votes of people"
        return Decision(False, "votes", text, tested=True, advice=f"run `{page}`, then set register.votes")
    if gate.lost(votes):
        text += "; people may prefer the champion"
        return Decision(False, "votes", text, tested=True, advice=_AFTER_VOTES)
    return Decision(True, rule, text, tested=True)


def _by_people(votes: Votes | None, gate: Gate) -> str:
    if not votes:
        return ""
    text = (
        f"; {votes['mean']:.3f} [{votes['low']:.3f}, {votes['high']:.3f}] by {votes['votes']:g} votes of"
        f" people on {votes['pairs']:g} pairs"
    )
    if gate.votes_margin is not None:
        text += f" (lower bound above {0.5 - gate.votes_margin:g} is needed)"
    return text


def _asked_champions_judge(match: Match, champion: Evaluation) -> bool:
    """Return whether the judge of the champion's own evaluation judged the match.

    Each retraining makes another reward model, so that of the champion judges the match as well.
    """
    if match.away_win_rate is not None:
        return True
    if champion.judge is None:  # records of older versions
        return match.judge != "reward_model"
    return (champion.judge, champion.judge_digest) == (match.judge, match.judge_digest)


def _too_few(words: str, gate: Gate) -> Decision:
    # A test was made, because its outcome is known: more prompts continue it at its level.
    text = f"{words}; register.min_prompts={gate.min_prompts} are needed"
    advice = f"raise {_MORE_PROMPTS} until there are enough"
    return Decision(False, "min_prompts", text, tested=True, advice=advice)


def _judge_name(record: Evaluation) -> str:
    if record.judge is None:
        return "an unknown judge"
    return record.judge.replace("_", " ")


def _mean(value: Any) -> float | None:
    match value:
        case {"mean": int() | float() as mean}:
            return float(mean)
    return None
