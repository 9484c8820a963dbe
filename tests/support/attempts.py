"""Attempts at a stage whose work is a function of the test."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from rlhf_core.config import PipelineConfig
from rlhf_core.executors.events import Events
from rlhf_core.executors.spec import StageSpec
from rlhf_core.pipeline import Stage
from rlhf_core.run.attempt import run_attempt
from rlhf_core.types import ArtifactRef, StageContext, StageResult


def attempt_with(
    function: Callable[[PipelineConfig, StageContext], StageResult], spec: StageSpec
) -> ArtifactRef:
    """Run the stage of `spec`, which does what `function` does, and return its artifact."""
    with mock.patch.object(Stage, "load", lambda _row: function):
        return run_attempt(spec, Events(None))
