"""The check of the beginning of a data file.

Tested here:
- bad rows before good ones are left to the data stage, which counts them;
- an array may follow any number of blanks;
- an array that is too large for the memory is refused, also by the reader.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.data.files import BEGINNING_ROWS, MAX_ARRAY_BYTES, check_beginning, read_file
from rlhf_core.errors import DataError


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("a.jsonl", '{"prompt": NaN}\n', '{"prompt": "x"}\n'),
        ("a.csv", "x,y,z\n", "p,c\n"),
    ],
)
def test_beginning_with_some_bad_rows_is_accepted(name: str, bad: str, good: str, tmp_path: Path) -> None:
    header = "prompt,completion\n" if name.endswith(".csv") else ""
    (tmp_path / name).write_text(header + 6 * bad + 100 * good)
    check_beginning(tmp_path / name)


def test_beginning_of_blanks_before_an_array_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(" " * 1000 + '[{"prompt": "x"}]')
    check_beginning(tmp_path / "a.json")


def test_an_array_above_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    array, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
    # As many lines as are looked at: the rest of the file would be one line of 2 GiB.
    for file, start in ((array, '[{"prompt": "x"},'), (lines, '{"prompt": "x"}\n' * BEGINNING_ROWS)):
        with file.open("w") as writer:
            writer.write(start)
            writer.truncate(MAX_ARRAY_BYTES + 1)  # a hole, which needs no space on the disk
    expected = r"a\.json: an array of 2\.0 GiB .*write it as \.jsonl"
    with pytest.raises(DataError, match=expected):
        check_beginning(array)
    with array.open("rb") as stream, pytest.raises(DataError, match=expected):
        next(read_file(str(array), stream))
    check_beginning(lines)


def test_an_array_that_does_not_fit_in_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    file.write_text('[{"prompt": "x"}]')

    def exhaust(*_args: object, **_options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(json, "loads", exhaust)
    with file.open("rb") as stream, pytest.raises(DataError, match=r"does not fit in memory; write it as"):
        next(read_file(str(file), stream))
