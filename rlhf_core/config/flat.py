"""A configuration as flat names and values, as trackers show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_core.config.pipeline import PipelineConfig


def flat(config: PipelineConfig, sections: Sequence[str] | None = None) -> dict[str, Any]:
    """`ppo.kl.coef` -> 0.05 and so on, without what is None. `sections`: of the top level; None: all."""
    dump = config.model_dump(mode="json", by_alias=True)
    return {name: value for section in sections or dump for name, value in leaves(section, dump[section])}


def leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what is not None in the nested `value`; the names begin with `prefix`."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            yield from leaves(f"{prefix}.{name}", part)
    elif value is not None:
        yield prefix, value
