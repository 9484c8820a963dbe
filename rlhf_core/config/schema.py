"""The JSON Schema of configuration files, for completion and checks in editors: `rlhf schema`."""

from __future__ import annotations

import json
from typing import Any

from rlhf_core.config.data import SETS
from rlhf_core.config.messages import Schema, root

FILE = "rlhf.schema.json"
"""Name of the schema beside a configuration."""
_OURS = ("affects", "form", "within", "later", "inherits")
"""Keys of `config.base` that are no part of JSON Schema."""


def editor_schema() -> Schema:
    """Return the schema of what `load_config` reads: with short forms, and with the ranges of numbers.

    Rules between fields are not in it.
    """
    schema: Schema = _plain(json.loads(json.dumps(root())))
    text = {"type": "string", "minLength": 1}
    schema["properties"]["model"] = {"anyOf": [schema["properties"]["model"], text]}
    sets = schema["$defs"]["DataConfig"]["properties"]
    for name in SETS:
        source = sets[name]["items"]
        sets[name]["items"] = {"anyOf": [source, text]}
        described = {key: sets[name].pop(key) for key in ("title", "description", "default")}
        sets[name] = {"anyOf": [sets[name], source, text], **described}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "rlhf"}


def _plain(part: Any) -> Any:
    """Return a part of a schema with only the keys of JSON Schema."""
    if isinstance(part, list):
        return [_plain(item) for item in part]
    if not isinstance(part, dict):
        return part
    plain = {key: _plain(value) for key, value in part.items() if key not in _OURS}
    if isinstance(part.get("within"), list):
        # Both limits apply to numbers only, so a field that can be null has them as well.
        low, high, _ = part["within"]
        plain |= {"minimum": low, "maximum": high}
    return plain


def schema_json() -> str:
    """Return the schema as text."""
    return json.dumps(editor_schema(), indent=1, ensure_ascii=False) + "\n"
