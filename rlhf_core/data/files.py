"""Parsing one file of rows: jsonl (also gzipped), json, csv, parquet.

Rows that cannot be parsed come out as `BadRow`; a file that is not what its name says, or is damaged, raises one
DataError that names it.
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
    """Every row of one open file; its name tells the format. Blank lines, CRLF and a byte-order mark are accepted."""
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
    return "null" if value is None else type(value).__name__


def _cut(text: str) -> str:
    return text[:500]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; use null or leave the field out")


def _parse(text: str) -> dict[str, Any]:
    """One JSON object; ValueError with the reason."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
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
        raise DataError(f"{file}:{number + 1}: the gzip file is cut short or damaged; copy it again") from error


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
        return BadRow(file, number, f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}", shown)
    except ValueError as error:
        cut_short = not line.endswith(b"\n") and str(error).startswith("not valid JSON")
        return BadRow(file, number, "incomplete JSON: the last line is cut short" if cut_short else str(error), shown)


def _read_json(file: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    try:
        value = json.loads(stream.read().decode("utf-8-sig"), parse_constant=_refuse_constant)
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
            f"{file}: expected an array of objects, got {json_type(value)}; name it .jsonl if each line is an object"
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
            yield BadRow(file, line, f"not CSV: {error}", "")
            continue
        shown = _cut(",".join(cells)).encode(errors="replace").decode()
        if any("\udc80" <= char <= "\udcff" for cell in cells if not cell.isascii() for char in cell):
            yield BadRow(file, line, "not UTF-8", shown)
        elif cells and len(cells) != len(header):
            yield BadRow(file, line, f"{len(cells)} cells, but the first line names {len(header)} fields", shown)
        elif cells:
            yield Row(file, line, {name: cell for name, cell in zip(header, cells, strict=True) if cell})


def _read_parquet(file: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=1024):
            yield from numbered(file, batch.to_pylist(), number)
            number += batch.num_rows
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: a text in it, about row {number + 1}, is not UTF-8; export it again") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: the parquet file is damaged: {' '.join(str(error).split())[:200]}; copy it again"
        ) from error


def numbered(file: str, rows: Iterable[dict[str, Any]], number: int = 0) -> Iterator[Row]:
    """Parsed rows with their index, from `number + 1`."""
    for index, row in enumerate(rows, start=number + 1):
        yield Row(file, index, row)
