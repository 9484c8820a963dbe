"""What the responses of late steps say and those of early steps did not: n-grams and openings."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

_LONGEST = 5
_SHOWN = 60
_SAME = 0.02
"""Difference of two shares that hides a phrase within a longer one."""
_LEAST_RISE = 0.01


@dataclass(frozen=True)
class Phrase:
    """A phrase that became more frequent."""

    text: str
    before: float
    """Share of the responses before with the phrase."""
    after: float
    """Share of the responses after."""
    times: float
    """Mean number in a response after that has it."""
    differences: Mapping[str, float | None]
    """Mean with the phrase minus mean without it, of both groups, by score; None if one of both is empty."""

    @property
    def rise(self) -> float:
        return self.after - self.before


def n_grams(words: Sequence[str]) -> Iterator[str]:
    """Yield all sequences of one to five words, as often as they occur."""
    for size in range(1, _LONGEST + 1):
        for start in range(len(words) - size + 1):
            yield " ".join(words[start : start + size])


def openings(words: Sequence[str]) -> Iterator[str]:
    """Yield the first one to five words."""
    for size in range(1, min(_LONGEST, len(words)) + 1):
        yield " ".join(words[:size])


def risen(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    scores: Sequence[str],
    phrases_of: Callable[[Sequence[str]], Iterator[str]],
) -> list[Phrase]:
    """Return the phrases whose share rose most, the largest rise first.

    Args:
        before: Responses: rows with `text` and the scores.
        after: The responses that are compared with them.
        scores: Names of scores, of which a row may have none (None).
        phrases_of: Yields the phrases of the words of a response.
    """
    rows = [*before, *after]
    found = [Counter(phrases_of(row["text"].split())) for row in rows]
    of_before, of_after = _shares(found[: len(before)]), _shares(found[len(before) :])
    rises = {phrase: share - of_before.get(phrase, 0.0) for phrase, share in of_after.items()}
    rising = sorted(
        (phrase for phrase, rise in rises.items() if rise >= _LEAST_RISE),
        key=lambda phrase: (-rises[phrase], -len(phrase), phrase),
    )
    chosen = (phrase for phrase in rising if not _is_within_longer(phrase, rising, rises))
    results = []
    for phrase in islice(chosen, _SHOWN):
        holders = {number for number, counts in enumerate(found) if phrase in counts}
        times = [found[number][phrase] for number in holders if number >= len(before)]
        differences = {name: _difference(rows, holders, name) for name in scores}
        shares = of_before.get(phrase, 0.0), of_after[phrase]
        results.append(Phrase(phrase, *shares, statistics.fmean(times), differences))
    return results


def _shares(found: Sequence[Counter[str]]) -> dict[str, float]:
    """Return the share of the responses with each phrase."""
    holders = Counter(phrase for counts in found for phrase in counts)
    return {phrase: count / len(found) for phrase, count in holders.items()}


def _is_within_longer(phrase: str, rising: Sequence[str], rises: Mapping[str, float]) -> bool:
    """Return whether a longer phrase contains this one and rose almost as much."""
    inner = f" {phrase} "
    for other in rising:
        if rises[other] < rises[phrase] - _SAME:
            return False
        if len(other) > len(phrase) and inner in f" {other} ":
            return True
    return False


def _difference(rows: Sequence[Mapping[str, Any]], holders: set[int], name: str) -> float | None:
    groups: tuple[list[float], list[float]] = ([], [])
    for number, row in enumerate(rows):
        if row[name] is not None:
            groups[number not in holders].append(row[name])
    if not all(groups):
        return None
    return statistics.fmean(groups[0]) - statistics.fmean(groups[1])
