"""Which checkpoints a test keeps."""

from __future__ import annotations

from typing import Any

from rlhf_core.config.pipeline import StoreConfig


def keep(newest: int, **settings: Any) -> StoreConfig:
    """Return the section `store` that keeps this many checkpoints; `settings` are its other fields."""
    return StoreConfig(keep_checkpoints=newest, **settings)
