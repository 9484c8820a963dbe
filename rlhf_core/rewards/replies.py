"""Replies of a language model, kept on the disk by the digest of what was asked.

    home/judge/<first two digits>/<sha256 of judge and question>.json

A run that is interrupted asks nothing twice, and ends with the same verdicts and rewards even if the model
would reply differently the second time. Of several runs that ask the same question at the same time, all use
the first reply. The folder can be removed: the questions are then asked again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_core.system.files import create_once, read_json, write_atomic

_INVISIBLE = re.compile("[\u200b-\u200d\u2060\ufeff]")
_AROUND = " \t#*_`.\"'()[]"


def last_line(reply: str) -> tuple[str, str]:
    """Return the label on the last line of a reply, up to its last colon, and the rest without decoration.

    Only the last line counts, so that a text which the reply quotes decides nothing.
    """
    lines = _INVISIBLE.sub("", reply).strip().splitlines() or [""]
    label, _, rest = lines[-1].rpartition(":")
    return label, rest.strip(_AROUND)


@dataclass(frozen=True)
class ModelReply:
    """Reply of a model to one question."""

    text: str
    prompt_tokens: int
    """0 if the server does not say it."""
    completion_tokens: int
    seconds: float
    """Time that it took when it was asked."""
    is_cut: bool = False
    """Whether it ended at the limit of tokens. It is not used then."""


class Replies:
    """Reads and writes replies.

    Args:
        folder: Local folder. It is created with the first reply. None: nothing is kept.
        judge: Digest of the judge.
    """

    def __init__(self, folder: Path | None, judge: str) -> None:
        self._folder = folder
        self._judge = judge

    def find(self, question: str) -> ModelReply | None:
        """Return the reply to a question that was asked before. None if there is none, or it is damaged."""
        file = self._file(question)
        content = None if file is None else read_json(file)
        try:
            return None if content is None else ModelReply(**content)
        except TypeError:
            return None

    def find_all(self, questions: Sequence[str]) -> tuple[dict[str, ModelReply], list[str]]:
        """Return the kept replies by question, and the questions without one, each once."""
        replies: dict[str, ModelReply] = {}
        missing = []
        for question in dict.fromkeys(questions):
            reply = self.find(question)
            if reply is None:
                missing.append(question)
            else:
                replies[question] = reply
        return replies, missing

    def keep(self, question: str, reply: ModelReply) -> ModelReply:
        """Write a reply, unless another run has kept one since, and return the one that is kept."""
        file = self._file(question)
        if file is None:
            return reply
        content = json.dumps(asdict(reply)) + "\n"
        if not create_once(file, content.encode(), private=True):
            kept = self.find(question)
            if kept is not None:
                return kept
            write_atomic(file, content, private=True)  # the kept one is damaged
        return reply

    def forget(self, question: str) -> None:
        """Remove the reply to a question, so that it is asked again."""
        file = self._file(question)
        if file is not None:
            file.unlink(missing_ok=True)

    def _file(self, question: str) -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.sha256(json.dumps([self._judge, question]).encode()).hexdigest()
        return self._folder / digest[:2] / f"{digest}.json"
