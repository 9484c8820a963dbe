"""Reads the record of a run.

>>> from tempfile import mkdtemp
>>> from rlhf_core.config.pipeline import RecordConfig
>>> from rlhf_core.record.writer import RecordWriter
>>> folder = Path(mkdtemp())
>>> writer = RecordWriter(folder / "parts", "ppo", RecordConfig())
>>> writer.add(1, pa.table({"step": [1, 1], "index": [0, 1], "score": [0.5, 2.0]}))
>>> writer.add(2, pa.table({"step": [2, 2], "index": [0, 1], "score": [1.0, 1.5]}))
>>> writer.save(folder)
>>> read_rollouts(folder, ["index", "score"], steps=[1]).to_pylist()
[{'index': 0, 'score': 0.5}, {'index': 1, 'score': 2.0}]
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds

from rlhf_core.errors import InputError

RECORD = "record"
"""Folder with the parts of the record, in a checkpoint and in an artifact."""


def parts_of(folder: Path) -> list[Path]:
    """Return the finished and unfinished parts in a folder, in the order of their steps."""
    # Eight digits, so that the names sort as the numbers of their steps do.
    return sorted(folder.glob("*-????????.parquet"))


def read_rollouts(
    folder: Path | str, columns: Sequence[str] | None = None, steps: Collection[int] | None = None
) -> pa.Table:
    """Return the recorded rollouts, in the order of steps and responses.

    A column that a part lacks, for example because it was recorded at another level, is null there.

    Args:
        folder: An artifact with a record (`ArtifactStore.fetch(ref, record=True)`), or a checkpoint.
        columns: Names of the columns (`rlhf_core.record.schema`); None: all.
        steps: Steps to read; None: all. Other steps are not read from the disk.

    Raises:
        InputError: The folder has no record, or the record has no such column.
    """
    parts = parts_of(Path(folder) / RECORD)
    if not parts:
        raise InputError(
            f"{folder} has no recorded rollouts; the stages ppo, sample, evaluate, and register with a match,"
            " record them unless record.level is none, and the copy of an artifact in a bucket has them with"
            " ArtifactStore.fetch(ref, record=True)"
        )
    datasets = [ds.dataset(part, format="parquet") for part in parts]
    # Of all parts: a data set of several files would have the schema of the first one.
    schema = pa.unify_schemas([dataset.schema for dataset in datasets])
    unknown = sorted(set(columns or ()) - set(schema.names))
    if unknown:
        raise InputError(
            f"the record {folder} has no column {', '.join(unknown)}; it has {', '.join(schema.names)}"
        )
    chosen = None if steps is None else ds.field("step").isin(list(steps))
    rollouts = ds.dataset([dataset.replace_schema(schema) for dataset in datasets])
    return rollouts.to_table(columns=None if columns is None else list(columns), filter=chosen)
