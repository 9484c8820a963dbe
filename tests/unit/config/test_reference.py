"""The page of configuration.

Locked here: `docs/configuration.md` is what the schema says now, every field of the schema is on it, and
every field has a description.
"""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.reference import markdown
from rlhf_core.config.schema import all_fields, fields, kind, locate

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run: python -m rlhf_core.config.reference > docs/configuration.md"
    )


def test_every_field_has_a_row_in_the_table_of_its_section() -> None:
    tables = {part.split("`")[1]: part for part in markdown().split("\n## ") if part.startswith("`")}
    missing = []
    for path in all_fields():
        found = locate(path)
        assert found.kind is not None
        wanted = ".".join(path) if found.kind.section else ".".join(path[:-1])
        row = f"| `{path[-1]}` |"
        if wanted not in tables or (found.kind.section is None and row not in tables[wanted]):
            missing.append(".".join(path))
    assert missing == []


def test_every_field_has_a_description() -> None:
    places = [locate(path) for path in all_fields()]
    rewards = locate(("ppo", "rewards", 0)).kind
    assert rewards is not None
    bare = [".".join(map(str, found.path)) for found in places if not (found.info and found.info.description)]
    bare += [
        f"{tag}.{name}"
        for tag, model in rewards.variants.items()
        for name, info in fields(model).items()
        if name != "type" and not info.description
    ]
    assert bare == []


def test_a_default_is_that_of_its_section_not_of_its_class() -> None:
    policy = next(part for part in markdown().split("\n## ") if part.startswith("`ppo.policy`"))
    assert "| `learning_rate` | number above 0 | `1e-06` |" in policy


def test_no_bound_of_nonsense_is_shown() -> None:
    assert "1000000000" not in markdown()
    assert "e+09" not in markdown()
    assert kind(int).section is None
