"""`rlhf replay`: steps of PPO again, with the configuration and the inputs of a finished run.

    artifacts data, sft, reward (or a kept checkpoint) -> the stage `ppo` until step N, in a folder of its own
                                                          record, metrics, checkpoint of step N
    both recordings                                    -> the first thing that differs, or none

The checkpoints of a finished stage are deleted, so that a replay begins with step 1 unless an earlier one has
kept its folder. Store, tracking and registry are not written. Evaluations are left out: they do not change
the steps.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import sources_in_key, stage_inputs
from rlhf_core.config.pipeline import RecordConfig
from rlhf_core.config.training import OptimizerConfig
from rlhf_core.data.card import with_limits_of_data
from rlhf_core.errors import InputError
from rlhf_core.ops.finished_run import FinishedRun
from rlhf_core.ops.first_difference import (
    Difference,
    Recording,
    columns_compared,
    conditions,
    differing,
    first_difference,
    of_files,
    of_versions,
)
from rlhf_core.pipeline import STAGES
from rlhf_core.run.external_inputs import reward_code_digests
from rlhf_core.run.local_context import FolderCheckpoints, stage_context
from rlhf_core.storage.versions import versions
from rlhf_core.system.files import read_json, write_json
from rlhf_core.system.processes import StopRequest
from rlhf_core.types import Progress, StageContext

log = logging.getLogger(__name__)

Train = Callable[[PipelineConfig, StageContext], object]

_VERSIONS = "versions.json"
"""File of a kept folder: the versions that made it."""
_NEVER = 10**9


@dataclass(frozen=True)
class Replayed:
    """The result of `replay`."""

    start: int
    """The step after which it began; 0: the beginning."""
    seconds: float
    responses: int
    """Responses of the step."""
    columns: int
    """Columns that were compared."""
    metrics: int
    """Metrics that were compared."""
    has_weights: bool
    """Whether the weights after the step were compared."""
    difference: Difference | None


class _Until(Progress):
    """Requests a stop after a step of PPO."""

    def __init__(self, step: int, stop: StopRequest) -> None:
        self._step = step
        self._stop = stop

    @override
    def __call__(self, task: str, done: int, total: int, unit: str, **metrics: float) -> None:
        if task == "ppo":
            log.info("replay: step %d of %d", done, self._step)
            self._stop.requested |= done >= self._step


def replay(run: FinishedRun, step: int, keep: Path | None = None, train: Train | None = None) -> Replayed:
    """Make the steps until `step` again, and compare them with what the run recorded.

    Args:
        run: The run.
        step: The last step.
        keep: Folder for the record and the checkpoint of the replay. If it has those of an earlier one, the
            replay continues from there. None: a folder that is deleted.
        train: None: the stage `ppo`.

    Raises:
        InputError: The run has no record of the step, `keep` was made by another version, or an earlier
            release trained with settings that this one does not have.
        RLHFError: The stage failed.
    """
    recorded = Recording(run.recorded("ppo"), run.name)
    rows = recorded.rollouts(step)  # before any work: is it recorded?
    _require_same_adam(run)
    folder = keep or run.home.replay(run.name)
    _require_same_versions(folder)
    start, made = FolderCheckpoints(folder / "checkpoints").latest() or (0, folder)
    started = time.monotonic()
    try:
        if start < step:
            made = _run_until(run, step, folder, train or STAGES["ppo"].load())
        again = Recording(made, "the replay")
        common = recorded.metrics.get(step, {}).keys() & again.metrics.get(step, {}).keys()
        return Replayed(
            start,
            time.monotonic() - started,
            len(rows),
            len(columns_compared(rows, again.rollouts(step))),
            len(common),
            None not in (recorded.weights_after(step), again.weights_after(step)),
            first_difference(recorded, again, step),
        )
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _require_same_adam(run: FinishedRun) -> None:
    """Raise InputError if an earlier release made the run with an epsilon that this one does not have."""
    artifacts, ref = run.artifact("ppo")
    ppo, now = artifacts.config(ref)["ppo"], OptimizerConfig.constants["eps"]
    others = {ppo.get(name, {}).get("eps", now) for name in ("policy", "critic")} - {now}
    if others:
        raise InputError(
            f"{ref.uri} was made with eps={others.pop():g} of policy or critic, which is always {now:g} now;"
            " replay it with the release that made it"
        )


def _require_same_versions(folder: Path) -> None:
    """Write the versions of this code to `folder`, or compare them with those that it has."""
    file, now = folder / _VERSIONS, of_versions(versions())
    found = read_json(file)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, now)
    elif found != now:
        # A difference between two versions would look like one of the run.
        raise InputError(f"--keep: {folder} was made by another version of the code; use another folder")


def _run_until(run: FinishedRun, step: int, folder: Path, train: Train) -> Path:
    """Run PPO in `folder`, from its last checkpoint until `step`. Return the folder with its record."""
    config = run.config("ppo")
    inputs = {}
    for stage in stage_inputs(config, "ppo"):
        artifacts, ref = run.artifact(stage)
        inputs[str(stage)] = artifacts.fetch(ref)
    config = with_limits_of_data(config, inputs).with_values(
        {
            "run.home": str(run.home.path),  # with the replies of language models
            # All columns and no limit of size: each of them can have the first difference.
            "record": RecordConfig(level="all", max_bytes=10**15),
            # From here on: what costs time or ends a run, and changes no step.
            "ppo.evaluate_every": 0,
            "ppo.publish": "last",
            "ppo.stop_patience": None,
            "ppo.samples_every": _NEVER,
            "ppo.checkpoint_every": _NEVER * config.ppo.sync_every,
        }
    )
    # What an interrupted replay left there would be part of this one.
    for name in ("output", "scratch"):
        shutil.rmtree(folder / name, ignore_errors=True)
    stop = StopRequest()
    context = stage_context(folder, inputs=inputs, progress=_Until(step, stop))
    try:
        train(config, replace(context, stop=stop))
    except SystemExit:  # the stop that `_Until` requests
        if not stop.requested:
            raise
    latest = FolderCheckpoints(folder / "checkpoints").latest()
    # A policy with an adapter ends its last step without a checkpoint.
    return context.output if latest is None or latest[0] < step else latest[1]


def changed_since(run: FinishedRun) -> dict[str, tuple[Any, ...]]:
    """Return what has changed since the run that can explain a difference, with both values: versions, and
    files that the configuration names (rewards, losses).
    """
    then, config = conditions(run), run.config("ppo")
    files = sources_in_key(config, "ppo", reward_code_digests(config))
    return differing(then, then | of_versions(versions()) | of_files(files))
