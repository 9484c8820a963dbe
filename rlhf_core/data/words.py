"""What counts as a word, in scripts with blanks between words and in those without.

A word is a run of letters and digits, with apostrophes and hyphens inside. Chinese, Japanese, Thai, Lao,
Tibetan, Burmese and Khmer have no blanks between words: each of their characters counts as a word. A sign or
emoji that touches no word is a word, and so is a run of it, such as `---`, and a line of a table between its
rows, such as `| --- | --- |`. Of a run that is too long to be a word, such as a repeated digit, each
character counts.
"""

from __future__ import annotations

import regex

WITHOUT_BLANKS = "\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""The scripts without blanks between words, as a part of a set in a regular expression."""
_LONGEST_WORD = 20
_PIECE = regex.compile(r"[^\W_]+(?:['’-][^\W_]+)*|(?<!\w)(?:([^\w\s])\1*)(?!\w)")
_LINE = regex.compile(
    r"(?=[|+]|---|===)(?<![|+:=-][ \t]*)(?=(?:[ \t]*(?:[|+:]|([-=])\1{0,99}+(?!\1))){1,60}+(?![ \t]*[|+:=-]))"
    r"([|+]|...)[ \t|+:=-]*"
)
"""Signs of a table on one line, which count as one: a line between its rows, or empty cells. More than 60
runs of a sign, or a run of more than 100, are a loop.
"""
_UNIT = regex.compile(rf"[{WITHOUT_BLANKS}]|[^{WITHOUT_BLANKS}]+")


def words(text: str) -> list[str]:
    """Return the words of a text in their order, with case folded."""
    pieces = _PIECE.finditer(_LINE.sub(r"\2 ", text.casefold()))
    return [unit for piece in pieces for unit in word_units(piece[0])]


def word_units(piece: str) -> list[str]:
    """Return the words of a text without blanks, in their order; signs that touch a word belong to it."""
    found: list[str] = []
    for unit in _UNIT.findall(piece):
        found += [unit] if len(unit) <= _LONGEST_WORD else list(unit)
    return found
