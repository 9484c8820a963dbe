"""Training sets that are read from one file of a host.

- their rows are those of the lists in any order, also of artifacts of earlier versions, of no rows and of
  several batches
- one process makes the file, and the others map it: their own memory does not grow with the rows
- a process that is killed while it writes, a full disk, a host of the same folder and locks that are not
  supported leave no wrong rows
- rows stay readable after the file is deleted
- only the columns that are asked for are read
- rows are written in groups
- a damaged or missing file is a DataError
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import random
import resource
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

from rlhf_core.data import dataset
from rlhf_core.data.dataset import (
    Rows,
    load_pairs,
    load_prompts,
    load_sft,
    open_pairs,
    open_sft,
    read_evenly,
    write,
)
from rlhf_core.errors import DataError
from rlhf_core.types import PairExample, PromptExample, SFTExample

COUNT = 10
SETS: dict[str, Any] = {
    "sft": [SFTExample((1, 7 * i, 2), (0, 1, 1), "a", f"g{i}") for i in range(COUNT)],
    "pairs": [
        PairExample(f"p{i}", "Why? é", (1, i), (8,) * i, (9, 2), "a", i / 2 if i % 2 else None)
        for i in range(COUNT)
    ],
    "prompts": [PromptExample(f"p{i}", "Why?", (1,) * i, {"answer": i}, "a") for i in range(COUNT)],
}
LOADERS: dict[str, Any] = {"sft": load_sft, "pairs": load_pairs, "prompts": load_prompts}
OPENERS: dict[str, Any] = {"sft": open_sft, "pairs": open_pairs}


@pytest.mark.parametrize("name", SETS)
def test_rows_are_written_in_groups(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_GROUP_BYTES", 1)
    monkeypatch.setattr(dataset, "_BATCH_ROWS", 4)
    write(tmp_path, name, "train", SETS[name])
    assert LOADERS[name](tmp_path, "train") == SETS[name]
    assert pq.ParquetFile(tmp_path / f"{name}_train.parquet").num_row_groups == 3


def test_a_row_group_is_not_in_memory_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_BATCH_ROWS", 16)
    monkeypatch.setattr(dataset, "_GROUP_BYTES", 2**23)
    tokens = tuple(range(2**12))
    rows = [PairExample(f"p{i}", "Why?", tokens, tokens, tokens) for i in range(512)]
    sizes = []

    class Writer(pq.ParquetWriter):  # type: ignore[misc]
        @override
        def write_table(self, table: Any, row_group_size: int | None = None) -> None:
            sizes.append(table.nbytes)

    monkeypatch.setattr(pq, "ParquetWriter", Writer)
    own = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(own)
    pa.set_memory_pool(pool)
    try:
        write(tmp_path, "pairs", "train", rows)
    finally:
        pa.set_memory_pool(own)
    # One of the three columns of tokens is there twice.
    assert len(sizes) == 3 and max(sizes) < pool.max_memory() < 1.6 * max(sizes)


def test_texts_that_arrow_splits_are_written_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = dataset._column

    def split(rows: Sequence[Any], field: Any) -> Any:  # as from 2 GiB on
        return pa.chunked_array([column(rows[:2], field), column(rows[2:], field)])

    files = []
    for made in (column, split):
        monkeypatch.setattr(dataset, "_column", made)
        write(tmp_path, "prompts", "train", SETS["prompts"])
        files.append((tmp_path / "prompts_train.parquet").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("name", OPENERS)
@pytest.mark.parametrize("count", [0, 1, 6, COUNT])
def test_rows_are_those_of_the_list(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "_BATCH_ROWS", 3)
    write(tmp_path, name, "train", SETS[name][:count])
    rows, expected = OPENERS[name](tmp_path, "train", tmp_path), SETS[name][:count]
    assert list(rows) == LOADERS[name](tmp_path, "train") == expected
    assert len(rows) == count
    order = random.Random(0).choices(range(-count, count), k=40) if count else []
    assert [rows[index] for index in order] == [expected[index] for index in order]
    for part in (slice(None), slice(2, -1), slice(None, None, -2), slice(4, 99), slice(5, 2)):
        assert rows[part] == expected[part]
    for outside in (count, -count - 1):
        with pytest.raises(IndexError):
            rows[outside]


@pytest.mark.parametrize("name", OPENERS)
def test_several_row_groups_are_one_set(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_BATCH_ROWS", 3)
    write(tmp_path, name, "train", SETS[name])
    path = tmp_path / f"{name}_train.parquet"
    pq.write_table(pq.read_table(path), path, row_group_size=4)
    rows = OPENERS[name](tmp_path, "train", tmp_path)
    assert list(rows) == LOADERS[name](tmp_path, "train") == SETS[name]


@pytest.mark.parametrize("name", OPENERS)
def test_an_artifact_of_an_earlier_version_is_read(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, "train", SETS[name])
    path = tmp_path / f"{name}_train.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["group"]), path)
    rows = OPENERS[name](tmp_path, "train", tmp_path)
    groups = [getattr(row, "prompt_id", "") for row in SETS[name]]
    assert list(rows) == LOADERS[name](tmp_path, "train")
    assert [row.group for row in rows] == groups


def test_a_column_that_an_earlier_version_lacks_can_be_read_alone(tmp_path: Path) -> None:
    write(tmp_path, "prompts", "train", SETS["prompts"])
    path = tmp_path / "prompts_train.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["source"]), path)
    assert read_evenly(tmp_path, "prompts", "train", ("source",), None) == [(None,)] * COUNT


def _tokens(data: Path, work: Path) -> int:
    """Return the bytes that Arrow has allocated for the pairs in this process, after all were read."""
    rows = open_pairs(data, "train", work)
    assert sum(len(pair.chosen_ids) for pair in rows) == sum(range(COUNT))
    return int(pa.total_allocated_bytes())


def test_the_file_is_made_once_and_mapped_by_all_processes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write(data, "pairs", "train", SETS["pairs"])
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        allocated = pool.starmap(_tokens, [(data, tmp_path)] * 6, chunksize=1)
    assert min(allocated) == 0
    (made,) = tmp_path.glob("*.arrow")
    before = made.stat()
    shutil.rmtree(data)
    assert list(open_pairs(data, "train", tmp_path)) == SETS["pairs"]
    assert made.stat().st_ino == before.st_ino
    assert sorted(each.suffix for each in tmp_path.iterdir()) == [".arrow", ".lock"]


def test_rows_stay_readable_after_the_file_is_deleted(tmp_path: Path) -> None:
    write(tmp_path, "pairs", "train", SETS["pairs"])
    rows = open_pairs(tmp_path, "train", tmp_path)
    for each in tmp_path.iterdir():
        each.unlink()
    assert list(rows) == SETS["pairs"]


def _stopped(data: Path, work: Path, written: Any) -> None:
    """Write all columns but do not end."""
    batches = dataset._batches

    def endless(*args: Any) -> Any:
        yield from batches(*args)
        written.set()
        time.sleep(600)

    vars(dataset).update(_batches=endless)
    open_pairs(data, "train", work)


def test_a_process_that_is_killed_while_it_writes_leaves_no_wrong_rows(tmp_path: Path) -> None:
    write(tmp_path, "pairs", "train", SETS["pairs"])
    context = multiprocessing.get_context("spawn")
    written = context.Event()
    process = context.Process(target=_stopped, args=(tmp_path, tmp_path, written))
    process.start()
    with context.Pool(1) as pool:
        assert written.wait(60)
        waiting = pool.apply_async(_tokens, (tmp_path, tmp_path))
        with pytest.raises(multiprocessing.TimeoutError):
            waiting.get(timeout=3)
        process.kill()
        process.join()
        waiting.get(timeout=60)
    assert list(open_pairs(tmp_path, "train", tmp_path)) == SETS["pairs"]


def _limited(data: Path, work: Path) -> str:
    """Open the pairs where a file can have 1,000 bytes, and return the error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with pytest.raises(OSError) as caught:
        open_pairs(data, "train", work)
    return str(caught.value)


def test_a_file_that_cannot_be_written_is_named_and_deleted(tmp_path: Path) -> None:
    write(tmp_path, "pairs", "train", SETS["pairs"])
    (tmp_path / "work").mkdir()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        error = pool.apply(_limited, (tmp_path, tmp_path / "work"))
    assert "cannot write the columns of pairs_train" in error and str(tmp_path / "work") in error
    assert [each.suffix for each in (tmp_path / "work").iterdir()] == [".lock"]
    assert list(open_pairs(tmp_path, "train", tmp_path / "work")) == SETS["pairs"]


def test_hosts_that_share_the_folder_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "pairs", "train", SETS["pairs"])
    for host in ("node-1.cluster", "node-2.cluster"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert list(open_pairs(tmp_path, "train", tmp_path)) == SETS["pairs"]
    assert len(list(tmp_path.glob("*.arrow"))) == 2


def test_a_folder_without_locks_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", refused)
    write(tmp_path, "pairs", "train", SETS["pairs"])
    assert list(open_pairs(tmp_path, "train", tmp_path)) == SETS["pairs"]


def test_only_the_columns_that_are_asked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    iter_batches = pq.ParquetFile.iter_batches

    def recorded(file: Any, size: int, columns: list[str]) -> Any:
        asked.append(columns)
        return iter_batches(file, size, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", recorded)
    write(tmp_path, "sft", "train", SETS["sft"])
    assert read_evenly(tmp_path, "sft", "train", ("source",), 2) == [("a",)] * 2
    assert asked == [["source"]]


@pytest.mark.parametrize("name", SETS)
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}_train.parquet"
    for content in (None, b"PAR1", pa.table({"other": [1]})):
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            pq.write_table(content, path)
        with pytest.raises(DataError, match=f"cannot read .*{name}_train.parquet.*run the data stage"):
            LOADERS[name](tmp_path, "train")
        if name in OPENERS:
            with pytest.raises(DataError, match=f"cannot read .*{name}_train.parquet.*run the data stage"):
                OPENERS[name](tmp_path, "train", tmp_path)
    assert list(tmp_path.glob("*.arrow")) == []


def test_rows_are_made_when_they_are_asked_for() -> None:
    made = []

    def make(index: int) -> int:
        made.append(index)
        return index

    rows = Rows(10**9, make)
    assert (rows[5], rows[-1], len(rows)) == (5, 10**9 - 1, 10**9)
    assert made == [5, 10**9 - 1]
