"""Rows that are encoded in parts, by several processes, and parts that the store keeps."""

from __future__ import annotations

import copy
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlhf_core.config.data import Limits, Source
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.data import dataset, parts
from rlhf_core.data.dataset import load_pairs, write
from rlhf_core.data.examples import EncodedRecord, SourceRecord, encode_record, to_record, tokens_of
from rlhf_core.data.files import Row
from rlhf_core.data.prepare import prepare
from rlhf_core.data.templates import Encoder
from rlhf_core.errors import InfrastructureError
from rlhf_core.storage.store import Store
from rlhf_core.types import PARTS, PairExample
from tests.unit.data.data_samples import write_jsonl

COUNT = 400
BOUNDS = Limits(200, 200, 200, 0)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_MEAN_ROWS", 8)


@pytest.fixture
def encoded_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The prompts that are encoded in this process."""
    found: list[str] = []

    def counted(record: Any, *arguments: Any) -> Any:
        found.append(record.prompt_text)
        return tokens_of(record, *arguments)

    monkeypatch.setattr(parts, "tokens_of", counted)
    yield found


def records(first: int, end: int) -> list[SourceRecord]:
    rows = [
        {"prompt": f"Question {i}?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(first, end)
    ]
    source = Source(path="rows.jsonl")
    found = [to_record(Row("rows.jsonl", i, row), source, "preference", "rows") for i, row in enumerate(rows)]
    return [item for item in found if isinstance(item, SourceRecord)]


def encode(
    tokenizer: Any,
    folder: Path,
    rows: Sequence[SourceRecord],
    bounds: Limits = BOUNDS,
    processes: int = 1,
) -> list[EncodedRecord]:
    folder.mkdir(exist_ok=True)
    encoder = Encoder(tokenizer, "chat")
    store = partial(Store, folder / "store")
    with parts.opened(encoder, bounds, folder, store, len(rows), processes) as opened:
        found = opened.encode("preference", rows, lambda further: None)
    assert not found.failures
    return list(found.rows)


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_that_are_encoded_in_parts_are_those_that_are_encoded_alone(
    byte_tokenizer: Any, tmp_path: Path, processes: int
) -> None:
    rows = records(1, 50)
    alone = [
        item
        for row in rows
        for item in encode_record(row, "preference", Encoder(byte_tokenizer, "chat"), BOUNDS)
    ]
    assert encode(byte_tokenizer, tmp_path, rows, processes=processes) == alone


def test_a_part_that_the_store_has_is_not_encoded_again(
    byte_tokenizer: Any, tmp_path: Path, encoded_rows: list[str]
) -> None:
    rows = records(0, COUNT)
    first = encode(byte_tokenizer, tmp_path, rows)
    assert len(encoded_rows) == COUNT == len(first)
    assert encode(byte_tokenizer, tmp_path, rows) == first
    assert len(encoded_rows) == COUNT


@pytest.mark.parametrize("place", [0, COUNT // 2, COUNT])
def test_new_rows_encode_little_more_than_themselves(
    byte_tokenizer: Any, tmp_path: Path, encoded_rows: list[str], place: int
) -> None:
    """As a new file does, whose name can sort before the others, and an old row that is taken out."""
    rows, new = records(0, COUNT), records(COUNT, COUNT + 4)
    encode(byte_tokenizer, tmp_path, rows)
    encoded_rows.clear()
    encode(byte_tokenizer, tmp_path, [*rows[:place], *new, *rows[place:]])
    assert {item.record.prompt_text for item in new} <= set(encoded_rows)
    assert len(encoded_rows) < 60
    encoded_rows.clear()
    encode(byte_tokenizer, tmp_path, rows[1:])
    assert len(encoded_rows) < 60


def test_an_attempt_that_ends_early_leaves_its_parts_to_the_next_one(
    byte_tokenizer: Any, tmp_path: Path, encoded_rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = records(0, COUNT)
    expected = encode(byte_tokenizer, tmp_path / "whole", rows)
    chance = random.Random(0)
    encoded_rows.clear()
    for _ in range(3):
        passes = iter(range(chance.randint(2, 12), -1, -1))
        monkeypatch.setattr(parts, "failpoint", lambda name, passes=passes: 1 // next(passes))
        with pytest.raises(ZeroDivisionError):
            encode(byte_tokenizer, tmp_path / "killed", rows)
    monkeypatch.setattr(parts, "failpoint", lambda name: None)
    assert encode(byte_tokenizer, tmp_path / "killed", rows) == expected
    assert len(encoded_rows) == COUNT


def test_a_damaged_part_is_encoded_again(
    byte_tokenizer: Any, tmp_path: Path, encoded_rows: list[str]
) -> None:
    rows = records(0, COUNT)
    first = encode(byte_tokenizer, tmp_path, rows)
    damaged, short, *others = sorted((tmp_path / "store" / PARTS).glob("*/*"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    short.write_bytes(b"")
    encoded_rows.clear()
    assert encode(byte_tokenizer, tmp_path, rows) == first
    assert others and 0 < len(encoded_rows) < COUNT


def test_what_changes_the_tokens_changes_the_address(
    byte_tokenizer: Any, sp_tokenizer: Any, tmp_path: Path, encoded_rows: list[str]
) -> None:
    rows = records(0, 20)
    encode(byte_tokenizer, tmp_path, rows)
    encode(byte_tokenizer, tmp_path, rows, BOUNDS._replace(response=150))
    assert len(encoded_rows) == 40
    encode(sp_tokenizer, tmp_path, rows)
    assert len(encoded_rows) == 60
    other = copy.deepcopy(byte_tokenizer)
    other.chat_template = "{# another one #}" + other.chat_template
    encode(other, tmp_path, rows)
    assert len(encoded_rows) == 80


def test_a_process_that_the_kernel_ends_is_named(byte_tokenizer: Any, tmp_path: Path) -> None:
    rows = records(0, COUNT)

    def kill(_: int) -> None:
        for each in multiprocessing.active_children():
            each.kill()

    with (
        pytest.raises(InfrastructureError, match=r"data.preference: a process .* lower data.processes"),
        parts.opened(Encoder(byte_tokenizer, "chat"), BOUNDS, tmp_path, None, COUNT, 2) as opened,
    ):
        opened.encode("preference", rows, kill)


def test_few_rows_are_encoded_without_further_processes(byte_tokenizer: Any, tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    with parts.opened(Encoder(byte_tokenizer, "chat"), BOUNDS, tmp_path, None, 63, None) as opened:
        opened.encode("preference", records(0, 63), lambda further: None)
        assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("processes", [2, 3])
def test_the_artifact_is_the_same_for_any_number_of_processes(tmp_path: Path, processes: int) -> None:
    rows = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(60)]
    rows += [{"prompt": "long", "chosen": "x " * 500, "rejected": "y"}, rows[3]]
    source = [{"path": str(write_jsonl(tmp_path / "pairs.jsonl", rows))}]
    made = []
    for count in (1, processes):
        out = tmp_path / str(count)
        out.mkdir()
        data = {"sft": source, "preference": source, "prompts": source, "processes": count}
        prepare(
            PipelineConfig.model_validate({"data": data}, strict=False),
            out,
            lambda done, total: None,
            None,
            partial(Store, tmp_path / f"store{count}"),
        )
        made.append(
            {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
        )
    assert made[0] == made[1] and len(made[0]) > 8


def test_rows_beyond_a_row_group_are_written_as_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [PairExample(str(i), f"prompt {i}", (1,) * i, (2,), (3,), "a") for i in range(30)]
    whole = tmp_path / "whole"
    whole.mkdir()
    write(whole, "pairs", "train", pairs)
    monkeypatch.setattr(dataset, "_GROUP_ROWS", 8)
    monkeypatch.setattr(dataset, "_BATCH_ROWS", 3)
    write(tmp_path, "pairs", "train", pairs)
    assert pq.ParquetFile(tmp_path / "pairs_train.parquet").num_row_groups == 4
    assert load_pairs(tmp_path, "train") == pairs == load_pairs(whole, "train")
    write(tmp_path, "pairs", "eval", [])
    assert load_pairs(tmp_path, "eval") == []
