"""What runs have left outside the store: their folders and logs in `run.home`, their runs in MLflow, and the
database of the Prefect server that `rlhf run` starts.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_core.cluster.disk_space import bytes_below
from rlhf_core.ops.retention import Reason, Trace
from rlhf_core.pipeline import STAGES
from rlhf_core.run.state import process_of, read_state
from rlhf_core.storage.inventory import ArtifactName
from rlhf_core.system.home import Home
from rlhf_core.tracking.mlflow_client import Mlflow, PastRun, sqlite_path
from rlhf_core.tracking.tracker import PARENT, PIPELINE_KEY, STAGE, STAGE_KEY

_STARTING_SECONDS = 3600.0
"""A process that has used Prefect's database for a shorter time may not have recorded its run yet."""
_JOBS = "jobs"
"""Folder in `logs` with the logs of jobs of all runs."""


def traces_of_home(home: Home) -> list[Trace]:
    """Return what runs have left in `run.home`."""
    runs, logs = sorted(home.runs.glob("*/")), sorted(home.logs.glob("*/"))
    # Before the folders of the runs, which say what the logs are of.
    found = [_of_folder("logs", folder, home) for folder in logs if folder.name != _JOBS]
    found += [_of_folder("runs", folder, home) for folder in runs]
    others = [*home.run_logs(_JOBS).glob("*"), *home.all_stacks.glob("*/")]
    found += [_of_folder("logs", path, home) for path in sorted(others)]
    if home.prefect_complete.exists():
        found.append(_of_prefect(home))
    return found


def traces_of_mlflow(mlflow: Mlflow, home: Home, also: Collection[str]) -> list[Trace]:
    """Return the runs of all pipelines in MLflow. If no kind of `also` depends on them, return one entry for
    all, whose size is 0 if they are not in `run.home`: MLflow reads a hundred runs in a second.
    """
    database = sqlite_path(mlflow.uri)
    size = database.stat().st_size if database is not None and database.exists() else 0
    # Artifacts, too: the home has only its own runs.
    if not {"mlflow", "data", "evaluations"}.intersection(also):
        size += bytes_below(home.mlflow_artifacts)
        return [Trace("mlflow", "of all runs", (), size, math.inf)]
    runs = mlflow.past_runs()
    members: dict[str, list[PastRun]] = {run.run_id: [run] for run in runs if PIPELINE_KEY in run.tags}
    for run in runs:
        if run.tags.get(PARENT) in members and STAGE_KEY in run.tags:
            members[run.tags[PARENT]].append(run)
    return [_of_pipeline(pipeline, size // len(runs), home) for pipeline in members.values()]


def remove_from_home(home: Home, trace: Trace) -> bool:
    """Delete what a run has left in `run.home`. Return False if it has changed."""
    if trace.kind != "prefect":
        path = Path(*trace.where)
        if not path.exists() or _of_folder(trace.kind, path, home) != trace:
            return False
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        return True
    try:
        with FileLock(home.prefect_lock, timeout=0):
            if not home.prefect_complete.exists() or _of_prefect(home) != trace:
                return False
            # The marker first: what a kill leaves then is deleted by the next run.
            home.prefect_complete.unlink()
            for file in home.prefect.glob("prefect.db*"):
                file.unlink()
    except Timeout:
        return False
    return True


def remove_from_mlflow(mlflow: Mlflow, trace: Trace) -> bool:
    """Delete the runs of a pipeline. Return False if the pipeline has run again."""
    pipeline = mlflow.past_run(trace.where[0])
    if pipeline is None or not pipeline.finished or pipeline.updated > trace.updated:
        return False
    # The pipeline last: it is what the next command finds after a kill.
    for run_id in reversed(trace.where):
        mlflow.delete_for_good(run_id)
    return True


def _of_folder(kind: str, path: Path, home: Home) -> Trace:
    run = home.run(path.name)
    own = _votes(run)
    state = read_state(run / "run.json")
    if state is None:  # it is of no run, or of one whose folder was deleted
        files = [path, *path.rglob("*")]
        updated = max(file.stat().st_mtime for file in files if file.exists())
        return Trace(kind, path.name, (str(path),), _size(path), updated, own=own)
    if state["state"] != "finished":
        own = Reason.UNFINISHED
    artifacts = _artifacts((stage, str(each.get("key"))) for stage, each in state["stages"].items())
    return Trace(kind, path.name, (str(path),), _size(path), state["updated"], artifacts, own)


def _votes(run: Path) -> Reason | None:
    return Reason.VOTES if (run / "review").exists() else None


def _size(path: Path) -> int:
    return bytes_below(path) if path.is_dir() else path.stat().st_size


def _of_prefect(home: Home) -> Trace:
    files = [file.stat() for file in home.prefect.glob("prefect.db*")]
    own = None
    if any(file.st_mtime > time.time() - _STARTING_SECONDS for file in files):
        own = Reason.IN_USE
    for state in filter(None, map(read_state, home.run_states())):
        if state["state"] == "running" and process_of(state).alive() is not False:
            own = Reason.IN_USE
    created = home.prefect_complete.stat().st_mtime
    size = sum(file.st_size for file in files)
    return Trace("prefect", "prefect.db", (str(home.prefect),), size, created, own=own)


def _of_pipeline(runs: list[PastRun], share: int, home: Home) -> Trace:
    """Return the runs of a pipeline and of its stages. `share` is the size of a run in the database."""
    size = share * len(runs)
    size += sum(bytes_below(run.folder) for run in runs if run.folder is not None)
    artifacts = _artifacts((run.tags.get(STAGE, ""), run.tags[STAGE_KEY]) for run in runs[1:])
    own = _votes(home.run(runs[0].name)) if all(run.finished for run in runs) else Reason.UNFINISHED
    where = tuple(run.run_id for run in runs)
    updated = max(run.updated for run in runs)
    return Trace("mlflow", runs[0].name, where, size, updated, artifacts, own)


def _artifacts(keys: Iterable[tuple[str, str]]) -> tuple[ArtifactName, ...]:
    """Return names of artifacts in the order of the stages, from stages and their keys."""
    order: list[str] = list(STAGES)
    names = [ArtifactName(stage, key) for stage, key in keys if stage in order]
    return tuple(sorted(names, key=lambda name: order.index(name.stage)))
