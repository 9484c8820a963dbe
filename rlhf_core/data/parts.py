"""Encodes the rows of a set in parts: each is encoded by one process, and is kept in the store.

    rows of a set --cut--> parts of a few megabytes --encode--> their tokens: compressed, in the store,
                                                                and as columns of the set, mapped into memory

A part ends at a row that its own content chooses, so that a row that is new, or gone, changes the parts
around it only. Its address is a digest of its rows and of everything else that its tokens follow from. What
the store has is not encoded again: not after a kill, and not if other files are new.
"""

from __future__ import annotations

import hashlib
import pickle
import signal
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.config.data import PROMPT, RESPONSE, TEXT, Limits, SetName
from rlhf_core.data.dataset import FILE_NAMES, Rows, column_reader, token_fields
from rlhf_core.data.examples import (
    EncodedRecord,
    RecordDropped,
    SourceRecord,
    Tokens,
    tokens_of,
    with_tokens,
)
from rlhf_core.data.templates import EncodeError, Encoder
from rlhf_core.errors import InfrastructureError
from rlhf_core.pipeline import STAGES
from rlhf_core.storage.store import Store
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.machine import Machine
from rlhf_core.system.processes import die_with_parent
from rlhf_core.types import PARTS

_MEAN_ROWS, _MOST_ROWS, _MOST_BYTES = 2**10, 2**12, 2**22
"""Of a part. The bytes are those of its texts."""
_PARTS_OF_A_PROCESS = 8
"""A process needs seconds to start. With fewer parts for it, it is not worth that."""
KNOWN_PROMPTS = 2**13
_LIBRARIES = ("transformers", "tokenizers", "jinja2")
_LENGTHS = (PROMPT, RESPONSE, TEXT)
_ABSENT = -1
OpenStore = Callable[[], Store]


class Failure(NamedTuple):
    """A record without tokens."""

    record: int
    """Its index."""
    dropped: str | None
    """The reason, if it is well formed."""
    bad: str | None
    """The reason, if it cannot be encoded."""


@dataclass(frozen=True)
class EncodedSet:
    """The sequences of a set, in the order of its records."""

    records: Sequence[SourceRecord]
    owners: np.ndarray
    """(N,) index of the record of each sequence."""
    lengths: Mapping[str, np.ndarray]
    """(N,) as `EncodedRecord.lengths`; -1: none."""
    turns: np.ndarray
    """(N,) as `EncodedRecord.longest_turn`; -1: none."""
    rows: Rows[EncodedRecord]
    failures: Sequence[Failure]
    failed_lengths: Mapping[str, Sequence[int]]
    """Estimated lengths of the records that were too long to be encoded."""


@dataclass(frozen=True)
class _Work:
    """What a process encodes with."""

    encoder: Encoder
    bounds: Limits
    digest: str
    store: Store | None

    def make(self, name: SetName, rows: Sequence[bytes]) -> bytes:
        """Return the tokens of a part as a compressed stream of Arrow, from the store if it has them."""
        key = hashlib.sha256(f"{self.digest}\x1f{name}".encode())
        for row in rows:
            key.update(len(row).to_bytes(8, "little") + row)
        address = f"{PARTS}/{key.hexdigest()[:2]}/{key.hexdigest()}"
        if self.store is not None and (kept := _intact(self.store.read_bytes(address))) is not None:
            return kept
        made = _stream(name, [_found(pickle.loads(row), name, self) for row in rows])
        if self.store is not None:
            self.store.put_bytes(address, hashlib.sha256(made).digest() + made)
            failpoint("data.part")
        return made


def _intact(stored: bytes | None) -> bytes | None:
    """Return what follows the digest of a stored part, unless it is damaged or missing."""
    return stored[32:] if stored is not None and hashlib.sha256(stored[32:]).digest() == stored[:32] else None


def _found(record: Any, name: SetName, work: _Work) -> list[tuple[Tokens, str | None, str | None]]:
    """Return the sequences of a record, or the reason why it has none."""
    nothing = ((),) * len(token_fields(FILE_NAMES[name]))
    try:
        return [(tokens, None, None) for tokens in tokens_of(record, name, work.encoder, work.bounds)]
    except RecordDropped as dropped:
        return [(Tokens(nothing, dropped.lengths), str(dropped), None)]
    except EncodeError as error:
        return [(Tokens(nothing, {}), None, str(error))]


def _schema(name: SetName) -> Any:
    import pyarrow as pa

    numbers = [(each, pa.int32()) for each in ("row", *_LENGTHS, "turn")]
    reasons = [("dropped", pa.string()), ("bad", pa.string())]
    return pa.schema([*token_fields(FILE_NAMES[name]), *numbers, *reasons])


def _stream(name: SetName, found: Sequence[Sequence[tuple[Tokens, str | None, str | None]]]) -> bytes:
    import pyarrow as pa

    rows: list[tuple[Any, ...]] = []
    for row, sequences in enumerate(found):
        for tokens, *reasons in sequences:
            lengths = (tokens.lengths.get(each, _ABSENT) for each in _LENGTHS)
            turn = _ABSENT if tokens.longest_turn is None else tokens.longest_turn
            rows.append((*tokens.ids, row, *lengths, turn, *reasons))
    schema = _schema(name)
    arrays = [
        pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    return bytes(sink.getvalue())


def _cut(records: Sequence[SourceRecord]) -> Iterator[list[bytes]]:
    """Yield the records of each part."""
    rows: list[bytes] = []
    size = 0
    for item in records:
        # No token follows from the other fields of a row.
        rows.append(pickle.dumps(replace(item.record, meta={})))
        size += len(rows[-1])
        if zlib.crc32(rows[-1]) % _MEAN_ROWS == 0 or len(rows) == _MOST_ROWS or size >= _MOST_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


class Parts:
    """Encodes the sets of a run. Use `opened`."""

    def __init__(self, work: _Work, folder: Path, pool: ProcessPoolExecutor | None, most: int) -> None:
        self._work, self._folder, self._pool, self._most = work, folder, pool, most

    def encode(
        self, name: SetName, records: Sequence[SourceRecord], report: Callable[[int], None]
    ) -> EncodedSet:
        """Return the sequences of a set. `report` is called with the number of further records."""
        import pyarrow as pa

        path = self._folder / f"{name}.arrow"
        starts = []
        first = 0
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _schema(name)) as writer:
            for count, stream in self._made(name, records):
                starts.append(first)
                writer.write_table(pa.ipc.open_stream(stream).read_all())
                first += count
                report(count)
        mapped = pa.ipc.open_file(pa.memory_map(str(path)))
        return _encoded_set(name, records, [mapped.get_batch(at) for at in range(len(starts))], starts)

    def _made(self, name: SetName, records: Sequence[SourceRecord]) -> Iterator[tuple[int, bytes]]:
        """Yield the number of records and the tokens of each part, in order. Few parts are in memory."""
        if self._pool is None:
            for rows in _cut(records):
                yield len(rows), self._work.make(name, rows)
            return
        waiting: deque[tuple[int, Future[bytes]]] = deque()
        try:
            for rows in _cut(records):
                waiting.append((len(rows), self._pool.submit(_make, name, rows)))
                if len(waiting) == self._most:
                    count, future = waiting.popleft()
                    yield count, future.result()
            for count, future in waiting:
                yield count, future.result()
        except BrokenProcessPool as error:
            raise InfrastructureError(
                f"data.{name}: a process that encodes rows was ended, as by the kernel if the memory is full;"
                " lower data.processes"
            ) from error


def _encoded_set(
    name: SetName, records: Sequence[SourceRecord], batches: Sequence[Any], starts: Sequence[int]
) -> EncodedSet:
    """Return the set whose parts are `batches`. `starts` has the index of the first record of each."""
    failures: list[Failure] = []
    failed_lengths: dict[str, list[int]] = {each: [] for each in _LENGTHS}
    columns: dict[str, list[np.ndarray]] = {each: [] for each in ("part", "place", "row", *_LENGTHS, "turn")}
    for part, (batch, start) in enumerate(zip(batches, starts, strict=True)):
        row = batch.column("row").to_numpy() + start
        reasons = zip(batch.column("dropped").to_pylist(), batch.column("bad").to_pylist(), strict=True)
        failed = np.zeros(len(row), bool)
        for place, (dropped, bad) in enumerate(reasons):
            if dropped is not None or bad is not None:
                failed[place] = True
                failures.append(Failure(int(row[place]), dropped, bad))
        usable = np.flatnonzero(~failed).astype(np.int32)
        columns["part"].append(np.full(len(usable), part, np.int32))
        columns["place"].append(usable)
        columns["row"].append(row[usable])
        for each in (*_LENGTHS, "turn"):
            values = batch.column(each).to_numpy()
            columns[each].append(values[usable])
            if each in failed_lengths:
                failed_lengths[each] += values[failed & (values != _ABSENT)].tolist()
    found = {each: np.concatenate([np.zeros(0, np.int32), *arrays]) for each, arrays in columns.items()}
    tokens_of_set = token_fields(FILE_NAMES[name])
    readers = [[column_reader(batch.column(each.name)) for each in tokens_of_set] for batch in batches]

    def make(index: int) -> EncodedRecord:
        place, turn = int(found["place"][index]), int(found["turn"][index])
        ids = tuple(tuple(read(place)) for read in readers[found["part"][index]])
        lengths = {each: int(found[each][index]) for each in _LENGTHS if found[each][index] != _ABSENT}
        tokens = Tokens(ids, lengths, None if turn == _ABSENT else turn)
        return with_tokens(records[found["row"][index]], name, tokens)

    lengths = {each: found[each] for each in _LENGTHS}
    rows = Rows(len(found["row"]), make)
    return EncodedSet(records, found["row"], lengths, found["turn"], rows, failures, failed_lengths)


@contextmanager
def opened(
    encoder: Encoder,
    bounds: Limits,
    folder: Path,
    store: OpenStore | None,
    records: int,
    processes: int | None,
) -> Iterator[Parts]:
    """Yield what encodes the sets of a run. The processes end with the context.

    Args:
        encoder: Tokenizer with the chat template.
        bounds: As for `tokens_of`.
        folder: Receives a file for each set, which may be deleted when the set is encoded.
        store: Returns the store that keeps the parts; None: they are not kept.
        records: Number of all records.
        processes: Their number; None: one for each core, but not more than are worth their start.
    """
    libraries = [f"{each} {version(each)}" for each in _LIBRARIES]
    everything = (encoder.identity, bounds, STAGES["data"].version, libraries)
    digest = hashlib.sha256(repr(everything).encode()).hexdigest()
    if processes is None:
        processes = min(Machine().cores(), records // (_MEAN_ROWS * _PARTS_OF_A_PROCESS))
    work = _Work(encoder, bounds, digest, None if store is None else store())
    if processes <= 1:
        yield Parts(work, folder, None, 0)
        return
    # Not forked from this process, whose threads may hold locks.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.utils.chat_template_utils"])
    arguments = (encoder.tokenizer, encoder.template, encoder.name, bounds, digest, store)
    pool = ProcessPoolExecutor(processes, context, _start, arguments)
    try:
        yield Parts(work, folder, pool, 2 * processes)
    finally:
        pool.shutdown(cancel_futures=True)


_work: _Work | None = None


def _start(
    tokenizer: Any, template: Any, model: str, bounds: Limits, digest: str, store: OpenStore | None
) -> None:
    global _work  # of this process
    die_with_parent(signal.SIGKILL)()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    encoder = Encoder(tokenizer, template, model, known_prompts=KNOWN_PROMPTS)
    _work = _Work(encoder, bounds, digest, None if store is None else store())


def _make(name: SetName, rows: Sequence[bytes]) -> bytes:
    assert _work is not None
    return _work.make(name, rows)
