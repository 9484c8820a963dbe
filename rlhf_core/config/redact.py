"""What may be shown of a value in messages and logs: never a secret, never much."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "(hidden)"

_SECRET_NAME = re.compile(
    r"(^|[_.-])(token|secret|password|passwd|pwd|api_?key|access_?key(_id)?|credentials?|auth(_string)?|private_?key)$",
    re.I,
)
_SECRET_VARIABLE = re.compile(
    _SECRET_NAME.pattern + r"|secret|passw(or)?d|passphrase|pass$|token(s|_\w+)?$|_key$|connection_string$|_dsn$", re.I
)
"""Variables are named by many programs, and hiding one too many costs little."""
_SECRET_QUERY = r"[?&;](sig|signature|token|key|secret|password|access_token|x-amz-\w+)="
_SECRET_VALUE = re.compile(
    r"AKIA[0-9A-Z]{12}|ASIA[0-9A-Z]{12}|\bhf_[A-Za-z0-9]{8}|\bsk-[\w-]{8}|\bgh[pousr]_\w{8}|github_pat_|xox[abpr]-"
    r"|-----BEGIN|\beyJ[\w-]{10,}\.|" + _SECRET_QUERY,
    re.I,
)
_URL_WITH_SECRET = re.compile(r"://([^/\s@]*@|[^@\s/]*:[^@\s]*@|\S*" + _SECRET_QUERY + ")", re.I)

_URL_USER = re.compile(r"://[^/\s@'\"]*:[^@\s'\"]*@")
_FOLDERS = {"PWD", "OLDPWD"}
"""Variables of every shell that hold a folder, though elsewhere a name like theirs is a password's."""
_SHORTEST_SECRET = 8
"""Shorter values are words such as `true`, and would be taken out of every line."""


def has_credentials(text: str) -> bool:
    """True for a URL with a user part (`scheme://user:password@host`) or with a secret in its query (`?token=`)."""
    return _URL_WITH_SECRET.search(text) is not None


def is_secret(name: str, value: Any) -> bool:
    """True if the value, or a field of this name, should not be shown."""
    if _SECRET_NAME.search(name):
        return True
    return isinstance(value, str) and (has_credentials(value) or _SECRET_VALUE.search(value) is not None)


def shown(value: Any, name: str = "", limit: int = 60) -> str:
    """A value as messages show it: short, on one line, without control characters, `(hidden)` if it may be secret."""
    if is_secret(name, value):
        return HIDDEN
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return f"a section of {len(value)} keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(str(value))} characters)"


def scrubbed(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """`text` without user parts of URLs and without the value of any variable that has a secret's name.

    The net below all sinks: a library's error message, which nobody here wrote, may echo what it was given.
    """
    text = _URL_USER.sub(f"://{HIDDEN}@", text)
    for name, value in environ.items():
        secret = name not in _FOLDERS and _SECRET_VARIABLE.search(name)
        if secret and len(value) >= _SHORTEST_SECRET and value in text:
            text = text.replace(value, HIDDEN)
    return text


class ScrubbingFormatter(logging.Formatter):
    """A formatter whose lines, tracebacks included, are `scrubbed`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line as it is written."""
        return scrubbed(super().format(record))


def printable(text: str) -> str:
    """`text` with control and direction characters spelled out: what comes from outside must not steer a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown_key(key: str) -> str:
    """A key as messages show it."""
    return HIDDEN if is_secret("", key) else (key if key.isprintable() and len(key) <= 60 else shown(key))


def texts(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Every text in a tree of plain data, with its path."""
    if isinstance(tree, str):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from texts(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from texts(value, (*path, index))
