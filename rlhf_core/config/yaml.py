"""A small, strict reader of YAML: plain data with the line of every field, and nothing else.

It differs from `yaml.safe_load` where that surprises: a key given twice is an error, `1e-5` is a number, only
`true` and `false` are booleans, `012` and `22:30` stay text, tags are refused, aliases are counted and may
not recurse. Nothing is ever constructed but dict, list, str, int, float, bool and None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlhf_core.config.redact import printable, shown
from rlhf_core.errors import ConfigError
from rlhf_core.system.files import UnfitFile, open_regular

MAX_BYTES = 1_000_000
MAX_ALIASES = 100
MAX_NODES = 20_000
MAX_DEPTH = 40

Keys = tuple[str | int, ...]
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,30})")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]{1,6})?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Document:
    """A parsed file."""

    name: str
    """How messages call it: the path as given."""
    tree: Any
    """Its content as plain data."""
    lines: dict[Keys, int] = field(default_factory=dict)
    """1-based line of each key and list item, by its path; aliased parts have the line of the alias only."""

    def place(self, path: Keys) -> str:
        """`FILE:LINE` of the field, or of the nearest section around it that the file has; `FILE` if none."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return f"{self.name}:{self.lines[path[:end]]}"
        return self.name


def read(path: str | Path) -> Document:
    """Parse a file. Raises ConfigError: missing, a folder, unreadable, too large, not UTF-8, not YAML, empty."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: configuration file not found; give the path of a YAML file") from error
    except PermissionError as error:
        raise ConfigError(f"{path}: permission denied; make the file readable for this user") from error
    except UnfitFile as error:
        if Path(path).is_dir():
            raise ConfigError(f"{path}: is a directory; give the path of a YAML file in it") from error
        raise ConfigError(
            f"{printable(str(error)[:300])}: a configuration cannot be read from it, as it is read several"
            " times; write it to a file and give its path"
        ) from error
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{shown(str(path))}: cannot be read ({what}); give the path of a YAML file"
        ) from error
    return parse(data, str(path))


def parse(data: bytes, name: str) -> Document:
    """Parse bytes; `name` is what messages call the file."""
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{name}: is larger than {MAX_BYTES} bytes; a configuration has a few hundred lines"
        )
    text = _decode(data, name)
    document = Document(name, *_build(text, name))
    if document.tree is None:
        raise ConfigError(f"{name}: is empty; give at least one section, such as `run: {{name: demo}}`")
    if not isinstance(document.tree, dict):
        kind = "a list" if isinstance(document.tree, list) else "a single value"
        raise ConfigError(f"{name}:1: the file must hold sections (`key: value`); got {kind}")
    return document


def parse_value(text: str, name: str) -> Any:
    """One value as YAML would read it after `key: ` (`3`, `1e-5`, `text`, `[1, 2]`, `{a: 1}`)."""
    return _build(text, name)[0]


def scalar(text: str) -> str | int | float | bool | None:
    """What an unquoted word means."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if len(text) <= 40 and _NUMBER.fullmatch(text):
        return float(text)
    if special := _SPECIAL.fullmatch(text):
        return float("nan") if special[3] else float(f"{special[1]}inf")
    return text


def _decode(data: bytes, name: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{name}:1: is UTF-16 or UTF-32, not UTF-8 text; save it as UTF-8")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise ConfigError(f"{name}:{line}: has a NUL byte, so it is not UTF-8 text; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from error


def _build(text: str, name: str) -> tuple[Any, dict[Keys, int]]:
    builder = _Builder(name)
    try:
        events: Iterator[Any] = yaml.parse(text, Loader=_Parser)
        for event in events:
            builder.take(event)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(error, text, name)) from error
    except RecursionError as error:
        raise ConfigError(f"{name}: is nested deeper than {MAX_DEPTH} levels; flatten it") from error
    return builder.root, builder.lines


def _syntax_message(error: yaml.YAMLError, text: str, name: str) -> str:
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if "\t" in line[: len(line) - len(line.lstrip())]:
            return f"{name}:{number}: a tab indents this line; YAML allows spaces only; replace it"
    mark = getattr(error, "problem_mark", None)
    position = getattr(error, "position", None)
    if mark is not None:
        number = min(mark.line + 1, max(1, len(lines)))
    else:
        number = text.count("\n", 0, position) + 1 if isinstance(position, int) else 1
    parts = (getattr(error, "context", None), getattr(error, "problem", None), getattr(error, "reason", None))
    what = ", ".join(str(part) for part in parts if part)
    return f"{name}:{number}: not valid YAML: {what}; quote values that hold `:`, `#`, `*`, `@` or brackets"


@dataclass
class _Open:
    """A list or mapping that is not finished yet."""

    value: Any
    anchor: str | None
    nodes_before: int
    key: str | None = None


class _Builder:
    """Turns parser events into plain data. Raises ConfigError for what a configuration may not hold."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.root: Any = None
        self.lines: dict[Keys, int] = {}
        self._open: list[_Open] = []
        self._path: list[str | int] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._documents = self._aliases = self._nodes = 0

    def take(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                self._refuse(line, "a second document begins here (`---`)", "keep one document per file")
        elif isinstance(event, yaml.AliasEvent):
            self._add(self._aliased(event.anchor, line), line)
        elif isinstance(event, yaml.ScalarEvent):
            self._check_tag(event, line)
            self._scalar(event, line)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._check_tag(event, line)
            self._start(event, line)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = self._open.pop()
            if done.anchor:
                self._anchors[done.anchor] = (done.value, self._nodes - done.nodes_before)
            if self._open:
                self._path.pop()
                self._open[-1].key = None

    def _refuse(self, line: int, what: str, fix: str) -> None:
        raise ConfigError(f"{self.name}:{line}: {what}; {fix}")

    def _check_tag(self, event: Any, line: int) -> None:
        if event.tag is not None:
            self._refuse(
                line, f"unsupported tag {str(event.tag)[:80]!r}: tags are refused", "write the plain value"
            )

    def _count(self, nodes: int, line: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            self._refuse(
                line,
                f"more than {MAX_NODES} values once aliases are filled in: too many aliases",
                "write fewer",
            )

    def _aliased(self, anchor: str | None, line: int) -> Any:
        assert anchor is not None
        self._aliases += 1
        if self._aliases > MAX_ALIASES:
            self._refuse(line, f"too many aliases (more than {MAX_ALIASES})", "write the values out")
        if any(part.anchor == anchor for part in self._open):
            self._refuse(line, f"recursive alias *{anchor[:40]}: it contains itself", "write the value out")
        if anchor not in self._anchors:
            self._refuse(
                line,
                f"alias *{anchor[:40]} has no anchor before it",
                "quote the value if the asterisk is text",
            )
        value, nodes = self._anchors[anchor]
        self._count(nodes, line)
        return value

    def _scalar(self, event: Any, line: int) -> None:
        text: str = event.value
        if any("\ud800" <= character <= "\udfff" for character in text):
            self._refuse(line, "half of a surrogate pair is no text", "write the character itself")
        waiting = self._open[-1] if self._open else None
        if waiting is not None and isinstance(waiting.value, dict) and waiting.key is None:
            self._key(waiting, text, line)
            return
        self._count(1, line)
        value = scalar(text) if event.implicit[0] else text
        if event.anchor:
            self._anchors[event.anchor] = (value, 1)
        self._add(value, line)

    def _key(self, waiting: _Open, text: str, line: int) -> None:
        if text == "<<":
            self._refuse(line, "merge keys (`<<`) are not supported", "write the fields out")
        if text in waiting.value:
            where = ".".join(str(part) for part in [*self._path, text])
            self._refuse(line, f"duplicate key {where[:120]}", "keep one of them")
        waiting.key = text
        self.lines[(*self._path, text)] = line

    def _start(self, event: Any, line: int) -> None:
        if len(self._open) >= MAX_DEPTH:
            self._refuse(line, f"nested deeper than {MAX_DEPTH} levels", "flatten it")
        before = self._nodes
        self._count(1, line)
        value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        self._add(value, line, opens=True)
        self._open.append(_Open(value, event.anchor, before))

    def _add(self, value: Any, line: int, opens: bool = False) -> None:
        if not self._open:
            self.root = value
            return
        parent = self._open[-1]
        step: str | int
        if isinstance(parent.value, list):
            step = len(parent.value)
            self.lines[(*self._path, step)] = line
            parent.value.append(value)
        else:
            if parent.key is None:
                self._refuse(line, "a key must be a single word", "write `key: value`")
            step = str(parent.key)
            parent.value[step] = value
            if not opens:
                parent.key = None
        if opens:
            self._path.append(step)
