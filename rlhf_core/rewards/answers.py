r"""The answer of a response: where it stands, and whether it is that of the row (`data.answers`).

Only what follows the thoughts counts. The answer is the first of these that the response has:

    box      the content of the last `\boxed{}` or `\fbox{}`; a box that is cut off has no answer
    marker   the last line of `####` and a number (GSM8K)
    phrase   what follows the last `answer is`, `answer:` or heading `Answer`
    text     the whole of a single line, or its last number or formula

A number is never taken out of a formula, a list, a range or a date: `$\sqrt{3}$`, `3 and 5`, `5-7`,
`12/25/2024`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import regex

from rlhf_core.data.answers import boxed, canonical, number, same_answer
from rlhf_core.data.words import WITHOUT_BLANKS

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
