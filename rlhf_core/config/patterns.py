"""Regular expressions of the configuration: those of Python's `re` with DOTALL, and with a time limit.

`re` has no time limit, so the package `regex` is used for matching. `regex` has additional syntax: for
example, `{e<2}` means fuzzy matching and `[[:alpha:]]` is a POSIX class, while `re` treats these characters
literally. They are escaped before compilation, so that a pattern has the same meaning as in `re`.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import Any

import regex

_QUANTIFIER = re.compile(r"\{([0-9]+(,[0-9]*)?|,[0-9]*)\}")
_PLAIN = re.compile(r"\\N\{[^}]*\}|\\.|\(\?#[^)]*\)", re.DOTALL)
"""Parts that are copied unchanged: an escape, a named character, a comment."""
_VERBOSE = re.compile(r"\\.|\(\?#[^)]*\)|\[\^?\]?(?:\\.|[^\]\\])*\]|(\(\?[a-zA-Z]*x)", re.DOTALL)
"""An escape, a comment, a set, or the beginning of a group with the flag x, which is group 1."""


def pattern_problem(pattern: str) -> str | None:
    """Return why `pattern` cannot be used, or None. It must compile with `re` and with `regex`."""
    if any(part[1] for part in _VERBOSE.finditer(pattern)):
        return "has the flag x (verbose), which is not supported; leave it out, with the blanks and comments"
    try:
        with warnings.catch_warnings():
            # `[[a]` and `[a--b]` will have a different meaning in a later Python version
            warnings.simplefilter("error")
            re.compile(pattern)
        compiled(pattern)
    except FutureWarning as error:
        return f"is ambiguous: {error}; write a backslash before the bracket or sign that is meant as itself"
    except RecursionError:
        return "is nested too deeply; flatten it"
    except Exception as error:  # re.error, regex.error, OverflowError or MemoryError
        return f"does not compile: {error}"
    return None


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """Compile `pattern` with `regex`, with its meaning in `re`. Its `fullmatch` accepts a `timeout`.

    A dot matches line feeds, because responses have several lines.
    """
    return regex.compile(_escaped(pattern), regex.VERSION0 | regex.DOTALL)


def _escaped(pattern: str) -> str:
    """Escape the braces and brackets in `pattern` that `re` treats literally and `regex` does not."""
    parts: list[str] = []
    position = 0
    start_of_set = -1  # of the first character in the set, or -1 outside of sets
    while position < len(pattern):
        character = pattern[position]
        in_set = start_of_set >= 0
        unchanged = _PLAIN.match(pattern, position)
        quantifier = _QUANTIFIER.match(pattern, position)
        # Only an escape has a meaning inside a set; `(?#` is three literal characters there.
        if unchanged and (character == "\\" or not in_set):
            parts.append(unchanged[0])
            position = unchanged.end()
        elif in_set:
            # A closing bracket at the beginning of a set is a literal character of the set.
            if character == "]" and position > start_of_set:
                start_of_set = -1
            parts.append("\\[" if character == "[" else character)
            position += 1
        elif character == "[":
            negated = pattern[position + 1 : position + 2] == "^"
            start_of_set = position + 2 if negated else position + 1
            parts.append(pattern[position:start_of_set])
            position = start_of_set
        elif quantifier:
            parts.append("{0,}" if quantifier[0] == "{,}" else quantifier[0])
            position = quantifier.end()
        else:
            parts.append("\\{" if character == "{" else character)
            position += 1
    return "".join(parts)
