"""What holds for any file, any row and any chat template.

Rules:
- any bytes under any supported name, and any edit of a good file, end in rows, bad rows with a line and a
  reason, or one DataError that names the file; the look before the start never fails in another way and never
  refuses what is good;
- any JSON object ends in a record or in a reason, and through a whole set every row is either kept or in the
  quarantine file with its line and its reason;
- any chat template ends in an encoder or in a ModelError, within its limits.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import Source
from rlhf_core.data.card import begins_with
from rlhf_core.data.check import check_source
from rlhf_core.data.examples import Quarantine, SetCounts, read_records
from rlhf_core.data.files import BadRow, Row
from rlhf_core.data.formats import Record, normalise
from rlhf_core.data.messages import Message, RowError
from rlhf_core.data.sources import read_rows, source_contents
from rlhf_core.data.templates import EncodeError, Encoder
from rlhf_core.errors import DataError, ModelError
from tests.support.demo_data import GENERATED
from tests.support.sampled import examples

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

ROWS = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}", "id": i} for i in range(8)]


def parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), out, compression="NONE")
    return out.getvalue()


JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
GOOD: dict[str, bytes] = {
    "a.jsonl": JSONL,
    "a.jsonl.gz": gzip.compress(JSONL, mtime=0),
    "a.json": json.dumps(ROWS).encode(),
    "a.csv": b"prompt,chosen,rejected\n" + b"".join(b"q %d,good %d,bad %d\n" % (i, i, i) for i in range(8)),
    "a.parquet": parquet(),
}
NASTY = st.sampled_from(
    [b"\0", b"\n", b"\r\n", b'"', b"'", b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\ud800", b"\xff",
        b"\xef\xbb\xbf",
     b"NaN", b"-Infinity", b"1e999", b"null", b"true", b"\xe2\x80\xa8", b"9" * 5000, b"[" * 2000, b"\x1f\x8b",
     b"PAR1"]
)  # fmt: skip


def ends_well(file: Path) -> list[Row | BadRow] | None:
    """The rows; None where the file was refused as a whole."""
    findings = list(check_source("data.sft.0", Source(path=str(file))))
    assert all(isinstance(finding, DataError) and str(file) in finding.message for finding in findings)
    try:
        rows = list(read_rows(Source(path=str(file))))
    except DataError as error:
        assert str(file) in error.message and "\n" not in error.message
        return None
    assert all(row.line > 0 and (isinstance(row, Row) or row.reason) for row in rows)
    assert not findings or not any(isinstance(row, Row) for row in rows[:5]), findings
    return rows


@pytest.mark.parametrize("name", GOOD)
def test_a_good_file_passes_the_look_and_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(GOOD[name])
    assert list(check_source("data.sft.0", Source(path=str(tmp_path / name)))) == []
    rows = ends_well(tmp_path / name)
    assert rows is not None and [type(row) for row in rows] == [Row] * 8


@pytest.mark.parametrize("name", GOOD)
@examples(60, 3, suppress_health_check=QUIET)
@given(data=st.data())
def test_any_bytes_and_any_edit_of_a_good_file_end_in_rows_or_one_error(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    content = GOOD[name]
    if data.draw(st.booleans()):
        content = data.draw(st.binary(max_size=200))
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            at, length = data.draw(st.integers(0, len(content))), data.draw(st.integers(0, 20))
            new = data.draw(NASTY | st.binary(max_size=3))
            content = content[:at] + new + content[at + length :]
    (tmp_path / name).write_bytes(content)
    ends_well(tmp_path / name)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("a\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool"]),
            "content": VALUES,
            "tool_calls": VALUES,
        }
    ),
    max_size=4,
)
FIELDS = ("text", "messages", "prompt", "completion", "chosen", "rejected", "meta", "split", "tools")
ANY_ROW = st.dictionaries(
    st.sampled_from(FIELDS),
    VALUES | TURNS | st.text(max_size=8) | st.just("\n\nHuman: a\n\nAssistant: b"),
    max_size=5,
)


@examples(300, 3, suppress_health_check=QUIET)
@given(ANY_ROW, st.sampled_from(["auto", "text", "messages", "completion", "preference", "prompt"]))
def test_any_object_is_a_record_or_has_a_reason(row: dict[str, Any], wanted: Any) -> None:
    try:
        record = normalise(row, wanted)
    except RowError as error:
        assert str(error) and "\n" not in str(error)
        return
    assert isinstance(record, Record)
    answers = [each for each in (record.response, record.rejected) if each is not None]
    texts = [message.text for message in (*record.prompt, *record.messages, *answers)] + [record.text or "x"]
    assert all(text.strip() and text.encode() for text in texts if record.kind != "prompt" or text)


@examples(60, 3, suppress_health_check=QUIET)
@given(st.lists(ANY_ROW.map(lambda row: json.dumps(row).encode()) | st.binary(max_size=20), max_size=8))
def test_every_row_of_a_set_is_kept_or_in_the_quarantine_with_line_and_reason(
    tmp_path: Path, lines: list[bytes]
) -> None:
    good = b'{"prompt": "a", "chosen": "b", "rejected": "c"}'
    lines = [good, *(line.replace(b"\n", b" ").replace(b"\r", b" ") for line in lines)]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    source = {"path": str(tmp_path / "rows.jsonl")}
    config = PipelineConfig.model_validate(
        {"data": {**GENERATED, "preference": [source], "max_bad_rows": 1.0}}, strict=False
    )
    quarantine, counts = Quarantine(tmp_path / "quarantine.jsonl"), SetCounts()
    contents = source_contents(config)
    kept = list(read_records(config, "preference", quarantine, counts, contents, tmp_path))
    quarantine.close()
    bad = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert counts.read == len(kept) + len(bad) == sum(bool(line.strip()) for line in lines)
    assert len(bad) == counts.bad
    assert sorted([item.line for item in kept] + [row["line"] for row in bad]) == [
        number for number, line in enumerate(lines, start=1) if line.strip()
    ]
    assert all(row["reason"] and row["source"].endswith("rows.jsonl") for row in bad)


PIECES = st.sampled_from(
    ["{% for m in messages %}", "{% endfor %}", "{{ m['content'] }}", "{{ m.role }}", "{{ bos_token }}",
        "{{ eos_token }}",
     "{% if m['role'] == 'assistant' %}", "{% else %}", "{% endif %}", "{% generation %}",
     "{% endgeneration %}", "{% if add_generation_prompt %}", "{% set x = messages %}", "{{ x | length }}",
     "{{ messages[9] }}", "{{ 1/0 }}", "{{ messages | tojson }}", "{{ 'x' * 9 }}", "{{ m.content | trim }}",
     "{% raw %}", "{{", "}}", "{#", "text", "\n", "{{ raise_exception('no') }}",
     "{{ range(99999) | list | length }}", "{{ messages.pop() }}", "{% break %}", "{{ [] | first }}",
     "{{ ''.join([]) }}", "{{ namespace(a=1).a }}",
     "{% macro f(x) %}{{ x }}{% endmacro %}", "{{ f(1) }}",
     "{{ m.content[5:] }}"]
)  # fmt: skip


@examples(150, 3, suppress_health_check=QUIET)
@given(pieces=st.lists(PIECES, max_size=10), text=st.text(max_size=12))
def test_any_template_and_any_text_end_in_tokens_or_in_an_error_of_the_input(
    make_tokenizer: Callable[..., Any], pieces: list[str], text: str
) -> None:
    talk = [Message("user", text or "a"), Message("assistant", "It is noon.")]
    try:
        encoder = Encoder(tokenizer_with(make_tokenizer, "".join(pieces)), "chat", "the/model")
    except ModelError as error:
        assert "data.chat_template" in error.message and "\n" not in error.message
        return
    try:
        encoded = encoder.conversation(talk)
    except EncodeError:
        return
    assert len(encoded.ids) == len(encoded.mask)


_MADE: list[Any] = []


def tokenizer_with(make: Callable[..., Any], template: str) -> Any:
    if not _MADE:
        _MADE.append(make())
    _MADE[0].chat_template = template
    return _MADE[0]


@given(st.text("ab ", max_size=12), st.sets(st.text("ab ", min_size=1, max_size=8)))
def test_a_text_begins_with_a_held_out_prompt_unless_that_ends_within_a_word(
    text: str, keys: set[str]
) -> None:
    wanted = any(text.startswith(key) and " " in f"{key[-1]}{text[len(key) :]} "[:2] for key in keys)
    assert begins_with(text, sorted(keys)) == wanted
