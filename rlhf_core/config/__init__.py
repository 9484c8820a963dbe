"""Typed configuration: `PipelineConfig`, its loader, its messages and the stage keys."""

from rlhf_core.config.pipeline import PipelineConfig

__all__ = ["PipelineConfig"]
