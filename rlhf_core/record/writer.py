"""Writes the record, as files of consecutive steps ("parts").

    add(step)  ->  row groups of the open part       {folder}/ppo-00000001.parquet   steps 1 to 10
    save       ->  the part ends; links to all       {folder}/ppo-00000011.parquet   steps 11 to 20
                   parts, in a checkpoint or in the artifact

A part has the name of its first step and ends with a checkpoint. An attempt that continues from a checkpoint
has the parts of this checkpoint. The steps after it are made again, and so is their part. A step is therefore
recorded once, however often the stage is killed.

The size counts the columns before compression, which does not depend on where parts end.

`RecordWriter` is what PPO writes with. The other stages collect their answers in an `AnswerRecord` and write
them as one table at their end: an attempt that is interrupted has written nothing.
"""

from __future__ import annotations

import itertools
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.config.pipeline import RecordConfig
from rlhf_core.record.reader import RECORD, parts_of
from rlhf_core.record.schema import ANSWER_COLUMNS, COLUMNS, NUMBERS, TOKENS
from rlhf_core.system.files import linked
from rlhf_core.types import PromptExample, RewardInput, StageContext

log = logging.getLogger(__name__)

_BYTES = b"rlhf.bytes"
_GROUP_BYTES = 2**26
"""Approximate largest size of a row group, before compression. A step with less is one."""


class RecordWriter:
    """Writes the rollouts of one stage.

    Args:
        folder: Local folder of this attempt for the parts. It is created, without what it had.
        kind: `kind` of all rows.
        settings: Section `record`.
    """

    def __init__(self, folder: Path, kind: str, settings: RecordConfig) -> None:
        self._folder = folder
        self._kind = kind
        self.level = settings.level
        self._max_bytes = settings.max_bytes
        self._bytes = 0
        """Bytes of all steps so far, before compression."""
        self.is_full = False
        """Whether the limit is reached, so that `add` does nothing. `restore` must be told."""
        self._part: pq.ParquetWriter | None = None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def add(self, step: int, rows: pa.Table) -> None:
        """Record a step. All tables of an attempt have the same columns."""
        if self.is_full:
            return
        if self._bytes + rows.nbytes > self._max_bytes:
            log.warning(
                "step %d and later ones are not recorded: the record has %.1f MB, and record.max_bytes=%d is"
                " its limit",
                step,
                self._bytes / 1e6,
                self._max_bytes,
            )
            self.is_full = True
            return
        if self._part is None:
            self._part = _new_part(self._folder / f"{self._kind}-{step:08d}.parquet", rows.schema)
        # A row group is encoded in memory, beside the rows.
        groups = 1 + rows.nbytes // _GROUP_BYTES
        self._part.write_table(rows, row_group_size=max(1, math.ceil(len(rows) / groups)))
        self._bytes += rows.nbytes

    def save(self, folder: Path) -> None:
        """End the open part, and link all parts to `folder`/record."""
        if self._part is not None:
            # In the footer and not in the name: it is known only
            # when the part ends, and `restore` continues from it.
            self._part.add_key_value_metadata({_BYTES: str(self._bytes).encode()})
            self._part.close()
            self._part = None
        _link_all(self._folder, folder / RECORD)

    def restore(self, folder: Path, *, is_full: bool) -> None:
        """Continue with the parts of the checkpoint `folder`, and with what `is_full` was then.

        It does not follow from the parts: the first step can be above the limit, and a later one below it.
        """
        _link_all(folder / RECORD, self._folder)
        for part in parts_of(self._folder):
            self._bytes = int(pq.read_metadata(part).metadata[_BYTES])
        self.is_full = is_full


def _new_part(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Open a part, with the encodings that make the files of the demo smallest."""
    tokens = [f"{field.name}.list.element" for field in schema if field.type == TOKENS]
    # The bytes of exponents are put together: only they can be compressed.
    numbers = [f"{field.name}.list.element" for field in schema if field.type == NUMBERS]
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=[*tokens, *texts],
        use_byte_stream_split=numbers,
        column_encoding={"index": "DELTA_BINARY_PACKED", "group": "DELTA_BINARY_PACKED"},
        write_statistics=["step"],  # with which a reader leaves out row groups
    )


def _link_all(source: Path, target: Path) -> None:
    """Link all parts of a folder to another one, which loses what it had."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for part in parts_of(source):
        # Links, because each checkpoint has all parts: with copies,
        # a run would write its record once for each of them.
        if not linked(part, target / part.name):
            shutil.copy(part, target)


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
        # By identity: equal answers, such as those of two models to one prompt, are rows of their own.
        self._noted.setdefault(column, {}).update(zip(map(id, answers), values, strict=True))

    def save(self, context: StageContext) -> None:
        """Write the record into the output of the stage. Without answers, or if `record.level` is none, there
        is none.
        """
        if self._settings.level == "none" or not self._rows:
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
            "response_ids": [np.asarray(answer.response_ids, np.int32) for answer in answers],
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
