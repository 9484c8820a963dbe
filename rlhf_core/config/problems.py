"""From what pydantic found to sentences for people: `FILE:LINE: field: rule; got VALUE; fix`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlhf_core.config.redact import shown, shown_key
from rlhf_core.config.schema import Keys, Kind, Spot, all_fields, fields, locate, rule
from rlhf_core.config.yaml import scalar

Place = Callable[[Keys], str]
"""From a path of the configuration to the words for where the user wrote it."""

_FIELD_IN_MESSAGE = re.compile(r"[a-z_]+(\.[a-z_]+)+")


def dotted(path: Iterable[str | int]) -> str:
    """`ppo.rewards.0.type`"""
    return ".".join(shown_key(str(step)) for step in path)


def sentences(error: ValidationError, place: Place) -> list[str]:
    """One line per problem."""
    return [_sentence(found, place) for found in error.errors(include_url=False) if not _is_echo(found)]


def suggest(key: str, owner: type[BaseModel], path: Keys) -> str:
    """`did you mean ...`, or the list of known keys of the section."""
    known = list(fields(owner))
    same = [found for found in all_fields() if found[-1] == key]
    alike = [found for found in all_fields() if _stands_for(key, found[-1])]
    # Two or three letters are an abbreviation sooner than a slip.
    cutoff = 0.6 if len(key) > 3 else 0.8
    guesses = (
        [(*path, name) for name in difflib.get_close_matches(key, known, n=1, cutoff=cutoff)],
        [found for found in same if found[: len(path)] == path],
        [(*path, name) for name in known if _stands_for(key, name)][:1],
        [found for found in alike if found[: len(path)] == path],
        same,
        alike,
    )
    for guess in guesses:
        if guess:
            return f"did you mean {' or '.join(dotted(found) for found in guess[:2])}?"
    return "known keys: " + ", ".join(known)


def _stands_for(key: str, name: str) -> bool:
    """`lr` for `learning_rate`, `batch` for `batch_size`, `decay` for `weight_decay`."""
    parts = name.split("_")
    return len(parts) > 1 and key in ("".join(part[0] for part in parts if part), parts[0], parts[-1])


def unknown(path: Keys, owner: type[BaseModel], variant: str | None = None) -> str:
    """`ppo.stpes: unknown key; did you mean ppo.steps?`"""
    where = f" for a reward of type {variant}" if variant else ""
    return f"{dotted(path)}: unknown key{where}; {suggest(str(path[-1]), owner, path[:-1])}"


def _is_echo(found: ErrorDetails) -> bool:
    """A list whose items are wrong is also called too short, whatever its length."""
    context = found.get("ctx", {})
    return (
        found["type"] == "too_short"
        and isinstance(found["input"], list)
        and len(found["input"]) >= context["min_length"]
    )


def _sentence(found: ErrorDetails, place: Place) -> str:
    kind, spot, value = found["type"], locate(found["loc"]), found["input"]
    if kind == "value_error":
        text = found["msg"].removeprefix("Value error, ")
        named = _FIELD_IN_MESSAGE.match(text)
        if named:
            return f"{place(tuple(named[0].split('.')))}: {text}"
        own = str(spot.path[-1]) if spot.path else ""
        told = text.removeprefix(f"{own} ") if own and text.startswith(f"{own} ") else text
        return f"{place(spot.path)}: {dotted(spot.path) or 'the configuration'}: {told}"
    if kind == "extra_forbidden" and spot.owner is not None:
        return f"{place(spot.path)}: {unknown(spot.path, spot.owner, spot.variant)}"
    if kind.startswith("union_tag") and spot.kind is not None:
        return _tag(found, spot, place)
    where = dotted(spot.path) or "the configuration"
    if kind == "missing":
        wanted = f" ({rule(spot.kind)})" if spot.kind else ""
        return f"{place(spot.path)}: {where}: is required{wanted}; got nothing; add it"
    got = shown(value, str(spot.path[-1]) if spot.path else "")
    if spot.kind is None:
        return f"{place(spot.path)}: {where}: {found['msg']}; got {got}"
    fix = _fix(spot, spot.kind, value)
    return f"{place(spot.path)}: {where}: must be {rule(spot.kind)}; got {got}; {fix}"


def _tag(found: ErrorDetails, spot: Spot, place: Place) -> str:
    assert spot.kind is not None
    path, known = (*spot.path, "type"), list(spot.kind.variants)
    if found["type"] == "union_tag_not_found":
        return f"{place(path)}: {dotted(path)}: is required (one of {', '.join(known)}); got nothing; add it"
    tag = found["input"].get("type") if isinstance(found["input"], dict) else None
    near = difflib.get_close_matches(str(tag), known, n=1)
    fix = f"did you mean {near[0]}?" if near else f"use, for example, {known[0]}"
    return (
        f"{place(path)}: {dotted(path)}: must be one of {', '.join(known)}; got {shown(tag, 'type')}; {fix}"
    )


def _fix(spot: Spot, wanted: Kind, value: Any) -> str:
    annotation = wanted.annotation
    example = _example(spot)
    if wanted.section is not None or wanted.variants:
        return "write its fields below it, indented, or leave the key out"
    if wanted.items is not None:
        if not isinstance(value, list | dict) and value is not None:
            return "write it as a list: [...]"
        return f"use, for example, {example}" if example else "add one, or leave the key out for the default"
    if annotation in (int, float) and not isinstance(value, bool):
        return _number_fix(wanted, value, example)
    if annotation is bool and str(value).lower() in ("no", "off", "n", "yes", "on", "y"):
        return f"write {'true' if str(value).lower() in ('yes', 'on', 'y') else 'false'}"
    if annotation is str and isinstance(value, int | float):
        return "put it in quotes"
    if (
        annotation is str
        and isinstance(value, str)
        and wanted.limit("pattern")
        and spot.path[-1:] == ("name",)
    ):
        tame = re.sub(r"[^a-z0-9_]+", "_", value.lower()).strip("_")[:32]
        return f"use, for example, {tame or 'rlhf'}"
    options = [str(option) for option in get_args(annotation)] if annotation is not str else []
    if near := difflib.get_close_matches(str(value), options, n=1):
        return f"did you mean {near[0]}?"
    return f"use, for example, {example}" if example else "write a value of that form"


def _example(spot: Spot) -> str | None:
    """The default, if it is short enough to show."""
    if spot.info is None or spot.info.is_required() or spot.info.default_factory is not None:
        return None
    default = spot.info.default
    if default is None or isinstance(default, BaseModel):
        return None
    if isinstance(default, tuple):
        plain = all(isinstance(item, int | float | str) for item in default)
        return "[" + ", ".join(map(str, default)) + "]" if plain else None
    if isinstance(default, bool):
        return "true" if default else "false"
    return str(default)


def _number_fix(wanted: Kind, value: Any, example: str | None) -> str:
    number = _as_number(value)
    if number is None or not math.isfinite(number):
        return f"use, for example, {example or '1'}"
    low, above, high, below = (wanted.limit(name) for name in ("ge", "gt", "le", "lt"))
    if low is not None and number < low:
        return f"use {low:g} or more"
    if above is not None and number <= above:
        return f"use a number above {above:g}" + (f", such as {example}" if example else "")
    if high is not None and number > high:
        return f"use at most {int(high) if high >= 1 else high}"
    if below is not None and number >= below:
        return f"use a number below {below:g}" + (f", such as {example}" if example else "")
    if wanted.annotation is int and number != int(number):
        return f"use {max(int(low or 0), math.floor(number))} or {math.ceil(number)}"
    if wanted.annotation is int:
        return f"write {int(number)}"
    return f"write {number:g} without quotes"


def _as_number(value: Any) -> float | None:
    if isinstance(value, str):
        value = scalar(value.strip().lstrip("0").replace("_", "") or "0")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
