"""Reading the schema itself: which fields there are, and each field's rule in words.

Messages (`problems.py`) and the table of configuration (`document.py`) say the same because both ask here.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_core.config.pipeline import PipelineConfig

Keys = tuple[str | int, ...]

_PATTERNS = {
    r"^[a-z0-9][a-z0-9._-]{0,63}$": "1 to 64 of a-z, 0-9, `.`, `_` and `-`, the first a letter or digit",
    r"^[a-z0-9_]{1,32}$": "1 to 32 of a-z, 0-9 and `_`",
    r"^[^\x00-\x1f\x7f]{1,250}$": "1 to 250 characters on one line",
    r"^[\w.-]{1,100}$": "1 to 100 letters, digits, `.`, `_` and `-`",
    r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$": "`package.module:function`",
}


@dataclass(frozen=True)
class Kind:
    """One level of an annotation, with `Optional` and `Annotated` taken off."""

    annotation: Any
    limits: tuple[Any, ...] = ()
    """The constraint objects of `Field` and `Annotated` (ge, gt, le, min_length, pattern, ...)."""
    optional: bool = False
    """True where null is allowed."""
    discriminator: str | None = None
    """Set for a union that is told apart by a field."""

    def limit(self, name: str) -> Any:
        """The value of a constraint such as `ge`, or None."""
        for limit in self.limits:
            value = getattr(limit, name, None)
            if value is not None:
                return value
        return None

    @property
    def section(self) -> type[BaseModel] | None:
        """The model class, if this is a section."""
        found = self.annotation
        return found if isinstance(found, type) and issubclass(found, BaseModel) else None

    @property
    def items(self) -> Kind | None:
        """The kind of a list's items, if this is a list."""
        return kind(get_args(self.annotation)[0]) if get_origin(self.annotation) is tuple else None

    @property
    def variants(self) -> dict[str, type[BaseModel]]:
        """The sections of a discriminated union, by tag; empty otherwise."""
        if self.discriminator is None:
            return {}
        return {
            get_args(model.model_fields[self.discriminator].annotation)[0]: model
            for model in get_args(self.annotation)
        }


def kind(annotation: Any, field: FieldInfo | None = None) -> Kind:
    """Take `Annotated` and `Optional` off, collecting constraints."""
    limits: list[Any] = list(field.metadata) if field else []
    optional, discriminator = False, field.discriminator if field else None
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *extras = get_args(annotation)
            for extra in extras:
                if isinstance(extra, FieldInfo):
                    limits.extend(extra.metadata)
                    discriminator = extra.discriminator or discriminator
                else:
                    limits.append(extra)
        elif get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation):
            rest = tuple(part for part in get_args(annotation) if part is not type(None))
            annotation, optional = (rest[0] if len(rest) == 1 else Union[rest]), True  # noqa: UP007 - built at run time
        else:
            name = discriminator if isinstance(discriminator, str) else None
            return Kind(annotation, tuple(limits), optional, name)


@cache
def fields(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Fields by the name that the YAML uses."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


@cache
def kinds(model: type[BaseModel]) -> Mapping[str, Kind]:
    """What the schema wants in each of `fields`."""
    return {name: kind(info.annotation, info) for name, info in fields(model).items()}


@dataclass(frozen=True)
class Spot:
    """Where a path of the configuration leads."""

    path: Keys
    """The path as users write it (without the tags that pydantic puts into the place of an error)."""
    kind: Kind | None
    """What the schema wants there; None where the schema has no such field."""
    owner: type[BaseModel] | None
    """The section that holds (or would hold) the last key."""
    info: FieldInfo | None = None
    """The field itself, where the last key names one."""
    variant: str | None = None
    """The innermost `type` that was passed on the way."""


def locate(location: Sequence[str | int]) -> Spot:
    """Follow a path of keys and indices, or a pydantic error location."""
    here: Kind | None = Kind(PipelineConfig)
    path: list[str | int] = []
    owner: type[BaseModel] | None = None
    info: FieldInfo | None = None
    variant: str | None = None
    for step in location:
        if here is not None and here.variants:
            if step in here.variants:
                variant = str(step)
                here = Kind(here.variants[variant])
                continue
            here = None
        path.append(step)
        info = None
        if here is None:
            continue
        owner = here.section
        if owner is not None:
            info = fields(owner).get(str(step))
            here = kinds(owner).get(str(step))
        elif here.items is not None and isinstance(step, int):
            here = here.items
        else:
            here = None
    return Spot(tuple(path), here, owner, info, variant)


def all_fields(
    model: type[BaseModel] = PipelineConfig, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Paths of all fields that are not in lists."""
    for name, found in kinds(model).items():
        yield (*path, name)
        if found.section is not None:
            yield from all_fields(found.section, (*path, name))


def rule(wanted: Kind) -> str:
    """The rule in words: `an integer from 1 to 1000000000`, `one of chat, plain`, `a list of sections`."""
    words = _rule(wanted)
    return f"{words}, or null" if wanted.optional else words


def _rule(wanted: Kind) -> str:
    annotation = wanted.annotation
    if annotation is bool:
        return "true or false"
    if annotation in (int, float):
        return ("an integer" if annotation is int else "a finite number") + _range(wanted)
    if annotation is str:
        pattern = wanted.limit("pattern")
        if pattern:
            return f"text: {_PATTERNS.get(pattern, pattern)}"
        return "non-empty text" if wanted.limit("min_length") else "text"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    parts = get_args(annotation)
    if bool in parts:  # Packing
        return "true, false or " + ", ".join(
            str(value) for part in parts if part is not bool for value in get_args(part)
        )
    if wanted.variants:
        return "a section with `type`: one of " + ", ".join(wanted.variants)
    if wanted.section is not None:
        return "a section"
    if get_origin(annotation) is dict:
        return "a map of text to text"
    return _list_rule(wanted)


def _list_rule(wanted: Kind) -> str:
    parts = get_args(wanted.annotation)
    if wanted.items is None:
        return "a value"
    if len(parts) == 2 and parts[1] is not Ellipsis:
        return f"a list of {len(parts)}, each {_rule(wanted.items)}"
    least = wanted.limit("min_length")
    inner = wanted.items
    what = "sections" if inner.section else "sections, each with a `type`" if inner.variants else "texts"
    return f"a list of {what}" + (f", at least {least}" if least else "")


def _range(wanted: Kind) -> str:
    low, above, high, below = (wanted.limit(name) for name in ("ge", "gt", "le", "lt"))
    lower = f"above {above:g}" if above is not None else f"from {low:g}" if low is not None else ""
    if below is not None:
        return f" {lower} to below {below:g}"
    if high is None:
        return f" {lower}".rstrip()
    upper = f"{int(high)}" if float(high) < 1e12 and float(high).is_integer() else f"{high:g}"
    return f" {lower} to {upper}" if above is None else f" {lower}, at most {upper}"
