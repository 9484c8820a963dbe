"""When a retraining is due: new data, enough rows, enough time since the last one.

A check lists the inputs without reading large files: files with sizes and times, objects with their ETags,
commits of hub names, and for references the versions with their digests. The contents are read only if this
list differs from that of the last finished retraining, and from the last list for which they were read.

The state (digests of these lists, numbers of rows, the time of the last start) is a tag of the registered
model. The store shows whether the pipeline has finished for the present contents. It therefore does not
matter on which machine it ran. While MLflow does not answer, no retraining is due.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import is_enabled, pipeline_key
from rlhf_core.config.redact import scrubbed
from rlhf_core.data.sources import count_rows, pinned
from rlhf_core.pipeline import LAST_STAGE, STAGES, StageName
from rlhf_core.run.external_inputs import external_marks
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.run.references import kept_versions, reference_marks, resolve
from rlhf_core.tracking.mlflow_client import describe_failure
from rlhf_core.tracking.tracker import open_tracking
from rlhf_core.types import ArtifactRef

log = logging.getLogger(__name__)

_STATE = "rlhf.retraining."
"""Prefix of the tag of the registered model with the state. The key of the settings follows."""


@dataclass(frozen=True)
class RetrainingState:
    """What is known about the last retraining with the same settings. The field names are in stored tags."""

    marks: str = ""
    """Digest of the list of inputs of the last retraining that finished."""
    weights: str = ""
    """Digest of the weights that it registered."""
    rows: int | None = None
    """Rows of its sources; None if they were not counted."""
    started: float = 0.0
    """Start of the last retraining, finished or not, in seconds since 1970. If another program ran it, the
    time of the check that found it.
    """
    run: str = ""
    """Id of the flow run that began it; empty if it has finished."""
    read: str = ""
    """`Retraining._observed` of the last check that read the contents and found no finished retraining."""
    read_rows: int = 0
    """Rows of the sources at that check."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of the digests of the inputs' marks, at the last retraining that finished."""


@dataclass(frozen=True)
class RetrainingDecision:
    """Whether a retraining is due."""

    due: bool
    name: str
    """`Unchanged`, `Waiting` or `Due`."""
    message: str


class Retraining:
    """The retraining of one configuration: whether it is due, and its start and end."""

    def __init__(self, config: PipelineConfig, run: str = "", clock: Callable[[], float] = time.time) -> None:
        """List the inputs, and read the state.

        Args:
            config: The configuration, with references.
            run: Id of the flow run, which continues its own retraining.
            clock: Returns the time in seconds since 1970.
        """
        self._clock = clock
        self._given = config
        self._kept: Mapping[str, str] = {}
        """The versions of an unfinished run, which the retraining will continue."""
        self._run = run
        self._model = config.registered_model
        # With a key of the settings, because two deployments can train the same registered model differently.
        self._tag = _STATE + pipeline_key(config, {})
        self._tracking = open_tracking(config)
        self._failure = ""
        self._marks = self._observed = ""
        self._state, versions = self._read()
        if self._failure:  # without MLflow, `champion:NAME` stands for nothing
            return
        # Before the marks are taken: they and the data that are read later are then of the same commits.
        self._given = pinned(config)
        self._kept = kept_versions(config)
        marks = external_marks(self._given) | reference_marks(config, self._kept)
        self._marks = hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()
        self._sources = {name: hashlib.sha256(mark.encode()).hexdigest()[:8] for name, mark in marks.items()}
        # A new version may be a retraining by another program, for which the store must be asked again.
        self._observed = f"{self._marks} {versions}"

    @cached_property
    def config(self) -> PipelineConfig:
        """The configuration with the present commits of hub names, and without references: their files are
        verified.
        """
        return resolve(self._given, kept=self._kept).config

    def check(self, *, min_new_rows: int, min_pause_hours: float) -> RetrainingDecision:
        """Return whether a retraining is due.

        Args:
            min_new_rows: Rows that the sources must have more than at the last one that finished.
            min_pause_hours: Hours since the start of the last one.
        """
        if self._failure:
            return RetrainingDecision(False, "Waiting", self._failure)
        if self._state.marks == self._marks and self._is_registered(self._state.weights):
            return RetrainingDecision(False, "Unchanged", "the sources look as after the last retraining")
        interrupted = bool(self._run) and self._state.run == self._run
        hours = (self._clock() - self._state.started) / 3600
        # Negative hours, after the clock was set back, are no reason to wait.
        if not interrupted and 0 <= hours < min_pause_hours:
            return RetrainingDecision(
                False, "Waiting", f"{hours:.1f} hours since the last start, of {min_pause_hours:g}"
            )
        # Contents are read once for each list: checks follow within minutes, and sources are large.
        if self._state.read != self._observed:
            finished = finished_registration(self.config)
            rows = count_rows(self.config)
            if finished is not None and self._is_registered(finished.attributes["weights_sha256"]):
                self._record_finished(finished.attributes["weights_sha256"], rows)
                version = finished.attributes.get("version", "?")
                return RetrainingDecision(
                    False, "Unchanged", f"{self._model} version {version} was made from these inputs"
                )
            self._state = replace(self._state, read=self._observed, read_rows=rows)
        if interrupted:
            return RetrainingDecision(True, "Due", "this flow run began it, and was interrupted")
        new = self._state.read_rows - (self._state.rows or 0)
        if self._state.rows is not None and new < min_new_rows:
            # Kept, so that the next check does not read the contents again.
            self._write()
            return RetrainingDecision(False, "Waiting", f"{new} new rows, of {min_new_rows} that are needed")
        if not self._state.marks:
            return RetrainingDecision(True, "Due", "no retraining with these settings has finished yet")
        if self._state.marks == self._marks:
            return RetrainingDecision(True, "Due", "MLflow has no version of the last retraining any more")
        more = "" if self._state.rows is None else f" ({new:+d} rows)"
        what = "the sources have changed"
        if known := self._state.sources.items():  # an earlier release wrote none
            what += f": {', '.join(sorted(dict(known ^ self._sources.items())))}"
        return RetrainingDecision(True, "Due", what + more)

    def record_start(self) -> bool:
        """Record the start of a retraining. Return whether MLflow has recorded it.

        Otherwise the retraining must not start: the next check would start it again without a pause.
        """
        self._state = replace(self._state, started=self._clock(), run=self._run)
        return self._write()

    def record_end(self, weights: str) -> None:
        """Record the end of a retraining that registered these weights."""
        rows = self._state.read_rows if self._state.read == self._observed else self._state.rows
        self._finish(weights, rows)

    def _record_finished(self, weights: str, rows: int) -> None:
        """Record a finished retraining for the present contents, which another program may have run."""
        if weights != self._state.weights:
            self._state = replace(self._state, started=self._clock())
        self._finish(weights, rows)

    def _finish(self, weights: str, rows: int | None) -> None:
        done = replace(self._state, marks=self._marks, sources=self._sources)
        self._state = replace(done, weights=weights, rows=rows, run="")
        self._write()

    def _is_registered(self, weights: str) -> bool:
        return bool(weights) and not self._tracking.is_missing(self._model, weights)

    def _read(self) -> tuple[RetrainingState, int]:
        """Return the state and the number of versions. Without an answer of MLflow, set `_failure`."""
        mlflow = self._tracking.mlflow
        try:
            tags = mlflow.model_tags(self._model) or {}
            versions = len(mlflow.versions(self._model))
        except Exception as error:  # of MLflow's client
            # It becomes the message of a flow run, and an address can have a password.
            self._failure = scrubbed(f"MLflow at {mlflow.uri} {describe_failure(error)}")
            return RetrainingState(), 0
        try:
            return RetrainingState(**json.loads(tags.get(self._tag, "{}"))), versions
        except (ValueError, TypeError) as error:  # a tag that was edited by hand
            log.warning("the state of the last retraining cannot be read (%s)", type(error).__name__)
            return RetrainingState(), versions

    def _write(self) -> bool:
        """Return whether MLflow has stored the state."""
        try:
            # Before the first registration there is no registered model that a tag could be put on.
            self._tracking.mlflow.ensure_model(self._model, "")
            self._tracking.mlflow.tag_model(self._model, {self._tag: json.dumps(asdict(self._state))})
        except Exception as error:  # of MLflow's client: the next check reads the contents again
            log.warning("the state of the retraining cannot be written (%s)", type(error).__name__)
            return False
        return True


def finished_registration(config: PipelineConfig) -> ArtifactRef | None:
    """Return the artifact of stage `register` if the store has all stages for the present inputs."""
    # Not `open_run`: only the keys and the store are needed, and no run may begin.
    run = PipelineRun(config, "")
    artifacts: dict[StageName, ArtifactRef] = {}
    for stage in STAGES:
        if not is_enabled(config, stage):
            continue
        ref = run.artifacts.find(stage, run.spec(stage, artifacts).key)
        if ref is None:
            return None
        artifacts[stage] = ref
    return artifacts[LAST_STAGE]
