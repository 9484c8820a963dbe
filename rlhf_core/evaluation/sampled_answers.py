"""The file with all answers of the stage `sample`, for people and for other tools.

answers.jsonl   {"prompt_id", "prompt", "answers": [{"text", "score", "usable"}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_core.errors import CorruptArtifact
from rlhf_core.system.files import write_jsonl

ANSWERS = "answers.jsonl"
"""Name of the file in the artifact of the stage `sample`."""


@dataclass(frozen=True)
class SampledAnswer:
    """One answer of the policy."""

    text: str
    score: float | None
    """Score by `sample.judge`; None if it has none."""
    usable: bool
    """Whether it can be a row of data: it ended with EOS, has a score, and its text is valid."""


@dataclass(frozen=True)
class AnswersToPrompt:
    """The answers to one training prompt."""

    prompt_id: str
    prompt: str
    answers: tuple[SampledAnswer, ...]

    @property
    def different(self) -> list[SampledAnswer]:
        """The usable answers with different texts; of equal ones the first."""
        by_text: dict[str, SampledAnswer] = {}
        for answer in self.answers:
            if answer.usable:
                by_text.setdefault(answer.text, answer)
        return list(by_text.values())


def write_answers(folder: Path, prompts: Iterable[AnswersToPrompt]) -> None:
    """Write the answers to (n,) prompts into `folder`."""
    write_jsonl(folder / ANSWERS, map(asdict, prompts))


def read_answers(file: Path) -> list[AnswersToPrompt]:
    """Return the answers to each prompt. Raises CorruptArtifact."""
    try:
        found = []
        for line in file.read_bytes().decode().splitlines():
            row = json.loads(line)
            answers = tuple(SampledAnswer(**answer) for answer in row["answers"])
            found.append(AnswersToPrompt(row["prompt_id"], row["prompt"], answers))
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptArtifact(f"{file} cannot be read ({error}); run the stage sample again") from error
