"""The table of configuration, made from the schema: `python -m rlhf_core.config.reference >
docs/configuration.md`.

The descriptions of the fields are the one source; a test compares the file with what this makes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_core.config.base import effect_of
from rlhf_core.config.data import Source
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.ranges import RANGES, number
from rlhf_core.config.rewards import RewardSource
from rlhf_core.config.schema import fields, kind, kinds, rule

_HEAD = """# Configuration

One YAML file holds one run. Every field has a default, so a file names only what differs; every field can be
overridden on the command line by its path:

```
rlhf run deployments/configs/demo.yaml ppo.steps=20 ppo.kl.coef=0.02 'data.sft=[{path: stories.jsonl}]'
```

Items of lists are reached by index (`ppo.rewards.0.weight=2`). Unknown keys, wrong types and values out of range are
errors that name the line, the rule and a fix; nothing heavy starts before all of it is checked.

The column "affects" says what a change of the field does:

- `result`: other numbers. The value is part of the stage keys, so the stages that use it run again, and those after
  them.
- `rounding`: the same numbers up to rounding. Finished stages are reused.
- `execution`: only when, where and how fast something runs, and when a run stops. Finished stages are reused.
- `content`: an address. Its content counts in the stage keys and not the address, so files and folders can be moved.

`run.home` and `tracking.uri` decide which registry `register` writes to, so this stage runs again if they change.

This page is made from the schema: `python -m rlhf_core.config.reference > docs/configuration.md`.
"""


_RANGES = """## Ranges

Numbers outside these ranges are refused, even if their type would allow them (`*` is an index).
"""


def markdown() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, info in fields(PipelineConfig).items():
        section = info.get_default(call_default_factory=True)
        parts += list(_section(name, type(section), section))
    parts.append("## Items of `data.sft`, `data.preference` and `data.prompts`\n")
    parts.append(_table(type(Source(path="x")), None))
    parts.append("## Items of `ppo.rewards`\n\nTold apart by `type`. All of them have:\n")
    parts.append(_table(RewardSource, None))
    parts += list(_rewards())
    parts.append(_RANGES)
    parts.append("| field | from | to | why |\n|---|---|---|---|")
    parts += [
        f"| `{name}` | {number(low)} | {number(high)} | {why} |" for name, (low, high, why) in RANGES.items()
    ]
    parts.append("")
    return "\n".join(parts)


def _section(path: str, model: type[BaseModel], section: BaseModel | None) -> Iterator[str]:
    """A section's table and those of the sections in it. `section`: the defaults, None for one that is
    absent.
    """
    absent = "" if section is not None else " Absent (`null`) by default."
    yield f"## `{path}`\n\n{_summary(model)}{absent}\n"
    yield _table(model, section, leave_out_sections=True)
    for name, found in kinds(model).items():
        if found.section is not None:
            yield from _section(f"{path}.{name}", found.section, getattr(section, name))


def _rewards() -> Iterator[str]:
    items = kinds(PPOConfig)["rewards"].items
    assert items is not None
    for tag, model in items.variants.items():
        yield f"### `type: {tag}`\n\n{_summary(model)}\n"
        own = {
            name: info
            for name, info in fields(model).items()
            if name not in fields(RewardSource) and name != "type"
        }
        if own:
            yield _rows(own, None)


def _summary(model: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(model) or "").split())


def _table(model: type[BaseModel], values: BaseModel | None, leave_out_sections: bool = False) -> str:
    shown = fields(model)
    if leave_out_sections:
        shown = {name: info for name, info in shown.items() if kinds(model)[name].section is None}
    return _rows(shown, values) if shown else ""


def _rows(shown: Mapping[str, FieldInfo], values: BaseModel | None) -> str:
    lines = ["| field | type | default | affects | meaning |", "|---|---|---|---|---|"]
    for name, info in shown.items():
        default = getattr(values, name) if values is not None else _default(info)
        meaning = _cell(info.description or "")
        lines.append(
            f"| `{name}` | {_cell(_type(info))} | {_value(default)} | {effect_of(info)} | {meaning} |"
        )
    return "\n".join(lines) + "\n"


def _type(info: FieldInfo) -> str:
    """The rule, without the article and without the bound that only keeps nonsense out."""
    text = re.sub(r"^an? |finite | from -1e\+09 to 1000000000", "", rule(kind(info.annotation, info)))
    return re.sub(
        r"from (\S+) to 1000000000|, at most 1000000000",
        lambda found: f">= {found[1]}" if found[1] else "",
        text,
    )


def _default(info: FieldInfo) -> Any:
    return ... if info.is_required() else info.get_default(call_default_factory=True)


def _value(default: Any) -> str:
    """A default as the YAML would write it; `...` (no default) in words."""
    if default is ...:
        return "required"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return f"`[{', '.join(_item(item) for item in default)}]`"
    if isinstance(default, dict):
        return "`{}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _item(item: Any) -> str:
    if isinstance(item, BaseModel):
        given = item.model_dump(exclude_defaults=True) or {"type": getattr(item, "type", "")}
        return "{" + ", ".join(f"{name}: {value}" for name, value in given.items()) + "}"
    return str(item)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(markdown())
