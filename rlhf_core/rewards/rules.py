"""Rule rewards: one pure function per rule of `rlhf_core.config.rewards`, each of one response.

Every function takes its configuration and one `RewardInput` and returns a finite float; ranges are given per
rule. `rlhf_core.data.words` says what a word is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import regex

from rlhf_core.config.rewards import (
    AnswerReward,
    AnyReward,
    FormatReward,
    GoldReward,
    KeywordsReward,
    LengthReward,
    RelevanceReward,
    RepetitionReward,
    RewardSource,
    TokenShareReward,
    WellFormedReward,
    compiled,
)
from rlhf_core.data.answers import gold_answers
from rlhf_core.data.formats import field_value
from rlhf_core.data.words import WITHOUT_BLANKS, words
from rlhf_core.rewards.answers import is_right
from rlhf_core.types import RewardInput

log = logging.getLogger(__name__)

MATCH_SECONDS = 1.0
"""Time limit of a pattern on one response; see `format_match`."""

_CLOSERS = "\"'”’»)]}*_"
_OPENERS = "\"'“‘«([{*_¿¡"
# `regex` and not `re`, which has no time limit, no `\p{...}` and no lookbehind of variable length.
_FULL_STOP = regex.compile(r"[\p{Sentence_Terminal}…]|[\u0e00-\u0eff]")
"""Thai and Lao sentences end without a mark."""
_LETTER = rf"[^\W{WITHOUT_BLANKS}]"
"""A letter or digit beside which a word cannot begin or end."""
_IS_CHARACTER = regex.compile(rf"[{WITHOUT_BLANKS}]")


def answer(source: AnswerReward, sample: RewardInput) -> float:
    """Return 0 or 1: 0 if the prompt's row has no answer, as `require_answers` allows for a few rows."""
    answers = gold_answers(field_value(sample.meta, source.field))
    return float(any(is_right(sample.response, each, source.extract) for each in answers))


def gold(sample: RewardInput) -> float:
    """Return the synthetic task's true reward."""
    from rlhf_core.data.synthetic import gold_reward

    return float(gold_reward(sample.prompt, sample.response, sample.finished))


def length(source: LengthReward, sample: RewardInput) -> float:
    """Return max(0, 1 - |T - target| / tolerance), in [0, 1]; T counts the generated tokens, EOS included."""
    distance = abs(len(sample.response_ids) - source.target)
    return max(0.0, 1.0 - distance / source.tolerance)


def keywords(source: KeywordsReward, sample: RewardInput) -> float:
    """Return per_word * min(cap, occurrences), in [0, per_word * cap], or below 0 if `per_word` is."""
    counts = [len(_whole_word(word).findall(sample.response)) for word in source.words]
    if source.distinct:
        counts = [min(count, 1) for count in counts]
    return source.per_word * min(source.cap, sum(counts))


def format_match(source: FormatReward, sample: RewardInput, seconds: float = MATCH_SECONDS) -> float:
    """Return 1.0 if the pattern matches the response from end to end, with or without the white space around
    it, else 0.0.

    A pattern with nested quantifiers can need exponential time on an unlucky text, so matching is bounded by
    `seconds`; a response on which it is not decided by then counts as no match and is named in the log.
    """
    pattern, text = compiled(source.pattern), sample.response
    try:
        found = pattern.fullmatch(text, timeout=seconds) or pattern.fullmatch(text.strip(), timeout=seconds)
        return float(found is not None)
    except TimeoutError:
        log.warning(
            "reward %s: the pattern was not decided within %g s on the response to prompt %s, which counts"
            " as no match; rewrite the pattern without nested quantifiers",
            source.used_name, seconds, sample.prompt_id,
        )  # fmt: skip
        return 0.0


def repetition(source: RepetitionReward, sample: RewardInput) -> float:
    """Return distinct / total - 1 over the n-grams of words, in (-1, 0]; 0 for a text without n-grams."""
    found = words(sample.response)
    grams = Counter(tuple(found[i : i + source.ngram]) for i in range(len(found) - source.ngram + 1))
    total = grams.total()
    if not total:
        return 0.0
    return len(grams) / total - 1.0


def relevance(source: RelevanceReward, sample: RewardInput) -> float:
    """Return the share, in [0, 1], of the prompt's distinct content words found in the response; 0 if the
    prompt has none.
    """
    wanted = _content_words(sample.prompt, source.min_letters)
    if not wanted:
        return 0.0
    return len(wanted & _content_words(sample.response, source.min_letters)) / len(wanted)


def well_formed(sample: RewardInput) -> float:
    """Return the mean of four checks, in {0, 0.25, 0.5, 0.75, 1}. Quotes and brackets around the text do not
    matter.
    """
    text = sample.response.strip()
    end = text.rstrip(_CLOSERS).rstrip()[-1:]
    start = text.lstrip(_OPENERS).lstrip()[:1]
    # The last condition is true for a letter of a script without case, such as Chinese.
    begins = start.isupper() or start.isdigit() or (start.isalpha() and start.lower() == start.upper())
    checks = (sample.finished, bool(text), _FULL_STOP.match(end) is not None, begins)
    return sum(checks) / len(checks)


def token_share(source: TokenShareReward, sample: RewardInput) -> float:
    """Return the share, in [0, 1], of response token ids under `below`; 0 for an empty response."""
    ids = sample.response_ids
    return int(np.count_nonzero(np.asarray(ids) < source.below)) / max(1, len(ids))


_RULES: dict[type[RewardSource], Callable[[Any, RewardInput], float]] = {
    GoldReward: lambda _, sample: gold(sample),
    LengthReward: length,
    KeywordsReward: keywords,
    FormatReward: format_match,
    RepetitionReward: repetition,
    RelevanceReward: relevance,
    WellFormedReward: lambda _, sample: well_formed(sample),
    TokenShareReward: token_share,
    AnswerReward: answer,
}


def evaluate_rule(source: AnyReward, sample: RewardInput) -> float:
    """Return the raw value of a rule source for one response.

    Raises the gold reward's error for a prompt of another task.
    """
    return _RULES[type(source)](source, sample)


def _content_words(text: str, min_letters: int) -> set[str]:
    """Return the words with enough letters. Of a script without blanks, two characters in a row are one."""
    found = words(text)
    content = {word for word in found if sum(map(str.isalpha, word)) >= min_letters}
    # `words` drops punctuation: two characters in a row there can end one sentence and begin the next one.
    pairs = ("".join(pair) for pair in pairwise(found) if all(map(_IS_CHARACTER.fullmatch, pair)))
    return content | {pair for pair in pairs if pair in text.casefold()}


@lru_cache(maxsize=256)
def _whole_word(word: str) -> Any:
    # Without blanks, nothing shows where a word begins and ends.
    before = "" if _IS_CHARACTER.match(word[0]) else f"(?<!{_LETTER})"
    after = "" if _IS_CHARACTER.match(word[-1]) else f"(?!{_LETTER})"
    # Not `\b`: there is no boundary between `+` and a blank, so that `C++` would never be found.
    return regex.compile(f"{before}{regex.escape(word)}{after}", regex.IGNORECASE)
