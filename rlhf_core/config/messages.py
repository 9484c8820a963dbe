"""Messages about a configuration: `FILE:LINE: field: rule; got VALUE; fix`.

Pydantic finds the problems and their locations. The rules in words, the suggestions and the fixes come from
the JSON schema of `PipelineConfig`. docs/configuration.md (`tests.reference`) and the schema for completion
and checks in editors (`rlhf schema`) are made from the same one.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlhf_core.config.data import SETS
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import shown, shown_key
from rlhf_core.config.yaml import Keys, scalar

Schema = dict[str, Any]
"""A JSON schema, as `resolved` returns it."""

Place = Callable[[Keys], str]
"""Returns `FILE:LINE` or the override that sets the field at a path."""

RENAMED = {
    "ppo.guards.patience": "ppo.guard_patience",
    "ppo.guards.eos_loss_ratio": "ppo.guard_limits.eos_loss",
    "ppo.guards.entropy_collapse_ratio": "ppo.guard_limits.entropy_collapse",
    "ppo.guards.entropy_explosion_ratio": "ppo.guard_limits.entropy_explosion",
    "ppo.guards.negative_kl_limit": "ppo.guard_limits.negative_kl",
    "ppo.guards.length_drift_ratio": "ppo.guard_limits.length_drift",
    "ppo.guards.loops_share": "ppo.guard_limits.loops",
    "ppo.guards.score_length_correlation": "ppo.guard_limits.score_length",
    "ppo.guards.blind_critic_steps": "ppo.guard_limits.blind_critic",
    "ppo.guards.score_clip_share": "ppo.guard_limits.score_clip",
    "ppo.guards.overoptimization_ratio": "ppo.guard_limits.overoptimization",
}
"""Fields of earlier versions, and their names in this one."""
REMOVED = {
    "allow_other_ranks": "a checkpoint of another number of ranks is converted without it; leave it out",
    "allowed_hosts": "leave it out",
    "backoff": "it is 1 s; leave it out",
    "dispatch": "leave it out",
    "keep_best": "leave it out",
    "logprob_gap_limit": "it is half of ppo.weight_sync.canary_tolerance; set that instead",
    "ppo.engine.max_restarts": "it is 3; leave it out",
    "optimizer.eps": "it is 1e-8; leave it out",
    "ppo.critic.eps": "it is 1e-8; leave it out",
    "ppo.policy.eps": "it is 1e-8; leave it out",
    "run.retry_delay": "it is 5 s; leave it out",
    "senders": "leave it out",
    "tie_embeddings": "it is true; leave it out",
}
"""How the names of fields of earlier versions end that this one has no more, and what to do."""
SCHEMA_FILE = "rlhf.schema.json"
"""Name of the schema beside a configuration."""
_NOT_JSON_SCHEMA = ("affects", "form", "within", "later", "inherits")
"""Keys of `config.base` that are no part of JSON Schema."""
_FIELD_IN_MESSAGE = re.compile(r"[a-z_]+(\.[a-z_]+)+")


# The schema


# Pydantic takes 0.1 s and more to make it, and a message looks into it many times.
@cache
def root() -> Schema:
    """Return the schema of the whole configuration."""
    return PipelineConfig.model_json_schema()


def resolved(schema: Schema) -> Schema:
    """Return a schema in one level, with its reference followed.

    `nullable` is true where null is allowed, and `summary` is the docstring of a section. `properties` are
    the fields of a section, or the values of a map with fixed keys.
    """
    options = schema.get("anyOf", [])
    if {"type": "null"} in options:
        # A field that can be null has exactly one other type.
        (option,) = (option for option in options if option != {"type": "null"})
        field = {key: value for key, value in schema.items() if key != "anyOf"}
        schema = {**option, **field, "nullable": True}
    if "$ref" in schema:
        section = root()["$defs"][schema["$ref"].rpartition("/")[2]]
        schema = {**section, **schema, "summary": section.get("description", "")}
    if "propertyNames" in schema:
        # A map with fixed keys is a section whose fields are all alike.
        value = {name: schema[name] for name in ("description", "affects")} | schema["additionalProperties"]
        names = schema["propertyNames"]["enum"]
        schema = {**schema, "properties": dict.fromkeys(names, value), "additionalProperties": False}
    return schema


def is_section(schema: Schema) -> bool:
    """Return whether a field has fields. A map of values, such as `drift.warn`, is one field."""
    if "propertyNames" not in schema:
        return "properties" in schema
    return any("$ref" in value for value in schema["properties"].values())


def has_own_fields(schema: Schema, field: Schema) -> bool:
    """Return whether a field of the section `schema` is a section that is described by itself. In a section
    that inherits, such as `reward.judge`, it has the fields of the section that it inherits from.
    """
    return is_section(field) and not schema.get("inherits")


def fields(schema: Schema) -> list[tuple[str, Schema]]:
    """Return the fields of a section by their names; of a map with fixed keys only the first."""
    every = [(name, resolved(field)) for name, field in schema["properties"].items()]
    if "propertyNames" in schema:
        return every[:1]
    return every


def child(schema: Schema, step: str | int) -> Schema | None:
    """Return the schema of a section's field or of a list's item, or None if there is no such field."""
    found = None
    if "properties" in schema:
        found = schema["properties"].get(step)
    elif "prefixItems" in schema and isinstance(step, int):
        # An index beyond the end gets the rule of the last item, for the message about it.
        found = schema["prefixItems"][min(step, len(schema["prefixItems"]) - 1)]
    elif "items" in schema and isinstance(step, int):
        found = schema["items"]
    return None if found is None else resolved(found)


def variants(schema: Schema) -> dict[str, Schema]:
    """Return the sections by `type`, if the schema has several; empty otherwise."""
    if "discriminator" not in schema:
        return {}
    # The mapping is sorted by name, and `oneOf` has the order of the declaration.
    types = {reference: name for name, reference in schema["discriminator"]["mapping"].items()}
    return {types[option["$ref"]]: resolved(option) for option in schema["oneOf"]}


@dataclass(frozen=True)
class Location:
    """What a path of the configuration refers to."""

    path: Keys
    """The path in the file, without the types of rewards that pydantic adds to its locations."""
    schema: Schema | None
    """The schema of the field; None if there is no such field."""
    section: Schema | None
    """The schema of the section to which the last key belongs."""
    variant: str | None
    """The last `type` of a reward in the location."""


def locate(location: Sequence[str | int]) -> Location:
    """Follow a path of keys and indices, or the location of a pydantic error."""
    path: list[str | int] = []
    schema: Schema | None = root()
    section: Schema | None = None
    variant: str | None = None
    for step in location:
        if schema is not None and "discriminator" in schema:
            sections = variants(schema)
            if step in sections:
                variant = str(step)
                schema = sections[variant]
                continue
            schema = None
        path.append(step)
        if schema is not None:
            section = schema if "properties" in schema else None
            schema = child(schema, step)
    return Location(tuple(path), schema, section, variant)


def all_fields(
    schema: Schema | None = None, path: tuple[str, ...] = (), *, repeated: bool = False
) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all fields that are not in lists, those of sections included.

    The fields of a map and of a section that inherits are yielded once, or each time if `repeated`.
    """
    schema = schema or root()
    if repeated:
        parts = [(name, resolved(field)) for name, field in schema["properties"].items()]
    else:
        parts = fields(schema)
    for name, field in parts:
        yield (*path, name)
        if has_own_fields(schema, field) or (repeated and "properties" in field):
            yield from all_fields(field, (*path, name), repeated=repeated)


# Rules


def rule(schema: Schema) -> str:
    """Return the rule in words: `an integer from 1 to 1000000000`, `one of chat, plain`."""
    words = _rule(schema)
    return f"{words}, or null" if schema.get("nullable") else words


def _rule(schema: Schema) -> str:
    if is_section(schema):
        return "a section"
    if "properties" in schema:
        value = next(iter(schema["properties"].values()))
        return f"a map of {', '.join(schema['properties'])} to {rule(resolved(value))}"
    if "discriminator" in schema:
        return "a section with `type`: one of " + ", ".join(variants(schema))
    choices = _choices(schema)
    if choices:
        return "one of " + ", ".join(choices)
    if "anyOf" in schema:
        return _union_rule(schema["anyOf"])
    match schema["type"]:
        case "boolean":
            return "true or false"
        case "integer":
            return "an integer" + _limits(schema)
        case "number":
            return "a finite number" + _limits(schema)
        case "string" if "pattern" in schema:
            return f"text: {schema.get('form', schema['pattern'])}"
        case "string":
            return "non-empty text" if "minLength" in schema else "text"
        case "array":
            return _list_rule(schema)
        case _:
            return "a map of text to text"


def _union_rule(parts: Sequence[Schema]) -> str:
    """Return the rule of a field with a type or one of some words."""
    types, words = [], []
    for part in parts:
        words += _choices(part)
        if part.get("type") == "boolean":
            types.append("true, false")
        elif not _choices(part):
            types.append(_rule(part))
    return f"{', '.join(types)} or {', '.join(words)}"


def _choices(schema: Schema) -> list[str]:
    if "const" in schema:
        return [str(schema["const"])]
    return [str(choice) for choice in schema.get("enum", ())]


def _list_rule(schema: Schema) -> str:
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])}, each {rule(schema['prefixItems'][0])}"
    item = resolved(schema["items"])
    if "properties" in item:
        items = "sections"
    elif "discriminator" in item:
        items = "sections, each with a `type`"
    else:
        items = "texts"
    least = f", at least {schema['minItems']}" if "minItems" in schema else ""
    return f"a list of {items}{least}"


def _limits(schema: Schema) -> str:
    lower = ""
    if "minimum" in schema:
        lower = f" from {schema['minimum']:g}"
    elif "exclusiveMinimum" in schema:
        lower = f" above {schema['exclusiveMinimum']:g}"
    if "exclusiveMaximum" in schema:
        return f"{lower} to below {schema['exclusiveMaximum']:g}"
    between = ", at most" if "exclusiveMinimum" in schema else " to"
    return f"{lower}{between} {number(schema['maximum'])}"


def number(value: float) -> str:
    """Return a limit as a configuration has it: 1000000, not 1e+06."""
    return str(int(value)) if float(value).is_integer() and value < 1e12 else f"{value:g}"


# Problems


def dotted(path: Iterable[str | int]) -> str:
    """Return a path as one name: `ppo.rewards.0.type`."""
    return ".".join(shown_key(str(step)) for step in path)


def format_errors(error: ValidationError, place: Place) -> list[str]:
    """Return one line per problem."""
    problems = error.errors(include_url=False)
    # Pydantic also checks the value of an unknown key of a map.
    unknown_keys = [problem["loc"][:-1] for problem in problems if _is_key(problem)]
    lines = []
    for problem in problems:
        of_unknown_key = any(problem["loc"][: len(key)] == key for key in unknown_keys)
        if _is_key(problem) or not (of_unknown_key or _repeats_its_items(problem)):
            lines.append(_format_error(problem, place))
    return lines


def _is_key(problem: ErrorDetails) -> bool:
    """Return whether the problem is a key of a map with fixed keys."""
    return problem["loc"][-1:] == ("[key]",)


def _repeats_its_items(problem: ErrorDetails) -> bool:
    """Return whether the problem is a list that pydantic calls too short only because its items are wrong."""
    given = problem["input"]
    if problem["type"] != "too_short" or not isinstance(given, list):
        return False
    least: int = problem["ctx"]["min_length"]
    return len(given) >= least


def _format_error(problem: ErrorDetails, place: Place) -> str:
    kind, value = problem["type"], problem["input"]
    at = locate(problem["loc"][:-1] if _is_key(problem) else problem["loc"])
    start = f"{place(at.path)}: {dotted(at.path) or 'the configuration'}"
    if kind == "value_error":
        text = problem["msg"].removeprefix("Value error, ")
        # The rule of a section names the field itself, with its full path.
        named = _FIELD_IN_MESSAGE.match(text)
        if named:
            return f"{place(tuple(named[0].split('.')))}: {text}"
        # A rule such as `min must be ...` begins with its field, whose whole path stands before it.
        return f"{start}: {text.removeprefix(f'{at.path[-1]} ') if at.path else text}"
    if (kind == "extra_forbidden" or _is_key(problem)) and at.section is not None:
        return f"{place(at.path)}: {unknown(at.path, at.section, at.variant)}"
    if kind.startswith("union_tag") and at.schema is not None:
        return _format_type_error(problem, at.path, list(variants(at.schema)), place)
    if kind == "missing":
        wanted = f" ({rule(at.schema)})" if at.schema else ""
        return f"{start}: is required{wanted}; got nothing; add it"
    got = shown(value, str(at.path[-1]) if at.path else "")
    if at.schema is None:
        return f"{start}: {problem['msg']}; got {got}"
    return f"{start}: must be {rule(at.schema)}; got {got}; {_fix(at.schema, at.path, value)}"


def _format_type_error(problem: ErrorDetails, path: Keys, types: list[str], place: Place) -> str:
    path = (*path, "type")
    start = f"{place(path)}: {dotted(path)}"
    if problem["type"] == "union_tag_not_found":
        return f"{start}: is required (one of {', '.join(types)}); got nothing; add it"
    given = problem["input"].get("type") if isinstance(problem["input"], dict) else None
    fix = _nearest(given, types) or f"use, for example, {types[0]}"
    return f"{start}: must be one of {', '.join(types)}; got {shown(given, 'type')}; {fix}"


def _nearest(value: Any, choices: Sequence[str]) -> str | None:
    """Return `did you mean ...?` if a choice is similar."""
    near = difflib.get_close_matches(str(value), choices, n=1)
    return f"did you mean {near[0]}?" if near else None


def unknown(path: Keys, section: Schema, variant: str | None = None) -> str:
    """Return `ppo.stpes: unknown key; did you mean ppo.steps?`"""
    name = dotted(path)
    if name in RENAMED:
        return f"{name}: has another name in this version; write {RENAMED[name]}"
    for end, fix in REMOVED.items():
        if name.endswith(end):
            return f"{name}: is no field of this version (CHANGELOG.md says why); {fix}"
    kind = "loss" if path[:2] == ("ppo", "loss") else "reward"
    owner = f" for a {kind} of type {variant}" if variant else ""
    return f"{name}: unknown key{owner}; {did_you_mean(str(path[-1]), section, path[:-1])}"


def did_you_mean(key: str, section: Schema, path: Keys) -> str:
    """Return `did you mean ...`, or the list of the keys of the section."""
    names = list(section["properties"])
    every = list(all_fields(repeated=True))
    # Two or three letters are more often an abbreviation than a typing error.
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6 if len(key) > 3 else 0.8)
    guesses: list[Keys] = [(*path, name) for name in near]
    for is_meant in (str.__eq__, _abbreviates):
        guesses = guesses or [field for field in every if is_meant(key, field[-1])]
    if guesses:
        guesses.sort(key=lambda field: field[: len(path)] != path)  # those of this section first
        return f"did you mean {' or '.join(dotted(field) for field in guesses[:2])}?"
    return "known keys: " + ", ".join(names)


def _abbreviates(key: str, name: str) -> bool:
    """Return True for `lr` and `learning_rate`, `batch` and `batch_size`, `decay` and `weight_decay`."""
    parts = name.split("_")
    initials = "".join(part[:1] for part in parts)
    return len(parts) > 1 and key in (initials, parts[0], parts[-1])


# Fixes


def _fix(schema: Schema, path: Keys, value: Any) -> str:
    example = _example(schema)
    kind = schema.get("type")
    word = str(value).lower()
    if "properties" in schema or "discriminator" in schema:
        return "write its fields below it, indented, or leave the key out"
    if kind == "array":
        if not isinstance(value, list | dict) and value is not None:
            return "write it as a list: [...]"
        return f"use, for example, {example}" if example else "add one, or leave the key out for the default"
    if choices := _choices(schema):
        if meant := _nearest(value, choices):
            return meant
    elif kind in ("integer", "number") and not isinstance(value, bool):
        return _number_fix(schema, value, example)
    elif kind == "boolean" and word in ("no", "off", "n", "yes", "on", "y"):
        return f"write {'true' if word in ('yes', 'on', 'y') else 'false'}"
    elif kind == "string" and isinstance(value, int | float):
        return "put it in quotes"
    elif "pattern" in schema and path[-1] == "name" and isinstance(value, str):
        # The strictest form of all fields `name` is that of rewards. It is valid for the others too.
        valid = re.sub(r"[^a-z0-9_]+", "_", word).strip("_")[:32]
        return f"use, for example, {valid or 'rlhf'}"
    return f"use, for example, {example}" if example else "write a value of that form"


def _example(schema: Schema) -> str | None:
    """Return the default, if it is short enough to show."""
    default = schema.get("default")
    if default is None or isinstance(default, dict):
        return None
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        if any(isinstance(item, dict) for item in default):
            return None
        return f"[{', '.join(map(str, default))}]"
    return str(default)


def _number_fix(schema: Schema, value: Any, example: str | None) -> str:
    given = _as_number(value)
    if given is None or not math.isfinite(given):
        return f"use, for example, {example or '1'}"
    such_as = f", such as {example}" if example else ""
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and given < low:
        return f"use {low:g} or more"
    if "exclusiveMinimum" in schema and given <= schema["exclusiveMinimum"]:
        return f"use a number above {schema['exclusiveMinimum']:g}{such_as}"
    if high is not None and given > high:
        return f"use at most {number(high)}"
    if "exclusiveMaximum" in schema and given >= schema["exclusiveMaximum"]:
        return f"use a number below {schema['exclusiveMaximum']:g}{such_as}"
    if schema["type"] == "number":
        return f"write {given:g} without quotes"
    if given != int(given):
        return f"use {max(int(low or 0), math.floor(given))} or {math.ceil(given)}"
    return f"write {int(given)}"


def _as_number(value: Any) -> float | None:
    """Return the number that a value is, or that a text such as `012` or `1_000` means."""
    if isinstance(value, str):
        value = scalar(value.strip().lstrip("0").replace("_", "") or "0")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


# Ranges


def out_of_range(tree: Any) -> Iterator[tuple[Keys, str]]:
    """Yield path and message for each number in `tree` that its type allows but its `Range` does not.

    This is not part of the validation, because pydantic checks the rules of a section only if all its fields
    are right. All problems are to be listed at once.
    """
    yield from _out_of_range(tree, root(), ())


def _allowed_by_type(value: float, schema: Schema) -> bool:
    """Return whether the type of the field allows `value`. The validation reports the other values."""
    return all(
        limits.get("minimum", -math.inf) <= value <= limits.get("maximum", math.inf)
        and limits.get("exclusiveMinimum", -math.inf) < value < limits.get("exclusiveMaximum", math.inf)
        for limits in (schema, *schema.get("anyOf", ()))
    )


def _out_of_range(tree: Any, schema: Schema, path: Keys) -> Iterator[tuple[Keys, str]]:
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(tree, dict):
        schema = variants(schema).get(str(tree.get("type")), schema)
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    elif isinstance(tree, int | float) and not isinstance(tree, bool) and "within" in schema:
        low, high, reason = schema["within"]
        if _allowed_by_type(tree, schema) and not low <= tree <= high:
            fix = f"use {number(low)} or more" if tree < low else f"use at most {number(high)}"
            limits = f"must be from {number(low)} to {number(high)} ({reason})"
            yield path, f"{dotted(path)}: {limits}; got {shown(tree)}; {fix}"
    for key, value in items:
        field = child(schema, key)
        if field is not None:
            yield from _out_of_range(value, field, (*path, key))


# The schema for editors


def editor_schema() -> Schema:
    """Return the schema of what `load_config` reads: with short forms, and with the ranges of numbers.

    Rules between fields are not in it.
    """
    # A copy of the whole tree, because `root` is cached and the sources below are changed.
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
    plain = {key: _plain(value) for key, value in part.items() if key not in _NOT_JSON_SCHEMA}
    if isinstance(part.get("within"), list):
        # Both limits apply to numbers only, so a field that can be null has them as well.
        low, high, _ = part["within"]
        plain |= {"minimum": low, "maximum": high}
    return plain


def schema_json() -> str:
    """Return the schema as text."""
    return json.dumps(editor_schema(), indent=1, ensure_ascii=False) + "\n"
