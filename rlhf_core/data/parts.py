"""Encodes the rows of large data in parts, each by one process, and keeps the parts.

    rows of a set --cut--> parts of a few megabytes of text --encode--> a file with the tokens of each

A part ends at a row that its own content chooses, so that a row that is new, or gone, changes the parts
around it only. Its name is a digest of its rows and of everything else that its tokens follow from. A part
that is there is not encoded again: not after a kill, and not if other files are new.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import time
import zlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.metadata import version
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.config.data import Limits, SetName
from rlhf_core.data.dataset import Rows
from rlhf_core.data.examples import RecordDropped, SourceRecord, Tokens, tokens_of
from rlhf_core.data.formats import Record
from rlhf_core.data.templates import EncodeError, Encoder
from rlhf_core.errors import InfrastructureError
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.files import write_atomic
from rlhf_core.system.machine import Machine
from rlhf_core.system.processes import die_with_parent
from rlhf_core.types import Numbers

FEW_ROWS = 2**14
"""Fewer rows in all sets are encoded within a minute, at once and without parts."""
_MEAN_ROWS, _MOST_ROWS, _MOST_BYTES = 2**10, 2**12, 2**22
"""Of a part. The bytes are those of its texts."""
_PARTS_OF_A_PROCESS = 4
"""A process needs seconds to start. With fewer parts for it, it is not worth that."""
_KEPT_SECONDS = 30 * 86_400
"""Parts that no run has read for so long are deleted."""
_DIGEST_BYTES = 32

Found = list[Tokens] | RecordDropped | EncodeError
"""The sequences of a record, or why it has none."""
Encoding = tuple[Callable[[SetName], Iterable[Found]], Callable[[SetName], Sequence[Found]]]


class _Part(NamedTuple):
    start: int
    """Index of its first record."""
    end: int
    path: Path


@contextmanager
def encoding(
    records: Mapping[SetName, Sequence[SourceRecord]],
    encoder: Encoder,
    bounds: Limits,
    folder: Path | None,
    processes: int | None = None,
) -> Iterator[Encoding]:
    """Yield two functions of the name of a set. The first encodes the records of the set, in their order. The
    second returns the results again, as a sequence by the index of the record.

    Args:
        records: The records of all sets.
        encoder: Tokenizer with the chat template.
        bounds: As for `tokens_of`.
        folder: Keeps the parts; None: there are none, and one process encodes.
        processes: Most processes that encode; None: one for each core.

    Raises InfrastructureError if one of the processes is killed.
    """
    if folder is None or sum(map(len, records.values())) < FEW_ROWS:

        def found(name: SetName, index: int) -> Found:
            return _found(records[name][index].record, name, encoder, bounds)

        kept = {name: Rows(len(items), cache(partial(found, name))) for name, items in records.items()}
        yield kept.__getitem__, kept.__getitem__
        return
    folder.mkdir(parents=True, exist_ok=True)
    common = _common(encoder, bounds)
    parts = {name: list(_cut(name, items, common, folder)) for name, items in records.items()}
    missing = sum(not part.path.exists() for part in chain.from_iterable(parts.values()))
    most = Machine().cores() if processes is None else processes
    count = min(most, missing // _PARTS_OF_A_PROCESS)
    with _pool(encoder, bounds, count) as submit:
        made = _Parts(records, parts, partial(_make, encoder, bounds), submit, ahead=2 * count)
        yield made, made.found
    _delete_old(folder)


def _found(record: Record, name: SetName, encoder: Encoder, bounds: Limits) -> Found:
    try:
        return tokens_of(record, name, encoder, bounds)
    except (RecordDropped, EncodeError) as error:
        return error


def _delete_old(folder: Path) -> None:
    oldest = time.time() - _KEPT_SECONDS
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # another run can delete it first
            if file.stat().st_mtime < oldest:
                file.unlink()


# -- parts and their names --


def _common(encoder: Encoder, bounds: Limits) -> bytes:
    """Return everything that the tokens of all parts follow from, besides their rows."""
    code = hashlib.sha256()
    # The source and not a number, which somebody would forget to raise after a change of the encoding.
    for file in sorted(Path(__file__).parent.glob("*.py")):
        code.update(file.read_bytes())
    libraries = list(map(version, ("transformers", "tokenizers", "jinja2")))
    return json.dumps([encoder.identity, bounds, libraries, code.hexdigest()]).encode()


def _cut(name: SetName, records: Sequence[SourceRecord], common: bytes, folder: Path) -> Iterator[_Part]:
    """Yield the parts of a set."""
    seed = hashlib.sha256(common + name.encode())
    digest, start, size = seed.copy(), 0, 0
    for end, item in enumerate(records, start=1):
        row = json.dumps(_encoded(item.record)).encode()
        # With its length: otherwise other rows, cut at other
        # places of the same bytes, would have this digest.
        digest.update(len(row).to_bytes(8, "little") + row)
        size += len(row)
        # Not `hash`, which differs between processes: the parts of the last run would not be found.
        chosen = zlib.crc32(row) % _MEAN_ROWS == 0
        if chosen or end - start == _MOST_ROWS or size >= _MOST_BYTES or end == len(records):
            yield _Part(start, end, folder / digest.hexdigest())
            digest, start, size = seed.copy(), end, 0


def _encoded(record: Record) -> Record:
    """Return the part of a record that its tokens follow from."""
    return record._replace(meta={})


# -- encoding --


def _make(encoder: Encoder, bounds: Limits, path: Path, name: SetName, records: Sequence[Record]) -> None:
    """Encode the records of a part, and write its file."""
    content = _packed([_found(record, name, encoder, bounds) for record in records])
    # With its own digest: the folder is no bundle, so no manifest says what the file must be.
    write_atomic(path, hashlib.sha256(content).digest() + content)
    failpoint("data.part")


@dataclass(frozen=True)
class _Parts:
    """Encodes the parts of all sets. Few of them are in memory."""

    records: Mapping[SetName, Sequence[SourceRecord]]
    parts: Mapping[SetName, Sequence[_Part]]
    make: Callable[[Path, SetName, Sequence[Record]], None]
    submit: Callable[..., Future[None]] | None
    """Lets another process make a part; None: there is none."""
    ahead: int
    """Parts that the others encode or have encoded before they are read."""

    def __call__(self, name: SetName) -> Iterator[Found]:
        """Yield what is found for each record of a set."""
        waiting: deque[tuple[_Part, Future[None] | None]] = deque()
        try:
            for part in self.parts[name]:
                waiting.append((part, self._begun(name, part)))
                if len(waiting) > self.ahead:
                    yield from self._ended(name, *waiting.popleft())
            while waiting:
                yield from self._ended(name, *waiting.popleft())
        except BrokenProcessPool as error:
            raise InfrastructureError(
                f"data.{name}: a process that encodes rows was ended, as by the kernel if the memory is full;"
                " give the machine more memory, or the stage fewer cores"
            ) from error

    def found(self, name: SetName) -> Sequence[Found]:
        """Return what is found for each record of a set, of which one part is in memory."""
        parts = self.parts[name]

        @lru_cache(1)
        def read(part: _Part) -> list[Found]:
            return list(self._ended(name, part, None))

        def found(index: int) -> Found:
            part = parts[bisect_right(parts, index, key=lambda part: part.start) - 1]
            return read(part)[index - part.start]

        return Rows(len(self.records[name]), found)

    def _begun(self, name: SetName, part: _Part) -> Future[None] | None:
        if self.submit is None or part.path.exists():
            return None
        return self.submit(part.path, name, self._rows(name, part))

    def _ended(self, name: SetName, part: _Part, future: Future[None] | None) -> Iterator[Found]:
        try:
            if future is not None:
                future.result()
            content = _intact(part.path)
            if content is None:  # missing or damaged
                self.make(part.path, name, self._rows(name, part))
                content = part.path.read_bytes()[_DIGEST_BYTES:]
        except OSError as error:
            raise InfrastructureError(
                f"data.{name}: a part cannot be kept in run.home: {error}; free some space"
            ) from error
        yield from _unpacked(content)

    def _rows(self, name: SetName, part: _Part) -> list[Record]:
        return [_encoded(item.record) for item in self.records[name][part.start : part.end]]


@contextmanager
def _pool(encoder: Encoder, bounds: Limits, count: int) -> Iterator[Callable[..., Future[None]] | None]:
    """Yield a function that lets one of `count` processes make a part, or None for one process. They end with
    the context, at once if it ends with an exception, and with this process.
    """
    if count <= 1:
        yield None
        return
    # Their encoder is made with their first part, because an error of its template has to reach the caller.
    given = (encoder.tokenizer, encoder.template, encoder.name, bounds)
    # Not forked from this process, whose threads may hold locks.
    pool = ProcessPoolExecutor(count, get_context("spawn"), _start, (os.getpid(), given))
    try:
        yield partial(pool.submit, _make_here)
    except BaseException:
        # `shutdown` ends no part that has begun, and would wait for it.
        for process in list(pool._processes.values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_given: tuple[Any, Any, str, Limits] | None = None


def _start(parent: int, given: tuple[Any, Any, str, Limits]) -> None:
    """Prepare this process, which encodes for the process `parent`."""
    global _given  # of this process
    # If the parent is killed, a worker would wait forever: it holds both ends of its queue.
    die_with_parent(signal.SIGKILL)()
    if os.getppid() != parent:  # it ended before
        os._exit(1)
    # Ctrl-C reaches all processes of the terminal. The parent ends the workers. Without this, each of them
    # would write a traceback of its own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)  # the parent has logged what the template does
    _given = given


@cache
def _maker() -> Callable[..., None]:
    assert _given is not None
    tokenizer, template, model, bounds = _given
    return partial(_make, Encoder(tokenizer, template, model), bounds)


def _make_here(*part: Any) -> None:
    _maker()(*part)


# -- files --


def _packed(found: Sequence[Found]) -> bytes:
    """Return the content of a part: lengths and reasons as a line of JSON, and the tokens."""
    import pyarrow as pa

    head: list[Any] = []
    ids = array("i")
    for each in found:
        if isinstance(each, RecordDropped):
            head.append({"dropped": str(each), "lengths": each.lengths})
        elif isinstance(each, EncodeError):
            head.append({"bad": str(each)})
        else:
            sequences = []
            for tokens in each:
                sequences.append([list(map(len, tokens.ids)), tokens.lengths, tokens.longest_turn])
                for column in tokens.ids:
                    ids.extend(column)
            head.append(sequences)
    content = json.dumps(head).encode() + b"\n" + ids.tobytes()
    # pyarrow cannot decompress without the size.
    return len(content).to_bytes(8, "little") + bytes(pa.compress(content, "zstd", asbytes=True))


def _intact(path: Path) -> bytes | None:
    """Return what follows the digest of a part, unless it is missing or damaged."""
    try:
        content = path.read_bytes()
        os.utime(path)  # it is in use
    except FileNotFoundError:
        return None
    intact = hashlib.sha256(content[_DIGEST_BYTES:]).digest() == content[:_DIGEST_BYTES]
    return content[_DIGEST_BYTES:] if intact else None


def _unpacked(packed: bytes) -> Iterator[Found]:
    import pyarrow as pa

    size = int.from_bytes(packed[:8], "little")
    content = pa.decompress(packed[8:], size, "zstd", asbytes=True)
    end = content.index(b"\n")
    ids = np.frombuffer(content, np.int32, offset=end + 1)
    at = 0
    for each in json.loads(content[:end]):
        if isinstance(each, dict):
            yield (
                EncodeError(each["bad"]) if "bad" in each else RecordDropped(each["dropped"], each["lengths"])
            )
            continue
        found = []
        for counts, lengths, longest_turn in each:
            columns = []
            for count in counts:
                # Copied: a held-out row, which is kept, would keep the tokens of its whole part.
                columns.append(Numbers(ids[at : at + count].copy()))
                at += count
            found.append(Tokens(tuple(columns), lengths, longest_turn))
        yield found
