"""The pipeline as a library: the same stages, keys and artifacts as the Prefect flow, without Prefect."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.ops.drift import compare_with_champion
from rlhf_core.pipeline import FIRST_STAGE, LAST_STAGE, STAGES, StageName
from rlhf_core.run.checks import CheckedConfig, check_and_prepare, reuse_or_check
from rlhf_core.run.pipeline_run import PipelineRun, open_run
from rlhf_core.run.references import resolve_kept
from rlhf_core.run.stage_runner import run_with_retries
from rlhf_core.system.waiting import seconds_since_boot
from rlhf_core.types import ArtifactRef


def run_pipeline(
    config: PipelineConfig,
    *,
    start: StageName = FIRST_STAGE,
    until: StageName = LAST_STAGE,
    tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run the pipeline: reuse finished stages, continue interrupted ones, and run the rest in child
    processes.

    Args:
        config: The configuration, as `load_config` returns it.
        start: Stages before this one must have been made already.
        until: The last stage.
        tags: Tags of the MLflow run of the pipeline.

    Returns the summary, which is also in `runs/<name>/summary.json` below `run.home`, unless that
    file is of a longer run with the same artifacts.

    Raises:
        InputError: The configuration, the data or the model cannot be used. Raised before anything starts.
        RLHFError: A stage failed, and its retries are used up or would not help. The same call continues it.
    """
    return _run_config(config, start, until, tags).summary()


def run_stage(
    config: PipelineConfig, stage: StageName, *, tags: Mapping[str, str] | None = None
) -> ArtifactRef:
    """Run one stage and return its artifact. All stages that it reads must have been made already.

    Args:
        config: The configuration, as `load_config` returns it.
        stage: Name of the stage.
        tags: Tags of the MLflow run of the pipeline.

    Raises:
        InputError: The artifact of an earlier stage is missing, or this configuration does not have the
            stage.
        RLHFError: See `run_pipeline`.
    """
    return _run_config(config, stage, stage, tags).artifact(stage)


def run_file(
    config: str,
    overrides: Sequence[str] = (),
    start: StageName = FIRST_STAGE,
    until: StageName = LAST_STAGE,
) -> dict[str, Any]:
    """Run the pipeline of a configuration file as the flow `rlhf` does, and return the summary.

    Args:
        config: YAML file.
        overrides: Fields to override, each as `section.field=value`.
        start: Stages before this one must have been made already.
        until: The last stage.

    Raises the errors of `run_pipeline`.
    """
    return _run(reuse_or_check(config, overrides, start=start, until=until), start, until).summary()


def _run_config(
    config: PipelineConfig, start: StageName, until: StageName, tags: Mapping[str, str] | None
) -> PipelineRun:
    # The run counts from this call. By default it counts from the start of the process, perhaps a notebook.
    started = seconds_since_boot()
    # Names the origin of the run, as the configuration file does for `rlhf run`.
    script = Path(sys.argv[0]).name
    if script in ("", "-", "-c", "-m"):  # an interactive session, or code without a file
        script = "python"
    resolved, kept = resolve_kept(config)
    warnings = tuple(check_and_prepare(resolved.config, "the configuration", start=start, until=until))
    checked = CheckedConfig(resolved.config, warnings, script, reference_tags=resolved.tags, kept=kept)
    return _run(checked, start, until, tags, started)


def _run(
    checked: CheckedConfig,
    start: StageName,
    until: StageName,
    tags: Mapping[str, str] | None = None,
    started: float | None = None,
) -> PipelineRun:
    with open_run(checked, start, until, tags, started) as run:
        # Also stages before `start`: their artifacts are found, or `PipelineRun.find` raises.
        for stage in STAGES:
            if not run.includes(stage):
                continue
            record = run_with_retries(run, stage)
            # Not a stage of its own: the result depends on the present champion, which is no input of the
            # pipeline (decision 48). Before SFT: no hours of training on data that drifted.
            if stage == "data":
                report = compare_with_champion(run, record.ref)
                if report is not None:
                    report.raise_stop()
    return run
