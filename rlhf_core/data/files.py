"""Reader of data files: jsonl (also gzipped), json, csv, parquet.

`read_file` yields the rows of one open file. Rows that cannot be parsed are returned as `BadRow`. A file with
a content that its name does not say, or a damaged file, raises one DataError with its name. The preflight
uses the same reader for the beginning of a file (`check_beginning`), so that both give the same message.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

from rlhf_core.config.address import DATA_SUFFIXES, Address
from rlhf_core.config.redact import shown
from rlhf_core.errors import DataError
from rlhf_core.system.files import LFS_POINTER, exists, open_regular, unfit

MAX_FILES = 50_000
"""Maximum number of files of any kind in a folder. With more, it is probably not a folder of data."""
MAX_ROW_BYTES = 16 * 2**20
"""A longer line is a bad row: it is no text for a language model, and parsing it could exhaust the memory."""
_TOO_LONG = f"longer than {MAX_ROW_BYTES // 2**20} MiB"
MAX_ARRAY_BYTES = 2 * 2**30
"""Maximum size of a .json file. Its array is parsed as a whole, which needs several times its size."""
BEGINNING_ROWS = 20
"""Number of rows that are read before the run. `check_beginning` refuses a file if none of them is usable."""
_BATCH_ROWS = 16
"""Rows of a parquet file that are decoded at once. A few bytes of it can be a thousand copies of a long text.
"""
_BUFFER_BYTES = 2**20
"""Bytes of a column of a parquet file that are read at once."""
_MOST_LONG_ROWS = 100
"""Rows beyond `MAX_ROW_BYTES` at which the reading of a parquet file ends: each takes as long as its text."""
_SMALL_ARRAY_BYTES = 8_000_000
"""Maximum size of a .json file that `check_beginning` parses. An array can only be parsed as a whole."""
_BOM = b"\xef\xbb\xbf"
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
"""Files of a data set of the hub that have no rows."""
_ARROW = (
    "Arrow files, such as those of `Dataset.save_to_disk`, are not read; write Parquet:"
    " `datasets.load_from_disk(FOLDER).to_parquet('train.parquet')`, of a DatasetDict for each split"
)
_SHARD = re.compile(r"-\d+-of-\d+(?=[.]|$)")
_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "dev": "validation",
    "val": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""Words that name a split in the name of a file or folder, as `datasets` knows them."""
# Not `\b`, for which `_` and digits are part of a word: `train_sft` and `dev2` name a split as well.
_SPLIT_WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(_SPLITS)})(?![^\W\d_])", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """A row that could be parsed."""

    file: str
    line: int
    """Line of text files, from 1; index of the row elsewhere, from 1."""
    data: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that could not be parsed, or cannot be used."""

    file: str
    line: int
    reason: str
    text: str
    """The row as far as it can be shown, at most 500 characters."""


def suffix_of(name: str) -> str | None:
    """Return the supported suffix of a file name, or None."""
    lower = name.lower()
    for suffix in DATA_SUFFIXES:  # none is the end of another one
        if lower.endswith(suffix):
            return suffix
    return None


def is_data_file(path: str) -> bool:
    """Return whether a file of a folder or bucket is read, by its path inside of that.

    Hidden files, files in hidden folders such as `.ipynb_checkpoints`, and descriptions of a data set of the
    hub are not.
    """
    return (
        suffix_of(path) is not None and not _is_hidden(path) and PurePosixPath(path).name not in _DESCRIPTIONS
    )


def _is_hidden(path: str) -> bool:
    return any(name.startswith(".") for name in path.split("/"))


def files_of_split(names: Sequence[str], split: str) -> list[str]:
    """Return the files of a folder or bucket that belong to a split, as `datasets` selects them by their
    names: all of them if no name is that of a split.

    `names` are relative to the folder. Raises DataError if the names do not say which files are meant.
    """
    splits = {name: _split_of(name) for name in names}
    others = sorted(set(splits.values()), key=str)
    if others == [None]:
        return list(names)
    found = [name for name in names if splits[name] == _SPLITS.get(split, split)]
    first: dict[str | None, str] = {}
    for name in names:
        first.setdefault(splits[name], name)
    listed = ", ".join(f"{name} ({each or 'no split'})" for each, name in first.items())
    if None in others:
        raise DataError(
            f"only some of the files are named by splits: {listed}; rename or move the others, or give each"
            " file or folder as a source of its own"
        )
    if not found:
        raise DataError(
            f"no file is of the split {split!r}: {listed}; set `split` of the source to one of them"
        )
    shards = Counter(PurePosixPath(name).name for name in found if _SHARD.search(name))
    if shards and max(shards.values()) > 1:
        folders = sorted({str(PurePosixPath(name).parent) for name in found})
        raise DataError(
            f"its folders {', '.join(folders)} are data sets of their own; give one of them as `path`"
        )
    return found


def _split_of(path: str) -> str | None:
    """Return the split that the name of a file says, or else that of a folder in its path, or None.

    A shard `train_sft-00000-of-00003` is of the split `train_sft`.
    """
    *folders, name = path.split("/")
    suffix = suffix_of(name) or ""
    name = name[: len(name) - len(suffix)]
    shard = _SHARD.search(name)
    if shard is not None:
        name = name[: shard.start()]
    for part in (name, *reversed(folders)):
        word = _SPLIT_WORD.search(part)
        if word is not None:
            is_custom = shard is not None and part == name and name not in _SPLITS
            return name if is_custom else _SPLITS[word.group().lower()]
    return None


def list_files(address: Address, split: str | None = None, most: int = MAX_FILES) -> list[Path]:
    """Return the file at a local address, or the supported files in a folder and its subfolders, sorted.

    With `split`, and if the names of the files are those of splits, only its files are returned.

    Raises DataError if there is none, if the folder holds more than `most` files of any kind, or if the
    address, or a data file in the folder, is no regular file, such as a link to a file that does not exist.
    """
    path = address.path
    if not exists(path):
        name = address.text
        if not name.isprintable() or len(name) >= 300:
            name = shown(name)
        raise DataError(
            f"file not found: {name}; correct the path (relative ones start at the configuration or at"
            f" {Path.cwd()})"
        )
    if not path.is_dir():
        problem = unfit(path)
        if problem is not None:
            raise DataError(f"{problem}; write the rows to a file and give its path")
        return [path]
    # Bounded while it lists: a source can be a home folder by mistake, with millions of files.
    entries = list(islice(path.rglob("*"), most + 1))
    if len(entries) > most:
        raise DataError(f"{path} holds over {most} files; give the folder of the data alone")
    files = []
    for file in entries:
        name = file.relative_to(path).as_posix()
        if file.suffix == ".arrow" and not _is_hidden(name):
            raise DataError(f"{file}: {_ARROW}")
        if file.is_dir() or not is_data_file(name):
            continue
        problem = unfit(file)
        if problem is not None:  # such as a link of DVC or git-annex to a file that was not downloaded
            raise DataError(f"{problem}; correct it, or take it out of {path}")
        if _has_surrogates(str(file)):
            raise DataError(f"{shown(str(file), limit=200)}: the name of this file is not UTF-8; rename it")
        files.append(file)
    if not files:
        raise DataError(f"{path} has no data files; put {', '.join(DATA_SUFFIXES)} files into it")
    files.sort(key=str)  # the order of stage keys, which differs from that of paths
    if split is None:
        return files
    try:
        chosen = files_of_split([file.relative_to(path).as_posix() for file in files], split)
    except DataError as error:
        raise DataError(f"{path}: {error.message}") from error
    return [path / name for name in chosen]


def read_file(file: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    """Yield every row of an open file, whose name determines the format.

    Blank lines, CRLF and a byte-order mark are accepted.
    """
    suffix = _checked_suffix(file, stream)
    if suffix == ".parquet":
        yield from _read_parquet(file, stream)
    else:
        with _unpacked(suffix, stream) as text:
            yield from _read_text(file, suffix, text)


def check_beginning(file: Path) -> None:
    """Raise DataError if the beginning of a file shows that none of its rows can be used.

    Single bad rows are not an error here: the data stage counts them.
    """
    name = str(file)
    try:
        with open_regular(file) as stream:
            suffix = _checked_suffix(name, stream)
            if suffix == ".parquet":
                _check_parquet_end(name, stream)
                return
            if suffix == ".json" and file.stat().st_size > _SMALL_ARRAY_BYTES:
                start = stream.read(1_000_000)
                if start.strip():
                    _require_array(name, start)
                return
            _check_first_rows(name, suffix, list(islice(read_file(name, stream), BEGINNING_ROWS)))
    except OSError as error:
        raise DataError(f"{name}: it cannot be read ({error.strerror or error}); make it readable") from error


def first_rows(file: Path) -> list[Row]:
    """Return the rows among the first `BEGINNING_ROWS` lines of a file; none of a large .json file, whose
    array can only be parsed as a whole. Raises DataError if the file cannot be read.
    """
    name = str(file)
    try:
        with open_regular(file) as stream:
            if suffix_of(name) == ".json" and file.stat().st_size > _SMALL_ARRAY_BYTES:
                return []
            found = list(islice(read_file(name, stream), BEGINNING_ROWS))
    except OSError as error:
        raise DataError(f"{name}: it cannot be read ({error.strerror or error}); make it readable") from error
    return [row for row in found if isinstance(row, Row)]


def _check_first_rows(file: str, suffix: str, rows: Sequence[Row | BadRow]) -> None:
    """Raise DataError if none of the first rows of a file can be used."""
    bad = [row for row in rows if isinstance(row, BadRow)]
    if not rows:
        raise DataError(f"{file}: 0 rows, {_NO_ROWS[suffix]}; give a file with rows")
    if len(bad) == len(rows):
        raise DataError(
            f"{file}:{bad[0].line}: {bad[0].reason} (none of the first {len(bad)} lines is usable);"
            f" {_ROW_FIX[suffix]}"
        )


_ROW_FIX = {
    ".jsonl": "write one JSON object per line",
    ".jsonl.gz": "write one JSON object per line",
    ".json": "write an array of JSON objects",
    ".csv": "give each line a cell for each field, in UTF-8",
}
_AS_LINES = "write it as .jsonl, one object per line"
_NO_ROWS = {
    ".jsonl": "only blank lines",
    ".jsonl.gz": "only blank lines",
    ".json": "the array is empty",
    ".csv": "only the line of names",
}


@contextmanager
def _unpacked(suffix: str, stream: IO[bytes]) -> Iterator[IO[bytes]]:
    if suffix == ".jsonl.gz":
        with gzip.open(stream, "rb") as unpacked:
            yield unpacked  # type: ignore[misc]  # GzipFile has what the readers use of IO
    else:
        yield stream


def _read_text(file: str, suffix: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    if suffix == ".csv":
        return _read_csv(file, stream)
    if suffix == ".json":
        return _read_json(file, stream)
    return _read_jsonl(file, stream)


def _checked_suffix(file: str, stream: IO[bytes]) -> str:
    """Return the suffix of a file if its first bytes and its size agree with it.

    The stream is at its start afterwards.
    """
    suffix = suffix_of(file)
    if file.lower().endswith(".arrow"):
        raise DataError(f"{file}: {_ARROW}")
    if suffix is None:
        raise DataError(f"{file}: unknown kind of file; name it {', '.join(DATA_SUFFIXES)}")
    problem = content_mismatch(suffix, stream.read(256))
    if problem is not None:
        raise DataError(f"{file}: {problem}")
    size = stream.seek(0, io.SEEK_END)
    if suffix == ".json" and size > MAX_ARRAY_BYTES:
        raise DataError(
            f"{file}: an array of {size / 2**30:.1f} GiB cannot be read, because a .json file may have at"
            f" most {MAX_ARRAY_BYTES // 2**30} GiB; {_AS_LINES}"
        )
    stream.seek(0)
    return suffix


def content_mismatch(suffix: str, head: bytes) -> str | None:
    """Return why a file that begins with `head` is no `suffix` file, with a fix, or None.

    `head` are the first 64 bytes or more, or the whole file if it is shorter.
    """
    start = head.lstrip()[:64].lower()
    if not head:
        return "the file is empty (0 rows); give a file with rows"
    if start.startswith(LFS_POINTER):
        return "this is a Git LFS pointer, not the data; run `git lfs pull`"
    # S3 servers answer errors in XML, and other servers in
    # HTML, which downloads store under the name of the file.
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a web page or XML, not data; download the file again"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the file is UTF-16; save it as UTF-8"
    for name, magic, own_suffix in (("parquet", b"PAR1", ".parquet"), ("gzip", b"\x1f\x8b", ".jsonl.gz")):
        if head.startswith(magic) and suffix != own_suffix:
            return f"this is a {name} file with the name of a {suffix} file; rename it"
        if suffix == own_suffix and not head.startswith(magic):
            return f"this is not a {name} file, in spite of its name; rename it or export it again"
    return None


def _check_parquet_end(file: str, stream: IO[bytes]) -> None:
    """Check the last bytes only: importing pyarrow takes longer than all other checks together."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(max(0, size - 4))
    # 12 bytes are the magic number at both ends and the length of the footer.
    if size < 12 or stream.read() != b"PAR1":
        raise DataError(f"{file}: this parquet file is cut short (no PAR1 at its end); copy it again")


def json_type(value: Any) -> str:
    """Return the type of a JSON value, for messages."""
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
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"duplicate key {key[:40]!r} in an object; keep one of them")
        content[key] = value
    return content


def _parse(text: str) -> dict[str, Any]:
    """Parse one JSON object. Raises ValueError with the reason."""
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


def _read_jsonl(file: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    number = 0
    try:
        for number, line in enumerate(_lines(stream), start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            yield _jsonl_row(file, number, line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{file}:{number + 1}: the gzip file is cut short or damaged; copy it again"
        ) from error


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield each line with its end. Of a line over the limit only the beginning is kept in memory."""
    # One byte above the limit, so that a line of exactly the limit is not too long.
    while line := stream.readline(MAX_ROW_BYTES + 1):
        rest = line
        while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_ROW_BYTES + 1)
        yield line


def _jsonl_row(file: str, number: int, line: bytes) -> Row | BadRow:
    try:
        if len(line) > MAX_ROW_BYTES:
            raise ValueError(_TOO_LONG)
        # Without the line feed, so that the column of an error is one of this line.
        return Row(file, number, _parse(line.decode().rstrip("\r\n")))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}"
    except ValueError as error:
        reason = str(error)
        if reason.startswith("not valid JSON") and not line.endswith(b"\n"):
            reason = "incomplete JSON: the last line is cut short"
    # A character has at most 4 bytes in UTF-8, so 2000 bytes are at least 500 characters.
    return BadRow(file, number, reason, _cut(line[:2000].decode(errors="replace").strip()))


def _require_array(file: str, head: bytes) -> None:
    first = head.removeprefix(_BOM).lstrip()[:1]
    if first != b"[":
        raise DataError(
            f"{file}:1: must be a JSON array of objects; got {first!r} as its first character; name it .jsonl"
            " if each line is an object"
        )


def _read_json(file: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    """Yield the objects of a file with one JSON array. Raises DataError if it is not valid."""
    try:
        content = stream.read()
        _require_array(file, content)
        value = json.loads(
            content.decode("utf-8-sig"),
            parse_constant=_refuse_constant,
            object_pairs_hook=_without_repeats,
        )
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{error.lineno}: not valid JSON: {error.msg}; correct it") from error
    except RecursionError as error:
        raise DataError(f"{file}: nested too deeply; flatten it") from error
    except MemoryError as error:
        raise DataError(f"{file}: the array does not fit in memory; {_AS_LINES}") from error
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error
    for index, item in enumerate(value, start=1):
        if not isinstance(item, dict):
            yield BadRow(file, index, f"expected a JSON object, got {json_type(item)}", _cut(repr(item)))
        elif _text_size(item) > MAX_ROW_BYTES:
            yield BadRow(file, index, _TOO_LONG, "")
        else:
            yield Row(file, index, item)


def _read_csv(file: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    """Read a CSV file. Its first line has the names of the fields. Empty cells are missing fields.

    A first column without a name is the index that pandas writes, and is left out.
    """
    # A setting of the whole process. By default, a cell of more than 131,072 characters is an error.
    csv.field_size_limit(MAX_ROW_BYTES)
    # Bytes that are not UTF-8 become surrogates here, which the check of the text fields refuses row by row.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    # Without `strict`, a wrong quote is no error, and the lines after it become part of the cell.
    reader = csv.reader(text, strict=True)
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{file}:1: not CSV: {error}") from error
    if len(header) == 1 and (separator := re.search(r"[;\t|]", header[0])):
        raise DataError(f"{file}:1: {separator[0]!r} separates the fields; write commas between them")
    names = header[1:] if header[:1] == [""] else header
    if not names or len(set(names)) != len(names) or not all(name.strip() for name in names):
        raise DataError(
            f"{file}:1: the first line must name each field once; got {', '.join(header)[:200]!r}; write the"
            " names of the fields into the first line"
        )
    while True:
        # A row can have several lines. `line_num` is the last line of the row before.
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # `csv.Error` has no code, so that only its text tells the end of the file from a wrong quote.
            if str(error) == "unexpected end of data":
                raise DataError(
                    f"{file}:{line}: a quote that opens in this row is never closed, so the"
                    f" {reader.line_num - line} lines after it cannot be separated; close it"
                ) from error
            yield from _lost(file, line, reader.line_num, f"not CSV: {error}", "")
            continue
        text_of_row = ",".join(cells)
        beginning = _cut(text_of_row).encode(errors="replace").decode()
        if _has_surrogates(text_of_row):
            yield BadRow(file, line, "not UTF-8", beginning)
        elif cells and len(cells) != len(header):
            reason = f"{len(cells)} cells, but the first line names {len(header)} fields"
            yield from _lost(file, line, reader.line_num, reason, beginning)
        elif cells:
            named = zip(header, cells, strict=True)
            yield Row(file, line, {name: cell for name, cell in named if cell and name})


def _has_surrogates(text: str) -> bool:
    """Return whether bytes were decoded with `surrogateescape`."""
    return not text.isascii() and any("\udc80" <= char <= "\udcff" for char in text)


def _lost(file: str, first: int, last: int, reason: str, text: str) -> Iterator[BadRow]:
    """Yield a bad row for each line within a row with a wrong quote, because these lines may have been
    separate rows.
    """
    for line in range(first, max(first, last) + 1):
        yield BadRow(file, line, reason, text)
        reason = f"within the bad row that begins in line {first}"


def _read_parquet(file: str, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    """Yield the rows of a Parquet file. Raises DataError if the file is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    long_rows: list[int] = []
    try:
        names = pq.read_schema(stream).names
        # A row is a dictionary, which would keep one of two columns with the same name.
        repeated = sorted(name for name in names if names.count(name) > 1)
        if repeated:
            raise DataError(
                f"{file}: the column {repeated[0]!r} is there {names.count(repeated[0])} times; rename one of"
                " them"
            )
        # By rows and not by row groups, into which pyarrow writes up to a million rows. Without these
        # settings, their compressed columns would be in memory as a whole.
        opened = pq.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        for batch in opened.iter_batches(_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                if _text_size(row) > MAX_ROW_BYTES:
                    long_rows.append(number)
                    if len(long_rows) == _MOST_LONG_ROWS:
                        raise DataError(
                            f"{file}:{long_rows[0]}: {_TOO_LONG}, and so are {_MOST_LONG_ROWS} rows; leave"
                            " them out"
                        )
                    yield BadRow(file, number, _TOO_LONG, "")
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
    # pyarrow raises OSError for pages that cannot be decompressed or decoded.
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: the parquet file is damaged: {' '.join(str(error).split())[:200]}; copy it again"
        ) from error


def _text_size(value: Any) -> int:
    """Return the number of characters (or bytes, for binary values) of all texts in a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_text_size, value.values()))
    if isinstance(value, list):
        return sum(map(_text_size, value))
    return 0
