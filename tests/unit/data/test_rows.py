"""Training sets that are read from one file of a host.

- their rows are those of the lists, also of artifacts of earlier versions, of no rows and of several batches
- the first process makes the file, and the others map it: their own memory does not grow with the rows
- only the columns that are asked for are read
- a damaged or missing file is a DataError
"""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.data import dataset
from rlhf_core.data.dataset import (
    Rows,
    load_pairs,
    load_prompts,
    load_sft,
    open_pairs,
    open_prompts,
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
READERS: dict[str, Any] = {
    "sft": (load_sft, open_sft),
    "pairs": (load_pairs, open_pairs),
    "prompts": (load_prompts, open_prompts),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("count", [0, 1, 6, COUNT])
def test_rows_are_those_of_the_list(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "_BATCH_ROWS", 3)
    load, open_ = READERS[name]
    write(tmp_path, name, "train", SETS[name][:count])
    rows = open_(tmp_path, "train", tmp_path)
    assert list(rows) == load(tmp_path, "train") == SETS[name][:count]
    assert len(rows) == count
    assert [rows[index - count] for index in range(count)] == rows[:] == SETS[name][:count]
    with pytest.raises(IndexError):
        rows[count]


@pytest.mark.parametrize("name", SETS)
def test_an_artifact_of_an_earlier_version_is_read(name: str, tmp_path: Path) -> None:
    load, open_ = READERS[name]
    write(tmp_path, name, "train", SETS[name])
    path = tmp_path / f"{name}_train.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["group"]), path)
    rows = open_(tmp_path, "train", tmp_path)
    assert list(rows) == load(tmp_path, "train")
    assert {row.group for row in rows} <= {"", *(f"p{i}" for i in range(COUNT))}


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
    made = (tmp_path / "pairs_train.arrow").stat()
    shutil.rmtree(data)
    assert list(open_pairs(data, "train", tmp_path)) == SETS["pairs"]
    assert (tmp_path / "pairs_train.arrow").stat().st_ino == made.st_ino
    assert [each.name for each in tmp_path.glob("*.part")] == []


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
        for read in (lambda *_: READERS[name][0](tmp_path, "train"), READERS[name][1]):
            with pytest.raises(DataError, match=f"cannot read .*{name}_train.parquet.*run the data stage"):
                read(tmp_path, "train", tmp_path)
    assert not (tmp_path / f"{name}_train.arrow").exists()


def test_rows_are_made_when_they_are_asked_for() -> None:
    made = []
    rows = Rows(10**9, lambda index: made.append(index) or index)
    assert (rows[5], rows[-1], len(rows)) == (5, 10**9 - 1, 10**9)
    assert made == [5, 10**9 - 1]
