"""Parsing one file of rows: jsonl (also gzipped), json, csv, parquet.

Rows that cannot be parsed come out as `BadRow`; a file that is not what its name says, or is damaged, raises
one DataError that names it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from rlhf_core.config.checkdata import csv_header_problem, impostor, suffix_of
from rlhf_core.config.checkfiles import DATA_SUFFIXES
from rlhf_core.errors import DataError

MAX_ROW_BYTES = 16 * 2**20
"""A longer line is a bad row: it is no text for a language model, and parsing it could exhaust the memory."""

_BATCH_BYTES = 64 * 2**20
"""Amount of a parquet file that is decoded at once, but at least one row."""


@dataclass(frozen=True)
class Row:
    """A row that could be parsed."""

    file: str
    line: int
    """Line of text files, from 1; index of the row elsewhere, from 1."""
    data: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that could not."""

    file: str
    line: int
    reason: str
    text: str
    """The row as far as it can be shown, at most 500 characters."""


def read_file(file: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    """Every row of one open file; its name tells the format. Blank lines, CRLF and a byte-order mark are
    accepted.
    """
    suffix = suffix_of(file)
    if suffix is None:
        raise DataError(f"{file}: unknown kind of file; name it {', '.join(DATA_SUFFIXES)}")
    problem = impostor(suffix, stream.read(256))
    if problem is not None:
        raise DataError(f"{file}: {problem}")
    stream.seek(0)
    if suffix == ".parquet":
        yield from _read_parquet(file, stream)
    elif suffix == ".csv":
        yield from _read_csv(file, stream)
    elif suffix == ".json":
        yield from _read_json(file, stream)
    elif suffix == ".jsonl.gz":
        with gzip.open(stream, "rb") as unpacked:
            yield from _read_jsonl(file, unpacked)
    else:
        yield from _read_jsonl(file, stream)


def json_type(value: Any) -> str:
    """The type of a JSON value, for messages."""
    if isinstance(value, bytes):
        return "binary data; save the column as text"
    return "null" if value is None else type(value).__name__


def _cut(text: str) -> str:
    return text[:500]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; use null or leave the field out")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for duplicate keys, because JSON parsers silently keep one of
    them.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {twice[:40]!r} in an object; keep one of them")
    return found


def _parse(text: str) -> dict[str, Any]:
    """One JSON object; ValueError with the reason."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if isinstance(value, list):
        raise ValueError("expected a JSON object, got an array; a file that is one array must be named .json")
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {json_type(value)}")
    return value


def _read_jsonl(file: str, stream: IO[bytes] | gzip.GzipFile) -> Iterator[Row | BadRow]:
    number = 0
    try:
        for number, line in enumerate(_lines(stream), start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            yield _jsonl_row(file, number, line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{file}:{number + 1}: the gzip file is cut short or damaged; copy it again"
        ) from error


def _lines(stream: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    """Lines with their end; of one over the limit only the beginning, so that memory stays bounded."""
    while line := stream.readline(MAX_ROW_BYTES + 1):
        rest = line
        while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_ROW_BYTES + 1)
        yield line


def _jsonl_row(file: str, number: int, line: bytes) -> Row | BadRow:
    shown = _cut(line[:2000].decode(errors="replace").strip())
    if len(line) > MAX_ROW_BYTES:
        return BadRow(file, number, f"longer than {MAX_ROW_BYTES // 2**20} MiB", shown)
    try:
        return Row(file, number, _parse(line.decode()))
    except UnicodeDecodeError as error:
        return BadRow(
            file, number, f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}", shown
        )
    except ValueError as error:
        cut_short = not line.endswith(b"\n") and str(error).startswith("not valid JSON")
        return BadRow(
            file, number, "incomplete JSON: the last line is cut short" if cut_short else str(error), shown
        )


def _read_json(file: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    try:
        value = json.loads(
            stream.read().decode("utf-8-sig"),
            parse_constant=_refuse_constant,
            object_pairs_hook=_without_repeats,
        )
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        hint = "; name it .jsonl if each line is an object" if error.msg == "Extra data" else ""
        raise DataError(f"{file}:{error.lineno}: not valid JSON: {error.msg}{hint}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DataError(f"{file}: {reason}") from error
    if not isinstance(value, list):
        raise DataError(
            f"{file}: expected an array of objects, got {json_type(value)}; name it .jsonl if each line is an"
            " object"
        )
    for index, item in enumerate(value, start=1):
        if isinstance(item, dict):
            yield Row(file, index, item)
        else:
            yield BadRow(file, index, f"expected a JSON object, got {json_type(item)}", _cut(repr(item)))


def _read_csv(file: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    """The first line names the fields; empty cells are missing fields."""
    csv.field_size_limit(MAX_ROW_BYTES)
    # Bytes that are not UTF-8 become surrogates here, which the check of the text fields refuses row by row.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, strict=True)
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{file}:1: not CSV: {error}") from error
    if problem := csv_header_problem(header):
        raise DataError(f"{file}:1: {problem}")
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if str(error) == "unexpected end of data":
                raise DataError(
                    f"{file}:{line}: a quote that opens in this row is never closed, so the"
                    f" {reader.line_num - line} lines behind it cannot be told apart; close it"
                ) from error
            yield from _lost(file, line, reader.line_num, f"not CSV: {error}", "")
            continue
        shown = _cut(",".join(cells)).encode(errors="replace").decode()
        if any("\udc80" <= char <= "\udcff" for cell in cells if not cell.isascii() for char in cell):
            yield BadRow(file, line, "not UTF-8", shown)
        elif cells and len(cells) != len(header):
            reason = f"{len(cells)} cells, but the first line names {len(header)} fields"
            yield from _lost(file, line, reader.line_num, reason, shown)
        elif cells:
            yield Row(file, line, {name: cell for name, cell in zip(header, cells, strict=True) if cell})


def _lost(file: str, first: int, last: int, reason: str, shown: str) -> Iterator[BadRow]:
    """Yield a bad row for each line within a row with a wrong quote, because these lines may have been
    separate rows.
    """
    for line in range(first, max(first, last) + 1):
        yield BadRow(
            file, line, reason if line == first else f"within the bad row that begins in line {first}", shown
        )


def _read_parquet(file: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        names = pq.read_schema(stream).names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(
                f"{file}: the column {twice[0]!r} is there {names.count(twice[0])} times; rename one of them"
            )
        # Keep the dictionary encoding of texts, because a few bytes can represent a thousand copies of a long
        # text.
        whole = pq.ParquetFile(stream, read_dictionary=names)
        for batch in whole.iter_batches(batch_size=_batch_rows(whole.metadata)):
            columns = [_values(column) for column in batch.columns]
            for cells in zip(*columns, strict=True):
                number += 1
                row = dict(zip(names, cells, strict=True))
                if _text_size(row) > MAX_ROW_BYTES:
                    yield BadRow(file, number, f"longer than {MAX_ROW_BYTES // 2**20} MiB", "")
                else:
                    yield Row(file, number, row)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: a text in it, about row {number + 1}, is not UTF-8; export it again"
        ) from error
    except MemoryError as error:
        raise DataError(
            f"{file}: the rows about {number + 1} do not fit in memory; write smaller row groups"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: the parquet file is damaged: {' '.join(str(error).split())[:200]}; copy it again"
        ) from error


def _batch_rows(metadata: Any) -> int:
    """Return the number of rows that fit in `_BATCH_BYTES` according to the sizes in the file, at most 1024."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(1024, int(_BATCH_BYTES / max(largest, 1))))


def _values(column: Any) -> list[Any]:
    """Return the values of a column. Equal texts of a dictionary share one object."""
    import pyarrow as pa

    if not isinstance(column, pa.DictionaryArray):
        return list(column.to_pylist())
    texts = column.dictionary.to_pylist()
    return [None if index is None else texts[index] for index in column.indices.to_pylist()]


def _text_size(value: Any) -> int:
    """Return the number of characters (or bytes, for binary values) of all texts in a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_text_size, value.values()))
    return sum(map(_text_size, value)) if isinstance(value, list) else 0


def numbered(file: str, rows: Iterable[dict[str, Any]], number: int = 0) -> Iterator[Row]:
    """Parsed rows with their index, from `number + 1`."""
    for index, row in enumerate(rows, start=number + 1):
        yield Row(file, index, row)
