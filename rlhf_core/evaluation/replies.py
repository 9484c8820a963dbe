"""Replies of a language model, kept on the disk by the digest of what was asked.

    home/judge/<first two digits>/<sha256 of judge and question>.json

A run that is interrupted asks nothing twice, and ends with the same verdicts even if the model would reply
differently the second time. The folder can be removed: the questions are then asked again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_core.system.files import read_json, write_atomic


@dataclass(frozen=True)
class Reply:
    """Reply to one question."""

    text: str
    prompt_tokens: int
    """0 if the server does not say it."""
    completion_tokens: int
    seconds: float
    """Time that it took when it was asked."""


class Replies:
    """Reads and writes replies.

    Args:
        folder: Local folder. It is created with the first reply.
        judge: Digest of the judge.
    """

    def __init__(self, folder: Path, judge: str) -> None:
        self._folder = folder
        self._judge = judge

    def find(self, question: str) -> Reply | None:
        """Return the reply to a question that was asked before. None if there is none, or it is damaged."""
        content = read_json(self._file(question))
        try:
            return None if content is None else Reply(**content)
        except TypeError:
            return None

    def keep(self, question: str, reply: Reply) -> None:
        """Write a reply."""
        write_atomic(self._file(question), json.dumps(asdict(reply)) + "\n", private=True)

    def _file(self, question: str) -> Path:
        digest = hashlib.sha256(json.dumps([self._judge, question]).encode()).hexdigest()
        return self._folder / digest[:2] / f"{digest}.json"
