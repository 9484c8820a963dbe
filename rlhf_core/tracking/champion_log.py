"""The log of a registered model: the changes of its champion, and the tests of its candidates.

    NAME              the registered model: its versions, and the alias `champion`
    NAME.champions    its log, another registered model: each version of it is an entry, which nobody changes

MLflow has no transactions, but it numbers the versions of a model, and it creates a version with its tags in
one. An entry names the last entry that its writer had read (`after`). It counts unless another entry of its
kind that counts is in between. Of several writers who decided after the same entry, exactly one therefore
counts, and all readers agree which one.

`champions.settle` writes what the log demands to NAME (the alias and the tags of revoked versions), and then
marks the last entry.

Earlier releases kept moves and tests in tags of NAME. Who reads the log first copies them into entry 1.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from rlhf_core.tracking.mlflow_client import Mlflow, ModelVersion

ENTRY = "rlhf.entry"
"""Tag of an entry with its content."""
_SUFFIX = ".champions"
_WRITTEN = "rlhf.written"
"""Tag of an entry up to which the log was written to the registered model."""
_OLD_MOVE, _OLD_TEST = "rlhf.champion.", "rlhf.test."
"""Prefixes of the tags with moves and tests of earlier releases. Microseconds since 1970 follow."""

Action = Literal["crowned", "promoted", "rolled_back"]
"""These values are in entries, so they stay as they are."""
ACTION_NAMES: Mapping[Action, str] = {
    "crowned": "promoted automatically",
    "promoted": "promoted",
    "rolled_back": "rolled back",
}
"""Actions as messages and tables name them."""


@dataclass(frozen=True)
class Move:
    """One change of the champion."""

    time: float
    """Seconds since 1970."""
    action: Action
    """`crowned`: promoted by the stage `register`; `promoted`: by a person; or `rolled_back`."""
    version: str | None
    """The new champion; None if there is none after it."""
    previous: str | None
    """The champion before; None for the first one."""
    reason: str
    evidence: Mapping[str, Any] | None = None
    """The match that decided; None without one."""
    digests: Mapping[str, str] | None = None
    """For a rollback, the tags `POLICY` and `WEIGHTS` of the version that it revokes, which can be deleted.
    None if it revoked nothing.
    """
    by: str = ""
    """User and host of the process that made it. Empty in records of earlier releases."""
    state: Annotated[Literal["started", "done", "overtaken"], Field(exclude=True)] = "started"
    """`started`: it counts, and is not written to the registered model yet. `overtaken`: it does not count,
    because the champion was moved before. Not part of the record.
    """
    number: Annotated[int, Field(exclude=True)] = 0
    """Number of its entry. Not part of the record."""


@dataclass(frozen=True)
class PromotionTest:
    """A test that a version was subject to.

    A test has one time and one level, also if more prompts continue it.
    """

    time: float
    """Seconds since 1970."""
    level: Annotated[float, Field(gt=0, lt=1)]
    champion: str | None
    """The champion that the version was compared with; None: its own SFT model."""
    judge: str | None
    """Digest of the judge."""
    prompts: int
    outcomes: str
    """Digest of the outcomes of these prompts."""
    version: str = ""
    """The version."""


@dataclass(frozen=True)
class _Entry:
    """The content of the tag `ENTRY`."""

    after: int | None
    """Number of the last entry that its writer had read. None for what an earlier release recorded, which
    counts if it is the first entry.
    """
    moves: tuple[Move, ...] = ()
    tests: tuple[PromotionTest, ...] = ()


_ENTRIES = TypeAdapter(_Entry)
_MOVES = TypeAdapter(Move)
_TESTS = TypeAdapter(PromotionTest)


class Log(NamedTuple):
    """All entries of a log, in their order."""

    moves: Sequence[Move] = ()
    tests: Sequence[PromotionTest] = ()
    """Those that count."""
    last: int = 0
    """Number of the last entry; 0 if there is none."""
    written: int = 0
    """Number of the last entry that is written to the registered model."""

    @property
    def done(self) -> list[Move]:
        """The moves that are finished."""
        return [move for move in self.moves if move.state == "done"]


def counted(moves: Iterable[Move]) -> list[Move]:
    """Return the moves of a history that count."""
    return [move for move in moves if move.state != "overtaken"]


def log_of(model: str) -> str:
    """Return the name of the registered model that is the log of `model`."""
    return f"{model}{_SUFFIX}"


def without_logs(names: Iterable[str]) -> list[str]:
    """Return the names of registered models without those of logs."""
    known = list(names)
    # The suffix alone is no proof: a model of somebody else can have it too.
    return [name for name in known if not name.endswith(_SUFFIX) or name.removesuffix(_SUFFIX) not in known]


def read_log(mlflow: Mlflow, model: str) -> Log:
    """Return the log of `model`. Entries that cannot be read are ignored."""
    entries = mlflow.versions(log_of(model))
    if not entries:
        _copy_old_tags(mlflow, model)
        entries = mlflow.versions(log_of(model))
    contents = {int(entry.version): _entry(entry) for entry in entries}
    written = max((int(entry.version) for entry in entries if _WRITTEN in entry.tags), default=0)
    moves: list[Move] = []
    tests: list[PromotionTest] = []
    last_move = last_test = 0
    for number, content in sorted(contents.items()):
        # Of two processes that copied the tags of an earlier release, the first one counts.
        if content is None or (content.after is None and number > 1):
            continue
        after = content.after
        if after is None:
            # The earlier release has written its moves to the registered model.
            after, written = 0, max(written, number)
        for move in content.moves:
            if after < last_move:
                # Without digests, because it has revoked nothing.
                moves.append(replace(move, number=number, state="overtaken", digests=None))
            elif number <= written:
                moves.append(replace(move, number=number, state="done"))
            else:
                moves.append(replace(move, number=number, state="started"))
        if content.moves and after >= last_move:
            last_move = number
        if content.tests and after >= last_test:
            tests += content.tests
            last_test = number
    return Log(moves, tests, max(contents, default=0), written)


def append(mlflow: Mlflow, model: str, after: int, content: Move | PromotionTest) -> int:
    """Append an entry to the log of `model`, and return its number.

    Args:
        mlflow: The registry.
        model: Name of the registered model.
        after: `Log.last` of the log by which the writer decided. The entry counts only if no other one of its
            kind was appended since then.
        content: The content of the entry.
    """
    if isinstance(content, Move):
        return _create(mlflow, model, _Entry(after, (replace(content, by=_writer()),)))
    return _create(mlflow, model, _Entry(after, tests=(content,)))


def mark_written(mlflow: Mlflow, model: str, number: int) -> None:
    """Record that the moves up to the entry `number` are written to the registered model."""
    mlflow.tag_version(log_of(model), str(number), {_WRITTEN: "true"})


def _create(mlflow: Mlflow, model: str, entry: _Entry) -> int:
    name, text = log_of(model), _ENTRIES.dump_json(entry).decode()
    mlflow.ensure_model(name, f"History of the champions of {model}, and of the tests of its candidates.")
    description = "".join(move.reason for move in entry.moves[-1:])
    # Every version needs a source, and a server refuses a local path.
    version = mlflow.create_version(
        name, source="rlhf-log:///champions", run_id=None, tags={ENTRY: text}, description=description
    )
    return int(version.version)


def _entry(entry: ModelVersion) -> _Entry | None:
    try:
        # Strict: otherwise pydantic would convert what a hand
        # has changed, such as a number in quotes, and count it.
        return _ENTRIES.validate_json(entry.tags.get(ENTRY, ""), strict=True)
    except (ValueError, OverflowError):
        return None  # edited by hand


def _copy_old_tags(mlflow: Mlflow, model: str) -> None:
    """Begin the log with the moves and tests in the tags of an earlier release, if there are any.

    If two processes do it, the first entry counts. An interrupted move counts if it had moved the alias.
    """
    moves: list[Move] = []
    tests: list[PromotionTest] = []
    # The names contain the time, and sort by it.
    for name, text in sorted((mlflow.model_tags(model) or {}).items()):
        with suppress(ValueError, OverflowError):  # edited by hand
            if name.startswith(_OLD_MOVE):
                moves.append(_MOVES.validate_json(text, strict=True))
            elif name.startswith(_OLD_TEST):
                test = _TESTS.validate_json(text, strict=True)
                tests.append(replace(test, version=name.rpartition(".")[2]))
    if moves or tests:
        champion = mlflow.aliases(model).get("champion")
        kept = [move for move in counted(moves) if move.state == "done" or move.version == champion]
        _create(mlflow, model, _Entry(None, tuple(kept), tuple(tests)))


def _writer() -> str:
    """Return user and host of this process."""
    user = ""
    with suppress(OSError, KeyError, ImportError):  # the user of a container may have no name
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"
