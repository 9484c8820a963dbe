"""Tracking: one MLflow run per pipeline run, and a nested run per stage.

A run is found by its tags before one is created, so that a pipeline that is continued writes to the same
runs. A tracker that is down never stops a pipeline: data is kept on disk (`stage_run.Spool`) or left out,
with one warning.
"""

from __future__ import annotations

import getpass
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlsplit

from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_fixed

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import tracking_uri
from rlhf_core.config.redact import credential_problem
from rlhf_core.errors import ConfigError
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.system.home import Home
from rlhf_core.tracking.also import Copies
from rlhf_core.tracking.database import MACHINE_LEARNING, ui_command
from rlhf_core.tracking.mlflow_client import (
    COLUMNS_KEY,
    DataSet,
    Mlflow,
    Point,
    RunState,
    attempt,
    clean_name,
    describe_failure,
    mlflow_at,
    shorten_timeouts,
)
from rlhf_core.tracking.registry import has_version, why_outdated
from rlhf_core.tracking.stage_run import MS_PER_STEP, Pauses, Spool, StageRun, next_attempt
from rlhf_core.types import ArtifactRef

__all__ = ["DataSet", "StageRun", "Status", "Tracking", "open_tracking", "origin_tags"]

log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]
_T = TypeVar("_T")

PIPELINE_KEY, STAGE_KEY, STAGE, PARENT = (
    "rlhf.pipeline_key",
    "rlhf.stage_key",
    "rlhf.stage",
    "mlflow.parentRunId",
)

_DESCRIPTION = "mlflow.note.content"
"""MLflow shows this tag as the description of a run, rendered as Markdown."""


def open_tracking(config: PipelineConfig) -> Tracking:
    """Return the tracker at `tracking_uri`. Connects to nothing.

    Raises ConfigError for an address that cannot be a tracker.
    """
    home = Home.of(config.run.home)
    instead = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
    # MLFLOW_TRACKING_URI may have a password: only the configuration is written to manifests and to MLflow.
    if problem := credential_problem(config.tracking.uri or "", instead):
        raise ConfigError(f"tracking.uri: {problem}")
    mlflow = mlflow_at(tracking_uri(config), config.experiment)
    copies = partial(Copies, config.tracking.also, home.path / "also", config.experiment)
    return Tracking(mlflow, home.spool, config.tracking.system_metrics, copies=copies)


@dataclass
class Tracking:
    """The runs of one experiment. Methods that return an id return None if the tracker is down."""

    mlflow: Mlflow
    spool: Path
    """Local folder for data that could not be sent yet."""
    system_metrics: bool = False
    """Sample CPU, memory and GPU during stages."""
    pauses: Pauses = field(default_factory=Pauses)
    copies: Callable[[str], Copies] | None = None
    """Returns the copies of a stage run's metrics in other trackers, by its name."""
    _warned: bool = field(default=False, init=False)

    @property
    def uri(self) -> str:
        """The tracker's address without credentials."""
        return public_uri(self.mlflow.uri)

    def warm_up(self) -> None:
        """Import MLflow, which takes seconds, and open its database if that is a file."""
        with suppress(Exception):  # the first call that needs it reports the error
            self.mlflow.prepare()

    def parent_run(
        self,
        pipeline_key: str,
        name: str,
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Find the run of the pipeline by `pipeline_key`, or create it; mark it as RUNNING and
        return its id.
        """
        identity = {PIPELINE_KEY: pipeline_key}
        state = self._try(lambda: self._find_or_create(identity, name, tags or {}, params or {}))
        return state.run_id if state else None

    def stage_run(
        self,
        parent_id: str | None,
        stage: StageName,
        key: str,
        params: Mapping[str, Any] | None = None,
        *,
        attempt: int = 0,
        tags: Mapping[str, str] | None = None,
        inputs: Mapping[str, ArtifactRef] | None = None,
        pipeline: tuple[str, str] | None = None,
    ) -> StageRun:
        """Find the run of a stage under `parent_id` by its stage key, or create it. Also works if the tracker
        is not available.

        Args:
            parent_id: The run of the pipeline; None if the tracker did not answer when it was created.
            stage: Name of the stage.
            key: The stage key.
            params: Parameters to log.
            attempt: Number of the attempt; data that earlier attempts could not send is sent with this one's.
            tags: Further tags.
            inputs: Artifacts that the stage reads; the data artifact is logged as the data set of the run.
            pipeline: Key and name of the pipeline, to find or create the parent run if `parent_id` is None.
        """
        inputs = inputs or {}
        facts = {f"rlhf.input.{name}": f"{ref.key} {ref.digest}" for name, ref in inputs.items()}

        def open_run() -> RunState:
            parent = parent_id
            if parent is None and pipeline is not None:
                parent = self._find_or_create({PIPELINE_KEY: pipeline[0]}, pipeline[1], {}, {}).run_id
            identity = _stage_identity(parent, key)
            about = {STAGE: stage, _DESCRIPTION: f"Stage `{stage}`, key `{key}`.", **facts, **(tags or {})}
            name = _stage_name(stage, pipeline[1] if pipeline else "")
            state = self._find_or_create(identity, name, about, params or {})
            if (data := inputs.get("data")) is not None:
                self.mlflow.log_datasets(state.run_id, [_artifact(data)], STAGES[stage].data_context)
            return state

        spool = Spool(self._spool_folder(stage, key), attempt)
        return StageRun(
            self.mlflow,
            open_run,
            spool,
            uri=self.uri,
            system=self.system_metrics,
            pauses=self.pauses,
            copies=self.copies and self.copies(f"{stage}-{key}"),
        )

    def link_reused(
        self, parent_id: str | None, stage: StageName, ref: ArtifactRef, pipeline: str = ""
    ) -> None:
        """Add a short run for a reused stage, with its headline metrics and a link to the run that made it.

        Nothing is added if the stage ran, or was linked, under this parent before. Data that its run could
        not send then is sent now. `pipeline` is the name of the pipeline.
        """
        if parent_id is None:
            return
        spool = self._spool_folder(stage, ref.key)
        if spool.exists():
            self.stage_run(parent_id, stage, ref.key, attempt=next_attempt(spool)).finish("FINISHED")
        self._try(lambda: self._link(parent_id, stage, ref, pipeline))

    def wait(self, seconds: float) -> None:
        """Wait until the server answers, for at most `seconds`; for the one stage that is useless without it.

        Any answer ends the wait, also a refusal such as 401, which a retry would not change.
        """
        if not self.mlflow.uri.startswith("http"):
            return
        retrying = Retrying(
            retry=retry_if_exception(_is_temporary),
            wait=wait_fixed(self.pauses.wait),
            stop=stop_before_delay(seconds),
        )
        # The caller's own request reports the problem.
        if error := attempt(lambda: retrying(self.mlflow.ping)).exception():
            log.debug("MLflow does not answer", exc_info=error)

    def is_missing(self, model: str, weights_sha256: str) -> bool:
        """Return whether MLflow answers and has no version of `model` with these weights."""
        return self._try(lambda: has_version(self.mlflow, model, weights_sha256)) is False

    def why_outdated(self, model: str, facts: Mapping[str, str]) -> str:
        """Return why a registration is not true any more (`registry.why_outdated`); empty if MLflow does not
        answer.
        """
        return self._try(lambda: why_outdated(self.mlflow, model, facts)) or ""

    def log_results(self, pipeline_key: str, metrics: Mapping[str, float]) -> None:
        """Log metrics of a finished pipeline on its own run. Those of a later command replace them."""

        def log_all() -> None:
            state = self.mlflow.find_run({PIPELINE_KEY: pipeline_key})
            if state is not None:
                # Of several values of a step, MLflow shows the one with the last time.
                now = int(time.time() * 1000)
                points = [Point(clean_name(name), value, 0, now) for name, value in metrics.items()]
                self.mlflow.log_points(state.run_id, points)

        self._try(log_all)

    def has_results(self, pipeline_key: str, names: Iterable[str]) -> bool:
        """Return whether MLflow answers and the run of a pipeline has all these metrics."""

        def has_all() -> bool:
            state = self.mlflow.find_run({PIPELINE_KEY: pipeline_key})
            return state is not None and {clean_name(name) for name in names} <= state.last_steps.keys()

        return self._try(has_all) is True

    def log_file(self, run_id: str | None, path: Path) -> None:
        """Log a local file as an artifact of a run, replacing one of the same name."""
        if run_id is not None:
            self._try(lambda: self.mlflow.log_file(run_id, path, ""))

    def log_datasets(self, run_id: str | None, datasets: Iterable[DataSet]) -> None:
        """Log the external data of a pipeline as inputs of its run."""
        if run_id is not None:
            self._try(lambda: self.mlflow.log_datasets(run_id, datasets, "training"))

    def describe(self, run_id: str | None, text: str) -> None:
        """Set the description of a run."""
        if run_id is not None:
            self._try(lambda: self.mlflow.set_tags(run_id, {_DESCRIPTION: text}))

    def links(self, stages: Mapping[StageName, ArtifactRef], version: tuple[str, str] | None) -> str:
        """Return a paragraph of Markdown with links to the runs of stages, and to a version (model, number).

        Empty if MLflow does not answer.
        """

        def text() -> str:
            shown = []
            if version is not None:
                model, number = version
                shown.append(
                    f"[{model} version {number}](#/models/{quote(model, safe='')}/versions/{number})"
                )
            for stage, ref in stages.items():
                if ref.mlflow_run_id is not None:
                    shown.append(self._link_to_run(ref.mlflow_run_id, stage))
            return f"Pages: {', '.join(shown)}" if shown else ""

        return self._try(text) or ""

    def finish(self, run_id: str | None, status: Status, *, reused: bool = False) -> None:
        """End a run. With `reused`, the run keeps its earlier end time, because no stage ran."""
        if status == "KILLED":
            # The command was asked to end: Ctrl-C must not wait for a tracker that does not answer.
            shorten_timeouts()
        if run_id is not None:
            self._try(lambda: self.mlflow.terminate(run_id, status, keep_end=reused))

    def finish_stage(self, parent_id: str | None, key: str, status: Status) -> None:
        """End the run of a stage whose process is gone, if it is still RUNNING."""
        if status == "KILLED":
            shorten_timeouts()

        def end() -> None:
            state = self.mlflow.find_run(_stage_identity(parent_id, key))
            if state is not None and state.running:
                self.mlflow.terminate(state.run_id, status)

        self._try(end)

    def set_tags(self, run_id: str | None, tags: Mapping[str, str]) -> None:
        """Set or change tags of a run."""
        if run_id is not None:
            self._try(lambda: self.mlflow.set_tags(run_id, tags))

    def remove_tags(self, run_id: str | None, prefix: str) -> None:
        """Remove tags of an earlier attempt."""
        if run_id is not None:
            self._try(lambda: self.mlflow.remove_tags(run_id, prefix))

    def url(self, run_id: str | None, artifact: str = "") -> str:
        """Return a link to a server's page of a run or of one of its artifacts, or the command that shows a
        database.
        """
        if urlsplit(self.mlflow.uri).scheme in ("http", "https"):
            base = self.uri.rstrip("/")
            experiment = self._try(lambda: self.mlflow.experiment_id) if run_id else None
            return f"{base}/{_page(experiment, run_id, artifact)}" if experiment else base
        return ui_command(self.uri)

    def runs_url(self) -> str | None:
        """Return a link to the list of runs with the columns of the main metrics; None if MLflow does not
        answer. For a database it is that of the server which the command of `url` starts.
        """
        is_server = urlsplit(self.mlflow.uri).scheme in ("http", "https")
        base = self.uri.rstrip("/") if is_server else "http://127.0.0.1:5000"
        experiment = self._try(lambda: self.mlflow.experiment_id)
        if experiment is None:
            return None
        return f"{base}/#/experiments/{experiment}/runs?{MACHINE_LEARNING}&viewStateShareKey={COLUMNS_KEY}"

    def _spool_folder(self, stage: str, key: str) -> Path:
        return self.spool / f"{stage}-{key}"

    def _find_or_create(
        self, identity: Mapping[str, str], name: str, tags: Mapping[str, str], params: Mapping[str, Any]
    ) -> RunState:
        text = {**tags, **identity}
        state = self.mlflow.find_run(identity)
        if state is None:
            state = self._create_once(identity, name, text)
        else:
            self.mlflow.reopen(state.run_id)
            # Tags of the original run and later additions are kept.
            self.mlflow.set_tags(
                state.run_id,
                {tag: value for tag, value in text.items() if tag not in (_DESCRIPTION, "mlflow.user")},
            )
        # A kill after the creation leaves a run without parameters, so they are completed on every opening.
        known = state.params
        missing = {}
        for name, value in params.items():
            if value is not None and clean_name(name) not in known:
                missing[name] = value
        self.mlflow.log_params(state.run_id, missing)
        return state

    def _create_once(self, identity: Mapping[str, str], name: str, tags: Mapping[str, str]) -> RunState:
        """Create a run and return it, or the older one that another process has just created."""
        # MLflow has no unique tags, so the search before cannot exclude that two processes create a run each.
        created = self.mlflow.create_run(name, tags)
        oldest = self.mlflow.find_run(identity) or created
        if oldest.run_id != created.run_id:
            self.mlflow.delete_run(created.run_id)
        return oldest

    def _link(self, parent_id: str, stage: StageName, ref: ArtifactRef, pipeline: str) -> None:
        if self.mlflow.find_run(_stage_identity(parent_id, ref.key)) is not None:
            return
        tags = {
            **_stage_identity(parent_id, ref.key),
            STAGE: stage,
            "rlhf.reused": "true",
            "rlhf.artifact": ref.uri,
            "rlhf.artifact_digest": ref.digest,
        }
        if ref.mlflow_run_id is not None:
            tags["rlhf.producer_run_id"] = ref.mlflow_run_id
            tags[_DESCRIPTION] = f"Reused from {self._link_to_run(ref.mlflow_run_id)}."
        state = self.mlflow.create_run(f"{_stage_name(stage, pipeline)} (reused)", tags)
        points = [
            Point(clean_name(name), value, 0, state.start + MS_PER_STEP)
            for name, value in ref.metrics.items()
        ]
        self.mlflow.log_points(state.run_id, points)
        self.mlflow.terminate(state.run_id, "FINISHED")

    def _link_to_run(self, run_id: str, text: str = "") -> str:
        # Relative, because the reader may see MLflow under another address than this process.
        return f"[{text or f'run {run_id}'}]({_page(self.mlflow.experiment_id, run_id)})"

    def _try(self, action: Callable[[], _T]) -> _T | None:
        done = attempt(action)
        error = done.exception()
        if error is None:
            return done.result()
        level = logging.DEBUG if self._warned else logging.WARNING
        log.log(level, "MLflow at %s %s; the pipeline continues.", self.uri, describe_failure(error))
        log.debug("MLflow's answer", exc_info=error)
        self._warned = True
        return None


def _stage_name(stage: StageName, pipeline: str) -> str:
    """Return the name of a stage's run: `ppo · demo-seed0-27e993f4`."""
    return f"{stage} · {pipeline}" if pipeline else stage


def _is_temporary(error: BaseException) -> bool:
    # Errors of other libraries, such as a refused connection, have no status.
    status = getattr(error, "get_http_status_code", lambda: 500)()
    return isinstance(error, Exception) and not 400 <= status < 500


def _page(experiment: str, run_id: str | None, artifact: str = "") -> str:
    """Return the path of a run's page in MLflow's view for training; the default view is that for prompts."""
    part = f"/artifacts/{artifact}" if artifact else ""
    return f"#/experiments/{experiment}/runs/{run_id}{part}?{MACHINE_LEARNING}"


def _artifact(data: ArtifactRef) -> DataSet:
    """Return the data artifact as an MLflow data set with its numbers of rows."""
    kind = "s3" if data.uri.startswith("s3://") else "local"
    counts = {name.removeprefix("data/"): value for name, value in data.metrics.items()}
    return DataSet(f"data-{data.key}", data.digest, kind, {"uri": data.uri}, counts)


def origin_tags(source: str, software: Mapping[str, str]) -> dict[str, str]:
    """Return tags for the user, the `source` file, and the versions of `software`.

    Those of the GPUs' software also have tags of their own, to search by. `git` may end in `-dirty`.
    """
    tags = {
        "mlflow.source.name": source,
        "mlflow.source.type": "LOCAL",
        "rlhf.versions": json.dumps(dict(software)),
    }
    for name in ("cuda", "rocm", "nccl", "gpu_driver"):
        if name in software:
            tags[f"rlhf.{name}"] = software[name]
    with suppress(OSError, KeyError, ImportError):  # the user of a container may have no name
        tags["mlflow.user"] = getpass.getuser()
    git = software.get("git", "")
    if git:
        tags["mlflow.source.git.commit"] = git.removesuffix("-dirty")
        tags["mlflow.source.git.dirty"] = str(git.endswith("-dirty")).lower()
    return tags


def _stage_identity(parent_id: str | None, key: str) -> dict[str, str]:
    return {STAGE_KEY: key, **({PARENT: parent_id} if parent_id is not None else {})}


def public_uri(uri: str) -> str:
    """Return the address without user, query and fragment, which may be secret. The path of a file is not
    changed.
    """
    if uri.startswith("sqlite:"):
        return uri
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
