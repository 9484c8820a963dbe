"""`rlhf tune`: a few steps of PPO with each of a few settings, and the fastest as a configuration.

    what PPO reads (reused, or made)  -->  short PPO runs  -->  CONFIG with the fields of the fastest

Candidates are the configuration, on GPUs the fastest placements of `rlhf plan`, on CPUs one engine for each
core, and all of them with `ppo.staleness=1`. Prompts, models and rewards are those of the pipeline.
"""

from __future__ import annotations

import logging
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import stage_inputs
from rlhf_core.config.load import load_config, overridden
from rlhf_core.config.pipeline import runs_on_gpu
from rlhf_core.config.placement import plan
from rlhf_core.config.yaml import dump
from rlhf_core.data.card import with_limits_of_data
from rlhf_core.errors import ConfigError, InputError, RLHFError
from rlhf_core.ops.plan.plan import make_plan
from rlhf_core.pipeline import FIRST_STAGE, STAGES
from rlhf_core.planning.search import as_overrides
from rlhf_core.run.checks import CheckedConfig, check_and_prepare
from rlhf_core.run.local_context import RecordingMetrics, stage_context
from rlhf_core.run.pipeline_run import open_run
from rlhf_core.run.references import resolve
from rlhf_core.run.stage_runner import run_with_retries
from rlhf_core.system.machine import machine
from rlhf_core.system.waiting import seconds_since_boot
from rlhf_core.types import StageContext

log = logging.getLogger(__name__)

STEPS = 3
"""Measured steps of a candidate. One more before them is not counted."""
_SHORT = (
    "ppo.checkpoint_every=1000000",  # never, in a few steps
    "ppo.samples_every=1000000",
    "ppo.critic_warmup_steps=0",  # these steps train the critic only
    "ppo.critic_warmup_max_steps=null",
    "ppo.evaluate_every=0",
    "ppo.stop_patience=null",
    # `best` needs evaluations, which are switched off here.
    "ppo.publish=last",
)
"""What a short run leaves out."""


@dataclass(frozen=True)
class Trial:
    """The measurement of one candidate."""

    changes: tuple[str, ...]
    """Overrides; none for the configuration as it is."""
    seconds: float | None
    """Median of a step. None if it does not run."""
    phases: Mapping[str, float]
    """Medians of `timing/<phase>`."""
    problem: str = ""
    """Why it does not run."""

    @property
    def label(self) -> str:
        return " ".join(self.changes) or "as configured"


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`."""

    trials: tuple[Trial, ...]
    best: Trial
    file: Path
    """Configuration with the changes of the fastest candidate."""


def tune(
    config_path: str | Path,
    overrides: Sequence[str],
    out: Path,
    train: Callable[[PipelineConfig, StageContext], object] | None = None,
) -> Tuned:
    """Measure the candidates, and write the configuration of the fastest to `out`.

    Args:
        config_path: Configuration file.
        overrides: Fields to override, each as `section.field=value`.
        out: The new file.
        train: Trains with the configuration of a candidate and logs the times of its steps. None: the stage
            `ppo`.

    Raises:
        InputError: `out` exists, the configuration is wrong, or no candidate runs.
        RLHFError: An earlier stage failed.
    """
    # First, because the file is written only after all candidates were measured.
    if out.exists():
        raise InputError(f"--out: must be a new file; got {out}, which exists; choose another name")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out: its folder must exist; got {out}; create the folder")
    config = load_config(config_path, overrides)
    if not config.ppo.enabled:
        raise InputError("ppo.enabled: must be true for settings of ppo to be measured; got false")
    given, overrides = overrides, [*overrides, *resolve(config).overrides]
    # A name of its own: the summary and the MLflow run of the configuration stay as they are. Keys of stages
    # do not contain the name, so finished stages are reused.
    named = load_config(config_path, [*overrides, f"run.name={config.run.name}-tune"])
    checked = CheckedConfig(named, tuple(check_and_prepare(named, str(config_path))), str(config_path))
    last = stage_inputs(named, "ppo")[-1]
    folders: dict[str, Path] = {}
    with open_run(checked, FIRST_STAGE, last, {}, seconds_since_boot()) as run:
        for stage in filter(run.includes, STAGES):
            folders[stage] = run.artifacts.fetch(run_with_retries(run, stage).ref)
    ppo = train or STAGES["ppo"].load()
    work = run.home.tune(run.name)

    def train_briefly(config: PipelineConfig, metrics: RecordingMetrics) -> None:
        context = stage_context(work, inputs=folders, metrics=metrics, sources=run.sources)
        ppo(with_limits_of_data(config, folders), context)

    trials = []
    for changes in candidates(config, config_path, overrides):
        log.info("tune: %s", " ".join(changes) or "as configured")
        try:
            trials.append(_measure(config_path, [*overrides, *changes], changes, train_briefly))
        finally:
            # The next candidate writes to the same folder, and each trial leaves a whole policy there.
            shutil.rmtree(work, ignore_errors=True)
    measured = [trial for trial in trials if trial.seconds is not None]
    if not measured:
        raise InputError(f"{config_path}: no candidate of ppo runs; {trials[0].label}: {trials[0].problem}")
    best = min(measured, key=lambda trial: trial.seconds or 0.0)
    # `given` and not the resolved overrides: the file keeps references such as `champion:NAME`.
    out.write_text(dump(overridden(config_path, [*given, *best.changes])), encoding="utf-8")
    return Tuned(tuple(trials), best, out)


def candidates(
    config: PipelineConfig, config_path: str | Path, overrides: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the overrides of each candidate, at most eight. The first has none."""
    found: list[tuple[str, ...]] = [()]
    if runs_on_gpu(config):
        # The plan estimates times, so the fastest one may be another.
        for _, changes in make_plan(config_path, overrides).fastest.get("ppo", []):
            if changes:
                found.append(as_overrides(changes))
    # Not `run.threads`: with one thread, each engine and each rank still has a core of its own.
    elif (cores := machine().cores()) != config.ppo.engine.count:
        found.append((f"ppo.engine.count={cores}",))
    if not config.ppo.staleness:
        found += [(*changes, "ppo.staleness=1") for changes in found]
    return [changes for changes in found if _is_allowed(config_path, [*overrides, *changes])]


def _is_allowed(config_path: str | Path, overrides: Sequence[str]) -> bool:
    """Return whether a candidate is a valid configuration.

    With `ppo.colocate=all`, engines use the devices of the ranks: no more engines than ranks, and no
    staleness.
    """
    try:
        load_config(config_path, overrides)
    except ConfigError:
        return False
    return True


def _measure(
    config_path: str | Path,
    overrides: Sequence[str],
    changes: tuple[str, ...],
    train: Callable[[PipelineConfig, RecordingMetrics], None],
) -> Trial:
    """Return the measurement of a short run of PPO.

    Args:
        config_path: Configuration file.
        overrides: Overrides of this candidate, with those of the user.
        changes: Overrides of this candidate alone.
        train: Trains and logs the times of the steps.
    """
    metrics = RecordingMetrics()
    problem, every = "", 1
    try:
        config = load_config(config_path, [*overrides, *_SHORT])
        every = config.ppo.sync_every
        # With staleness, the last steps sample nothing and are not counted.
        steps = every + _rounded_up(STEPS, every) + config.ppo.staleness
        config = load_config(config_path, [*overrides, *_SHORT, f"ppo.steps={steps}"])
        log.info("tune: %s", plan(config.ppo).describe())
        train(config, metrics)
    except RLHFError as error:
        problem = error.message
    needed = _rounded_up(STEPS, every)
    # The first steps compile and fill caches. Only whole groups between two syncs are left out and counted.
    counted = [row for _, row in metrics.rows if "timing/step" in row][every : every + needed]
    if len(counted) < needed:
        return Trial(changes, None, {}, problem)
    medians = {}
    for name in ("step", "rollout", "scoring", "training", "sync"):
        seconds = [row.get(f"timing/{name}", 0.0) for row in counted]
        # One step of several has the sync.
        means = [statistics.fmean(seconds[start : start + every]) for start in range(0, needed, every)]
        # The median, because one step that another program of the machine has slowed down must not decide.
        medians[name] = statistics.median(means)
    return Trial(changes, medians.pop("step"), medians)


def _rounded_up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple
