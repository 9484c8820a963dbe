"""Every bad data source gives one clear message.

Rules: each input of the tables ends `rlhf run` with exit code 2 and a message that names the field, the
file and where it can the line, the rule and a fix. What the first bytes of a file show is refused before
anything starts; what only reading shows (rows, lengths, duplicates) by the data stage, with nothing heavier
behind it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.address import parse_address
from rlhf_core.data.files import list_files
from rlhf_core.errors import DataError
from tests.unit.bad_input.bad_inputs import Bad, Command

GOOD: list[dict[str, Any]] = [
    {"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(20)
]


def jsonl(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


DEMO = "sft: [{path: synthetic}], prompts: [{path: synthetic}]"


def config_of(name: str, **fields: Any) -> str:
    """All three sets from one source."""
    source = [{"path": name, **fields.pop("source", {})}]
    return json.dumps({"data": {"sft": source, "preference": source, "prompts": source, **fields}})


def chat(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


ROW = b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
LONG_ROW = b'{"prompt": "' + random.Random(0).randbytes(9000).hex().encode() + b'"}\n'

FILES: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "an empty file": ("a.jsonl", b"", ("a.jsonl: the file is empty (0 rows)",)),
    "only blank lines": ("a.jsonl", b"\n \n\r\n", ("a.jsonl: 0 rows, only blank lines",)),
    "40 MB of blanks": (
        "a.jsonl.gz",
        gzip.compress(b" " * 41_000_000, 1),
        ("a.jsonl.gz: 0 rows, only blank lines",),
    ),
    "no JSON": ("a.jsonl", b"hello\nworld\n", ("a.jsonl:1", "not valid JSON", "one JSON object per line")),
    "a row cut off": ("a.jsonl", b'{"prompt": "a', ("a.jsonl:1", "the last line is cut short")),
    "rows that are lists": (
        "a.jsonl",
        b"[1]\n[2]\n",
        ("a.jsonl:1", "expected a JSON object", "got an array"),
    ),
    "an array on one line": (
        "a.jsonl",
        b"[" + ROW.strip() + b"]\n",
        ("a.jsonl:1", "got an array", "named .json"),
    ),
    "Latin-1": ("a.jsonl", '{"prompt": "caf\u00e9"}\n'.encode("latin-1"), ("a.jsonl:1", "0xe9", "not UTF-8")),
    "UTF-16": ("a.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), ("UTF-16", "save it as UTF-8")),
    "zeros": ("a.jsonl", bytes(1000), ("a.jsonl:1",)),
    "nesting": ("a.jsonl", b"[" * 100_000 + b"\n", ("a.jsonl:1", "nested too deeply")),
    "nested objects": ("a.jsonl", b'{"a":' * 100_000 + b"\n", ("a.jsonl:1", "nested too deeply")),
    "parquet under another name": ("a.jsonl", b"PAR1" + bytes(20), ("this is a parquet file", "rename")),
    "gzip under another name": ("a.jsonl", gzip.compress(ROW), ("this is a gzip file", "rename")),
    "a web page": ("a.jsonl", b"<!DOCTYPE html>\n<html>404</html>\n", ("a.jsonl", "web page", "download")),
    "JSON named parquet": ("a.parquet", ROW, ("not a parquet file",)),
    "parquet cut short": ("a.parquet", b"PAR1" + bytes(50), ("a.parquet", "cut short")),
    "a pointer file": ("a.jsonl", LFS, ("Git LFS pointer", "git lfs pull")),
    "a pointer file named parquet": ("a.parquet", LFS, ("Git LFS pointer",)),
    "gzip cut short": ("a.jsonl.gz", gzip.compress(LONG_ROW)[:-5000], ("the gzip file is cut short",)),
    "no gzip": ("a.jsonl.gz", ROW, ("not a gzip file",)),
    "no array": ("a.json", b"hello", ("a.json:1", "JSON array")),
    "an object": ("a.json", ROW, ("a.json", "array of objects", ".jsonl")),
    "rows named .json": ("a.json", ROW * 2, ("a.json", "array of objects", ".jsonl")),
    "an empty array": ("a.json", b"[]", ("0 rows",)),
    "an array of numbers": ("a.json", b"[1, 2]", ("objects", "got int")),
    "an array cut short": ("a.json", b'[{"prompt": 1}', ("not valid JSON",)),
    "an array in Latin-1": ("a.json", b'[{"prompt": "\xe9"}]', ("a.json", "not UTF-8")),
    "a nested array": ("a.json", b"[" * 100_000, ("a.json", "nested too deeply")),
    "a header twice": ("a.csv", b"prompt,prompt\na,b\n", ("a.csv:1", "each field once")),
    "a header with blanks": ("a.csv", b"prompt,,\na,b,c\n", ("a.csv:1", "each field once")),
    "a header alone": ("a.csv", b"prompt,chosen,rejected\n", ("a.csv", "0 rows")),
    "another kind of file": ("a.txt", b"text", ("unknown kind of file", ".jsonl")),
    "another kind of gzip": ("a.gz", gzip.compress(ROW), ("unknown kind of file",)),
    "a program": ("a.py", b"open('ran', 'w')\n", ("a.py",)),
    "a pickle": ("a.pkl", b"\x80\x04.", ("a.pkl",)),
}


@pytest.mark.parametrize("title", FILES)
def test_a_file_that_cannot_be_used_is_refused_before_the_start(command: Command, title: str) -> None:
    name, content, words = FILES[title]
    bad = Bad(title, f"data: {{{DEMO}, preference: [{{path: ./{name}}}]}}", words, files={name: content})
    assert command.complaint(bad).startswith("data.preference.0.path: ")


PATHS = {
    "missing.jsonl": ("file not found: missing.jsonl", "relative ones start at"),
    "./missing": ("file not found: ./missing",),
    "../missing.jsonl": ("file not found: ../missing.jsonl",),
    "/nowhere/x": ("file not found: /nowhere/x",),
    "file:///nowhere/x.jsonl": ("file not found: file:///nowhere/x.jsonl",),
    "not an id": ("file not found", "no hub id"),
    "owner/name/more": ("file not found", "no hub id"),
    "s3://": ("s3://bucket/key",),
    "s3://bucket": ("s3://bucket/key",),
    "s3:///key": ("s3://bucket/key",),
    "https://host/a.jsonl": ("scheme https://", "download"),
    "ftp://host/a.jsonl": ("scheme ftp://", "download"),
    "empty": ("no data files",),
    "Synthetic": ("did you mean synthetic?", "./Synthetic"),
    "sinthetic": ("did you mean synthetic?",),
    "pipe": ("pipe is a pipe (FIFO), not a regular file", "write the rows to a file"),
    "pipe.jsonl": ("pipe.jsonl is a pipe (FIFO)",),
    "/dev/zero": ("/dev/zero is a device",),
    "loop.jsonl": ("file not found: loop.jsonl",),
    "x" * 5000 + ".jsonl": ("file not found",),
    "a\\0b.jsonl": ("file not found",),
}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:20])
def test_a_path_that_leads_nowhere_is_refused_before_the_start(command: Command, path: str) -> None:
    (command.folder / "empty").mkdir()
    (command.folder / "loop.jsonl").symlink_to("loop.jsonl")
    for pipe in ("pipe", "pipe.jsonl"):
        os.mkfifo(command.folder / pipe)
    bad = Bad(path, f'data: {{{DEMO}, preference: [{{path: "{path}"}}]}}', PATHS[path])
    assert command.complaint(bad).startswith("data.preference.0.path: ")


def test_a_folder_that_holds_far_too_much_is_refused_without_reading_it(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.jsonl").write_bytes(ROW)
    assert len(list_files(parse_address(str(tmp_path)), most=6)) == 6
    with pytest.raises(DataError, match=f"{tmp_path} holds over 5 files; give the folder of the data alone"):
        list_files(parse_address(str(tmp_path)), most=5)


ROWS: dict[str, tuple[bytes, str]] = {
    "no prompt": (jsonl({"chosen": "a", "rejected": "b"}),
        "'prompt' is missing, and 'chosen' is not a conversation"),
    "a null prompt": (jsonl({**GOOD[0], "prompt": None}), "'prompt' is missing"),
    "an empty prompt": (jsonl({**GOOD[0], "prompt": ""}), "'prompt' is empty"),
    "a blank prompt": (jsonl({**GOOD[0], "prompt": " \t\u2003"}), "'prompt' is blank"),
    "a number": (jsonl({**GOOD[0], "prompt": 5}), "'prompt' must be a string or a list of messages; got int"),
    "a number chosen": (jsonl({**GOOD[0], "chosen": 5}), "'chosen' must be a string or a list of messages"),
    "nothing rejected": (jsonl({"prompt": "a", "chosen": "b"}), "'rejected' is missing or null"),
    "null rejected": (jsonl({**GOOD[0], "rejected": None}), "'rejected' is missing or null"),
    "equal answers": (jsonl({**GOOD[0], "rejected": GOOD[0]["chosen"]}),
        "'chosen' and 'rejected' are the same"),
    "Latin-1": (jsonl(GOOD[0]).replace(b"good", b"caf\xe9"), "not UTF-8: byte 0xe9"),
    "half a character": (jsonl({**GOOD[0], "prompt": "a\ud800b"}), "lone surrogate"),
    "a NUL": (jsonl({**GOOD[0], "prompt": "a\x00b"}), "NUL character"),
    "a raw NUL": (b'{"prompt": "a\x00b"}\n', "not valid JSON"),
    "an enormous number": (b'{"prompt": ' + b"9" * 5000 + b"}\n", "Exceeds the limit"),
    "nesting": (b'{"prompt": ' + b"[" * 100_000 + b"\n", "nested too deeply"),
    "a NaN": (jsonl(GOOD[0]).replace(b'"good 0"', b"NaN"), "NaN is not JSON"),
    "an infinite number": (jsonl(GOOD[0]).replace(b'"good 0"', b"-Infinity"), "-Infinity is not JSON"),
    "a comment": (b"# rows follow\n", "not valid JSON"),
    "single quotes": (b"{'prompt': 'a'}\n", "not valid JSON"),
    "a list": (jsonl(["a"]), "expected a JSON object, got an array"),
    "a word": (jsonl("a"), "expected a JSON object, got str"),
    "null": (b"null\n", "expected a JSON object, got null"),
    "a 17 MiB row": (b'{"prompt": "' + b"x" * (17 << 20) + b'"}\n', "longer than 16 MiB"),
    "roles that do not take turns": (
        jsonl({**GOOD[0], "prompt": chat(("user", "a"), ("user", "b"))}),
        "prompt[1].role must be assistant (roles take turns)",
    ),
    "system last": (jsonl({**GOOD[0], "prompt": chat(("user", "a"), ("system", "b"))}),
        "prompt[1].role must be"),
    "an unknown role": (jsonl({**GOOD[0], "prompt": chat(("tool", "a"))}), "got 'tool'"),
    "no role": (jsonl({**GOOD[0], "prompt": [{"content": "a"}]}), "prompt[0].role must be"),
    "null content": (jsonl({**GOOD[0], "prompt": chat(("user", None))}),
        "prompt[0].content is missing or null"),
    "no messages": (jsonl({**GOOD[0], "prompt": []}), "'prompt' has no messages"),
    "a role with an escape": (jsonl({**GOOD[0], "prompt": chat(("\x1b]0;x\x07", "a"))}),
        "prompt[0].role must be"),
    "a key twice": (b'{"prompt": "a", "chosen": "b", "rejected": "c", "prompt": "d"}\n',
        "duplicate key 'prompt'"),
    "a zero-width prompt": (jsonl({**GOOD[0], "prompt": "\u200b"}), "'prompt' is blank"),
    "a row cut short": (b'{"prompt": "a", "cho', "the last line is cut short"),
}  # fmt: skip


def parquet(columns: list[tuple[str, Any]], **options: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_arrays(
        [pa.array(values) for _, values in columns], names=[name for name, _ in columns]
    )
    stream = io.BytesIO()
    pq.write_table(table, stream, **options)
    return stream.getvalue()


def bomb(rows: int, *, in_messages: bool = False) -> bytes:
    """Rows that are one long text of the column's dictionary, or a message with it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * (20 << 20)]))
    if in_messages:
        roles = pa.array(["user"] * rows)
        messages = pa.StructArray.from_arrays([roles, column], ["role", "content"])
        column = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), messages)
    stream = io.BytesIO()
    table = pa.Table.from_arrays([column], names=["prompt"])
    pq.write_table(table, stream, compression="zstd", dictionary_pagesize_limit=1 << 30)
    return stream.getvalue()


QUOTE = "prompt,chosen,rejected\n" + "".join(f"{i},good {i},bad {i}\n" for i in range(5))
TEXTS = [f"text {i}" for i in range(20)]
BAD_TABLES: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "a quote that is never closed": (
        "a.csv",
        (QUOTE + '"open,b,c\n' + "".join(f"{i},a,b\n" for i in range(30))).encode(),
        ("a.csv:7: a quote that opens in this row is never closed", "30 lines after it"),
    ),
    "a quote that is closed lines later": (
        "a.csv",
        (QUOTE + '"open,b,c\n' + "".join(f"{i},a,b\n" for i in range(30)) + '1,"2",3\n').encode(),
        ("32 of 37 rows", "a.csv:7: not CSV"),
    ),
    "a column twice": (
        "a.parquet",
        parquet([("prompt", TEXTS), ("chosen", TEXTS), ("rejected", TEXTS), ("prompt", TEXTS)]),
        ("a.parquet: the column 'prompt' is there 2 times", "rename"),
    ),
    "binary texts": (
        "a.parquet",
        parquet([("prompt", [text.encode() for text in TEXTS])]),
        ("'prompt' must be a string or a list of messages; got binary data; save the column as text",),
    ),
    "a thousand rows of 20 MiB in a few bytes": (
        "a.parquet",
        bomb(1000),
        ("a.parquet:1: longer than 16 MiB",),
    ),
    "a hundred messages of 20 MiB in a few bytes": (
        "a.parquet",
        bomb(100, in_messages=True),
        ("a.parquet:1: longer than 16 MiB",),
    ),
}


@pytest.mark.parametrize("title", BAD_TABLES)
def test_a_table_that_would_lose_or_swap_rows_is_refused(command: Command, title: str) -> None:
    name, content, words = BAD_TABLES[title]
    command.data_stage = True
    assert len(content) < 2_000_000
    bad = Bad(title, config_of(f"./{name}", max_bad_rows=0.05), words, files={name: content})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert command.complaint(bad).startswith(("data.sft[0]: ", "data.sft.0.path: ", f"{name}:"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


@pytest.mark.parametrize("title", ROWS)
def test_rows_that_cannot_be_used_stop_the_run_with_line_and_reason(command: Command, title: str) -> None:
    line, reason = ROWS[title]
    command.data_stage = True
    content = jsonl(*GOOD[:19]) + line
    bad = Bad(
        title,
        config_of("./rows.jsonl", max_bad_rows=0.0),
        ("rows.jsonl:20: ", reason),
        files={"rows.jsonl": content},
    )
    message = command.complaint(bad)
    assert message.startswith("data.sft[0]: ")
    assert "data.max_bad_rows" in message and "correct the rows or raise the limit" in message


def pairs(number: int, **fields: Any) -> bytes:
    return jsonl(*({**row, **fields} for row in (GOOD * number)[:number]))


def parquet_in_latin_1() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(GOOD), out, compression="NONE")
    return out.getvalue().replace(b"good 7", b"caf\xe9 7")


SETS = (
    Bad("parquet in Latin-1", config_of("./r.parquet"), ("r.parquet", "not UTF-8", "export it again"),
        files={"r.parquet": parquet_in_latin_1()}),
    Bad("an array over lines", config_of("./r.jsonl"),
        ("data.sft.0.path: r.jsonl:1: not valid JSON", "one JSON object per line"),
        files={"r.jsonl": b"[\n" + b",\n".join(jsonl(row).strip() for row in GOOD) + b"\n]\n"}),
    Bad("one row", config_of("./r.jsonl"), ("1 of 1 rows left", "data.min_rows"),
        files={"r.jsonl": pairs(1)}),
    Bad("one prompt", config_of("./r.jsonl", deduplicate=False), ("only 1 group of prompts", "at least 2"),
        files={"r.jsonl": pairs(9, prompt="a")}),
    Bad("one row many times", config_of("./r.jsonl"), ("1 of 60 rows left", "59 duplicate"),
        files={"r.jsonl": jsonl(*[GOOD[0]] * 60)}),
    Bad("fewer than asked for", config_of("./r.jsonl", min_rows=100), ("20 of 20 rows left", "at least 100"),
        files={"r.jsonl": pairs(20)}),
    Bad("prompts too long", config_of("./r.jsonl", max_prompt_tokens=2),
        ("data.sft: 0 of 20 rows left", "20 prompt longer than", "data.max_prompt_tokens: raise it"),
        files={"r.jsonl": pairs(20)}),
    Bad("answers too long", config_of("./r.jsonl", max_response_tokens=1),
        ("0 of 20 rows left", "data.max_response_tokens: raise it"), files={"r.jsonl": pairs(20)}),
    Bad("10 MB of prompt", config_of("./r.jsonl"), ("data.sft: 0 of 2 rows left", "data.max_prompt_tokens"),
        files={"r.jsonl": jsonl(*({**row, "prompt": row["prompt"] * 500_000} for row in GOOD[:2]))}),
    Bad("every pair both ways", config_of("./r.jsonl"),
        ("data.preference: 0 of 40 rows left", "40 contradictory pair"),
        files={"r.jsonl": jsonl(*GOOD, *({**r, "chosen": r["rejected"],
            "rejected": r["chosen"]} for r in GOOD))}),
    Bad("no row of the split", config_of("./r.jsonl", source={"only_split": True, "split": "test"}),
        ("data.sft[0]", "0 rows whose `split` is 'test'"), files={"r.jsonl": pairs(20)}),
    Bad("prompts without answers", config_of("./r.jsonl"), ("this is a `prompt` row", "rename"),
        files={"r.jsonl": jsonl(*({"prompt": row["prompt"]} for row in GOOD))}),
    Bad("texts for pairs", config_of("./r.jsonl"), ("`text` row", "a pair needs 'chosen' and 'rejected'"),
        files={"r.jsonl": jsonl(*({"text": f"a story {i}"} for i in range(20)))}),
    Bad("fields of other names", config_of("./r.jsonl"), ("no known format", "'query'", "rename"),
        files={"r.jsonl": jsonl(*({"query": row["prompt"]} for row in GOOD))}),
    Bad("another format than asked for", config_of("./r.jsonl", source={"format": "messages"}),
        ("'messages' is missing or null",), files={"r.jsonl": pairs(20)}),
    Bad("a bad file among good ones", config_of("./d"), ("d/b.jsonl", "0 rows"),
        files={"d/a.jsonl": pairs(20), "d/b.jsonl": b""}),
    Bad("the fifth file is bad", config_of("./d"), ("d/e.parquet", "parquet"),
        files={**{f"d/{name}.jsonl": pairs(20) for name in "abcd"},
            "d/e.parquet": b"PAR1" + bytes(20) + b"PAR1"}),
    Bad("gzip cut short far down", config_of("./r.jsonl.gz"), ("r.jsonl.gz", "cut short"),
        files={"r.jsonl.gz": gzip.compress(pairs(20) + LONG_ROW * 3)[:-200]}),
    Bad("cells that do not fit", config_of("./r.csv"), ("r.csv:2", "3 cells, but the first line names 2"),
        files={"r.csv": b"prompt,completion\na,b,c\nd,e,f\n"}),
)  # fmt: skip


@pytest.mark.parametrize("bad", SETS, ids=lambda bad: bad.title)
def test_the_message_of_an_unusable_set_names_what_was_dropped_and_the_fix(
    command: Command, bad: Bad
) -> None:
    command.data_stage = True
    command.complaint(bad)
