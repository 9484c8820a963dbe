"""Regular expressions of the configuration: Python's syntax and meaning, matched by an engine that has a time limit.

`re` cannot be stopped, so `regex` matches. It knows more: to it `{e<2}` is fuzzy matching and `[[:alpha:]]` a class of
POSIX, where `re` reads plain characters. Those are escaped before it compiles, so that a pattern means what it means to
`re`.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import Any

import regex

_QUANTIFIER = re.compile(r"\{([0-9]+(,[0-9]*)?|,[0-9]*)\}")
_PLAIN = re.compile(r"\\N\{[^}]*\}|\\.|\(\?#[^)]*\)", re.DOTALL)
"""What is copied as it is: an escape, a named character, a comment."""
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")


def pattern_problem(pattern: str) -> str | None:
    """Why `pattern` cannot be used, or None: it must compile in `re`, and as it is used."""
    if _VERBOSE.search(pattern):
        return "has the flag x (verbose), which is not supported; leave it out, with the blanks and comments"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # `[[a]`, `[a--b]`: what will mean something else in a later Python
            re.compile(pattern)
        compiled(pattern)
    except FutureWarning as error:
        return f"is ambiguous: {error}; write a backslash before the bracket or sign that is meant as itself"
    except RecursionError:
        return "is nested too deeply; flatten it"
    except Exception as error:  # re.error, regex.error, OverflowError, MemoryError: this one cannot be used
        return f"does not compile: {error}"
    return None


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """`pattern` as `re` reads it, compiled by `regex`; its `fullmatch` takes a `timeout`."""
    return regex.compile(_escaped(pattern), regex.VERSION0)


def _escaped(pattern: str) -> str:
    """`pattern` with a backslash before each brace and bracket that `re` takes for itself and `regex` does not."""
    parts: list[str] = []
    at, start_of_set = 0, -1
    while at < len(pattern):
        char = pattern[at]
        if (plain := _PLAIN.match(pattern, at)) and (char == "\\" or start_of_set < 0):
            parts.append(plain[0])
            at = plain.end()
            continue
        if start_of_set >= 0:
            # A bracket that closes at once is itself one of the set's characters.
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
