"""docs/configuration.md.

Rules: the page is up to date with the schema, every field has a row, no table is there twice, and every
field has a description and declares what it affects.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from rlhf_core.config.messages import all_fields, has_own_fields, locate, root, variants
from tests.reference import markdown

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run: python -m tests.reference > docs/configuration.md"
    )


@cache
def section_texts() -> dict[str, str]:
    """Return the text of each section of a configuration by its name."""
    parts = (part for part in markdown().split("\n## ") if part.startswith("`"))
    return {part.split("`")[1]: part for part in parts}


@cache
def section_with_the_table(name: str) -> str:
    """Return `name`, or the section that the text of `name` refers to."""
    link = re.search(r"^The same fields as \[`([\w.]+)`\]", section_texts()[name], re.MULTILINE)
    return link[1] if link else name


def test_every_field_has_a_row() -> None:
    texts = section_texts()
    missing = []
    for path in all_fields():
        schema = locate(path).schema
        assert schema is not None
        is_own = has_own_fields(locate(path[:-1]).schema or root(), schema)
        name = ".".join(path if is_own else path[:-1])
        if name not in texts or (
            not is_own and f"| `{path[-1]}` |" not in texts[section_with_the_table(name)]
        ):
            missing.append(".".join(path))
    assert missing == []


def test_sections_with_the_same_fields_have_one_table() -> None:
    texts = section_texts()
    tables = [text.partition("\n\n")[2] for text in texts.values() if "| field |" in text]
    assert len(tables) == len(set(tables))
    links = [name for name in texts if section_with_the_table(name) != name]
    assert {"reward.lora", "ppo.critic_deepspeed"} <= set(links)
    for name in links:
        fields = [
            list((locate(tuple(path.split("."))).schema or {})["properties"])
            for path in (name, section_with_the_table(name))
        ]
        assert fields[0] == fields[1], name


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
    texts = section_texts()
    assert "| `learning_rate` | number from 1e-20 to 100 | `1e-06` |" in texts["ppo.policy"]
    assert "Absent (`null`) by default." in texts["drift"]
    assert "Absent" not in texts["sft"]


def test_the_range_of_a_field_is_its_type_and_general_limits_are_not_shown() -> None:
    assert "| `threads` | integer from 0 to 4096 |" in section_texts()["run"]
    assert "| `bucket_mib` | integer from 1 to 16384, or null |" in section_texts()["ppo.weight_sync"]
    assert "1000000000" not in markdown()
    assert "e+09" not in markdown()
