"""The rows of the kinds `evaluation`, `match` and `sample` (`rlhf_core.record.schema`): answers of models,
with scores and verdicts.

A stage writes them as one table at its end. An attempt that is interrupted has written nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import pyarrow as pa

from rlhf_core.config.pipeline import RecordConfig
from rlhf_core.record.reader import RECORD
from rlhf_core.record.schema import ANSWER_COLUMNS, COLUMNS
from rlhf_core.record.writer import RecordWriter
from rlhf_core.types import PromptExample, RewardInput, StageContext


class AnswerRecord:
    """Collects the answers of a stage.

    Args:
        kind: `kind` of the rows.
        settings: Section `record`.
        seed: Returns the seed of the request for a prompt, by its `prompt_id`.
    """

    def __init__(
        self,
        kind: Literal["evaluation", "match", "sample"],
        settings: RecordConfig,
        seed: Callable[[str], int],
    ) -> None:
        self._kind = kind
        self._settings = settings
        self._seed = seed
        self._rows: list[tuple[str, str, PromptExample, RewardInput]] = []
        """Model, set of prompts, prompt and answer."""
        self._noted: dict[str, dict[int, float]] = {"score": {}, "kl": {}}
        """Values by column, and by the `id` of the answer, which `_rows` keeps."""

    def add(
        self, model: str, prompts: Sequence[PromptExample], answers: Iterable[RewardInput], prompt_set: str
    ) -> None:
        """Add answers of a model to all prompts, and then further ones in the same order."""
        for prompt, answer in zip(itertools.cycle(prompts), answers, strict=False):
            self._rows.append((model, prompt_set, prompt, answer))

    def note(self, column: str, answers: Iterable[RewardInput], values: Iterable[float]) -> None:
        """Set a column of these answers. For others, it is null."""
        self._noted.setdefault(column, {}).update(zip(map(id, answers), values, strict=True))

    def save(self, context: StageContext) -> None:
        """Write the record into the output of the stage, unless `record.level` is none."""
        if self._settings.level == "none":
            return
        models, sets, prompts, answers = zip(*self._rows, strict=True)
        groups: dict[str, int] = {}
        rows: dict[str, Any] = {
            "kind": [self._kind] * len(answers),
            "step": [0] * len(answers),
            "index": range(len(answers)),
            "model": models,
            "group": [groups.setdefault(prompt.prompt_id, len(groups)) for prompt in prompts],
            "prompt_id": [prompt.prompt_id for prompt in prompts],
            "prompt_set": sets,
            "source": [prompt.source for prompt in prompts],
            "prompt_ids": [answer.prompt_ids for answer in answers],
            "response_ids": [answer.response_ids for answer in answers],
            "finished": [answer.finished for answer in answers],
            "seed": [self._seed(prompt.prompt_id) for prompt in prompts],
        }
        for column, values in self._noted.items():
            rows[column] = [values.get(id(answer)) for answer in answers]
        types = {column.name: column.type for column in (*COLUMNS, *ANSWER_COLUMNS)}
        schema = pa.schema({name: types.get(name, pa.float64()) for name in rows})
        writer = RecordWriter(context.scratch / RECORD, self._kind, self._settings)
        writer.add(0, pa.Table.from_pydict(rows, schema))
        writer.save(context.output)
