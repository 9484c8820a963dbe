"""docs/configuration.md.

Locked here: the page is up to date with the schema, every field has a row, and every field has a
description and declares what it affects.
"""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.messages import all_fields, locate, variants
from rlhf_core.config.reference import markdown

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run: python -m rlhf_core.config.reference > docs/configuration.md"
    )


def test_every_field_has_a_row() -> None:
    tables = {part.split("`")[1]: part for part in markdown().split("\n## ") if part.startswith("`")}
    missing = []
    for path in all_fields():
        schema = locate(path).schema
        assert schema is not None
        is_section = "properties" in schema
        table = tables.get(".".join(path if is_section else path[:-1]))
        if table is None or (not is_section and f"| `{path[-1]}` |" not in table):
            missing.append(".".join(path))
    assert missing == []


def test_every_field_declares_its_description_and_effect() -> None:
    reward = locate(("ppo", "rewards", 0)).schema
    assert reward is not None
    fields = {".".join(path): locate(path).schema or {} for path in all_fields()}
    for name, section in variants(reward).items():
        fields |= {f"{name}.{field}": schema for field, schema in section["properties"].items()}
        del fields[f"{name}.type"]
    assert [name for name, schema in fields.items() if not schema.get("description")] == []
    assert [name for name, schema in fields.items() if "affects" not in schema] == []


def test_defaults_are_those_of_the_section() -> None:
    policy = next(part for part in markdown().split("\n## ") if part.startswith("`ppo.policy`"))
    assert "| `learning_rate` | number above 0 | `1e-06` |" in policy


def test_general_limits_are_not_shown() -> None:
    assert "1000000000" not in markdown()
    assert "e+09" not in markdown()
