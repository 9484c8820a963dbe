"""Rows that are encoded in parts, by several processes, and parts that are kept.

Rules:
- rows that are encoded in parts are those that are encoded one by one, for any number of processes;
- a part that is there is not encoded again; a damaged one is;
- a new row, or one that is gone, encodes little more than itself; so does an attempt after a kill;
- what changes the tokens changes the names of the parts;
- no process outlives the one that encodes, and a stop waits for none; one that is killed is named, as is a
  part that cannot be kept;
- few rows are encoded without parts and processes; parts that no run has read for long are deleted;
- many rows are in a file without a name, and few of them in memory.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlhf_core.config.data import Limits, Source
from rlhf_core.config.load import config_from_tree
from rlhf_core.data import examples, parts, prepare
from rlhf_core.data.examples import RecordDropped, SourceRecord, Tokens, stored, to_record, tokens_of
from rlhf_core.data.files import Row
from rlhf_core.data.templates import TOOLS_TEMPLATE, EncodeError, Encoder
from rlhf_core.errors import InfrastructureError
from rlhf_core.system.machine import Machine
from tests.unit.data.data_samples import write_jsonl

COUNT = 400
BOUNDS = Limits(200, 200, 200, 0)
CALL = {"id": "a", "function": {"name": "clock", "arguments": {"zone": "CET"}}}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FEW_ROWS", 0)
    monkeypatch.setattr(parts, "_MEAN_ROWS", 8)


@pytest.fixture
def encoded_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The prompts that are encoded in this process."""
    found: list[str] = []

    def counted(record: Any, *arguments: Any) -> list[Tokens]:
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


def shown(found: parts.Found) -> Any:
    """Return what is found for a record, with errors as their texts."""
    if isinstance(found, RecordDropped):
        return str(found), found.lengths
    return str(found) if isinstance(found, EncodeError) else found


def encode(
    tokenizer: Any,
    folder: Path | None,
    rows: Sequence[SourceRecord],
    bounds: Limits = BOUNDS,
    processes: int = 1,
) -> list[Any]:
    encoder = Encoder(tokenizer, "chat")
    with parts.encoding({"preference": rows}, encoder, bounds, folder, processes) as (encoded, _):
        return list(map(shown, encoded("preference")))


def encode_alone(tokenizer: Any, rows: Sequence[SourceRecord]) -> list[Any]:
    encoder = Encoder(tokenizer, "chat")
    return [shown(parts._found(item.record, "preference", encoder, BOUNDS)) for item in rows]


def test_rows_that_are_encoded_in_parts_are_those_that_are_encoded_alone(
    byte_tokenizer: Any, tmp_path: Path
) -> None:
    rows = records(0, COUNT)
    long = {"prompt": "Is it late?", "chosen": "x " * 2**16, "rejected": "y"}
    mark = {"prompt": "Is it\0late?", "chosen": "</s>", "rejected": "y"}
    tools = {"prompt": "Is it noon?", "chosen": "Yes.", "rejected": "y", "tools": [{"name": "clock"}]}
    for row in (long, mark, tools):
        item = to_record(Row("rows.jsonl", 1, row), Source(path="rows.jsonl"), "preference", "rows")
        rows += [item] if isinstance(item, SourceRecord) else []
    alone = encode_alone(byte_tokenizer, rows)
    assert any(isinstance(found, tuple) for found in alone)
    assert any(isinstance(found, str) for found in alone)
    assert encode(byte_tokenizer, tmp_path, rows) == alone
    assert encode(byte_tokenizer, tmp_path, rows) == alone


def test_a_row_that_is_kept_keeps_no_other_tokens_of_its_part(byte_tokenizer: Any, tmp_path: Path) -> None:
    encoder = Encoder(byte_tokenizer, "chat")
    rows = records(0, COUNT)
    with parts.encoding({"preference": rows}, encoder, BOUNDS, tmp_path, 1) as (_, again):
        kept = again("preference")[0]
    alone = parts._found(rows[0].record, "preference", encoder, BOUNDS)
    assert isinstance(kept, list) and isinstance(alone, list)
    held = 0
    for column in kept[0].ids:
        array = np.asarray(column)
        # An array that is a part of another one keeps the whole of it.
        held += (array if array.base is None else array.base).nbytes
    assert held == 4 * sum(map(len, alone[0].ids))


def test_a_part_that_is_there_is_not_encoded_again(
    byte_tokenizer: Any, tmp_path: Path, encoded_rows: list[str]
) -> None:
    rows = records(0, COUNT)
    first = encode(byte_tokenizer, tmp_path, rows)
    assert len(encoded_rows) == COUNT == len(first)
    assert encode(byte_tokenizer, tmp_path, rows) == first
    assert len(encoded_rows) == COUNT
    assert encode(byte_tokenizer, None, rows) == first
    assert len(encoded_rows) == 2 * COUNT


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
    expected = encode_alone(byte_tokenizer, rows)
    chance = random.Random(0)
    encoded_rows.clear()
    for _ in range(3):
        passes = iter(range(chance.randint(2, 12), -1, -1))
        monkeypatch.setattr(parts, "failpoint", lambda name, passes=passes: 1 // next(passes))
        with pytest.raises(ZeroDivisionError):
            encode(byte_tokenizer, tmp_path, rows)
    monkeypatch.setattr(parts, "failpoint", lambda name: None)
    assert encode(byte_tokenizer, tmp_path, rows) == expected
    assert len(encoded_rows) == COUNT


def test_a_damaged_part_is_encoded_again(
    byte_tokenizer: Any, tmp_path: Path, encoded_rows: list[str]
) -> None:
    rows = records(0, COUNT)
    first = encode(byte_tokenizer, tmp_path, rows)
    damaged, short, *others = sorted(tmp_path.iterdir())
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    short.write_bytes(b"")
    encoded_rows.clear()
    assert encode(byte_tokenizer, tmp_path, rows) == first
    assert others and 0 < len(encoded_rows) < COUNT


def test_what_changes_the_tokens_changes_the_names(
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
    rows, encoder = records(0, COUNT), Encoder(byte_tokenizer, "chat")
    with (
        pytest.raises(InfrastructureError, match=r"data\.preference: a process that encodes rows was ended"),
        parts.encoding({"preference": rows}, encoder, BOUNDS, tmp_path, 2) as (encoded, _),
    ):
        for _ in encoded("preference"):
            for each in multiprocessing.active_children():
                each.kill()
                each.join()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_part_that_cannot_be_kept_is_named(
    byte_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setenv("RLHF_FAIL", "data.part:1:enospc")
    with pytest.raises(InfrastructureError, match=r"data\.preference: .* No space left .*; free some space"):
        encode(byte_tokenizer, tmp_path, records(0, COUNT), processes=processes)


def test_a_part_that_is_gone_is_made_again_or_named(byte_tokenizer: Any, tmp_path: Path) -> None:
    rows, encoder, folder = records(0, COUNT), Encoder(byte_tokenizer, "chat"), tmp_path / "parts"
    with parts.encoding({"preference": rows}, encoder, BOUNDS, folder, 1) as (encoded, again):
        first = list(map(shown, encoded("preference")))
    for file in folder.iterdir():
        file.unlink()
    kept = again("preference")
    assert list(map(shown, kept)) == first and shown(kept[0]) == first[0]
    shutil.rmtree(folder)
    folder.write_text("")
    with pytest.raises(InfrastructureError, match=r"data\.preference: .*Not a directory.*; free some space"):
        list(again("preference"))


def test_a_stop_waits_for_no_part(
    byte_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_MEAN_ROWS", 2**31)
    monkeypatch.setattr(parts, "_MOST_ROWS", 8)
    tokenizer = copy.deepcopy(byte_tokenizer)
    endless = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    tokenizer.chat_template += "{% if '9' in messages[0]['content'] %}" + endless + "{% endif %}"
    encoder = Encoder(tokenizer, "chat")
    with (
        pytest.raises(KeyboardInterrupt),
        parts.encoding({"preference": records(0, 80)}, encoder, BOUNDS, tmp_path, 2) as (encoded, _),
    ):
        for _ in encoded("preference"):
            time.sleep(1)  # the second part is begun, and never ends
            raise KeyboardInterrupt
    assert multiprocessing.active_children() == []


def test_no_process_outlives_the_one_that_encodes(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": "bad"} for i in range(4000)]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    mark = f"RLHF_TEST_{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.data.test_parts", str(tmp_path)], env={**os.environ, mark: "1"}
    )
    try:
        deadline = time.monotonic() + 300
        while process.poll() is None and not any((tmp_path / "parts").glob("*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(marked(mark)) >= 3  # it, its two processes, and what watches over their semaphores
    finally:
        process.kill()
        process.wait()
    while marked(mark):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """Return the running processes with the variable `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def test_few_rows_are_encoded_without_parts(
    byte_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "FEW_ROWS", 101)
    rows = records(0, 100)
    assert encode(byte_tokenizer, tmp_path, rows, processes=2) == encode_alone(byte_tokenizer, rows)
    assert list(tmp_path.iterdir()) == [] == multiprocessing.active_children()


def test_parts_that_no_run_has_read_for_long_are_deleted(byte_tokenizer: Any, tmp_path: Path) -> None:
    encode(byte_tokenizer, tmp_path, records(0, 100))
    old = set(tmp_path.iterdir())
    for each in old:
        os.utime(each, (0, 0))
    encode(byte_tokenizer, tmp_path, records(0, 50))
    kept = set(tmp_path.iterdir())
    assert kept and len(kept & old) >= 1 and old - kept


def test_the_artifact_is_the_same_for_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(60)]
    rows += [{"prompt": "long", "chosen": "x " * 500, "rejected": "y"}, rows[3]]
    tool = {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}
    call, told = {"name": "weather", "arguments": {"at": "noon"}}, {"role": "tool", "content": "rain"}
    chats: list[dict[str, Any]] = []
    for i in range(20):
        asked = {"role": "user", "content": f"Is it late, {i}?"}
        calling = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": f"Hm {i}."}
        said = {"role": "assistant", "content": f"It rains {i}.", "reasoning_content": "So.", "weight": i % 2}
        chats.append({"messages": [asked, calling, told, said], "tools": [tool], "meta": {"i": i}})
        chats.append({"messages": [{"role": "system", "content": "Be kind."}, asked, {**said, "weight": 1}]})
    chats += [
        {"text": "x " * 3000},
        {"text": "</s> is text"},
        {"messages": [{"role": "user", "content": [0]}]},
    ]
    pairs = [{"path": str(write_jsonl(tmp_path / "pairs.jsonl", rows))}]
    sft = [*pairs, {"path": str(write_jsonl(tmp_path / "chats.jsonl", chats))}]
    data = {"sft": sft, "preference": pairs, "prompts": sft, "chat_template": TOOLS_TEMPLATE}
    config = config_from_tree({"data": {**data, "thoughts": "keep", "max_bad_rows": 0.5}})
    made = []
    for few, count in ((10**6, 1), (0, 1), (0, 3)):
        monkeypatch.setattr(parts, "FEW_ROWS", few)
        monkeypatch.setattr(examples, "LISTED_ROWS", few)
        monkeypatch.setattr(Machine, "cores", lambda self, count=count: count)
        out = tmp_path / f"{few}-{count}"
        out.mkdir()
        prepare.prepare(config, out, lambda done, total: None, None, tmp_path / f"parts-{count}")
        made.append(
            {str(each.relative_to(out)): each.read_bytes() for each in out.rglob("*") if each.is_file()}
        )
    assert made[0] == made[1] == made[2] and len(made[0]) > 8


def test_many_rows_are_in_a_file_and_few_of_them_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Ist es spät? \u2028"},
        {"role": "assistant", "content": "", "reasoning_content": "A clock.", "tool_calls": [CALL]},
        {"role": "tool", "content": "12:00", "tool_call_id": "a"},
        {"role": "assistant", "content": "It is noon.", "weight": 1},
    ]
    odd: list[dict[str, Any]] = [
        {"messages": talk, "tools": [{"name": "clock"}], "group": "\ud800", "a": {"b": [None, 1.5]}},
        {"text": "plain"},
        {"prompt": "Why?", "completion": "Because.", "margin": "1"},
    ]
    source = Source(path="rows.jsonl")
    rows = records(0, COUNT)
    for row in odd:
        item = to_record(Row("rows.jsonl", 1, row), source, "sft", "rows", "keep")
        assert isinstance(item, SourceRecord), item
        rows.append(item)
    assert stored(iter(rows), tmp_path) is not rows and stored(iter(rows), tmp_path) == rows
    monkeypatch.setattr(examples, "LISTED_ROWS", len(rows) - 1)
    kept = stored(iter(rows), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert list(kept) == rows and kept[30:50] == rows[30:50] and kept[-1] == rows[-1]
    assert [kept[i] for i in range(len(rows) - 1, -1, -37)] == rows[::-37]
    assert kept[0] is not kept[0]


def main(folder: Path) -> None:
    """Encode the pairs in `folder` by two processes."""
    from rlhf_core.data.tokenizer import train_tokenizer

    rows = [json.loads(line) for line in (folder / "pairs.jsonl").open()]
    source = Source(path="rows.jsonl")
    found = [to_record(Row("rows.jsonl", i, row), source, "preference", "rows") for i, row in enumerate(rows)]
    items = [item for item in found if isinstance(item, SourceRecord)]
    encoder = Encoder(train_tokenizer(["It is noon."], 300), "chat")
    parts.FEW_ROWS, parts._MEAN_ROWS = 0, 64
    with parts.encoding({"preference": items}, encoder, Limits(9999, 9999, 9999, 0), folder / "parts", 2) as (
        encoded,
        _,
    ):
        for _ in encoded("preference"):
            pass


if __name__ == "__main__":
    main(Path(sys.argv[1]))
