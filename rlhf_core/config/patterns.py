"""Regular expressions of the configuration, with the syntax and meaning of Python's `re` and a time limit.

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
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")


def pattern_problem(pattern: str) -> str | None:
    """Return the reason for which `pattern` cannot be used, or None. It must compile with `re` and with
    `regex`.
    """
    if _VERBOSE.search(pattern):
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
    """Compile `pattern` with `regex`, with its meaning in `re`. Its `fullmatch` accepts a `timeout`."""
    return regex.compile(_escaped(pattern), regex.VERSION0)


def _escaped(pattern: str) -> str:
    """Escape the braces and brackets in `pattern` that `re` treats literally and `regex` does not."""
    parts: list[str] = []
    at, start_of_set = 0, -1
    while at < len(pattern):
        char = pattern[at]
        if (plain := _PLAIN.match(pattern, at)) and (char == "\\" or start_of_set < 0):
            parts.append(plain[0])
            at = plain.end()
            continue
        if start_of_set >= 0:
            # A closing bracket at the beginning of a set is a literal character of the set.
            if char == "]" and at > start_of_set:
                start_of_set = -1
            parts.append("\\[" if char == "[" else char)
        elif char == "[":
            start_of_set = at + 2 if pattern[at + 1 : at + 2] == "^" else at + 1
            parts.append(pattern[at:start_of_set])
            at = start_of_set
            continue
        elif char == "{" and not (quantifier := _QUANTIFIER.match(pattern, at)):
            parts.append("\\{")
        elif char == "{" and quantifier:
            parts.append("{0,}" if quantifier[0] == "{,}" else quantifier[0])
            at = quantifier.end()
            continue
        else:
            parts.append(char)
        at += 1
    return "".join(parts)
