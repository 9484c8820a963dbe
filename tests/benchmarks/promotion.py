"""How often a policy that is no better is promoted, and how soon one that is.

52 weekly promotions by two former rules and by the present one, also with groups of related
prompts, with ties and with several answers to each prompt; and how often intervals contain the true value.

    python -m tests.benchmarks.promotion
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from scipy.stats import binom

from rlhf_core.evaluation.statistics import bootstrap_mean, win_rate
from rlhf_core.tracking.gate import BETS, YEAR, Spent, next_level
from tests.support.arguments import positive

HISTORIES, WEEKS, ALPHA = 2000, 52, 0.05
LEAST_PROMPTS = 1536
"""Prompts of a match with one judge that finds a win rate of 55 % within three weeks."""
LEAST_PROMPTS_OF_TWO = 1792
"""Prompts of a match that finds a win rate of 55 % by the candidate's and by the champion's judge."""
RELATED = (
    (512, 2, 0.2), (512, 4, 0.1), (512, 4, 0.3), (512, 4, 1.0), (512, 8, 0.1), (512, 8, 0.3),
    (512, 16, 0.1), (512, 16, 0.3), (512, 64, 0.05), (1536, 8, 0.1), (1536, 16, 0.1), (1536, 64, 0.05),
)  # fmt: skip
"""Prompts of a match, prompts of a group, and correlation of the outcomes in a group."""


def weekly_levels(weeks: int) -> list[float]:
    """Return the levels of weekly tests by the present rule."""
    spent: list[Spent] = []
    for week in range(weeks):
        now = week * YEAR / 52
        spent.append(Spent(now, next_level(spent, now, ALPHA)))
    return [test.level for test in spent]


def matches(chance: np.random.Generator, count: int, prompts: int, rate: float, ties: float) -> np.ndarray:
    """Return outcomes (count, prompts) of matches: 1, 0 or -1. A tie is half a win in `rate`."""
    draws = chance.random((count, prompts), dtype=np.float32)
    wins = rate - ties / 2
    outcomes = np.full((count, prompts), -1, dtype=np.int8)
    outcomes[draws < wins + ties] = 0
    outcomes[draws < wins] = 1
    return outcomes


def largest_log_evidence(outcomes: np.ndarray) -> np.ndarray:
    """Return `evidence.log_evidence` of each row (count,)."""
    wins = (outcomes > 0).cumsum(1, dtype=np.int32)
    losses = (outcomes < 0).cumsum(1, dtype=np.int32)
    total = np.full(outcomes.shape, -np.inf)
    for bet in BETS:
        np.logaddexp(total, wins * math.log1p(bet) + losses * math.log1p(-bet), out=total)
    largest: np.ndarray = total.max(1)
    return largest - math.log(len(BETS))


def grouped_matches(
    chance: np.random.Generator, count: int, groups: int, size: int, correlation: float, rate: float
) -> np.ndarray:
    """Return outcomes (count, groups, size) without ties, 1 or -1.

    The probability of a win is the same for all prompts of a group. Over groups it has a beta distribution
    with mean `rate` in which two outcomes of one group have this correlation.

    Args:
        chance: Random generator.
        count: Number of matches.
        groups: Groups of a match.
        size: Prompts of a group, or answers to a prompt.
        correlation: Correlation of two outcomes of a group, from 0 to 1.
        rate: Win rate of the candidate.
    """
    if correlation == 0.0:
        wins = np.full((count, groups), rate, dtype=np.float32)
    elif correlation == 1.0:
        wins = (chance.random((count, groups)) < rate).astype(np.float32)
    else:
        scale = 1 / correlation - 1
        wins = chance.beta(rate * scale, (1 - rate) * scale, (count, groups)).astype(np.float32)
    draws = chance.random((count, groups, size), dtype=np.float32)
    return np.where(draws < wins[:, :, None], 1, -1).astype(np.int8)


def log_evidence_of_means(means: np.ndarray) -> np.ndarray:
    """Return `evidence.log_evidence` of each row (count,) of mean outcomes (count, groups)."""
    capitals = [np.log1p(bet * means).cumsum(1) for bet in BETS]
    largest: np.ndarray = np.logaddexp.reduce(capitals).max(1)
    return largest - math.log(len(BETS))


def first_promoted(evidence: np.ndarray, levels: list[float]) -> np.ndarray:
    """Return the week (0, 1, ...) of the first promotion in each row; the number of weeks if there is none.

    `evidence` (histories, weeks).
    """
    promoted = evidence >= -np.log(levels)
    return np.where(promoted.any(1), promoted.argmax(1), promoted.shape[1])


def earlier_rules(outcomes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return p-values of the sign test, and whether the 95 % interval is above one half, of each row."""
    wins, losses = (outcomes > 0).sum(1), (outcomes < 0).sum(1)
    p_values = binom.sf(wins - 1, wins + losses, 0.5)
    mean, error = outcomes.mean(1), outcomes.std(1) / math.sqrt(outcomes.shape[1])
    return p_values, mean - 1.96 * error > 0


def equal_policies(
    chance: np.random.Generator, prompts: int, ties: float, histories: int = HISTORIES
) -> dict[str, float]:
    """Return the share of histories with a false promotion in 52 weeks, by rule.

    In "changing champion", a better policy has become champion before each week, so that the levels of the
    former rule, alpha / (k (k + 1)), begin again. For the present rule this makes no difference.
    """
    evidence = np.zeros((histories, WEEKS))
    p_values = np.zeros((histories, WEEKS))
    above = np.zeros((histories, WEEKS), dtype=bool)
    for week in range(WEEKS):
        outcomes = matches(chance, histories, prompts, 0.5, ties)
        evidence[:, week] = largest_log_evidence(outcomes)
        p_values[:, week], above[:, week] = earlier_rules(outcomes)
    number = np.arange(1, WEEKS + 1)
    return {
        "interval": float(above.any(1).mean()),
        "changing champion": float((p_values <= ALPHA / 2).any(1).mean()),
        "same champion": float((p_values <= ALPHA / (number * (number + 1))).any(1).mean()),
        "present": float((first_promoted(evidence, weekly_levels(WEEKS)) < WEEKS).mean()),
    }


def better_policy(
    chance: np.random.Generator,
    prompts: int,
    rate: float,
    ties: float,
    after: int,
    histories: int = HISTORIES,
) -> float:
    """Return the share of histories in which a better policy is promoted within three weeks.

    Args:
        chance: Random generator.
        prompts: Prompts of a match.
        rate: Win rate of the policy against the champion.
        ties: Share of ties.
        after: Weekly tests that were made before.
        histories: Number of histories.
    """
    evidence = np.zeros((histories, 3))
    for week in range(3):
        evidence[:, week] = largest_log_evidence(matches(chance, histories, prompts, rate, ties))
    return float((first_promoted(evidence, weekly_levels(after + 3)[after:]) < 3).mean())


def two_judges(
    chance: np.random.Generator,
    prompts: int,
    rates: tuple[float, float],
    weeks: int,
    after: int = 0,
    histories: int = HISTORIES,
) -> dict[str, float]:
    """Return the share of histories with a promotion if each candidate has a judge of its own, by rule.

    Verdicts of both judges on one prompt are independent. If they agree more often, a better policy is
    promoted more often, up to the share with one judge.

    Args:
        chance: Random generator.
        prompts: Prompts of a match.
        rates: Win rate of the policy by its own judge and by the champion's.
        weeks: Weekly tests.
        after: Weekly tests that were made before.
        histories: Number of histories.
    """
    needed = -np.log(weekly_levels(after + weeks)[after:])
    before, present = np.zeros(histories, dtype=bool), np.zeros(histories, dtype=bool)
    for week in range(weeks):
        own, champions = (matches(chance, histories, prompts, rate, 0.0) for rate in rates)
        has_own = (largest_log_evidence(own) >= needed[week]) & (own.mean(1) > 0)
        has_champions = (largest_log_evidence(champions) >= needed[week]) & (champions.mean(1) > 0)
        before |= has_own & (champions.mean(1) >= 0)
        present |= has_own & has_champions
    return {"before": float(before.mean()), "present": float(present.mean())}


def related_prompts(
    chance: np.random.Generator, prompts: int, size: int, correlation: float, histories: int = HISTORIES
) -> tuple[float, float]:
    """Return the share of histories with a false promotion in 52 weeks of equal policies: with one bet for
    each prompt, in a random order, and with one for each group.

    Args:
        chance: Random generator.
        prompts: Prompts of a match.
        size: Prompts of a group.
        correlation: Correlation of two outcomes of a group.
        histories: Number of histories.
    """
    of_prompts, of_groups = np.zeros((histories, WEEKS)), np.zeros((histories, WEEKS))
    for week in range(WEEKS):
        outcomes = grouped_matches(chance, histories, prompts // size, size, correlation, 0.5)
        shuffled = outcomes.reshape(histories, prompts)[:, chance.permutation(prompts)]
        of_prompts[:, week] = largest_log_evidence(shuffled)
        of_groups[:, week] = log_evidence_of_means(outcomes.mean(2))
    levels = weekly_levels(WEEKS)
    return (
        float((first_promoted(of_prompts, levels) < WEEKS).mean()),
        float((first_promoted(of_groups, levels) < WEEKS).mean()),
    )


def better_policy_by_group(
    chance: np.random.Generator,
    groups: int,
    size: int,
    correlation: float,
    rate: float,
    after: int,
    histories: int = HISTORIES,
) -> float:
    """Return the share of histories in which a better policy is promoted within three weeks.

    Args:
        chance: Random generator.
        groups: Groups of a match, each with one bet.
        size: Prompts of a group, or answers to a prompt.
        correlation: Correlation of two outcomes of a group.
        rate: Win rate of the policy against the champion.
        after: Weekly tests that were made before.
        histories: Number of histories.
    """
    evidence = np.zeros((histories, 3))
    for week in range(3):
        outcomes = grouped_matches(chance, histories, groups, size, correlation, rate)
        evidence[:, week] = log_evidence_of_means(outcomes.mean(2))
    return float((first_promoted(evidence, weekly_levels(after + 3)[after:]) < 3).mean())


def coverage(
    chance: np.random.Generator,
    prompts: int,
    size: int,
    correlation: float,
    rate: float,
    samples: int,
) -> dict[str, float]:
    """Return the share of samples whose interval (level 95 %) of the win rate contains the true one: Wilson's
    with and without groups, and the bootstrap with and without groups.

    Args:
        chance: Random generator.
        prompts: Prompts of a sample.
        size: Prompts of a group.
        correlation: Correlation of two outcomes of a group.
        rate: True win rate.
        samples: Number of samples.
    """
    groups = [str(index // size) for index in range(prompts)]
    wins = (1 + grouped_matches(chance, samples, prompts // size, size, correlation, rate)) / 2
    inside = {"Wilson, prompts": 0, "Wilson, groups": 0, "bootstrap, prompts": 0, "bootstrap, groups": 0}
    for values in wins.reshape(samples, prompts).tolist():
        found = (
            win_rate(values, confidence=0.95),
            win_rate(values, confidence=0.95, groups=groups),
            bootstrap_mean(values, resamples=400, confidence=0.95, seed=0),
            bootstrap_mean(values, resamples=400, confidence=0.95, seed=0, groups=groups),
        )
        for name, interval in zip(inside, found, strict=True):
            inside[name] += interval.low <= rate <= interval.high
    return {name: count / samples for name, count in inside.items()}


def print_related_prompts(chance: np.random.Generator, histories: int) -> None:
    """Print the tables about groups, ties, answers and intervals."""
    print(f"\nEqual policies, related prompts: share of {histories} histories with a false promotion")
    print("| prompts | in a group | correlation | one bet for each prompt | one bet for each group |")
    print("|---|---|---|---|---|")
    for prompts, size, correlation in RELATED:
        of_prompts, of_groups = related_prompts(chance, prompts, size, correlation, histories)
        print(f"| {prompts} | {size} | {correlation} | {of_prompts:.3f} | {of_groups:.3f} |", flush=True)
    print("\nA better policy, with ties: promoted within three weeks. Win rate without the ties")
    print("| win rate | ties | prompts | first weeks | after 52 weekly tests |")
    print("|---|---|---|---|---|")
    for decided, ties, prompts in (
        (0.55, 0.0, LEAST_PROMPTS), (0.55, 0.1, LEAST_PROMPTS), (0.55, 0.3, LEAST_PROMPTS),
        (0.55, 0.5, LEAST_PROMPTS), (0.55, 0.3, 2304), (0.55, 0.5, 3072), (0.6, 0.3, 576), (0.6, 0.5, 768),
    ):  # fmt: skip
        rate = decided * (1 - ties) + ties / 2
        shares = [better_policy(chance, prompts, rate, ties, after, histories) for after in (0, 52)]
        print(f"| {decided:.2f} | {ties:.0%} | {prompts} | {shares[0]:.3f} | {shares[1]:.3f} |")
    print("\nA better policy, several answers to each prompt or prompts to each group: promoted within three"
          " weeks. Win rate 0.55, without ties")  # fmt: skip
    print("| bets | outcomes of a bet | correlation | first weeks | after 52 weekly tests |")
    print("|---|---|---|---|---|")
    for bets, size, correlation in (
        (384, 4, 0.0), (384, 4, 0.1), (384, 4, 0.3), (512, 4, 0.1), (512, 4, 0.3), (768, 4, 0.3),
        (512, 8, 0.1), (LEAST_PROMPTS, 4, 0.3),
    ):  # fmt: skip
        shares = [
            better_policy_by_group(chance, bets, size, correlation, 0.55, after, histories)
            for after in (0, 52)
        ]
        print(f"| {bets} | {size} | {correlation} | {shares[0]:.3f} | {shares[1]:.3f} |")
    print(
        f"\nIntervals of win rates (95 %): share of {histories} samples in which they contain the true rate"
    )
    print("| prompts | in a group | correlation | rate | Wilson, prompts | Wilson, groups |"
          " bootstrap, prompts | bootstrap, groups |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for prompts, size, correlation, rate in (
        (128, 1, 0.0, 0.5), (128, 1, 0.0, 0.95), (128, 1, 0.0, 0.97), (128, 8, 0.1, 0.5), (128, 8, 0.3, 0.5),
        (128, 8, 0.3, 0.9), (512, 4, 0.3, 0.5), (512, 4, 1.0, 0.95), (512, 16, 0.1, 0.5),
        (512, 64, 0.05, 0.5),
    ):  # fmt: skip
        found = coverage(chance, prompts, size, correlation, rate, histories)
        shares_of = " | ".join(f"{share:.3f}" for share in found.values())
        print(f"| {prompts} | {size} | {correlation} | {rate} | {shares_of} |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--histories", type=positive, default=HISTORIES, help=f"of each case (default {HISTORIES})"
    )
    histories = parser.parse_args(arguments).histories
    chance = np.random.default_rng(0)
    print(f"Equal policies: share of {histories} histories of {WEEKS} weeks with a false promotion")
    print("| prompts | ties | 95 % interval | former rule, changing champion | former rule, same champion |"
          " present rule |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for prompts, ties in ((128, 0.0), (128, 0.1), (512, 0.0), (LEAST_PROMPTS, 0.0), (LEAST_PROMPTS, 0.1)):
        share = equal_policies(chance, prompts, ties, histories)
        print(f"| {prompts} | {ties:.0%} | " + " | ".join(f"{value:.3f}" for value in share.values()) + " |")
    print(f"\nA better policy: share of {histories} histories in which it is promoted within three weeks")
    print("| win rate | prompts | first weeks | after 52 weekly tests |")
    print("|---|---|---|---|")
    for rate, prompts in (
        (0.55, 512), (0.55, 1024), (0.55, LEAST_PROMPTS), (0.55, 2048), (0.6, 128), (0.6, 384),
        (0.65, 128), (0.65, 256), (0.7, 128),
    ):  # fmt: skip
        shares = [better_policy(chance, prompts, rate, 0.0, after, histories) for after in (0, 52)]
        print(f"| {rate:.2f} | {prompts} | {shares[0]:.3f} | {shares[1]:.3f} |")
    print(
        "\nA judge of the candidate's own that favours it, equal policies by the champion's: false promotions"
    )
    print(f"in {WEEKS} weeks, {histories} histories")
    print("| prompts | win rate by its own judge | evidence of this judge only | smaller evidence of both |")
    print("|---|---|---|---|")
    for prompts, rate in ((512, 0.55), (LEAST_PROMPTS, 0.5), (LEAST_PROMPTS, 0.55), (LEAST_PROMPTS, 0.6)):
        two = two_judges(chance, prompts, (rate, 0.5), WEEKS, histories=histories)
        print(f"| {prompts} | {rate:.2f} | {two['before']:.3f} | {two['present']:.3f} |")
    print("\nA better policy by both judges: promoted within three weeks")
    print("| win rate | prompts | first weeks | after 52 weekly tests |")
    print("|---|---|---|---|")
    for rate, prompts in (
        (0.55, 1024), (0.55, LEAST_PROMPTS), (0.55, LEAST_PROMPTS_OF_TWO), (0.55, 2048), (0.6, 384),
        (0.6, 448), (0.65, 192), (0.65, 256),
    ):  # fmt: skip
        shares = [
            two_judges(chance, prompts, (rate, rate), 3, after, histories)["present"] for after in (0, 52)
        ]
        print(f"| {rate:.2f} | {prompts} | {shares[0]:.3f} | {shares[1]:.3f} |")
    print_related_prompts(chance, histories)


if __name__ == "__main__":
    main()
