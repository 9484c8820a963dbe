"""The check of the beginning of a data file.

Tested here:
- bad rows before good ones are left to the data stage, which counts them;
- an array may follow any number of blanks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.data.files import check_beginning


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
