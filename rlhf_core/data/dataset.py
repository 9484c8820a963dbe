"""Token files of a data artifact: writing them, and reading them as the records of `rlhf_core.types`.

load_*   a list of all records, for a few rows and for one process
open_*   records that are made when they are asked for, for training sets: the columns are in one file of
         each host, which all processes there map into their memory. It is in `work`, a folder that no other
         attempt uses
"""

from __future__ import annotations

import fcntl
import json
import logging
import socket
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, overload

from typing_extensions import override

from rlhf_core.config.rewards import AnswerReward, AnyReward
from rlhf_core.data.answers import gold_answers, is_reachable, rewording
from rlhf_core.data.formats import field_value
from rlhf_core.errors import DataError
from rlhf_core.system.files import replacing
from rlhf_core.types import PairExample, PromptExample, SFTExample

log = logging.getLogger(__name__)

Split = Literal["train", "eval"]
_T = TypeVar("_T")
_TOKENS, _MASK, _TEXT, _NUMBER = "list<int32>", "list<int8>", "string", "double"
_COLUMNS: dict[str, dict[str, str]] = {
    "sft": {"input_ids": _TOKENS, "loss_mask": _MASK, "source": _TEXT, "group": _TEXT},
    "pairs": {
        "prompt_id": _TEXT,
        "prompt": _TEXT,
        "prompt_ids": _TOKENS,
        "chosen_ids": _TOKENS,
        "rejected_ids": _TOKENS,
        "source": _TEXT,
        "margin": _NUMBER,
        "group": _TEXT,
    },
    "prompts": {
        "prompt_id": _TEXT,
        "prompt": _TEXT,
        "input_ids": _TOKENS,
        "meta": _TEXT,
        "source": _TEXT,
        "group": _TEXT,
    },
}
"""`meta` is JSON in a string."""
_ADDED = {"sft": ("group",), "pairs": ("group",), "prompts": ("source", "group")}
"""Columns that artifacts of earlier versions do not have."""
_BATCH_ROWS = 2**12
"""Rows that are read or made into columns at once."""
_GROUP_BYTES = 2**26
"""Bytes of a row group of a file, which is in memory when it is written. Files with less have one."""


class Rows(Sequence[_T]):
    """Rows that are made when they are asked for.

    Args:
        count: Their number.
        make: Returns the row with an index.
    """

    def __init__(self, count: int, make: Callable[[int], _T]) -> None:
        self._count, self._make = count, make

    @override
    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...
    @override
    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        if isinstance(index, slice):
            return list(map(self._make, range(self._count)[index]))
        # By a range, which takes negative indices and raises the IndexError that ends an iteration.
        return self._make(range(self._count)[index])


def picked(rows: Sequence[_T], indices: Any) -> Rows[_T]:
    """Return the rows with these indices."""
    return Rows(len(indices), lambda index: rows[indices[index]])


def load_sft(folder: Path, split: Split) -> list[SFTExample]:
    """Return the demonstrations of a data artifact's folder.

    Raises DataError if the file is missing or damaged.
    """
    return [_sft_example(*row) for row in _read(folder, "sft", split, tuple(_COLUMNS["sft"]))]


def open_sft(folder: Path, split: Split, work: Path) -> Rows[SFTExample]:
    """Return the demonstrations like `load_sft`, from a file in `work`, a folder of this host."""
    return _open(folder, "sft", split, work, _sft_example)


def load_pairs(folder: Path, split: Split) -> list[PairExample]:
    """Return the preference pairs of a data artifact's folder. There may be none."""
    return [_pair_example(*row) for row in _read(folder, "pairs", split, tuple(_COLUMNS["pairs"]))]


def open_pairs(folder: Path, split: Split, work: Path) -> Rows[PairExample]:
    """Return the preference pairs like `load_pairs`, from a file in `work`, a folder of this host."""
    return _open(folder, "pairs", split, work, _pair_example)


def load_prompts(folder: Path, split: Split) -> list[PromptExample]:
    """Return the prompts of a data artifact's folder."""
    return [_prompt_example(*row) for row in _read(folder, "prompts", split, tuple(_COLUMNS["prompts"]))]


def open_prompts(folder: Path, split: Split, work: Path) -> Rows[PromptExample]:
    """Return the prompts like `load_prompts`, from a file in `work`, a folder of this host."""
    return _open(folder, "prompts", split, work, _prompt_example)


def _sft_example(ids: Sequence[int], mask: Sequence[int], source: str, group: str | None) -> SFTExample:
    return SFTExample(tuple(ids), tuple(mask), source, group or "")


def _pair_example(
    prompt_id: str,
    prompt: str,
    prompt_ids: Sequence[int],
    chosen: Sequence[int],
    rejected: Sequence[int],
    source: str,
    margin: float | None,
    group: str | None,
) -> PairExample:
    ids = tuple(prompt_ids), tuple(chosen), tuple(rejected)
    return PairExample(prompt_id, prompt, *ids, source, margin, group or "")


def _prompt_example(
    prompt_id: str, prompt: str, ids: Sequence[int], meta: str, source: str | None, group: str | None
) -> PromptExample:
    return PromptExample(prompt_id, prompt, tuple(ids), json.loads(meta), source or "", group or "")


def read_pair_groups(folder: Path, split: Split) -> Iterator[tuple[str, str, str]]:
    """Yield the source, the id of the prompt and the group of each preference pair. Few are in memory."""
    for source, prompt_id, group in _read(folder, "pairs", split, ("source", "prompt_id", "group")):
        yield source, prompt_id, group or prompt_id


def sft_prompts(example: SFTExample) -> Iterator[tuple[int, ...]]:
    """Yield the tokens before each answer of a demonstration, as `PromptExample.input_ids` has them.

    A conversation has several answers. Plain text has none.
    """
    for end in range(1, len(example.loss_mask)):
        if example.loss_mask[end] and not example.loss_mask[end - 1]:
            yield example.input_ids[:end]


@dataclass
class Counted(Generic[_T]):
    """The number of some rows and the first of them. They can be all rows of a large set."""

    number: int = 0
    first: _T | None = None

    def add(self, row: _T) -> None:
        """Count a row."""
        self.first = self.first if self.number else row
        self.number += 1


def require_margins(*sets: Sequence[PairExample]) -> None:
    """Raise DataError unless every pair has a margin."""
    without = Counted[PairExample]()
    for pair in chain.from_iterable(sets):
        if pair.margin is None:
            without.add(pair)
    if without.first is not None:
        raise DataError(
            f"reward.margin: field needs a finite number `margin` in every preference row; {without.number}"
            f" of {sum(map(len, sets))} have none (the first: source {without.first.source!r}, prompt"
            f" {without.first.prompt[:60]!r}); add it, `rename` another field to it, or use none or constant"
        )


def require_answers(
    prompts: Sequence[PromptExample],
    rewards: Sequence[AnyReward],
    where: str = "ppo.rewards",
    most: float = 0.0,
) -> list[str]:
    """Return warnings about the answers that `rewards` compare with.

    Args:
        prompts: Prompts with the fields of their rows.
        rewards: Rewards; those of another type are ignored.
        where: Field of the rewards.
        most: Largest share of prompts, 0 to 1, whose answer is missing or cannot be reached.

    Raises:
        DataError: No prompt has an answer, or more than `most` of them have none that can be reached.
    """
    warnings: list[str] = []
    for source in rewards:
        if isinstance(source, AnswerReward):
            warnings += _answer_warnings(prompts, source, where, most)
    return warnings


def _answer_warnings(
    prompts: Sequence[PromptExample], source: AnswerReward, where: str, most: float
) -> Iterator[str]:
    field, count = source.field, len(prompts)
    without, unreachable, reworded = Counted[PromptExample](), Counted[Any](), Counted[str]()
    for prompt in prompts:
        value = field_value(prompt.meta, field)
        answers = gold_answers(value)
        if value is None:
            without.add(prompt)
        if not any(is_reachable(each, only_numbers=source.extract == "final_number") for each in answers):
            unreachable.add(value)
        elif reading := rewording(value):
            reworded.add(f"{value!r:.60} as {reading}")
    # All of them, whatever `most` allows: then it is the name of the field that is wrong.
    if without.first is not None and (without.number == count or without.number > most * count):
        raise DataError(
            f"{where}: type answer needs the field {field!r} in every prompt row; {without.number} of"
            f" {count} have none (the first: {without.first.prompt[:60]!r}, whose fields are"
            f" {', '.join(sorted(without.first.meta)) or 'none'}); add it, or set `field` to the one that"
            " holds the answer"
        )
    if lost := unreachable.number:
        problem = (
            f"{where}: type answer: no response can get the reward for {lost} of {count} prompts"
            f" ({lost / count:.1%}), because their field {field!r} is no answer that can be read"
            f" (the first: {unreachable.first!r:.80}); write each as a number or a short text, or set `field`"
            " to the one that holds it, such as `reward_model.ground_truth`"
        )
        if lost > most * count:
            raise DataError(f"{problem} (data.max_bad_rows={most:g})" if most else problem)
        yield problem
    if reworded.number:
        yield (
            f"{where}: type answer: {reworded.number} of {count} answers in the field {field!r} are read as"
            f" what they contain (the first: {reworded.first}); if that is not meant, write them as plain"
            " text"
        )


def read_evenly(
    folder: Path, name: str, split: Split, columns: Sequence[str], most: int | None
) -> list[tuple[Any, ...]]:
    """Return columns of rows at equal distances.

    Args:
        folder: Folder of the data artifact.
        name: Name of the table.
        split: Split of the rows.
        columns: Their names.
        most: Number of rows if there are more; None for all.

    Raises:
        DataError: The file is missing or damaged.
    """
    rows = list(_read(folder, name, split, columns))
    return rows if most is None else evenly(rows, most)


def evenly(rows: list[_T], most: int) -> list[_T]:
    """Return `rows`, or `most` of them at equal distances if there are more."""
    if len(rows) <= most:
        return rows
    return [rows[index * len(rows) // most] for index in range(most)]


def write(folder: Path, name: str, split: Split, examples: Iterable[Any]) -> None:
    """Write `{name}_{split}.parquet` with the columns of the record.

    The same examples give the same bytes. A row group of them is in memory.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, rest = _schema(name), iter(examples)
    columns = schema.empty_table().columns
    with pq.ParquetWriter(folder / f"{name}_{split}.parquet", schema, compression="zstd") as writer:

        def write_group() -> None:
            # One chunk, because the borders of chunks are borders of pages. One column after the other, so
            # that only one is in memory twice. As a table: of texts above 2 GiB it makes several chunks, and
            # a column raises an error.
            for at in range(len(columns)):
                columns[at] = pa.table({"": columns[at]}).combine_chunks().column(0)
            writer.write_table(pa.table(columns, schema=schema))
            columns[:] = schema.empty_table().columns

        while rows := list(islice(rest, _BATCH_ROWS)):
            if sum(column.nbytes for column in columns) >= _GROUP_BYTES:
                write_group()
            added = pa.table([_column(rows, field) for field in schema], schema=schema)
            for at, column in enumerate(added.columns):
                columns[at] = pa.chunked_array([*columns[at].chunks, *column.chunks])
        write_group()


def _column(examples: Sequence[Any], field: Any) -> Any:
    import numpy as np
    import pyarrow as pa

    values = [getattr(example, field.name) for example in examples]
    if field.name == "meta":
        values = [json.dumps(dict(value), sort_keys=True) for value in values]
    elif pa.types.is_list(field.type):
        # Arrow reads arrays many times as fast as sequences of Python.
        values = [np.asarray(value, field.type.value_type.to_pandas_dtype()) for value in values]
    return pa.array(values, field.type)


def _schema(name: str) -> Any:
    import pyarrow as pa

    types = {
        _TOKENS: pa.list_(pa.int32()),
        _MASK: pa.list_(pa.int8()),
        _TEXT: pa.string(),
        _NUMBER: pa.float64(),
    }
    return pa.schema([(column, types[kind]) for column, kind in _COLUMNS[name].items()])


def _read(folder: Path, name: str, split: Split, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield columns of all rows."""
    for batch in _batches(folder, name, split, columns):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _batches(folder: Path, name: str, split: Split, columns: Sequence[str]) -> Iterator[Any]:
    """Yield columns of all rows as record batches. No other column is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / f"{name}_{split}.parquet"
    schema = pa.schema([_schema(name).field(column) for column in columns])
    try:
        with pq.ParquetFile(path) as file:
            # Data of earlier versions may belong to a champion, whose prompts are needed for a match.
            there = [each for each in columns if each not in _ADDED[name] or each in file.schema_arrow.names]
            if missing := [each for each in there if each not in file.schema_arrow.names]:
                raise KeyError(f"no column {missing[0]}")
            for batch in file.iter_batches(_BATCH_ROWS, columns=there):
                nothing = pa.nulls(len(batch), pa.string())
                arrays = [batch.column(each) if each in there else nothing for each in columns]
                yield pa.record_batch(arrays, schema=schema)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DataError(f"cannot read {path}: {error}; run the data stage again") from error


def _open(folder: Path, name: str, split: Split, work: Path, make: Callable[..., _T]) -> Rows[_T]:
    """Return the rows of a file, whose columns are in an uncompressed Arrow file in `work`.

    The first process of the host makes it, and the others wait. Where files cannot be locked, each of them
    makes it.
    """
    import pyarrow as pa

    # Hosts may share the folder after all, and the locks of a network file system can be local to a host.
    mapped = work / f"{name}_{split}-{socket.gethostname()}.arrow"
    # A file of its own: a lock on the mapped file would stay with the inode that `replacing` takes away.
    with mapped.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            log.info("%s cannot be locked: %s", lock.name, error)
        # Under this name the file is always whole, because `replacing` renames it at its end. Without a lock,
        # processes therefore only do the work several times.
        if not mapped.exists():
            with replacing(mapped) as part:
                _write_columns(folder, name, split, part)
    # Mapped, so that the ranks of a host share the pages of one file and none of them holds the rows.
    file = pa.ipc.open_file(pa.memory_map(str(mapped)))
    batches = list(map(file.get_batch, range(file.num_record_batches)))
    readers = [list(map(_reader, batch.columns)) for batch in batches]
    ends = list(accumulate(map(len, batches)))

    def row(index: int) -> _T:
        batch = bisect_right(ends, index)
        place = index - ends[batch] + len(batches[batch])
        return make(*(read(place) for read in readers[batch]))

    return Rows(ends[-1] if ends else 0, row)


def _write_columns(folder: Path, name: str, split: Split, path: Path) -> None:
    """Write the columns of all rows as an Arrow file, a few at a time."""
    import pyarrow as pa

    try:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _schema(name)) as writer:
            for batch in _batches(folder, name, split, tuple(_COLUMNS[name])):
                writer.write_batch(batch)
    except OSError as error:
        problem = f"cannot write the columns of {name}_{split}: {error}"
        raise OSError(error.errno, problem, str(path.parent)) from error


def _reader(column: Any) -> Callable[[int], Any]:
    """Return a function that returns the value of a row."""
    import pyarrow as pa

    if not pa.types.is_list(column.type):
        return lambda row: column[row].as_py()
    # Not by `as_py`, which makes a scalar of Arrow for each token first.
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
    return lambda row: values[offsets[row] : offsets[row + 1]].tolist()
