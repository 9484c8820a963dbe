"""Verifiable answers: the final number or the boxed expression of a response, compared with the row's own
answer.

    final number   after the last `####` if there is one (GSM8K), else the last number of the text
    boxed          what the last `\\boxed{...}` holds, braces inside included (MATH)

Numbers are compared exactly, as fractions: `1,234.50`, `.5`, `1e-05`, `$18`, `-3`, `3/4`, `\\frac{3}{4}`,
`25%` (as 25).
Anything else is compared as text without spaces, dollar signs, `\\text{}` and the full stop at its end.
"""

from __future__ import annotations

from fractions import Fraction

import regex

_NUMBER_LENGTH = 1000
"""Longer texts are not read as numbers. A policy can repeat a digit; Python reads at most 4,300."""
# A sign counts only if no word or number precedes it and no blank follows it: the last number of `10-3`,
# `10 - 3` and the list item `- 3` is 3. `v2x` has none.
_NUMBER = regex.compile(
    r"(?<![\w.])[-+−]?(?:[$€£]\s?)?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\w))?(?:\s?/\s?\d+)?(?![\d])",
)
_FRAC = regex.compile(r"^([-+−]?)\\[dt]?frac\{([-+−]?\d+)\}\{(\d+)\}$")
# With an exponent, which `str` gives a float in the row from 1e16 on and below 1e-4.
_WHOLE = regex.compile(r"^([-+−]?)((?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?)(?:/(\d+))?%?$")
_TEXT = regex.compile(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}")


def boxed(response: str) -> str | None:
    """Return the content of the last `\\boxed{...}`; None without a whole one."""
    start = response.rfind("\\boxed{")
    if start < 0:
        return None
    depth, first = 1, start + len("\\boxed{")
    for i in range(first, len(response)):
        depth += {"{": 1, "}": -1}.get(response[i], 0)
        if depth == 0:
            return response[first:i]
    return None


def final_number(response: str) -> str | None:
    """Return the number after the last `####`, else the last one of the response; None without a number."""
    _, marker, after = response.rpartition("####")
    numbers = _NUMBER.findall(after if marker else response)
    if not numbers:
        return None
    # After a marker the answer comes first, and words may follow it. In free text the answer comes last.
    return str(numbers[0] if marker else numbers[-1])


def same_answer(given: str, wanted: str) -> bool:
    """Return whether both are equal as numbers, or as text if one is not a number."""
    left, right = _as_number(given), _as_number(wanted)
    if left is not None and right is not None:
        return left == right
    return _as_text(given) == _as_text(wanted)


def _as_number(text: str) -> Fraction | None:
    if len(text) > _NUMBER_LENGTH:
        return None
    text = regex.sub(r"[\s,$€£]|\\[,;!$%]|\\left|\\right", "", text).rstrip(".")
    fraction, whole = _FRAC.match(text), _WHOLE.match(text)
    if fraction:
        # `Fraction` reads the ASCII minus only.
        sign, numerator, denominator = fraction[1], fraction[2].replace("−", "-"), int(fraction[3])
    elif whole:
        sign, numerator, denominator = whole[1], whole[2], int(whole[3] or 1)
    else:
        return None
    if denominator == 0:
        return None
    value = Fraction(numerator) / denominator
    return -value if sign in ("-", "−") else value


def _as_text(text: str) -> str:
    plain = regex.sub(r"[\s$]|\\[,;!]", "", _TEXT.sub(r"\1", text))
    return str(plain).rstrip(".").casefold()
