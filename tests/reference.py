"""Print docs/configuration.md: `python -m tests.reference > docs/configuration.md`.

A test compares the file with the schema.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rlhf_core.config.messages import Schema, child, fields, has_own_fields, root, rule, variants
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.rewards import RewardSource

_HEAD = """# Configuration

One YAML file describes one run. Almost every field has a default, so a file has only the fields that differ.
Every field can be overridden on the command line by its path:

```
rlhf run deployments/configs/demo.yaml ppo.steps=20 ppo.kl.coef=0.02 'data.sft=[{path: stories.jsonl}]'
```

The items of a list have an index (`ppo.rewards.0.weight=2`). Unknown keys, wrong types and values out of
range are errors that name the line, the rule and a fix. All are reported before anything heavy starts.

The column "affects" gives the effect of changing the field:

- `result`: other numbers. The value is part of the stage keys, so the stages that use it run again, and
  those after them.
- `rounding`: the same numbers up to rounding. Finished stages are reused.
- `execution`: only when, where and how fast something runs, and when a run stops. Finished stages are reused.
- `content`: an address. The stage keys depend on its content, and not on the address, so files and folders
  can be moved.

`run.home` and `tracking.uri` decide to which registry `register` writes, so this stage runs again if they
change.

This page is generated from the schema: `python -m tests.reference > docs/configuration.md`.
"""
_RANGES = """## Ranges

The column "type" has the range of a number. A number outside is refused, with the reason of the range.
"""


@dataclass(frozen=True)
class _Printed:
    """A section that the page already has."""

    path: str
    rows: list[str]


_PrintedSections = dict[tuple[str, ...], _Printed]


def markdown() -> str:
    """Return the whole page."""
    # Without validation, which fills the limits of the demo.
    defaults = PipelineConfig.model_construct()
    names = {info.alias or attribute: attribute for attribute, info in PipelineConfig.model_fields.items()}
    parts = [_HEAD, "Sections: " + ", ".join(_link(name) for name in names) + ".\n"]
    printed: _PrintedSections = {}
    for name, attribute in names.items():
        parts += _section_parts(name, _field(root(), name), getattr(defaults, attribute), printed)
    parts.append("## Items of `data.sft`, `data.preference` and `data.prompts`\n")
    source = _field(_field(_field(root(), "data"), "sft"), 0)
    parts.append(_table(source, source["properties"]))
    parts.append(
        "## Items of `ppo.rewards`\n\nThe `type` of an item decides which fields it has. All have:\n"
    )
    parts += _reward_parts()
    parts.append("## Types of `ppo.loss`\n\n[A loss of your own](own-loss.md) says what each type is.\n")
    parts += _type_parts(variants(_field(_field(root(), "ppo"), "loss")), ())
    parts.append("## Items of `evaluate.regression`\n\nFurther fields are those of data sources:\n")
    regression = _field(_field(_field(root(), "evaluate"), "regression"), 0)
    parts.append(_table(regression, ("name", "reward", "margin")))
    parts.append(_RANGES)
    return "\n".join(parts)


def _field(schema: Schema, step: str | int) -> Schema:
    field = child(schema, step)
    assert field is not None
    return field


def _section_parts(
    path: str, schema: Schema, defaults: BaseModel | None, printed: _PrintedSections
) -> list[str]:
    """Return the heading and the table of a section, and of the sections in it.

    A section with the same fields as an earlier one gets a link to it, and the rows that differ.

    Args:
        path: The section's name in a configuration, such as `sft.optimizer`.
        schema: Its schema.
        defaults: The section with the default values; None if it, or the section around it, is absent by
            default.
        printed: The earlier sections; this one is added.
    """
    is_absent = "default" in schema and schema["default"] is None
    absent = " Absent (`null`) by default." if is_absent else ""
    sections = {}
    values = []
    for name, field in fields(schema):
        if has_own_fields(schema, field):
            sections[name] = field
        else:
            values.append(name)
    rows = [_row(schema, name, defaults) for name in values]
    earlier = printed.setdefault(_fields_of(schema), _Printed(path, rows))
    if earlier.path == path:
        summary = f"{_summary(schema)}{absent}"
    else:
        rows = [row for row in rows if row not in earlier.rows]
        differ = " Some defaults differ." if rows else ""
        summary = f"The same fields as {_link(earlier.path)}.{differ}{absent}"
    parts = [f"## `{path}`\n\n{summary}\n"]
    if rows:
        parts.append(_table_of(rows))
    for name, section in sections.items():
        parts += _section_parts(f"{path}.{name}", section, _default_of(defaults, name), printed)
    return parts


def _fields_of(schema: Schema) -> tuple[str, ...]:
    """Return what all sections of one class have in common: the description and the names of the fields."""
    return (schema.get("summary", ""), *schema["properties"])


def _link(path: str) -> str:
    return f"[`{path}`](#{path.replace('.', '')})"


def _default_of(defaults: BaseModel | None, name: str) -> Any:
    """Return the default of the field that is called `name` in YAML."""
    for attribute, info in type(defaults).model_fields.items() if defaults is not None else ():
        if name in (attribute, info.alias):
            return getattr(defaults, attribute)
    return None


def _reward_parts() -> list[str]:
    common = RewardSource.model_fields
    sections = variants(_field(_field(_field(root(), "ppo"), "rewards"), 0))
    return [_table(next(iter(sections.values())), common), *_type_parts(sections, common)]


def _type_parts(sections: Mapping[str, Schema], common: Collection[str]) -> list[str]:
    parts = []
    for name, section in sections.items():
        parts.append(f"### `type: {name}`\n\n{_summary(section)}\n")
        own = [field for field in section["properties"] if field not in common and field != "type"]
        if own:
            parts.append(_table(section, own))
    return parts


def _summary(schema: Schema) -> str:
    return " ".join(schema["summary"].split())


def _table(schema: Schema, names: Iterable[str]) -> str:
    return _table_of(_row(schema, name, None) for name in names)


def _table_of(rows: Iterable[str]) -> str:
    head = ["| field | type | default | affects | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def _row(schema: Schema, name: str, defaults: BaseModel | None) -> str:
    field = _field(schema, name)
    default = field.get("default") if defaults is None else getattr(defaults, name)
    shown = "required" if name in schema.get("required", ()) else _value(default)
    meaning = _cell(field["description"])
    return f"| `{name}` | {_cell(_type(field))} | {shown} | {field['affects']} | {meaning} |"


def _type(field: Schema) -> str:
    """Return the rule without the article and without the limit that all numbers have."""
    if "within" in field:
        low, high, _ = field["within"]
        field = {name: value for name, value in field.items() if not name.startswith("exclusive")}
        field |= {"minimum": low, "maximum": high}
    text = re.sub(r"^an? |finite | from -1e\+09 to 1000000000", "", rule(field))
    text = re.sub(r"from (\S+) to 1000000000", r">= \1", text)
    return text.replace(", at most 1000000000", "")


def _value(default: Any) -> str:
    """Return a default as the YAML file has it."""
    if default is None:
        return "null"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, list | tuple):
        return f"`[{', '.join(_item(item) for item in default)}]`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _item(item: Any) -> str:
    if not isinstance(item, BaseModel):
        return str(item)
    given = item.model_dump(exclude_defaults=True) or {"type": getattr(item, "type", "")}
    return "{" + ", ".join(f"{name}: {value}" for name, value in given.items()) + "}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page."""
    argparse.ArgumentParser(description="Print docs/configuration.md.").parse_args(arguments)
    sys.stdout.write(markdown())


if __name__ == "__main__":
    main()
