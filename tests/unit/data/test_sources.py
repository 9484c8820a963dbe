"""Reading rows.

Rules:
- jsonl, gzipped jsonl, json, csv and parquet give the same rows; folders are read in order of names,
  without hidden files and folders, locally and in buckets;
- where names of files are those of splits, only the files of `split` are read; names that do not say which
  files are meant, and folders of several data sets, are an error with a fix;
- folders of `save_to_disk` are an error with a fix; descriptions of data sets have no rows; the index column
  of pandas is left out;
- byte-order marks, CRLF and blank lines are accepted, and line numbers stay those of the file;
- a large parquet file needs the memory of its batches;
- a malformed row is a `BadRow` with line and reason, and the rows around it are kept;
- a file unusable as a whole is one DataError that names it; any bytes as jsonl end in rows or DataError;
- a missing local path is never taken for a hub id;
- digests follow contents, not names, times or the spelling of a path;
- `subset` is a configuration on the hub and a folder elsewhere, and in the digest;
- the name of a folder that is given as `.` or `..` is that of the folder;
- a file that is written to or replaced after its digest was taken is an error that names it, however the
  reading ends.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import Source
from rlhf_core.config.pipeline import StoreConfig
from rlhf_core.data.check import check_source
from rlhf_core.data.files import MAX_ROW_BYTES, BadRow, Row, read_file
from rlhf_core.data.sources import (
    model_digest,
    read_rows,
    require_unchanged,
    short_name,
    source_contents,
    source_digests,
)
from rlhf_core.errors import DataError, ModelError
from rlhf_core.storage import bundles
from rlhf_core.system.home import Home
from tests.conftest import S3Server
from tests.support.demo_data import GENERATED, with_demo_data

ROWS = [{"prompt": 'ä, "b"', "completion": "c\nd"}, {"prompt": "e", "completion": "f"}]


def read(path: Path, **options: Any) -> list[Row | BadRow]:
    return list(read_rows(Source(path=str(path), **options)))


def data_of(path: Path, **options: Any) -> list[dict[str, Any]]:
    return [row.data for row in read(path, **options) if isinstance(row, Row)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def as_jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_every_file_format_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(tmp_path / "a.jsonl", as_jsonl(ROWS))
    write(tmp_path / "a.jsonl.gz", gzip.compress(as_jsonl(ROWS).encode()))
    write(tmp_path / "a.json", json.dumps(ROWS, indent=1))
    write(tmp_path / "a.csv", 'prompt,completion\r\n"ä, ""b""","c\nd"\r\ne,f\r\n')
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for file in sorted(tmp_path.iterdir()):
        assert data_of(file) == ROWS, file.name


def test_an_object_of_an_array_has_the_limit_of_a_line(tmp_path: Path) -> None:
    long = {"messages": [{"content": "x" * (MAX_ROW_BYTES + 1)}]}
    write(tmp_path / "a.json", json.dumps([{"text": "a"}, long, {"text": "x" * MAX_ROW_BYTES}]))
    with (tmp_path / "a.json").open("rb") as stream:
        first, second, third = read_file("a.json", stream)
    assert isinstance(first, Row) and isinstance(third, Row)
    assert second == BadRow("a.json", 2, "longer than 16 MiB", "")


def test_copies_of_a_long_text_in_a_parquet_file_are_not_all_in_memory(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = "x" * 2**17
    rows = [{"text": text, "messages": [{"role": "user", "content": text}]}] * 512
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    assert file.stat().st_size < 2**20
    pool = pa.default_memory_pool()
    before, most = pool.bytes_allocated(), 0
    with file.open("rb") as stream:
        for row in read_file(str(file), stream):
            assert isinstance(row, Row) and row.data == rows[0]
            most = max(most, pool.bytes_allocated() - before)
    # All rows are 128 MiB, and a batch of 64 is 16 MiB.
    assert most < 40 * 2**20


def test_the_columns_of_a_parquet_file_are_not_read_as_a_whole(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    class Watched(io.FileIO):
        most = 0

        @override
        def read(self, size: int | None = -1, /) -> bytes:
            content = super().read(-1 if size is None else size)
            self.most = max(self.most, len(content))
            return content

    file = tmp_path / "a.parquet"
    texts = [os.urandom(2**7).hex() for _ in range(2**15)]
    pq.write_table(pa.table({"text": texts}), file)
    assert file.stat().st_size > 4 * 2**20
    with Watched(file) as stream:
        rows = list(read_file(str(file), stream))
        assert stream.most < 2 * 2**20
    assert [row.data["text"] for row in rows if isinstance(row, Row)] == texts


def test_parquet_with_lists_and_structs_gives_the_rows_of_jsonl(tmp_path: Path) -> None:
    """The usual layout of chats on the hub."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "messages": [{"role": "user", "content": f"ä {i}"}, {"role": "assistant", "content": "b"}],
            "tags": ["x", "y"] if i % 2 else [],
            "info": {"source": "z", "score": 0.5},
            "nested": [[{"a": ["q"]}]],
            "count": i,
            "empty": None,
        }
        for i in range(2000)
    ]
    write(tmp_path / "a.jsonl", as_jsonl(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert data_of(tmp_path / "a.parquet") == data_of(tmp_path / "a.jsonl") == rows


def test_a_folder_is_read_file_by_file_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "c.jsonl", '{"text": "3"}\n')
    write(tmp_path / "b.jsonl", '{"text": "2"}\n')
    write(tmp_path / "a.json", '[{"text": "1"}]')
    write(tmp_path / "readme.md", "no data")
    assert [row["text"] for row in data_of(tmp_path)] == ["1", "2", "3"]
    assert [row["text"] for row in data_of(tmp_path, limit=2)] == ["1", "2"]


def placed(folder: Path, *names: str) -> Path:
    """A folder of files that have a row with their own name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        row = {"text": name}
        write(folder / name, json.dumps([row]) if name.endswith(".json") else as_jsonl([row]))
    return folder


@pytest.mark.parametrize(
    ("names", "split", "read_names"),
    [
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], "train", [0]),
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], "test", [1]),
        (["train.jsonl", "dev.jsonl"], "validation", [1]),
        (["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"], "train", [0, 1]),
        (["a/train.jsonl", "a/test.jsonl", "b/train.jsonl"], "train", [0, 2]),
        (["my_train.part1.jsonl", "my_train.part2.jsonl", "my_eval.jsonl"], "train", [0, 1]),
        (["test_sft-00000-of-00001.jsonl", "train_sft-00000-of-00002.jsonl"], "train_sft", [1]),
        # No name is that of a split: contest, latest, devices.
        (["a.jsonl", "contest.jsonl", "devices.jsonl", "latest.jsonl"], "train", [0, 1, 2, 3]),
        (["part-00000-of-00002.jsonl", "part-00001-of-00002.jsonl"], "train", [0, 1]),
        (["train-a.jsonl", "dataset_infos.json", "dataset_info.json"], "train", [0]),
    ],
)
def test_the_files_of_a_folder_that_are_named_by_splits_are_read_by_split(
    tmp_path: Path, names: list[str], split: str, read_names: list[int]
) -> None:
    found = [row["text"] for row in data_of(placed(tmp_path, *names), split=split)]
    assert found == [names[index] for index in read_names]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["train.jsonl", "more.jsonl"], r"only some of the files.*more\.jsonl \(no split\)"),
        (["test.jsonl"], r"no file is of the split 'train': test\.jsonl \(test\); set `split`"),
        (
            ["train_gen-00000-of-00001.jsonl", "train_sft-00000-of-00001.jsonl"],
            r"no file is of the split 'train': .*\(train_gen\), .*\(train_sft\)",
        ),
        (
            ["main/train-00000-of-00001.jsonl", "socratic/train-00000-of-00001.jsonl"],
            "folders main, socratic are data sets of their own; give one",
        ),
    ],
)
def test_names_that_do_not_say_which_files_are_meant_are_an_error(
    tmp_path: Path, names: list[str], reason: str
) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}: .*{reason}"):
        read(placed(tmp_path, *names))


def test_the_check_before_a_run_says_that_files_of_other_splits_are_not_read(tmp_path: Path) -> None:
    source = Source(path=str(placed(tmp_path, "train.jsonl", "test.jsonl", "dev.jsonl")))
    (found,) = check_source("data.sft.0", source)
    assert isinstance(found, str) and "1 of 3 files" in found and "data.sft.0.split" in found


@pytest.mark.parametrize("is_dict", [False, True])
def test_a_folder_of_save_to_disk_is_an_error_with_the_call_that_writes_parquet(
    tmp_path: Path, is_dict: bool
) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    saved = datasets.DatasetDict({"train": data}) if is_dict else data
    saved.save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "saved", next((tmp_path / "saved").rglob("*.arrow"))):
        with pytest.raises(DataError, match=r"save_to_disk.*are not read.*to_parquet"):
            read(path)


def test_a_hidden_arrow_file_is_skipped_like_other_hidden_files(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.arrow").touch()
    file = write(tmp_path / "a.jsonl", '{"text": "a"}')
    assert data_of(file.parent) == [{"text": "a"}]


def test_the_index_column_of_pandas_is_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", ",prompt,completion\n0,a,b\n1,c,d\n")
    assert data_of(file) == [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]


def test_marks_crlf_and_blank_lines_are_accepted_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "1"}\r\n\r\n  \n{"text": "2"}')
    assert [(row.line, getattr(row, "data", None)) for row in read(file)] == [
        (1, {"text": "1"}),
        (4, {"text": "2"}),
    ]


def test_rows_of_another_split_are_left_out_on_request(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        as_jsonl([{"text": "1", "split": "test"}, {"text": "2", "split": "train"}, {"text": "3"}]),
    )
    assert [row["text"] for row in data_of(file, only_split=True)] == ["2"]
    assert len(data_of(file)) == 3


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "caf\xe9"}', "not UTF-8: byte 0xe9 at position 14"),
        (b'{"text": }', "not valid JSON at column 10"),
        (b'{"text": ', "not valid JSON at column 10"),
        (b'{"text": NaN}', "NaN is not JSON"),
        (b'{"text": -Infinity}', "-Infinity is not JSON"),
        (b'["a"]', "expected a JSON object, got an array"),
        (b"5", "expected a JSON object, got int"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"text": "a\x00"}', "Invalid control character"),
        (b'{"text": "' + b"x" * 17 * 2**20 + b'"}', "longer than 16 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_line_is_named_and_its_neighbours_are_kept(tmp_path: Path, line: bytes, reason: str) -> None:
    file = write(tmp_path / "a.jsonl", b'{"text": "1"}\n' + line + b'\n{"text": "3"}\n')
    first, bad, last = read(file)
    assert isinstance(first, Row) and isinstance(bad, BadRow) and isinstance(last, Row)
    assert bad.line == 2 and reason in bad.reason
    assert len(bad.text) <= 500


def test_a_truncated_last_line_is_reported_as_truncated(tmp_path: Path) -> None:
    *_, bad = read(write(tmp_path / "a.jsonl", '{"text": "1"}\n{"text": "tw'))
    assert isinstance(bad, BadRow) and bad.line == 2 and "cut short" in bad.reason


def test_csv_rows_with_too_few_cells_or_wrong_bytes_are_bad(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.csv", b"prompt,completion\na,b\nc\n\nd\xe9,e\nf,g\n"))
    assert [row.line for row in rows] == [2, 3, 5, 6]
    reasons = [row.reason for row in rows if isinstance(row, BadRow)]
    assert "1 cells, but the first line names 2" in reasons[0] and reasons[1] == "not UTF-8"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "the file is empty"),
        ("a.jsonl", b"PAR1....", "this is a parquet file with the name of a .jsonl file"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "this is a gzip file with the name of a .jsonl file"),
        ("a.parquet", b'{"a": 1}', "this is not a parquet file"),
        ("a.parquet", b"PAR1" + b"x" * 50, "parquet file is damaged"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        ("a.jsonl", b"<!DOCTYPE html><html>", "web page"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "UTF-16"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9999, mtime=0)[:-20], "cut short or damaged"),
        ("a.json", b'{"text": "a"}', "must be a JSON array of objects"),
        ("a.json", b'{"text": "a"}\n{"text": "b"}', "name it .jsonl"),
        ("a.json", b'[{"a": NaN}]', "NaN is not JSON"),
        ("a.json", b'["\xe9"]', "not UTF-8"),
        ("a.csv", b"a,a\n1,2\n", "must name each field once"),
        ("a.csv", b"prompt;chosen\n1;2\n", "';' separates the fields; write commas"),
        ("a.csv", b"prompt\tchosen\n1\t2\n", "separates the fields; write commas"),
        ("a.txt", b"hello", "unknown kind of file"),
    ],
)  # fmt: skip
def test_an_unusable_file_is_one_error_that_names_it(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as caught:
        read(file)
    assert str(file) in caught.value.message


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_as_jsonl_end_in_rows_or_one_error(tmp_path: Path, content: bytes) -> None:
    try:
        rows = read(write(tmp_path / "a.jsonl", content))
    except DataError:
        return
    assert all(isinstance(row, Row) or row.reason for row in rows)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (".", "pairs"),
        ("./", "pairs"),
        ("..", "corpus"),
        ("old/..", "pairs"),
        ("file://.", "pairs"),
        ("/", "/"),
        ("link", "link"),
        ("old/a.jsonl", "a.jsonl"),
        ("s3://bucket/pairs/", "pairs"),
    ],
)
def test_the_name_of_a_folder_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    folder = tmp_path / "corpus" / "pairs"
    (folder / "old").mkdir(parents=True)
    (folder / "link").symlink_to("old")
    monkeypatch.chdir(folder)
    assert short_name(Source(path=path)) == name


def test_hidden_files_and_those_of_other_splits_are_not_read(tmp_path: Path, s3_server: S3Server) -> None:
    import boto3

    names = ("a.jsonl", "._a.jsonl", "old/.b.jsonl", "old/b.jsonl", ".ipynb_checkpoints/a.jsonl")
    splits = {"train.jsonl": b'{"text": "a"}', "test.jsonl": b'{"text": "b"}', "dataset_infos.json": b"{}"}
    client = boto3.client("s3", endpoint_url=s3_server.endpoint)
    for folder in ("old", ".ipynb_checkpoints"):
        (tmp_path / folder).mkdir()
    for name in names:
        row = json.dumps({"text": name}) + "\n"
        write(tmp_path / name, row)
        client.put_object(Bucket=s3_server.bucket, Key=f"dots/{name}", Body=row.encode())
    store = StoreConfig(endpoint=s3_server.endpoint)
    for path in (str(tmp_path), f"s3://{s3_server.bucket}/dots"):
        rows = read_rows(Source(path=path), store)
        assert [row.data["text"] for row in rows if isinstance(row, Row)] == ["a.jsonl", "old/b.jsonl"]
    for name, body in splits.items():
        client.put_object(Bucket=s3_server.bucket, Key=f"splits/{name}", Body=body)
    source = Source(path=f"s3://{s3_server.bucket}/splits", split="test")
    assert [row.data for row in read_rows(source, store) if isinstance(row, Row)] == [{"text": "b"}]
    with pytest.raises(DataError, match=r"s3://.*/splits: no file is of the split 'dev'"):
        list(read_rows(source.model_copy(update={"split": "dev"}), store))


def test_a_link_in_a_folder_to_a_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"text": "a"}\n')
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    assert len(data_of(tmp_path)) == 2
    (tmp_path / "c.jsonl").symlink_to("not/downloaded")
    with pytest.raises(DataError, match=r"c\.jsonl is a link to not/downloaded, which does not exist"):
        read(tmp_path)


def test_a_file_whose_name_is_not_utf8_is_an_error_that_shows_it(tmp_path: Path) -> None:
    write(tmp_path / os.fsdecode(b"a\xff.jsonl"), '{"text": "a"}\n')
    with pytest.raises(DataError, match=r"a\\udcff\.jsonl': the name of this file is not UTF-8; rename it"):
        source_contents(config_for(tmp_path))


def test_a_bucket_without_a_key_is_no_source() -> None:
    with pytest.raises(DataError, match=r"a data source must be s3://bucket/key; got 's3://bucket/'"):
        list(read_rows(Source(path="s3://bucket/")))


def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"file not found: \./missing; correct the path"):
        list(read_rows(Source(path="./missing")))
    with pytest.raises(DataError, match="has no data files"):
        read(tmp_path)


def config_for(path: Path, model: Path | None = None) -> PipelineConfig:
    data = {
        "sft": [{"path": str(path)}],
        "preference": [{"path": "synthetic"}],
        "prompts": [{"path": "owner/name", "revision": "abc"}],
    }
    return PipelineConfig.model_validate(
        with_demo_data({"data": data, "model": {"path": str(model) if model else None}}), strict=False
    )


def test_digests_follow_contents_and_not_names_or_times(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(first, '{"text": "1"}\n')
    write(second, '{"text": "1"}\n')
    os.utime(second, (1, 1))
    digests = source_digests(config_for(first))
    assert digests == source_digests(config_for(second))
    assert digests["data.prompts[0]"] == "hub:owner/name@abc:train"
    assert digests["data.preference[0]"].startswith("synthetic@")
    write(second, '{"text": "2"}\n')
    assert source_digests(config_for(second))["data.sft[0]"] != digests["data.sft[0]"]


def test_the_digest_of_a_source_does_not_depend_on_the_spelling_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my data" / "old"
    folder.mkdir(parents=True)
    write(folder / "a.jsonl", '{"text": "1"}\n')
    write(folder / "b.jsonl", '{"text": "2"}\n')
    monkeypatch.chdir(tmp_path)

    def digest(path: str) -> str:
        config = PipelineConfig.model_validate({"data": {**GENERATED, "sft": [{"path": path}]}}, strict=False)
        return source_contents(config)["data.sft[0]"].digest

    for path, known in (("my data", "4dab8714d21f"), ("my data/old/a.jsonl", "e25cc1c12b68")):
        absolute = str(tmp_path / path)
        spellings = (f"./{path}", path.replace("/", "//"), absolute, f"file://{absolute}", f"file://./{path}")
        assert {digest(spelling) for spelling in spellings} == {digest(path)}
        assert digest(path).startswith(known)


def test_the_files_of_a_model_are_read_once_per_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, home = tmp_path / "model", tmp_path / "home"
    for each in (folder / ".hidden", home):
        each.mkdir(parents=True)
    for name in ("b.safetensors", "a.json", ".hidden/c"):
        write(folder / name, name)
    read: list[str] = []

    def hash_file(path: Path) -> str:
        read.append(path.name)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def digest() -> str:
        return model_digest(str(folder), None, str(home))

    monkeypatch.setattr(bundles, "hash_file", hash_file)
    lines = [f"{name}\x1f{hashlib.sha256(name.encode()).hexdigest()}" for name in ("a.json", "b.safetensors")]
    known = hashlib.sha256("\x1e".join(lines).encode()).hexdigest()
    # A file that was changed a moment ago could be changed again without another time.
    assert digest() == digest() == model_digest(str(folder), None) == known
    assert sorted(read) == [*3 * ["a.json"], *3 * ["b.safetensors"]]
    monkeypatch.setattr(bundles, "_TICK_SECONDS", 0.0)
    read.clear()
    assert digest() == digest() == known and len(read) == 2
    # The same size.
    write(folder / "a.json", "a.JSON")
    assert digest() == digest() != known and read[2:] == ["a.json"]
    (folder / "a.json").unlink()
    Home.of(home).digests.write_text("{")
    digest()
    assert read[3:] == ["b.safetensors"] and list(json.loads(Home.of(home).digests.read_text())) == [
        str(folder / "b.safetensors")
    ]


def test_the_digest_of_a_folder_changes_with_any_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "config.json", "{}")
    write(folder / "model.safetensors", "weights")
    data = write(tmp_path / "a.jsonl", "{}\n")
    before = source_digests(config_for(data, folder))
    write(folder / "model.safetensors", "Weights")
    after = source_digests(config_for(data, folder))
    assert {name for name in after if after[name] != before[name]} == {"model"}
    with pytest.raises(ModelError, match="model path not found"):
        source_digests(config_for(data, tmp_path / "nowhere"))


MANY = [{"text": f"row {number} " + "x" * 2000} for number in range(200)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet"])
@pytest.mark.parametrize("limit", [None, 3])
def test_a_file_that_grows_while_it_is_read_is_an_error_that_names_it(
    tmp_path: Path, name: str, limit: int | None
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / name
    text = as_jsonl(MANY).encode()
    contents = {
        "a.jsonl": text,
        "a.jsonl.gz": gzip.compress(text),
        "a.json": json.dumps(MANY).encode(),
        "a.csv": "\n".join(["text", *(row["text"] for row in MANY)]).encode(),
    }
    if name in contents:
        file.write_bytes(contents[name])
    else:
        pq.write_table(pa.Table.from_pylist(MANY), file)
    assert len(read(file, limit=limit)) == (limit or 200)
    rows = read_rows(Source(path=str(file), limit=limit))
    next(rows)
    with file.open("ab") as stream:
        stream.write(b'{"text": "one more"}\n')
    with pytest.raises(DataError, match=f"{name} was changed after reading it began"):
        list(rows)


def test_a_file_replaced_between_its_digest_and_its_rows_is_an_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "d").mkdir()
    first = write(tmp_path / "d" / "a.jsonl", as_jsonl(MANY[:10]))
    write(tmp_path / "d" / "b.jsonl", as_jsonl(MANY[10:20]))
    config = PipelineConfig.model_validate(
        {"data": {**GENERATED, "sft": [{"path": str(tmp_path / "d")}]}}, strict=False
    )
    source, contents = config.data.sft[0], source_contents(config)["data.sft[0]"]
    assert contents.digest == source_digests(config)["data.sft[0]"]
    assert len(list(read_rows(source, contents=contents))) == 20
    kept = first.rename(tmp_path / "kept")
    write(first, as_jsonl(MANY[20:30]))
    rows = read_rows(source, contents=contents)
    with pytest.raises(DataError, match=r"a\.jsonl was changed after its digest was taken"):
        next(rows)
    os.replace(kept, first)
    assert len(list(read_rows(source, contents=contents))) == 20


def test_a_source_that_no_longer_matches_the_key_is_named(tmp_path: Path) -> None:
    template = write(tmp_path / "t.jinja", "{{ messages }}")
    file = write(tmp_path / "a.jsonl", as_jsonl(MANY[:3]))
    config = PipelineConfig.model_validate(
        {"data": {**GENERATED, "sft": [{"path": str(file)}], "chat_template": str(template)}}, strict=False
    )
    key = source_digests(config)
    require_unchanged(source_digests(config), key, config)
    write(file, as_jsonl(MANY[:4]))
    write(template, "{{ messages[0] }}")
    with pytest.raises(DataError) as caught:
        require_unchanged(source_digests(config), key, config)
    first, second = caught.value.message.split("\n")
    assert first.startswith(f"data.sft[0]: {file} was changed") and "nothing was stored" in first
    assert second.startswith(f"data.chat_template: {template} was changed")


def test_the_subset_of_a_folder_is_a_folder_in_it(tmp_path: Path) -> None:
    for name in ("main", "socratic"):
        write(tmp_path / name / "train.jsonl", as_jsonl([{"text": name}]))
    assert data_of(tmp_path, subset="socratic") == [{"text": "socratic"}]
    digests = {
        source_contents(
            PipelineConfig.model_validate(
                with_demo_data({"data": {"sft": [{"path": str(tmp_path), "subset": name}]}}), strict=False
            )
        )["data.sft[0]"].digest
        for name in ("main", "socratic")
    }
    assert len(digests) == 2
    assert short_name(Source(path=str(tmp_path), subset="main")) == "main"
    assert "file not found" in str(next(iter(check_source("a", Source(path=str(tmp_path), subset="other")))))


def test_the_subset_of_a_data_set_of_the_hub_is_loaded_and_in_its_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda path, name, **_: [{"text": f"{path} {name}"}])
    commit = "a" * 40
    source = {"path": "org/set", "subset": "socratic", "revision": commit}
    assert [row.data for row in read_rows(Source.model_validate(source)) if isinstance(row, Row)] == [
        {"text": "org/set socratic"}
    ]
    config = PipelineConfig.model_validate(with_demo_data({"data": {"sft": [source]}}), strict=False)
    assert source_contents(config)["data.sft[0]"].digest == f"hub:org/set@{commit}:train:socratic"
