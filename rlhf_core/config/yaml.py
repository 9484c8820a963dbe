"""A strict reader of YAML: plain data with the line of each field. `dump` writes what it reads.

Only dict, list, str, int, float, bool and None are constructed. It differs from `yaml.safe_load`, which
follows YAML 1.1: a duplicate key is an error, `1e-5` is a number, only `true` and `false` are booleans, and
`012` and `22:30` are text. Tags and merge keys are refused, and the number of values is limited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

# Not ruamel.yaml: as YAML 1.2 it reads `012` as 12, and it would need the same checks (decision 22).
import yaml

from rlhf_core.config.redact import printable, shown
from rlhf_core.errors import ConfigError
from rlhf_core.system.files import UnfitFile, open_regular, shipped

MAX_BYTES = 1_000_000
MAX_VALUES = 20_000
MAX_DEPTH = 40

Keys = tuple[str | int, ...]

_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# Longer numbers stay texts: no field allows them, and `int` refuses more than 4,300 digits.
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,30})")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]{1,6})?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Document:
    """A parsed file."""

    name: str
    """The path as given, for messages."""
    tree: Any
    """Its content as plain data."""
    lines: dict[Keys, int] = field(default_factory=dict)
    """Line of each key and list item, from 1, by its path. Of an alias, only its own line."""
    folder: Path | None = None
    """Folder of the file."""

    def place(self, path: Keys) -> str:
        """Return `FILE:LINE` of the field or of the nearest section around it, or `FILE` if there is none."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return f"{self.name}:{self.lines[path[:end]]}"
        return self.name


def read(path: str | Path) -> Document:
    """Parse a file.

    Raises:
        ConfigError: The file is missing, not a regular file, unreadable, too large, empty or not valid YAML.
    """
    try:
        with open_regular(shipped(path)) as file:
            data = file.read(MAX_BYTES + 1)  # one more, so that `parse` sees that it is too large
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
    return replace(parse(data, str(path)), folder=shipped(path).parent)


def parse(data: bytes, name: str) -> Document:
    """Parse the content of a file. `name` stands for the file in messages."""
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{name}: is larger than {MAX_BYTES} bytes; a configuration has a few hundred lines"
        )
    text = _decode(data, name)
    document = Document(name, *_load(text, name))
    if document.tree is None:
        raise ConfigError(f"{name}: is empty; give at least one section, such as `run: {{name: demo}}`")
    if not isinstance(document.tree, dict):
        kind = "a list" if isinstance(document.tree, list) else "a single value"
        raise ConfigError(f"{name}:1: the file must hold sections (`key: value`); got {kind}")
    return document


def parse_value(text: str, name: str) -> Any:
    """Parse one value as after `key: ` (`3`, `1e-5`, `text`, `[1, 2]`, `{a: 1}`)."""
    return _load(text, name)[0]


def scalar(text: str) -> str | int | float | bool | None:
    """Return the value of an unquoted word."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if len(text) <= 40 and _NUMBER.fullmatch(text):
        return float(text)
    special = _SPECIAL.fullmatch(text)
    if special:
        return float("nan") if special[3] else float(f"{special[1]}inf")
    return text


def dump(tree: Mapping[str, Any]) -> str:
    """Return plain data as the text of a file that `read` reads as the same data."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def quoted(text: str) -> str:
    """Return a text as it is written within one line of YAML: in quotes if it is no text without them."""
    # As the only item of a list: `[text]` and a line feed.
    # The width, because PyYAML folds at 80 characters by default.
    return yaml.dump([text], Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=2**31)[1:-2]


class _Dumper(yaml.SafeDumper):
    """`SafeDumper` that quotes texts such as `1e3`, which YAML 1.1 does not take for numbers."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if scalar(text) == text else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


class _Loader(yaml.composer.Composer, yaml.CSafeLoader):
    """The nodes of a document; a tag is only what the document itself gives.

    `Composer` comes first because the one of `CSafeLoader` is written in C: a file that is nested deeply
    would end the process, and not raise RecursionError.
    """

    def __init__(self, text: str) -> None:
        yaml.composer.Composer.__init__(self)
        yaml.CSafeLoader.__init__(self, text)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """Give no tag to a node that has none."""
        return ""


class _Reader:
    """Plain data from nodes, with the line of each field. What an alias refers to is copied."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._values = 0
        self.lines: dict[Keys, int] = {}

    def plain(self, node: Any, path: Keys) -> Any:
        """Return the node at `path` as plain data."""
        self._values += 1
        # Aliases of aliases are few nodes and many values.
        if self._values > MAX_VALUES:
            self._refuse(node, f"more than {MAX_VALUES} values with aliases expanded", "write fewer")
        if len(path) >= MAX_DEPTH:
            self._refuse(node, f"nested deeper than {MAX_DEPTH} levels, or an alias in itself", "flatten it")
        if node.tag:
            self._refuse(
                node, f"unsupported tag {node.tag[:80]!r}: tags are refused", "write the plain value"
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = _line(item)
                items.append(self.plain(item, (*path, index)))
            return items
        # A scalar with a style is quoted or a block, and always text.
        return node.value if node.style else scalar(node.value)

    def _mapping(self, node: yaml.MappingNode, path: Keys) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, "a key must be a single word", "write `key: value`")
            name = key.value
            own = (*path, name)
            if name == "<<":
                self._refuse(key, "merge keys (`<<`) are not supported", "write the fields out")
            if name in mapping:
                dotted = ".".join(map(str, own))
                self._refuse(key, f"duplicate key {dotted[:120]}", "keep one of them")
            self.lines[own] = _line(key)
            mapping[name] = self.plain(value, own)
        return mapping

    def _refuse(self, node: yaml.Node, problem: str, fix: str) -> NoReturn:
        raise ConfigError(f"{self._name}:{_line(node)}: {problem}; {fix}")


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def _load(text: str, name: str) -> tuple[Any, dict[Keys, int]]:
    reader = _Reader(name)
    try:
        root = _Loader(text).get_single_node()
        return (None if root is None else reader.plain(root, ())), reader.lines
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(error, text, name)) from error
    # `Composer` recurses into the nodes, and `plain` compares their depth only afterwards.
    except RecursionError as error:
        raise ConfigError(f"{name}: is nested deeper than {MAX_DEPTH} levels; flatten it") from error
    except UnicodeEncodeError as error:
        # Bytes of a command line that are not UTF-8 arrive as halves of surrogate pairs.
        raise ConfigError(f"{name}:1: is not UTF-8 text; write the characters in UTF-8") from error


def _decode(data: bytes, name: str) -> str:
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise ConfigError(
            f"{name}:{line}: has a NUL byte, as in UTF-16, and is not UTF-8 text; save it as UTF-8"
        )
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from error


def _syntax_message(error: yaml.YAMLError, text: str, name: str) -> str:
    lines = text.splitlines()
    # First, because the parser says only that a character "cannot start any token".
    for number, line in enumerate(lines, start=1):
        if "\t" in line[: len(line) - len(line.lstrip())]:
            return f"{name}:{number}: a tab indents this line; YAML allows spaces only; replace it"
    mark = getattr(error, "problem_mark", None)
    # An error of the reader, for a character that YAML does not allow, has this and no mark.
    position = getattr(error, "position", None)
    if mark is not None:
        number = min(mark.line + 1, max(1, len(lines)))
    else:
        number = text.count("\n", 0, position) + 1 if isinstance(position, int) else 1
    parts = (getattr(error, "context", None), getattr(error, "problem", None), getattr(error, "reason", None))
    what = ", ".join(str(part) for part in parts if part)
    return (
        f"{name}:{number}: not valid YAML: {what}; quote values that hold `:`, `#`, `*`, `@` or brackets,"
        " and write one document per file"
    )
