"""Kinds of addresses.

- a text with the form of a path is local, even if nothing exists there
- a text with the form of a hub id is local only if it exists
- other schemes than file:// and s3:// are recognised, and nothing reads them
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.address import parse_address

KINDS = {
    "synthetic": "synthetic",
    "s3://bucket/key.jsonl": "s3",
    "https://host/a.jsonl": "url",
    "gs://bucket/key": "url",
    "owner/name": "hub",
    "name": "hub",
    "missing.jsonl": "local",
    "missing.TXT": "local",
    "data/missing.parquet": "local",
    "file:///missing": "local",
    "./missing": "local",
    "/missing": "local",
    "../missing": "local",
    "~/missing": "local",
    "a/b/c": "local",
    "Modelle/größe": "local",
    "with blank": "local",
    "a\0b": "local",
    "x" * 5000: "local",
}


@pytest.mark.parametrize(("text", "kind"), KINDS.items(), ids=lambda text: text[:20])
def test_the_form_of_an_address_determines_its_kind(text: str, kind: str) -> None:
    assert parse_address(text).kind == kind


def test_an_existing_folder_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_address("owner/name").kind == "hub"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert parse_address("owner/name").kind == "local"


def test_a_file_url_has_the_path_of_its_file() -> None:
    assert parse_address("file:///data/a.jsonl").path == Path("/data/a.jsonl")
