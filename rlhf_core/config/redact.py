"""Values in messages and logs: short, and without secrets."""

from __future__ import annotations

import html
import json
import logging
import math
import os
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "(hidden)"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_SECRET_NAME = re.compile(
    r"(^|[_.-])(token|secret|password|passwd|passphrase|pwd|api_?key|access_?key(_id)?|cred(ential)?s?"
    r"|auth(_string)?|authorization|private_?key)$",
    re.I,
)
_SECRET_VARIABLE = re.compile(
    _SECRET_NAME.pattern
    + r"|secret|passw(or)?d|passphrase|pass$|token$|_key$|connection_string$|_dsn$|webhook"
    r"|cookies?$|jwt$|_sas$|_cert(ificate)?$",
    re.I,
)
"""Many programs define variables, and it costs little to hide a value that is not secret."""
_TOKEN_VARIABLE = re.compile(r"token(s|_\w+)$", re.I)
"""Also names of numbers of tokens, such as MAX_BATCH_TOKENS, which would be hidden in all texts."""
_SECRET_PARAMETER = re.compile(
    r"token|secret|passw|passphrase|signature|credential|jwt|bearer"
    r"|(api|access|private|account|subscription|function|master)[_.-]?key|(^|[_.-])auth([_.-]|$)"
    r"|authorization|^(sig|sas|key|code|pwd|pw|pass|pin|otp|sid|session|x-(amz|goog|ms)-[\w-]+)$"
    r"|[_-](pwd|pw|otp)$",
    re.I,
)
"""Names of parameters in the query or the fragment of a URL."""
_PARAMETER = re.compile(r"(?<=[?&;#])([^\s?&;#=/'\"]{1,80})=([^\s&;#'\"<>]+)")
# AKIA and ASIA begin the keys of AWS. `eyJ` is the base64 of `{"`, with which a JSON web token begins.
_SECRET_VALUE = re.compile(
    r"(?:AKIA|ASIA)[0-9A-Z]{12,}"
    r"|\bhf_[A-Za-z0-9]{8,}"
    r"|\bsk-[\w-]{8,}"
    r"|\bgh[pousr]_\w{8,}|github_pat_\w+|\bglpat-[\w-]{8,}"
    r"|xox[abpr]-[\w-]+"
    r"|-----BEGIN[\s\S]*?(?:-----END[^-]*-----|$)"
    r"|\beyJ[\w-]{10,}\.[\w.-]*"
    r"|hooks\.slack\.com/\S+"
    r"|discord(?:app)?\.com/api/webhooks/\S+"
    r"|(?<!\w)\w{1,100}\.webhook\.office\.com/\S+"
)
"""Secret values that can be recognised by their format."""

_SLASHES = r"(?:https?:[/\\]+|:[/\\]{2,}|(?<![^\s'\"=(,])//(?=[^/\s@]*:))"
"""The start of a URL, up to its user or host. Clients accept backslashes and URLs without a scheme."""
# Limits of repetitions, as here, keep the time linear in the length of a line.
_URL_USER = re.compile(
    rf"({_SLASHES})(?:[^/\\\s@?#'\"]{{1,4000}}|[^/\s@'\"]{{0,200}}:[^@\s'\"]{{0,1000}})@", re.I
)
_HEADER = re.compile(
    # `(?=\S*\d)`: without a digit, an ordinary word follows, as in "basic authentication".
    r"(authorization['\"]?\s*[:=]\s*['\"b]*(?:(?:basic|bearer|digest|token|negotiate)\s+)?|"
    r"\b(?:bearer|basic)\s+(?=\S*\d))[\w.~+/=%;:-]{8,}",
    re.I,
)
_COOKIE = re.compile(r"(cookie['\"]?\s*:\s*)[^\n'\"]+", re.I)
_KEY_HEADER = re.compile(
    r"((?<![\w-])x-[\w-]{0,60}?(?:key|token|secret|auth)['\"]?[ \t]*:[ \t]*['\"b]*)[^\s'\",;}]+", re.I
)
_ASSIGNED = re.compile(
    r"((?:passw(?:or)?d|passwd|pwd|passphrase|secret|(?:api|access|private|account)[_-]?key|credentials?)"
    r"['\"]?\s*(?:=|(?<=['\"]):)\s*)"
    r"('[^']+'|\"[^\"]+\"|[^\s'\",;&}]+)",
    re.I,
)
"""`password=...` in connection strings and `"password": "..."` in JSON."""
_FOLDERS = {"PWD", "OLDPWD"}
"""Variables of every shell that contain a folder, although `PWD` can also be part of a password's name."""
_URL_PASSWORD = re.compile(rf"{_SLASHES}[^/\\\s:@]{{0,200}}:([^@\s]{{1,1000}})@", re.I)
_SHORTEST_SECRET = 6
"""Shorter values are words such as `true`, which would be removed from every line."""
_WORDS = {"default", "disabled", "enabled", "password", "secret"}
"""Values that are not secret although the name of their variable indicates a secret."""


def has_credentials(text: str) -> bool:
    """Return True for a URL with credentials, percent-encoded or not.

    Credentials are a user part (`scheme://user:password@host`) or a secret in the query or fragment
    (`?token=`).
    """
    forms = [form for form in _decoded(text) if re.search(r"https?:|:[/\\]|//", form, re.I)]
    return any(_URL_USER.search(form) or any(_secret_parameters(form)) for form in forms)


def credential_problem(text: str, instead: str) -> str | None:
    """Return the reason for which `text` is refused if it is a URL with credentials.

    Args:
        text: A value of the configuration or of the environment.
        instead: What to do instead, for the end of the message.
    """
    if not has_credentials(text):
        return None
    return f"credentials in a URL are refused; got {HIDDEN}; {instead}"


def _decoded(text: str) -> list[str]:
    """Return `text` and its decoded forms. Percent-encoding may have been applied several times."""
    forms = [text]
    # At most five, because a long `%252525...` loses only two characters each time.
    while len(forms) < 5 and (decoded := unquote(forms[-1])) != forms[-1]:
        forms.append(decoded)
    return forms


def _secret_parameters(text: str) -> Iterator[str]:
    """Yield the values of secret parameters in the URLs in `text`."""
    for match in _PARAMETER.finditer(text):
        if _SECRET_PARAMETER.search(_decoded(match[1])[-1]):
            yield match[2]


def is_secret(name: str, value: Any) -> bool:
    """Return whether the value, or any field of this name, is not to be shown."""
    if _SECRET_NAME.search(name):
        return True
    return isinstance(value, str) and (has_credentials(value) or _SECRET_VALUE.search(value) is not None)


def is_secret_variable(name: str) -> bool:
    """Return whether log lines hide the value of the environment variable `name`."""
    return name not in _FOLDERS and bool(_SECRET_VARIABLE.search(name) or _TOKEN_VARIABLE.search(name))


def shown(value: Any, name: str = "", limit: int = 60) -> str:
    """Return a value for a message: short, on one line, without control characters, and no secret."""
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
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(str(value))} characters)"


# The default is the live mapping: a variable that is set after this import is hidden as well.
def scrubbed(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` with secrets replaced.

    This covers user parts and secret parameters of URLs, authorization headers, keys in known formats, and
    the values of all variables whose name indicates a secret, in all common encodings. It is applied to all
    outputs, because error messages of libraries may contain the values that were passed to them.
    """
    # First, while the values are whole: a pattern below can replace a part of one.
    [text] = without_secret_values([text], environ)
    text = _URL_USER.sub(rf"\1{HIDDEN}@", text)
    text = _PARAMETER.sub(_hidden_parameter, text)
    for pattern in (_HEADER, _COOKIE, _KEY_HEADER, _ASSIGNED):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _SECRET_VALUE.sub(HIDDEN, text)


def without_secret_values(
    texts: Sequence[str], environ: Mapping[str, str] = os.environ, *, same_length: bool = False
) -> list[str]:
    """Return texts without the values of all variables whose name indicates a secret, in all common
    encodings. They have their lengths with `same_length`.

    For texts that are data, such as recorded responses: what only looks like a secret, as in program code, is
    shown.
    """
    found = list(texts)
    for form in _secret_forms(tuple(environ.items())):
        hidden = "*" * len(form) if same_length else HIDDEN
        found = [text.replace(form, hidden) for text in found]
    return found


def without_secrets(tree: Any) -> Any:
    """Return a tree of plain data with `without_secret_values` of its texts. Names of fields stay."""
    shown_texts = iter(without_secret_values([text for _, text in texts(tree)]))

    def rebuilt(value: Any) -> Any:
        if isinstance(value, str):
            return next(shown_texts)
        if isinstance(value, dict):
            return {key: rebuilt(part) for key, part in value.items()}
        if isinstance(value, list):
            return [rebuilt(part) for part in value]
        return value

    return rebuilt(tree)


def _hidden_parameter(match: re.Match[str]) -> str:
    return f"{match[1]}={HIDDEN}" if _SECRET_PARAMETER.search(_decoded(match[1])[-1]) else match[0]


# Every line of a log asks for them, and the environment hardly changes.
@lru_cache(maxsize=8)
def _secret_forms(environ: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Return all encoded forms of the secrets in these variables.

    Longer forms come first, because one secret may be the beginning of another.
    """
    values: set[str] = set()
    for name, value in environ:
        if name in _FOLDERS:
            continue
        if _SECRET_VARIABLE.search(name) or (_TOKEN_VARIABLE.search(name) and not value.isdecimal()):
            # A message can have a single line of a key, or a value without the newline at its end.
            values |= {value, value.strip(), *value.split("\n")}
        # An address of a database or proxy may contain a password, regardless of the name of the variable.
        values |= set(_URL_PASSWORD.findall(value)) | set(_secret_parameters(value))
    # A variable can have the encoded form of a secret, of which a library shows the decoded one.
    for value in tuple(values):
        values.update(_decoded(value))
    forms: set[str] = set()
    for value in values:
        if len(value) >= _SHORTEST_SECRET and value.lower() not in _WORDS:
            forms.update(_encoded(value))
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))


def _encoded(value: str) -> Iterator[str]:
    """Yield the forms of `value` in messages, JSON, URLs, HTML and headers."""
    # Python decodes bytes of the environment that are not UTF-8 in this way.
    data = value.encode("utf-8", "surrogateescape")
    escaped = quote(data, safe="")
    yield from (value, repr(value)[1:-1], repr(data)[2:-1], json.dumps(value)[1:-1])
    yield from (json.dumps(value, ensure_ascii=False)[1:-1], html.escape(value))
    digits = re.sub("%..", lambda code: code[0].lower(), escaped)
    yield from (quote(data), escaped, escaped.lower(), digits, escaped.replace("%20", "+"))
    for before in range(3):
        # In base64, the text before the value changes its first and last characters, for example in basic
        # authentication. Characters that have bits of another text or of the padding are left out.
        text = b64encode(b"\0" * before + data).decode()
        first = (0, 2, 3)[before]
        cut = (0, 3, 2)[(before + len(data)) % 3]
        core = text[first : len(text) - cut]
        if len(core) >= _SHORTEST_SECRET:
            yield from (core, core.replace("+", "-").replace("/", "_"))


class ScrubbingFormatter(logging.Formatter):
    """A logging formatter that removes secrets, also from tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return scrubbed(super().format(record))


def printable(text: str) -> str:
    """Return `text` with control and direction characters escaped, so that it cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def shown_key(key: str) -> str:
    """Return a key for a message."""
    if is_secret("", key):
        return HIDDEN
    return key if key.isprintable() and len(key) <= 60 else shown(key)


def texts(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield every text in a tree of plain data, with its path."""
    if isinstance(tree, str):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from texts(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from texts(value, (*path, index))
