"""Typed configuration: `PipelineConfig`, its loader, its messages and the stage keys.

`PipelineConfig` is imported at its first use, so that the command line starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.config.pipeline import PipelineConfig

__all__ = ["PipelineConfig"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlhf_core.config.pipeline import PipelineConfig

    return PipelineConfig
