"""A configuration as flat names and values, for trackers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_core.config.pipeline import PipelineConfig


def flat(config: PipelineConfig, sections: Sequence[str] | None = None) -> dict[str, Any]:
    """Return `{"ppo.kl.coef": 0.05, ...}` without null values, of some top-level sections or of all."""
    dump = config.model_dump(mode="json", by_alias=True)
    return {name: value for section in sections or dump for name, value in leaves(section, dump[section])}


def leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of everything in the nested `value` that is not None."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(f"{prefix}.{name}", part)
    elif value is not None:
        yield prefix, value
