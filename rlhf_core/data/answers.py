r"""What an answer is: how the answers of rows are read, and when two answers are the same.

A row's answer is a text or a number. Of a solution, it is what stands after `####` or in `\boxed{}`. A list
or an object with one element means this element. A list of texts, of which at most one is mathematics, has
several spellings of one answer.

Two answers are the same if they are equal as one of these:

    number       exactly, as fractions: `1,234.50`, `1.000.000`, `9{,}500`, `3/4`, `\frac34`, `1\frac12`,
                 `2e5`, `2\times10^5`. A unit counts only if both have one: `35\text{ cm}`, `9 (apples)`,
                 `$18`, `25\%`
    list         by mathematics: `(1,2)` and `[0,1)` in their order, `1,2`, `1 and 2` and `\{1,2\}` in any
    choice       `E`, `(E)`, `E: text`
    text         without LaTeX's decoration, and words without case
    expression   by mathematics (`expressions`): `2\sqrt{3}` and `\sqrt{12}`
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import regex

from rlhf_core.data.expressions import equal

MAX_LENGTH = 1000
"""A longer text is no answer. A policy can repeat a digit; Python reads at most 4,300."""

_BOX = regex.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_SIGNS = str.maketrans({
    "−": "-", "–": "-", "‐": "-", "‑": "-", "⁄": "/", "∕": "/", "×": r"\times ", "·": r"\cdot ",
    "÷": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ",
    "∈": r"\in ", "°": r"^\circ", "、": ",", "٫": ".", "٬": ",",
    "\u00a0": r"\,", "\u2009": r"\,", "\u202f": r"\,",
})  # fmt: skip
_DECORATION = (
    (r"\\f?box(?:ed)? ?\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}", r"\1"),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![A-Za-z])|\\! ?|\*\*|__(?!\d)", ""),
    (r"\\[dtc]frac", r"\\frac"),
    # `{,}` and a thin space before three digits group them; another `{,}` is a decimal comma.
    (r"(?<=\d)(?:\\[,;: ]|~|\{,\})+(?=\d{3}(?!\d))", ","),
    (r"(?<=\d)\{,\}(?=\d)", "."),
    (r"\\$", ""),
    (r"\\%", "%"),
    (r"\\[$()\[\]]", "$"),
    # A text at the end is a unit, with its exponent.
    (r"(?<=[\w)}])(?:\\[,;: ]|~|\s)*\\(?:text|mathrm|textrm|mbox|rm)\s*\{\s*([A-Za-z][^{}\d]*)\}"
     r"(\^\{?-?\d\}?)?$", r"¤\1\2"),
    (r"\\(?:(?:text|math)(?:bf|rm|it|sf|tt|normal)|mbox|operatorname|boldsymbol)(?![A-Za-z])", r"\\text"),
    (r"\\text ?\{([^{}]*)\}", r"\1"),
    (r"(?:(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~|\s)+", " "),
    (r"(?: ?\^ ?(?:\{ ?\\circ ?\}|\\circ)| ?¤?\\?degrees?)$", "¤degree"),
    (r" ?¤? ?(?:%|percent|percentage|pct)$", "¤%"),
    (r"(?<=\d) ?/ ?([A-Za-z]{3,})$", r"¤/\1"),
    (r"(?<=\d) ?\(([A-Za-z]{2}[^()\d]*)\)$", r"¤\1"),
    (r";|(?:(?<=[\s)¤\d]),?|(?<=,)) ?\b(?:and|or)\b", ","),
    # Groups of three digits. No element of a list begins with 0, so a group that does may follow a blank.
    (r"(?<![\d.,(\[]|\\\{)\d{1,3}(?:,\d{3})+(?!\d|,\d)", lambda found: found[0].replace(",", "")),
    (r"(?<![\d.,])\d{1,3}(?:, ?0\d\d)+(?!\d|,\d)", lambda found: regex.sub("[, ]", "", found[0])),
    (r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?!\d|[.,]\d)", lambda found: found[0].replace(".", "")),
    (r"(?<![\\\w])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi"),
    (r"([_^]) ?\{(\w)\}", r"\1\2"),
    (r"(?<=\d) ?(?:x|\*|\\times|\\cdot) ?(?=10\^)", r"\\times "),
    (r"^(-?)(?=10\^)", r"\g<1>1\\times "),
    (r" ?([^\w\s¤\\.)]) ?| (?=\))", r"\1"),
    (r"^([-+]?)\\?([$€£])([-+]?[\d.][^$¤]*?)\.?$", r"\1\3¤\2"),
    (r"[$€£](?=.*¤)|\$", ""),
)  # fmt: skip
"""What is written in several ways becomes one. The order matters: units and separators need what the later
rules remove.
"""
_DECORATIONS = [(regex.compile(pattern), replacement) for pattern, replacement in _DECORATION]

_DIGITS = r"(?:\d+(?:\.\d+)?|\.\d+)"
_FRACTION = regex.compile(rf"\\frac ?(?:\{{(-?{_DIGITS})\}}|(\d)) ?(?:\{{(-?{_DIGITS})\}}|(\d))")
_NUMBER = regex.compile(
    rf"(?P<sign>[-+]?)(?:(?P<whole>\d+) (?=\d+/))?"
    # At most three digits of an exponent: `1e999999999` would be a fraction of a billion digits.
    rf"(?P<plain>{_DIGITS})(?:(?:[eE]|\\times 10\^)\{{?(?P<e>[-+]?\d{{1,3}})\}}?|/(?P<by>-?{_DIGITS}))?"
)
# `2xy` and `2 x` are products. A unit has at least three letters, or four if no blank is before it.
_SHORT = "cm|mm|km|kg|mg|ml|ft|lbs?|oz|yd|hrs?|am|pm|st|nd|rd|th|kb|mb|gb|tb"
_NO_UNIT = r"sin|cos|tan|log|exp|and\b|times|plus|minus"
_UNIT = regex.compile(
    rf"(?<=\d)(?: (?!{_NO_UNIT})(?=[A-Za-z]{{3}})|(?=[A-Za-z]{{4}})| ?(?=(?:{_SHORT})\b|[€£]))"
    r"((?:[A-Za-z]+|[€£])(?:[ /.-](?!(?:and|or)\b)[A-Za-z]+|\^\{?-?\d\}?)*)$"
)
_UNITS = {"$": "dollar", "usd": "dollar", "€": "euro", "£": "pound"}
_CHOICE = regex.compile(r"\(([A-Za-z])\)(?=[\s.,:¤]|$)|([A-Za-z])(?:[.:)](?=\s|$)|:|$)")
_NAME = regex.compile(r"([A-Za-z](?:_\{?\w+\}?)?(?:\([a-z,]+\))?) ?(?:=|\\in ?)([^=<>]+)")
_NO_WORDS = regex.compile(r"[\\\d=+*/^<>|_]")


class Number(NamedTuple):
    """A number with its unit."""

    value: Fraction
    unit: str
    """Empty without one."""


def gold_answers(value: Any) -> tuple[str, ...]:
    """Return the spellings of a row's answer; none if it cannot be read."""
    while isinstance(value, list | Mapping) and len(value) == 1:
        value = value[0] if isinstance(value, list) else next(iter(value.values()))
    if isinstance(value, list):
        texts = [text for each in value if isinstance(each, str | int | float) for text in gold_answers(each)]
        expressions = sum(_NO_WORDS.search(canonical(text)) is not None for text in texts)
        return tuple(texts) if len(texts) == len(value) and expressions <= 1 else ()
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ()
    text = str(value)
    # GSM8K's own answers end with `#### 18`.
    text = text.rpartition("####")[2].strip() or text
    found = boxed(text)
    text = text if found is None else found
    return (text,) if canonical(text) else ()


def is_reachable(text: str, *, only_numbers: bool = False) -> bool:
    r"""Return whether a response with `\boxed{text}` gets the reward; with `only_numbers`, one that ends with
    `text`.
    """
    if only_numbers and number(canonical(text)) is None:
        return False
    # An answer with unbalanced braces ends its own box early or leaves it open.
    return boxed(rf"\boxed{{{text}}}") == text.strip() and same_answer(text, text)


def rewording(value: Any) -> str:
    """Return how a row's answer is read, for messages; "" if it is read as it is written.

    It is not if it is read as its element, or as a number with the unit after it.
    """
    if isinstance(value, str | int | float) and not ("¤" in canonical(str(value)) and str(value)[-1] == ")"):
        return ""
    return " or ".join(repr(canonical(text).partition("¤")[0]) for text in gold_answers(value))


def boxed(response: str) -> str | None:
    r"""Return the content of the last `\boxed{}` or `\fbox{}`; None without one, "" if it is not closed."""
    boxes = list(_BOX.finditer(response))
    if not boxes:
        return None
    first = boxes[-1].end()
    if response[first : first + 1] != "{":
        return response[first:].split("$")[0].split("\n")[0].split(" ")[0].rstrip(".,")
    depth, i = 0, first
    while i < len(response):
        if response[i] == "\\":
            i += 1
        else:
            depth += {"{": 1, "}": -1}.get(response[i], 0)
        if depth == 0:
            return response[first + 1 : i].strip()
        i += 1
    return ""


def same_answer(given: str, wanted: str) -> bool:
    """Return whether two answers are the same. A text without content is the same as nothing."""
    left, right = canonical(given), canonical(wanted)
    return bool(left and right) and _same(left, right)


@lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    """Return a text in one spelling: ASCII digits and signs, LaTeX without decoration, a unit after `¤`."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        return ""
    text = _ascii(text)
    for pattern, replacement in _DECORATIONS:
        text = pattern.sub(replacement, text).strip()
    return text.rstrip(".,; ") if text.count("{") == text.count("}") else ""


def number(text: str) -> Number | None:
    """Return a canonical text as a number, or None."""
    text, _, unit = text.partition("¤")
    found = _UNIT.search(text)
    if found and not unit:
        text, unit = text[: found.start()], found[1]
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    value = _value(text)
    return None if value is None else Number(value, _unit_name(unit))


def _value(text: str) -> Fraction | None:
    text = _FRACTION.sub(r" \1\2/\3\4", text, count=1)
    found = _NUMBER.fullmatch(text.replace("- ", "-").strip())
    if found is None:
        return None
    plain = found["plain"]
    if len(plain) in (17, 18, 19) and len(plain.partition(".")[2]) >= 12:
        plain = f"{float(plain):.15g}"  # 0.1 + 0.2 is 0.30000000000000004 in most programs
    value = Fraction(plain) * Fraction(10) ** int(found["e"] or 0)
    if found["by"]:
        divisor = Fraction(found["by"])
        if divisor == 0:
            return None
        value = int(found["whole"] or 0) + value / divisor
    return -value if found["sign"] == "-" else value


def _unit_name(unit: str) -> str:
    words = unit.casefold().replace("{", "").replace("}", "").replace(".", "").split()
    unit = " ".join(word.removesuffix("s") or word for word in words)
    return _UNITS.get(unit, unit)


def _ascii(text: str) -> str:
    """Return a text with ASCII digits and signs. Raised digits become an exponent."""
    text = regex.sub("[⁰¹²³⁴-⁹⁻]+", r"^{\g<0>}", text.translate(_SIGNS))
    text = regex.sub(r"(?<=\d)(?=\p{No})", " ", text)  # 3½ is a mixed number
    text = regex.sub(r"\p{Nd}", lambda found: str(unicodedata.decimal(found[0])), text)
    # The standard form has `1⁄2` for ½, and the minus of mathematics for a raised one.
    return unicodedata.normalize("NFKC", text).translate(_SIGNS)


def _same(left: str, right: str) -> bool:
    """Return whether two canonical texts are the same answer."""
    if left == right:
        return True
    first, second = number(left), number(right)
    if first is not None and second is not None:
        return first.value == second.value and _same_unit(first.unit, second.unit)
    choice = _CHOICE.fullmatch(right)
    if choice:
        other = _CHOICE.match(left)
        return other is not None and other[other.lastindex] == choice[choice.lastindex]
    named, other_named = _NAME.fullmatch(left), _NAME.fullmatch(right)
    if named or other_named:
        left_name, left_value = named.groups() if named else ("", left)
        right_name, right_value = other_named.groups() if other_named else ("", right)
        if not (left_name and right_name) or left_name == right_name:
            return _same(left_value, right_value)
    both = left + right
    if "," in both and r"\pm" not in both and _list_signs(left) != _list_signs(right):
        return False
    left, _, unit = left.partition("¤")
    right, _, other_unit = right.partition("¤")
    if not _same_unit(_unit_name(unit), _unit_name(other_unit)):
        return False
    if len(left) > 1 and not _NO_WORDS.search(left):
        return sorted(left.casefold().split(",")) == sorted(right.casefold().split(","))
    return equal(left, right)


def _same_unit(first: str, second: str) -> bool:
    return not first or not second or first == second


def _list_signs(text: str) -> list[str]:
    """Return the brackets and commas, which tell a point, an interval and a set from each other."""
    return sorted(character for character in text if character in "()[],")
