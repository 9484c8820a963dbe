"""Rows of Parquet files. A text that is stored once and used in many rows is not copied for each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

_BATCH_BYTES = 64 * 2**20
"""Amount of a parquet file that is decoded at once, but at least one row."""
_DICTIONARY_BYTES = 16 * 2**20
"""Growth of the dictionaries of a row group's texts after which it is read without them."""


def cells_of(stream: IO[bytes], metadata: Any, group: int) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the cells of each row of a row group, and the size of their texts.

    Texts keep their dictionary, because a few bytes can represent a thousand copies of a long text. But
    pyarrow also adds the texts that the file has without one, and copies all of them for each batch: after
    2 GiB this is an error. If dictionaries grow, the rest of the group is therefore read without them, unless
    its texts are copies. A large one that does not grow is that of the file.
    """
    texts = _texts(metadata.row_group(group))
    done = 0
    first_size: int | None = None
    for batch in _batches(stream, metadata, group, texts):
        unpacked = 0
        for cells in zip(*map(_values, batch.columns), strict=True):
            size = sum(map(_text_size, cells))
            unpacked += size
            yield cells, size
        done += len(batch)
        dictionary_size = sum(map(_dictionary_size, batch.columns))
        first_size = dictionary_size if first_size is None else first_size
        if dictionary_size - first_size > _DICTIONARY_BYTES and unpacked <= _BATCH_BYTES:
            break
    else:
        return
    for batch in _batches(stream, metadata, group, []):
        repeated = min(done, len(batch))
        done -= repeated
        for cells in zip(*map(_values, batch.slice(repeated).columns), strict=True):
            yield cells, sum(map(_text_size, cells))


def _batches(stream: IO[bytes], metadata: Any, group: int, texts: list[str]) -> Iterator[Any]:
    """Yield the batches of a row group. The columns `texts` keep their dictionary."""
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(stream, metadata=metadata, read_dictionary=texts)
    yield from parquet.iter_batches(_batch_rows(metadata.row_group(group)), row_groups=[group])


def _texts(group: Any) -> list[str]:
    """Return the paths of the columns of texts with a dictionary in a row group, those inside of lists and
    structs included.
    """
    columns = [group.column(index) for index in range(group.num_columns)]
    return [
        column.path_in_schema
        for column in columns
        if column.physical_type == "BYTE_ARRAY" and any("DICTIONARY" in each for each in column.encodings)
    ]


def _dictionary_size(column: Any) -> int:
    """Return the bytes of the dictionaries of a column, those inside of lists and structs included."""
    import pyarrow as pa

    if isinstance(column, pa.DictionaryArray):
        return int(column.dictionary.nbytes)
    if isinstance(column, pa.StructArray):
        return sum(map(_dictionary_size, column.flatten()))
    if isinstance(column, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        return _dictionary_size(column.values)
    return 0


def _batch_rows(group: Any) -> int:
    """Return the number of rows that fit in `_BATCH_BYTES` according to the size of a row group, at most
    1024.
    """
    row_bytes = group.total_byte_size / max(group.num_rows, 1)
    return max(1, min(1024, int(_BATCH_BYTES / max(row_bytes, 1))))


def _values(column: Any) -> Iterator[Any]:
    """Yield the values of a column. Equal texts of a dictionary share one object."""
    import pyarrow as pa

    if isinstance(column, pa.DictionaryArray):
        # Only the texts of this batch: the dictionary can have those of many batches.
        used = column.indices.unique().drop_null()
        texts = dict(zip(used.to_pylist(), column.dictionary.take(used).to_pylist(), strict=True))
        for index in column.indices.to_pylist():
            yield None if index is None else texts[index]
    else:
        # One at a time: texts inside of lists and structs do not share objects.
        for value in column:
            yield value.as_py()


def _text_size(value: Any) -> int:
    """Return the number of characters (or bytes, for binary values) of all texts in a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_text_size, value.values()))
    if isinstance(value, list):
        return sum(map(_text_size, value))
    return 0
