"""Files of votes that the pages of `rlhf review` save, as inputs of a run: `register.votes`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import ConfigError, InputError
from rlhf_core.system.files import read_bounded

FORMAT = "rlhf-review-1"
MAX_BYTES = 2**24
"""Largest size of a file."""
_CHOICES = ("1", "2", "tie", None)


@dataclass(frozen=True)
class VoteFile:
    """Content of a file of votes, whose page is not known yet."""

    name: str
    """The option or field and the path, for messages."""
    digest: str
    """sha256 of the text."""
    page: str
    """Digest of the page that saved it."""
    saved: int
    """Time when it was saved, in milliseconds since 1970."""
    choices: tuple[str | None, ...]
    """`1`, `2` or `tie` for each pair of the page in its order; None without a vote."""
    session: str | None = None
    """Random name of who voted in a browser, which a reload keeps; None in files of older pages."""
    person: str | None = None
    """Name that the person gave; None without one."""

    @property
    def is_empty(self) -> bool:
        return all(choice is None for choice in self.choices)


def read_vote_files(config: PipelineConfig) -> dict[str, VoteFile]:
    """Return the files in `register.votes`, by field.

    Raises ConfigError for a file that cannot be read, that no page saved, or that is damaged.
    """
    found = {}
    for index, path in enumerate(config.register_.votes):
        field = f"register.votes.{index}"
        try:
            text = read_bounded(path, MAX_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{field}: cannot read {path}: {error}; choose another file") from error
        try:
            found[field] = parse_votes(text, f"{field}: {path}")
        except InputError as error:
            raise ConfigError(error.message) from error
    return found


def parse_votes(text: str, name: str) -> VoteFile:
    """Return the content of a file of votes. `name` is that of the file in messages.

    Raises InputError if no page saved it, or if it is damaged.
    """
    try:
        content = json.loads(text)
    # A deeply nested file makes the parser exceed Python's recursion limit.
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{name}: must be a file that a review page saved ({FORMAT}); choose another")
    page, saved, choices = content.get("page"), content.get("saved"), content.get("votes")
    session, person = content.get("session"), content.get("person")
    if not isinstance(page, str) or not isinstance(session, str | None) or not isinstance(person, str | None):
        raise InputError(
            f"{name}: page, session and person must be texts; the file is damaged, save it again"
        )
    # `isinstance` would let `true` pass, because bool is a subclass of int.
    if type(saved) is not int:
        raise InputError(f"{name}: saved must be a time (an integer); the file is damaged, save it again")
    if not isinstance(choices, list):
        raise InputError(f"{name}: votes must be a list; the file is damaged, save it again")
    for number, choice in enumerate(choices, 1):
        if choice not in _CHOICES:
            raise InputError(
                f"{name}: vote {number} must be 1, 2, tie or null; got {choice!r:.40}; the file is damaged,"
                " save it again"
            )
    digest = hashlib.sha256(text.encode()).hexdigest()
    return VoteFile(name, digest, page, saved, tuple(choices), session, person)


def voters(files: Iterable[VoteFile]) -> dict[str, str]:
    """Return a key of the person who saved each file, by the digest of the file.

    Files with the same name are of one person, without regard to case and spaces at its ends. A session is
    one list of votes, so all its files are of the person whose name was given last in it.
    """
    files = sorted(files, key=lambda file: (file.saved, file.digest))
    names = {file.session: _name(file) for file in files if file.session and _name(file)}
    keys = {}
    for file in files:
        if name := names.get(file.session or "") or _name(file):
            keys[file.digest] = f"name {name}"
        elif file.session:
            keys[file.digest] = f"session {file.session}"
        else:
            keys[file.digest] = f"file {file.digest}"
    return keys


def _name(file: VoteFile) -> str:
    return (file.person or "").strip().casefold()


def newest_files(files: Iterable[VoteFile]) -> list[VoteFile]:
    """Return the files that count: of each person (`voters`) and page the one that was saved last."""
    files = list(files)
    keys = voters(files)
    newest: dict[tuple[str, str], VoteFile] = {}
    for file in files:
        key = (file.page, keys[file.digest])
        # By the time in the file: its modification time changes when it is copied.
        if key not in newest or file.saved > newest[key].saved:
            newest[key] = file
    return list(newest.values())
