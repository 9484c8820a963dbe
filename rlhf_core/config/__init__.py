"""Typed configuration: `PipelineConfig`, how it is loaded, and the stage keys that follow from it."""

from rlhf_core.config.pipeline import PipelineConfig

__all__ = ["PipelineConfig"]
