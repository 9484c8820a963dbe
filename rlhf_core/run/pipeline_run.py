"""One execution of the pipeline: its configuration, its folder, its MLflow run, and what each stage gave.

Typing the same command again finds the same folder and the same MLflow run, because both are named by the key
of the pipeline: a hash of everything that decides its result.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlhf_core.cluster.base_model import copied_base_models
from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import (
    changed,
    given_tracking_uri,
    is_enabled,
    is_made,
    key_content,
    key_fields,
    key_of,
    pipeline_key,
    pipeline_name,
    sources_in_key,
    sources_read,
    stage_inputs,
)
from rlhf_core.config.pipeline import BudgetConfig
from rlhf_core.config.placement import devices_of
from rlhf_core.config.redact import scrubbed
from rlhf_core.config.yaml import dump
from rlhf_core.data.sources import pinned
from rlhf_core.errors import BudgetSpent, InputError, RLHFError, StoreError, Superseded
from rlhf_core.evaluation.measures import titles_of
from rlhf_core.executors.child import NextStage
from rlhf_core.executors.job_files import delete_jobs
from rlhf_core.executors.spec import StageRecord, StageSpec
from rlhf_core.pipeline import FIRST_STAGE, LAST_STAGE, STAGES, StageName, stages_between
from rlhf_core.run.checks import CheckedConfig
from rlhf_core.run.display import current_display
from rlhf_core.run.external_inputs import data_sets, external_digests
from rlhf_core.run.state import describe_unfinished, process_of, read_state
from rlhf_core.run.summary import (
    headline_metrics,
    is_continued_by,
    made_in,
    nothing_made,
    outcome,
    run_markdown,
    summarize,
)
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import open_store
from rlhf_core.storage.versions import versions
from rlhf_core.system.files import read_json, write_atomic, write_json
from rlhf_core.system.home import Home
from rlhf_core.system.processes import RecordedProcess
from rlhf_core.system.waiting import seconds_since_boot
from rlhf_core.tracking.tracker import Status, Tracking, open_tracking, origin_tags
from rlhf_core.types import ArtifactRef, artifact_prefix

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
"""Progress is recorded at most this often."""
_MAX_TAG_LENGTH = 4500
"""MLflow allows 5000 characters."""
_GUARDS = "guards raised"


class PipelineRun:
    """The state of one execution, shared by its stages.

    Everything that a stage's process needs is in `spec`.
    """

    def __init__(
        self,
        config: PipelineConfig,
        config_path: str,
        start: StageName = FIRST_STAGE,
        until: StageName = LAST_STAGE,
        started: float | None = None,
    ) -> None:
        """Compute the key of the run. Nothing is created.

        Args:
            config: The checked configuration.
            config_path: File of the configuration, for messages.
            start: Stages before this one must have been made already.
            until: The last stage.
            started: Seconds since boot from which the run counts; None: the start of this process.
        """
        self.stages = stages_between(start, until)
        self.config = config
        self.config_path = config_path
        self.started = RecordedProcess.own().started if started is None else started
        # Once: a stage refuses what has changed since then, as its key would be wrong.
        self.sources = external_digests(config)
        self.key = pipeline_key(config, self.sources)
        self.name = pipeline_name(config, self.key)
        self.home = Home.of(config.run.home)
        self.store = open_store(config)
        self.artifacts = ArtifactStore(self.store, self.home.cache)
        self.tracking: Tracking = open_tracking(config)
        self.tags: dict[str, str] = {}
        """Tags of the MLflow run."""
        self.parent_run_id: str | None = None
        """The MLflow run; None until MLflow answers."""
        self.records: dict[StageName, StageRecord] = {}
        self.first_started: dict[StageName, float] = {}
        """When this run first came to a stage, by the monotonic clock. Failed attempts count in its time."""
        self.current_stage: dict[str, str] = {}
        """`stage` and `log` of the stage that is being made."""
        self.remarks: dict[str, str] = {}
        """What no artifact has and the report says: the guards that PPO raised in this run, and the drift."""
        self._raised: dict[str, str] = {}
        """Step in which each of these guards was raised first."""
        self._unseen: str | None = None
        """Note about the steps of PPO that an earlier process has made; None: PPO has not begun here."""
        self.next_stage = NextStage()
        self._progress_recorded = -PROGRESS_SECONDS
        """When progress was last recorded, by the monotonic clock."""

    @property
    def folder(self) -> Path:
        return self.home.run(self.name)

    @property
    def logs(self) -> Path:
        return self.home.run_logs(self.name)

    def ensure_parent(self) -> None:
        """Ask MLflow for the run of this pipeline, if it has not answered yet."""
        if self.parent_run_id is None:
            self.parent_run_id = self.tracking.parent_run(
                self.key, self.name, self.tags, changed(self.config)
            )
            # The run in MLflow may be that of an earlier command, which had warnings.
            if "rlhf.warnings" not in self.tags:
                self.tracking.remove_tags(self.parent_run_id, "rlhf.warnings")
            self.tracking.log_datasets(self.parent_run_id, data_sets(self.config, self.sources))
            file = self.folder / "config.yaml"
            write_atomic(file, dump(self.config.model_dump(mode="json", by_alias=True)))
            self.tracking.log_file(self.parent_run_id, file)

    def includes(self, stage: StageName) -> bool:
        """Return whether this run has `stage` (`is_made`)."""
        return is_made(self.config, stage, self.stages[-1])

    def artifact(self, stage: StageName) -> ArtifactRef:
        """Return the artifact of a finished stage.

        Raises InputError if the configuration does not have the stage, or if this run has not made it yet.
        """
        if not is_enabled(self.config, stage):
            raise InputError(f"this configuration has no stage {stage}; set {STAGES[stage].enabled_by}")
        if stage not in self.records:
            raise InputError(f"this run has no artifact of stage {stage}; run the stage first")
        return self.records[stage].ref

    def inputs(self, stage: StageName) -> dict[StageName, ArtifactRef]:
        """Return the artifacts that `stage` reads. Raises InputError if one has not been made yet."""
        return {name: self.artifact(name) for name in stage_inputs(self.config, stage)}

    def spec(self, stage: StageName, inputs: Mapping[StageName, ArtifactRef]) -> StageSpec:
        """Return what the child process of `stage` needs, with the stage's key."""
        inputs = {name: inputs[name] for name in stage_inputs(self.config, stage)}
        # By content and not by key: an input that is made again
        # with the same content leaves this stage as it is.
        digests: dict[str, str] = {name: ref.digest for name, ref in inputs.items()}
        # The stage compares all sources that it reads. The keys of its inputs contain the others.
        prefixes = sources_read(self.config, stage)
        read = {name: digest for name, digest in self.sources.items() if name.startswith(prefixes)}
        content = key_content(self.config, stage, digests, sources_in_key(self.config, stage, read))
        is_job = self.config.run.executor_of(stage) != "local"
        return StageSpec(
            stage,
            key_of(content),
            self.config,
            inputs,
            self.parent_run_id,
            self.key,
            read,
            until=self.stages[-1],
            decided_by=content,
            base_models=copied_base_models(self.config) if is_job else {},
        )

    def find(self, spec: StageSpec) -> ArtifactRef | None:
        """Return the artifact of this key, or None if it must be made.

        A registration that MLflow no longer confirms is marked as invalid and must be made again. Raises
        InputError if an artifact must be made, but this run starts after the stage.
        """
        ref = self.artifacts.find(spec.stage, spec.key)
        if ref is not None and STAGES[spec.stage].registers:
            reason = self.tracking.why_outdated(self.config.registered_model, ref.attributes)
            if reason:
                self.artifacts.invalidate(ref, f"The policy was registered once, but {reason}.")
                ref = None
        if ref is None and spec.stage not in self.stages:
            raise InputError(
                f"the run starts at stage {self.stages[0]} (--from) and needs the artifact of stage"
                f" {spec.stage} (key {spec.key}), which is not in {self.config.store_url};"
                f" start at {spec.stage}"
            )
        return ref

    def remove_leftovers(self, spec: StageSpec) -> None:
        """Remove what an attempt left that was killed after it had published its artifact."""
        outbox = Outbox.of(self.store, self.home.outbox)
        # `clear` does not use the folder for downloads.
        checkpoints = CheckpointStore(self.store, spec.key, self.home.cache, self.config.store, outbox=outbox)
        with suppress(StoreError):  # the next run tries again
            checkpoints.clear()
            if outbox is not None:
                outbox.discard_all(artifact_prefix(spec.stage, spec.key))
            if self.config.run.executor_of(spec.stage) != "local":
                delete_jobs(self.store, spec)
        shutil.rmtree(spec.work, ignore_errors=True)

    def log_file(self, stage: StageName) -> Path:
        """Create and return a log file for the next attempt at `stage`."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            path = self.logs / f"{stage}-{number:02d}.log"
            try:
                # Created at once, so that no other process takes the same number. For this user only, because
                # logs can contain training data.
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                continue
            return path
        raise InputError(f"{self.logs} has 10000 logs of stage {stage}; remove old ones")

    def stage_after(self, stage: StageName) -> StageName | None:
        """Return the stage that this run makes after `stage`, if there is one."""
        later = self.stages[self.stages.index(stage) + 1 :]
        return next((name for name in later if self.includes(name)), None)

    def record_start(self, stage: StageName, log_file: Path) -> None:
        """Record that a stage is being made, for `rlhf status`."""
        if stage == self.current_stage.get("stage"):
            # A retry within this run keeps the tags of earlier attempts, and goes on where they were.
            self.record_resumed(stage, 0)
        elif stage == "ppo":
            # All commands of a pipeline have one run in MLflow, so these tags are of an earlier command.
            self.tracking.remove_tags(self.parent_run_id, "rlhf.guard.")
            self._raised, self._unseen = {}, None
            self._note_guards()
        self.home.progress(self.name).unlink(missing_ok=True)  # of an earlier attempt
        self.current_stage = {"stage": stage, "log": str(log_file)}
        self.save_state("running")

    def record_progress(self, stage: StageName, event: Mapping[str, Any]) -> None:
        """Record a progress event of `stage` with the time left, for `rlhf status`, every few seconds."""
        now = time.monotonic()
        if now - self._progress_recorded >= PROGRESS_SECONDS:
            self._progress_recorded = now
            with suppress(OSError):  # it is only shown
                write_json(self.home.progress(self.name), {**event, "stage": stage, "metrics": None})

    def record_result(self, stage: StageName, record: StageRecord) -> None:
        """Record the outcome of a stage, also for `rlhf status`."""
        self.records[stage] = record
        self.current_stage = {}
        self.save_state("running")
        if stage == "data":  # now, because a later stage can fail
            self.tracking.set_tags(self.parent_run_id, {"rlhf.data": record.ref.digest[:12]})

    def budget_left(self, spec: StageSpec) -> float:
        """Return the seconds that `run.budget` leaves for a stage; infinity without one.

        Raises BudgetSpent if nothing is left.
        """
        budget = self.config.run.budget
        if budget is None:
            return math.inf
        spent = 0.0
        for name, record in self.records.items():
            spent += devices_of(self.config, name) * (made_in(record) or 0.0)
        devices = devices_of(self.config, spec.stage)
        checkpoints = CheckpointStore(self.store, spec.key, self.home.cache, self.config.store)
        # A stage that was interrupted has no record yet. Its checkpoints keep the seconds of its attempts.
        spent += devices * checkpoints.stored_seconds()
        left = (3600 * budget.device_hours - spent) / devices
        if left <= 0:
            raise budget_spent(budget, spec.stage)
        return left

    def record_guard(self, guard: str, message: str) -> None:
        """Record a guard of PPO that was raised, also as the tag `rlhf.guard.{guard}` of the MLflow run."""
        self.tracking.set_tags(self.parent_run_id, {f"rlhf.guard.{guard}": message})
        self._raised.setdefault(guard, message.partition(":")[0])
        self._note_guards()

    def record_resumed(self, stage: StageName, step: int) -> None:
        """Record that the training continues after `step`. In the first attempt of this process, it is not
        known which guards the steps before have raised.
        """
        if stage == "ppo" and self._unseen is None:
            self._unseen = f"; not known up to step {step}" if step else ""
            self._note_guards()

    def _note_guards(self) -> None:
        raised = ", ".join(f"{name} ({step})" for name, step in self._raised.items())
        self.remarks[_GUARDS] = (raised or "none") + (self._unseen or "")

    def runs_elsewhere(self) -> bool:
        """Return whether another process of this host, which is alive, continues this run."""
        state = read_state(self.folder / "run.json")
        if state is None or state["state"] != "running" or "process" not in state:
            return False
        process = process_of(state)
        return process.pid != os.getpid() and process.alive() is True

    def save_state(self, state: str, error: str = "") -> None:
        """Write `run.json`, unless another live process has written it and continues this run."""
        if self.runs_elsewhere():
            return
        stages = {}
        for name, record in self.records.items():
            seconds = round(record.seconds, 2)
            stages[name] = {"seconds": seconds, "reused": record.reused, "key": record.ref.key}
        content = {
            "state": state,
            "error": scrubbed(error),
            "process": RecordedProcess.own(),
            "config": self.config_path,
            "updated": time.time(),
            "pipeline_key": self.key,
            "decided_by": key_fields(self.config, self.sources),
            "mlflow_run_id": self.parent_run_id,
            "stages": stages,
            "making": self.current_stage,
        }
        write_json(self.folder / "run.json", content)

    def unfinished_predecessor(self) -> str:
        """Describe the unfinished run that this one does not continue; see `describe_unfinished`."""
        if (self.folder / "run.json").exists():
            return ""  # This run itself was started before, and continues.
        return describe_unfinished(self.home, self.config_path, key_fields(self.config, self.sources))

    def links(self, mlflow_run_id: str | None) -> dict[str, str]:
        """Return human-readable addresses of the logs, of the MLflow run and of the report."""
        addresses = {"logs": str(self.logs)}
        if mlflow_run_id is not None:
            addresses["MLflow"] = self.tracking.url(mlflow_run_id)
            if (runs := self.tracking.runs_url()) is not None:
                is_served = addresses["MLflow"].startswith("http")
                addresses["all runs" if is_served else "all runs, while that command runs"] = runs
        for stage, record in self.records.items():
            if (report := STAGES[stage].report) is not None:
                addresses["report"] = f"{record.ref.uri}/{report}"
                if addresses.get("MLflow", "").startswith("http") and self.parent_run_id is not None:
                    addresses["report in MLflow"] = self.tracking.url(self.parent_run_id, report)
        return addresses

    def log_outcome(self, summary: Mapping[str, Any]) -> None:
        """Send the reports with the outcome, the description and the main metrics to the MLflow run, unless
        it has them and every stage was reused.
        """
        from rlhf_core.evaluation.report import with_outcome

        metrics = headline_metrics(summary)
        if nothing_made(summary) and self.tracking.has_results(self.key, metrics):
            return
        for stage, record in self.records.items():
            if (report := STAGES[stage].report) is not None:
                try:
                    text = (self.artifacts.fetch(record.ref) / report).read_text(encoding="utf-8")
                    complete = self.folder / report
                    complete.write_text(
                        with_outcome(text, [*outcome(summary), *self.remarks.items()]), encoding="utf-8"
                    )
                    # To MLflow only: the artifact with the report was
                    # complete before `register` decided about the promotion.
                    self.tracking.log_file(self.parent_run_id, complete)
                except (RLHFError, OSError) as error:
                    log.warning("MLflow's run has no %s: %s", report, error)
        self.tracking.describe(self.parent_run_id, self._description(summary))
        self.tracking.log_results(self.key, metrics)  # last, because `has_results` looks for them

    def _description(self, summary: Mapping[str, Any]) -> str:
        registered = summary.get("registration", {})
        version = None
        if "version" in registered:
            version = registered["model"], registered["version"]
        refs = {stage: record.ref for stage, record in self.records.items()}
        return f"{run_markdown(summary)}\n\n{self.tracking.links(refs, version)}"

    def summary(self) -> dict[str, Any]:
        """Return the content of `summary.json`, see `summarize`."""
        given = given_tracking_uri(self.config) is not None
        identity = {
            "mlflow_run_id": self.parent_run_id,
            "tracking_uri": self.tracking.uri if given else None,
            "run": self.name,
            "pipeline_key": self.key,
            "policy": self.config.register_.policy,
            "where": self.links(self.parent_run_id),
        }
        # By the time since boot, in which the kernel has the start of this
        # process: so the imports count, and a change of the clock does not.
        return summarize(self.records, seconds_since_boot() - self.started, identity)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`. That of a longer command with the same artifacts is kept."""
        file = self.folder / "summary.json"
        known = read_json(file)
        if known is None or not is_continued_by(summary, known):
            write_json(file, summary)


def budget_spent(budget: BudgetConfig, stage: StageName) -> BudgetSpent:
    """Return the error of a run whose budget is spent in or before a stage."""
    spent = budget.spoken(budget.device_hours)
    return BudgetSpent(
        f"the budget of the run is spent: {spent}; raise run.budget.device_hours, and stage {stage} continues"
        " from its last checkpoint, if it has one"
    )


@contextmanager
def open_run(
    checked: CheckedConfig,
    start: StageName = FIRST_STAGE,
    until: StageName = LAST_STAGE,
    tags: Mapping[str, str] | None = None,
    started: float | None = None,
) -> Iterator[PipelineRun]:
    """Open the MLflow run of a pipeline, and close it with its summary or its error when the body ends.

    Args:
        checked: The checked configuration.
        start: Stages before this one must have been made already.
        until: The last stage.
        tags: Tags of the MLflow run.
        started: Seconds since boot from which the run counts; None: the start of this process.
    """
    for warning in checked.warnings:
        log.warning("%s", warning)
    # Pinned, so that a push to the hub during the run changes neither keys nor data.
    run = PipelineRun(pinned(checked.config), checked.path, start, until, started)
    predecessor = run.unfinished_predecessor()
    if predecessor:
        log.warning("%s", predecessor)
    run.tags = _tags(checked) | dict(tags or {})
    run.ensure_parent()
    run.save_state("running")
    # These values stay if KeyboardInterrupt or the exception of a signal ends the body.
    state: str = "stopped"
    status: Status = "KILLED"
    failure = ""
    reused = superseded = False
    try:
        with checked.kept.until_finished():
            yield run
            state, status = "finished", "FINISHED"
            run.ensure_parent()
            summary = run.summary()
            run.write_summary(summary)
        reused = nothing_made(summary)
        run.log_outcome(summary)
        current_display().run_finished(summary)
    except Exception as error:
        state, status, failure = "failed", "FAILED", f"{type(error).__name__}: {error}"
        superseded = isinstance(error, Superseded)
        raise
    finally:
        try:
            run.save_state(state, failure)
            # The process that continues may belong to the same MLflow run.
            if not superseded and not run.runs_elsewhere():
                run.tracking.finish(run.parent_run_id, status, reused=reused)
        finally:
            run.next_stage.close()  # last, because it can take seconds


def _tags(checked: CheckedConfig) -> dict[str, str]:
    """Return the tags of the MLflow run that say what made it."""
    tags = {
        "rlhf.config": checked.path,
        "rlhf.algorithm": titles_of(checked.config.ppo.title)[checked.config.register_.policy],
        "rlhf.base_model": checked.config.model.path or "model.tiny",
        "rlhf.seed": str(checked.config.run.seed),
        **checked.reference_tags,
        **origin_tags(checked.path, versions()),
    }
    if checked.warnings:
        tags["rlhf.warnings"] = "\n".join(checked.warnings)[:_MAX_TAG_LENGTH]
    return tags
