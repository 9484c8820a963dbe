r"""Rule rewards: one pure function per rule of `rlhf_core.config.rewards`, each of one response.

Every function takes its configuration and one `RewardInput` and returns a finite float; ranges are given per
rule. `rlhf_core.data.words` says what a word is.

Of the answer of a response, only what follows the thoughts counts. The answer is the first of these that the
response has:

    box      the content of the last `\boxed{}` or `\fbox{}`; a box that is cut off has no answer
    marker   the last line of `####` and a number (GSM8K)
    phrase   what follows the last `answer is`, `answer:` or heading `Answer`
    text     the whole of a single line, or its last number or formula

A number is never taken out of a formula, a list, a range or a date: `$\sqrt{3}$`, `3 and 5`, `5-7`,
`12/25/2024`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

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
from rlhf_core.data.answers import boxed, canonical, gold_answers, number, same_answer
from rlhf_core.data.formats import field_value
from rlhf_core.data.words import WITHOUT_BLANKS, words
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


# -- the answer of a response, and whether it is that of the row (`data.answers`) --


Extract = Literal["auto", "final_number", "boxed"]

# `_runs` searches the text before each number for an operator, so the time grows with the square of this.
_WINDOW = 2000
"""Without a box, a marker or a phrase, the answer is looked for in this many characters at the end."""
_TAG = r"(?:think(?:ing)?|thoughts?|reasoning)"
_THOUGHTS_END = regex.compile(rf"</{_TAG}>|\[/THINK\]", regex.IGNORECASE)
_THOUGHTS_START = regex.compile(rf"<{_TAG}>|\[THINK\]", regex.IGNORECASE)
# No `<answer>` inside: with one that is never closed, the match would begin there and end at the next answer.
_ANSWER_TAG = regex.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", regex.DOTALL | regex.IGNORECASE)
_MARKER = regex.compile(r"^[ \t]*####[ \t]*(\S.{0,200})$", regex.MULTILINE)
# `####` also begins a heading in Markdown. `#### 2 ways` is one, and no answer.
_MARKED_UNITS = ("", "%", "dollar", "euro", "pound")
_PHRASE = regex.compile(
    r"\banswers?(?: (?:to|of|for) [^.:\n]{1,60}?)?[*_]*\s?(?:\b(?:is|are|equals)\b|[:=])"
    r"|^[#*_ ]*(?:(?:the|my|final|correct) )*answer[*_ ]*$",
    regex.IGNORECASE | regex.MULTILINE,
)
_SENTENCE_END = regex.compile(r"[.;!?](?:\s|$)|\n")
_NEGATION = regex.compile(r"\b(?:not|no|never|neither|cannot)\b|n['’]t\b|不是", regex.IGNORECASE)
# As in pandoc, no digit follows a closing $: `$5 and $6` are two prices.
_FORMULA = r"\$\$[^$]+\$\$|\\\[.+?\\\]|\\\(.+?\\\)|(?<!\\)\$[^$\n]+(?<!\\)\$(?!\d)"
# A word in a script without blanks is no part of the number beside it, as in `共有12个`.
_SEPARATORS = '\\s|\u3001\u3002\uff0c\uff1a\uff1b\uff01\uff1f“”«»「」"'
_ITEM = regex.compile(rf"(?P<formula>{_FORMULA})|[^{_SEPARATORS}{WITHOUT_BLANKS}]+", regex.DOTALL)
_HAS_DIGIT = regex.compile(r"[\p{Nd}\p{No}]")
_IN_FORMULA = regex.compile(r"[\p{Nd}\\=]")
# Between the items of a list, a range, a calculation or a mixed number.
_CONNECTION = regex.compile(r"[,;]?[ \t]*(?:and|or|to|[-–+*/x×÷&]|(?<=[ \t]):)?[ \t]*", regex.IGNORECASE)
_OPERATOR_BEFORE = regex.compile(r"[^\s][ \t]*[-–−+*/^×÷<>][ \t]*$")
_OPERATOR_AFTER = regex.compile(r"[ \t]*(?:[+/^×÷<>]|\*[ \t])")
_CALCULATION = regex.compile(r"(?:[^\W\d]+:)?(?:[-+*/×÷().,$%\d\s]|(?<=\d ?)x(?= ?\d))+=(?!.*=)")
_TOKEN = regex.compile(r"[^'‘`~*_,;:!?<](?:.*[^'’`~*_.,;:!?>–-])?")
# Three digits after a comma are thousands, as in `1,234`.
_DECIMAL_COMMA = regex.compile(r"([-+]?\d+),(\d{1,2}|\d{4,})")


def is_right(response: str, wanted: str, extract: Extract = "auto") -> bool:
    """Return whether the answer of a response is `wanted`.

    Args:
        response: Text of the response.
        wanted: One of `gold_answers`.
        extract: See `AnswerReward`.
    """
    text = without_thoughts(response)
    if extract == "final_number":
        found = final_number(text)
        return found is not None and same_answer(found, wanted)
    content = boxed(text)
    if content is not None or extract == "boxed":
        return content is not None and same_answer(content, wanted)
    return any(same_answer(reading, wanted) for reading in _readings(text))


def without_thoughts(response: str) -> str:
    """Return what follows the last thoughts, in `<answer>` if it has that; "" if the thoughts have no end."""
    # By the end alone: templates of some models put `<think>`
    # into the prompt, so that no response begins with it.
    text = _THOUGHTS_END.split(response)[-1]
    if _THOUGHTS_START.search(text):
        return ""
    if tagged := _ANSWER_TAG.findall(text):
        text = tagged[-1]
    return str(text).strip()


def final_number(text: str) -> str | None:
    """Return the number that the answer of a text is; None without one."""
    for reading in _readings(text):
        if number(canonical(reading)) is not None:
            return reading
    return None


def _readings(text: str) -> Iterator[str]:
    """Yield the spellings of the one answer of a text, without its box. There may be none."""
    for line in reversed(_MARKER.findall(text)):
        marked = number(canonical(line))
        if marked is not None and marked.unit in _MARKED_UNITS:
            yield line
            return
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        whole = text.strip()
        if "\n" not in whole:
            yield whole
        runs = _runs(text[-_WINDOW:])
        if runs and not _NEGATION.search(runs[-1][0][-10:]):
            yield from _spellings(runs[-1][1], is_all=runs[-1][1] == whole)
        return
    rest = regex.sub(r"^(?:[\s:*_#>\"“]|-\s)+", "", text[phrases[-1].end() :][:_WINDOW])
    line = rest.split("\n")[0]
    runs = _runs(line)
    if runs and not runs[0][0]:
        yield from _spellings(runs[0][1], is_all=False)
    sentence = _SENTENCE_END.split(line)[0].strip("*_ ")
    yield sentence
    runs = _runs(sentence)
    if len(runs) == 1 and not _NEGATION.search(sentence):
        yield from _spellings(runs[0][1], is_all=False)


def _spellings(run: str, *, is_all: bool) -> Iterator[str]:
    """Yield the spellings of a run; `is_all`: nothing else is in the response."""
    yield run
    calculation = _CALCULATION.match(run)
    if calculation:
        yield run[calculation.end() :]
    comma = _DECIMAL_COMMA.fullmatch(run)
    # Of a text in a sentence. Alone, `3,5` is a list.
    if comma and not is_all:
        yield f"{comma[1]}.{comma[2]}"


def _runs(text: str) -> list[tuple[str, str]]:
    """Return the numbers and formulas of a text in their order, each after the text before it.

    What is connected is one run. Runs beside an operator are left out.
    """
    # In `-$ 3`, the blank would separate the number from its sign.
    text = regex.sub(r"(?<=[$€£])[ \t]+(?=\d)", "", text)
    spans: list[tuple[int, int]] = []
    for found in _ITEM.finditer(text):
        start, end = found.span()
        if found["formula"]:
            if not _IN_FORMULA.search(found[0]):
                continue
        elif _HAS_DIGIT.search(found[0]):
            start, end = _trimmed(text, start, end)
        else:
            continue
        if spans and _CONNECTION.fullmatch(text, spans[-1][1], start):
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    runs = []
    for start, end in spans:
        if not _OPERATOR_BEFORE.search(text[:start]) and not _OPERATOR_AFTER.match(text, end):
            runs.append((text[:start], text[start:end]))
    return runs


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the span of a token without the signs around it; brackets stay if both are there."""
    start, end = _TOKEN.search(text, start, end).span()
    opened = sum(map(text[start:end].count, "([{"))
    closed = sum(map(text[start:end].count, ")]}"))
    start += opened > closed and text[start] in "([{"
    end -= closed > opened and text[end - 1] in ")]}"
    return start, end
