"""Looks at where data sources lead and at the beginnings of their files; reads no file as a whole.

`check_source` yields findings: an `InputError` for what would make the run fail, a text for what the user
should know. `impostor` is asked again when the files are read.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rlhf_core.config.checkfiles import DATA_SUFFIXES, HUB_ID, POINTER, Finding, exists, is_local
from rlhf_core.config.redact import shown
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.system.files import open_regular, unfit

_FIRST_ROWS = 5
_MAX_READ = 8_000_000
_MAX_BLANK = 40_000_000
MAX_FILES = 50_000
"""Of a folder, counting all that lies in it: more is no folder of data."""


def suffix_of(name: str) -> str | None:
    """The supported suffix of a file name, the longest that fits, or None."""
    lower = name.lower()
    return next(
        (suffix for suffix in sorted(DATA_SUFFIXES, key=len, reverse=True) if lower.endswith(suffix)), None
    )


def impostor(suffix: str, head: bytes) -> str | None:
    """What is wrong with a file that begins with `head` (64 bytes or more, all if it is shorter) and has the
    name of a `suffix` file, with a fix; None if its beginning fits.
    """
    start = head.lstrip()[:64].lower()
    binary = {"parquet": head.startswith(b"PAR1"), "gzip": head.startswith(b"\x1f\x8b")}
    wanted = {".parquet": "parquet", ".jsonl.gz": "gzip"}.get(suffix)
    if not head:
        return "the file is empty (0 rows); give a file with rows"
    if start.startswith(POINTER):
        return "this is a Git LFS pointer, not the data; run `git lfs pull`"
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "this is a web page or XML, not data; download the file again"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the file is UTF-16; save it as UTF-8"
    for name, found in binary.items():
        if found and wanted != name:
            return f"this is a {name} file with the name of a {suffix} file; rename it"
    if wanted and not binary[wanted]:
        return f"this is not a {wanted} file, in spite of its name; rename it or export it again"
    return None


def csv_header_problem(header: list[str]) -> str | None:
    """What is wrong with the first line of a CSV file, or None."""
    if header and len(set(header)) == len(header) and all(name.strip() for name in header):
        return None
    return f"the first line must name each field once; got {', '.join(header)[:200]!r}"


def check_source(field: str, path: str, revision: str | None) -> Iterator[Finding]:
    """A data source: `field` is its place in the configuration, for messages."""
    if path == "synthetic":
        return
    if path.startswith("s3://"):
        if not re.match(r"s3://[^/]+/.", path):
            yield ConfigError(
                f"{field}.path: must be s3://bucket/key; got {path!r}; name the bucket and a key in it"
            )
        return
    if "://" in path and not path.startswith("file://"):
        scheme = path.split("://")[0][:20]
        yield ConfigError(
            f"{field}.path: must be a local path, s3://, a hub id or `synthetic`; got scheme {scheme}://; "
            "download the file first"
        )
        return
    if not is_local(path):
        if difflib.SequenceMatcher(a=path.lower(), b="synthetic").ratio() >= 0.85:
            yield DataError(
                f"{field}.path: file not found: {path}; did you mean synthetic? A hub data set is owner/name,"
                f" a local file ./{path}"
            )
        elif not HUB_ID.fullmatch(path):
            yield DataError(
                f"{field}.path: file not found, and {path[:80]!r} is no hub id either; correct the path"
            )
        elif revision is None:
            yield (
                f"{field}.path: {path} is no local path, so it is read from the Hugging Face hub; "
                f"pin {field}.revision to a commit, or a later run may read another one"
            )
        return
    local = path.removeprefix("file://")
    if not exists(local):
        what = path if path.isprintable() and len(path) < 300 else shown(path)
        yield DataError(
            f"{field}.path: file not found: {what}; correct the path (relative ones start at {Path.cwd()})"
        )
        return
    place = Path(local)
    if place.is_dir():
        yield from _folder(field, place)
    elif problem := unfit(place):
        yield DataError(f"{field}.path: {problem}; write the rows to a file and give its path")
    else:
        yield from _data_file(field, place)


def _folder(field: str, folder: Path) -> Iterator[Finding]:
    inside = list(islice(folder.rglob("*"), MAX_FILES + 1))
    files = sorted(file for file in inside if suffix_of(file.name) and file.is_file())
    if len(inside) > MAX_FILES:
        yield DataError(
            f"{field}.path: {folder} holds over {MAX_FILES} files; give the folder of the data alone"
        )
    elif not files:
        yield DataError(
            f"{field}.path: {folder} has no data files; put {', '.join(DATA_SUFFIXES)} files into it"
        )
    else:
        for file in files[:3]:
            yield from _data_file(field, file)


def _data_file(field: str, file: Path) -> Iterator[Finding]:
    suffix = suffix_of(file.name)
    if suffix is None:
        yield DataError(f"{field}.path: {file}: unknown kind of file; use one of {', '.join(DATA_SUFFIXES)}")
        return
    try:
        with open_regular(file) as stream:
            head = stream.read(256)
        problem = impostor(suffix, head) or _CHECKS[suffix](file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        problem = f"this is not whole gzip data ({error}); compress or download it again"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error}); make it readable"
    if problem is not None:
        # A problem of a line begins with its number.
        yield DataError(f"{field}.path: {file}:{'' if re.match(r'[0-9]+: ', problem) else ' '}{problem}")


def _parquet(file: Path) -> str | None:
    with open_regular(file) as stream:
        stream.seek(max(0, file.stat().st_size - 4))
        whole = file.stat().st_size >= 12 and stream.read() == b"PAR1"
    return None if whole else "this parquet file is cut short (no PAR1 at its end); copy it again"


def _csv(file: Path) -> str | None:
    with open_regular(file) as stream:
        text = io.StringIO(stream.read(_MAX_READ).decode("utf-8-sig", errors="replace"), newline="")
    reader = csv.reader(text, strict=True)
    try:
        problem = csv_header_problem(next(reader, []))
    except csv.Error as error:
        problem = f"not CSV: {error}"
    if problem is not None:
        return f"1: {problem}; write the names of the fields into the first line"
    try:
        return None if any(reader) else "0 rows, only the line of names; give a file with rows"
    except csv.Error:
        return None  # one row; the data stage counts it


def _json_lines(file: Path) -> str | None:
    """A file none of whose first rows is an object is of another kind; single bad rows are for the data
    stage.
    """
    reasons: list[str] = []
    with gzip.open(file, "rb") if suffix_of(file.name) == ".jsonl.gz" else open_regular(file) as stream:
        seen = 0
        for number in range(1, 1000):
            line = stream.readline(_MAX_READ)
            seen += len(line)
            if not reasons and seen > _MAX_BLANK:
                return f"its first {_MAX_BLANK // 10**6} MB are blank; give a file with rows"
            if not line or len(reasons) == _FIRST_ROWS:
                break
            if not line.removeprefix(b"\xef\xbb\xbf").strip():
                continue
            seen = 0
            reason = _row_problem(line, cut=len(line) == _MAX_READ)
            if reason is None:
                return None
            reasons.append(f"{number}: {reason}")
    if not reasons:
        return "0 rows, only blank lines; give a file with rows"
    return f"{reasons[0]} (none of the first {len(reasons)} rows is usable); write one JSON object per line"


def _row_problem(line: bytes, cut: bool) -> str | None:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return f"byte 0x{line[error.start]:02x} is not UTF-8"
    if cut:
        return None
    try:
        row = json.loads(text)
    except RecursionError:
        return "JSON nested too deep"
    except ValueError as error:
        return f"not complete JSON ({str(error).split(':')[0]})"
    return None if isinstance(row, dict) else f"must be a JSON object; got {type(row).__name__}"


def _json_array(file: Path) -> str | None:
    with open_regular(file) as stream:
        data = stream.read(_MAX_READ + 1)
    first = data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first != b"[":
        return (
            f"1: must be a JSON array of objects; got {first!r} as its first character; name it .jsonl if"
            " each line is an object"
        )
    if len(data) > _MAX_READ:
        return None
    try:
        rows = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return (
            f"byte 0x{data[error.start]:02x} at position {error.start} is not UTF-8; save the file as UTF-8"
        )
    except RecursionError:
        return "JSON nested too deep; flatten it"
    except ValueError as error:
        return f"this is not valid JSON ({error}); correct it"
    if not rows:
        return "0 rows, the array is empty; give one with rows"
    if not any(isinstance(row, dict) for row in rows[:_FIRST_ROWS]):
        return f"rows must be JSON objects; got {type(rows[0]).__name__}; write {{...}}"
    return None


_CHECKS = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".json": _json_array,
    ".csv": _csv,
    ".parquet": _parquet,
}
