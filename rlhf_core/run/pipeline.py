"""One execution of the pipeline: its configuration, its folder, its MLflow run, and what each stage gave.

Typing the same command again finds the same folder and the same MLflow run, because both are named by the key
of the pipeline: a hash of everything that decides its result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import parse_address
from rlhf_core.config.data import Source
from rlhf_core.config.flat import flat
from rlhf_core.config.keys import decisive, is_enabled, pipeline_key, pipeline_name, stage_inputs, stage_key
from rlhf_core.config.redact import scrubbed
from rlhf_core.config.rewards import PythonReward
from rlhf_core.data.sources import pinned, source_digests, source_name
from rlhf_core.errors import InputError, StageHeld, StoreError, Superseded
from rlhf_core.pipeline import STAGES, StageName, stages_between
from rlhf_core.rewards.check import module_file
from rlhf_core.run.home import read_run
from rlhf_core.run.settings import checked_config
from rlhf_core.run.spec import StageSpec
from rlhf_core.run.summary import nothing_made, reuse_sentence, run_markdown, summarize
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.outbox import Outbox
from rlhf_core.storage.store import open_store
from rlhf_core.storage.versions import versions
from rlhf_core.system.files import write_json
from rlhf_core.system.home import Home
from rlhf_core.system.processes import ProcessId, is_alive
from rlhf_core.tracking.tracker import DataSet, Status, Tracking, open_tracking, origin_tags
from rlhf_core.types import ArtifactRef

log = logging.getLogger(__name__)

_CHANGES_TOLD = 3
_LONGEST_TAG = 4500
"""MLflow allows 5000 characters."""


@dataclass(frozen=True)
class StageRecord:
    """What became of one stage in this execution."""

    ref: ArtifactRef
    seconds: float
    reused: bool
    continued: bool = False
    """It went on from a checkpoint of an earlier attempt."""

    @property
    def how(self) -> str:
        """In a word."""
        return "reused" if self.reused else "continued" if self.continued else "ran"


class Pipeline:
    """What the tasks of one flow run share. Everything that crosses into a stage is in `spec`."""

    def __init__(
        self,
        config: PipelineConfig,
        config_path: str,
        start: StageName = "data",
        until: StageName = "register",
    ) -> None:
        self.stages = stages_between(start, until)
        self.config = config
        self.config_path = config_path
        me = ProcessId.of(os.getpid())
        self.started = me.started if me is not None else time.time()
        self.sources = outside_digests(config)
        self.key = pipeline_key(config, self.sources)
        self.home = Home.of(config.run.home)
        self.name = pipeline_name(config, self.key)
        self.folder = self.home.run(self.name)
        self.logs = self.home.run_logs(self.name)
        self.store = open_store(config)
        self.artifacts = ArtifactStore(self.store, self.home.cache)
        self.tracking: Tracking = open_tracking(config)
        self.tags: dict[str, str] = {}
        """Of the MLflow run."""
        self.parent_run_id: str | None = None
        """None until MLflow answers."""
        self.records: dict[StageName, StageRecord] = {}
        self.began: dict[StageName, float] = {}
        """When this run first came to a stage, by the monotonic clock: tries that failed count in its time.
        """
        self._begun: set[StageName] = set()
        """Stages that this run has started."""
        self.making: dict[str, str] = {}
        """`stage` and `log` of what is being made."""

    def ensure_parent(self) -> None:
        """Ask MLflow for the run of this pipeline, if it has not answered yet."""
        if self.parent_run_id is None:
            self.parent_run_id = self.tracking.parent_run(self.key, self.name, self.tags, flat(self.config))
            if "rlhf.warnings" not in self.tags:
                self.tracking.remove_tags(self.parent_run_id, "rlhf.warnings")
            self.tracking.log_datasets(self.parent_run_id, data_sets(self.config, self.sources))

    def wants(self, stage: StageName) -> bool:
        """Whether this run has `stage` at all: `--until` ends it, and no reward model may be asked for."""
        names = list(STAGES)
        return is_enabled(self.config, stage) and names.index(stage) <= names.index(self.stages[-1])

    def spec(self, stage: StageName, inputs: Mapping[StageName, ArtifactRef]) -> StageSpec:
        """What the child process of `stage` is told, key included."""
        inputs = {name: inputs[name] for name in stage_inputs(self.config, stage)}
        digests: dict[str, str] = {name: ref.digest for name, ref in inputs.items()}
        prefixes = STAGES[stage].sources
        sources = {name: digest for name, digest in self.sources.items() if name.startswith(prefixes)}
        key = stage_key(self.config, stage, digests, sources if STAGES[stage].sources_in_key else {})
        return StageSpec(stage, key, self.config, inputs, self.parent_run_id, self.key, sources)

    def find(self, spec: StageSpec) -> ArtifactRef | None:
        """The artifact of this key, if it was ever made.

        Raises InputError if it was not and `--from` forbids to make it.
        """
        found = self.artifacts.find(spec.stage, spec.key)
        if found is not None and spec.stage == "register":
            model = self.config.registered_model
            if self.tracking.forgot(model, found.attributes["weights_sha256"]):
                self.artifacts.invalidate(
                    found, f"The policy was registered once, but MLflow has no such version of {model}."
                )
                found = None
        if found is None and spec.stage not in self.stages:
            raise InputError(
                f"--from {self.stages[0]} needs the artifact of stage {spec.stage} (key {spec.key}), which is not"
                f" in {self.config.store_url}; leave --from out, or give --from {spec.stage}"
            )
        return found

    def tidy(self, spec: StageSpec) -> None:
        """Remove what an attempt left that was killed after it had published: checkpoints, copies for the
        bucket, rollouts, scratch files.
        """
        outbox = Outbox.of(self.store, self.home.outbox)
        checkpoints = CheckpointStore(self.store, spec.key, self.home.cache, self.config.store, outbox=outbox)
        with suppress(StoreError):  # the next run comes by again
            checkpoints.clear()
            if outbox is not None:
                outbox.discard_all(f"artifacts/{spec.stage}/{spec.key}")
        for folder in (spec.rollout_cache, spec.work):
            shutil.rmtree(folder, ignore_errors=True)

    def log_file(self, stage: StageName) -> Path:
        """A new log file for the next attempt at `stage`."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            path = self.logs / f"{stage}-{number:02d}.log"
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                continue
            return path
        raise InputError(f"{self.logs} has 10000 logs of stage {stage}; remove old ones")

    def begin(self, stage: StageName, log_file: Path) -> None:
        """Note that a stage is being made, for `rlhf status`."""
        if (
            stage == "ppo" and stage not in self._begun
        ):  # a retry within this run keeps the tags of earlier attempts
            self.tracking.remove_tags(self.parent_run_id, "rlhf.guard.")
        self._begun.add(stage)
        self.making = {"stage": stage, "log": str(log_file)}
        self.save_state("running")

    def record(self, stage: StageName, record: StageRecord) -> None:
        """Note what became of a stage, also for `rlhf status`."""
        self.records[stage] = record
        self.making = {}
        self.save_state("running")

    def note_guard(self, guard: str, message: str) -> None:
        """Store the message of a PPO guard as a tag of the MLflow run."""
        self.tracking.set_tags(self.parent_run_id, {f"rlhf.guard.{guard}": message})

    def save_state(self, state: str, error: str = "") -> None:
        """Write `run.json`, what `rlhf status` shows, unless another process that lives has written it."""
        known = read_run(self.folder / "run.json")
        if known is not None and known.get("state") == "running" and _lives_elsewhere(known.get("process")):
            return
        stages = {
            name: {"seconds": round(record.seconds, 2), "reused": record.reused, "key": record.ref.key}
            for name, record in self.records.items()
        }
        content = {
            "state": state,
            "error": scrubbed(error),
            "process": [os.getpid(), self.started, socket.gethostname()],
            "config": self.config_path,
            "updated": time.time(),
            "pipeline_key": self.key,
            "decided_by": decisive(self.config, self.sources),
            "mlflow_run_id": self.parent_run_id,
            "stages": stages,
            "making": self.making,
        }
        write_json(self.folder / "run.json", content)

    def left_unfinished(self) -> str:
        """If this run is new: which one of the same configuration file stopped half-way, and in what they
        differ.
        """
        if (self.folder / "run.json").exists():
            return ""
        others = [
            known
            for file in self.home.run_states()
            if (known := read_run(file)) and known.get("config") == self.config_path
        ]
        last = max(others, key=lambda known: known["updated"], default=None)
        if last is None or last["state"] == "finished" or "decided_by" not in last:
            return ""
        if last["state"] == "running" and is_alive(*last.get("process", (0, 0.0, ""))) is not False:
            return ""
        then, now = last["decided_by"], decisive(self.config, self.sources)
        names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        changes = [
            f"{name} was {then.get(name, 'unset')} and is {now.get(name, 'unset')}"
            for name in names[:_CHANGES_TOLD]
        ]
        more = [f"{len(names) - _CHANGES_TOLD} more"] if len(names) > _CHANGES_TOLD else []
        where = f" in {stage}" if (stage := last.get("making", {}).get("stage")) else ""
        return scrubbed(
            f"the last run of {self.config_path} stopped{where}; this one does not continue it, because"
            f" {', '.join([*changes, *more])}. With settings, data and code of then it goes on where it"
            " stopped"
        )

    def where(self, mlflow_run_id: str | None) -> dict[str, str]:
        """Where to look: MLflow's page of a run (or the command that shows it), the report, the logs."""
        places = {"logs": str(self.logs)}
        if mlflow_run_id is not None:
            places["MLflow"] = self.tracking.url(mlflow_run_id)
        if "evaluate" in self.records:
            places["report"] = f"{self.records['evaluate'].ref.uri}/report.html"
        return places

    def results(self) -> dict[str, float]:
        """Headline numbers of all stages, by `stage/name`."""
        return {
            name if name.startswith(f"{stage}/") else f"{stage}/{name}": value
            for stage, record in self.records.items()
            for name, value in record.ref.metrics.items()
        }

    def summary(self) -> dict[str, Any]:
        """The documented content of `summary.json`."""
        identity = {
            "mlflow_run_id": self.parent_run_id,
            "run": self.name,
            "pipeline_key": self.key,
            "where": self.where(self.parent_run_id),
        }
        return summarize(self.records, time.time() - self.started, identity)

    @property
    def summary_file(self) -> Path:
        return self.folder / "summary.json"


_finished: list[Pipeline] = []


def finished() -> Pipeline | None:
    """What this process has brought to its end, also where Prefect could not be told."""
    return _finished[-1] if _finished else None


def _lives_elsewhere(process: Any) -> bool:
    try:
        pid, started, host = process
        return pid != os.getpid() and is_alive(int(pid), float(started), host) is True
    except (TypeError, ValueError):
        return False


@contextmanager
def open_pipeline(
    config: str, overrides: Sequence[str], start: StageName, until: StageName, tags: Mapping[str, str]
) -> Iterator[Pipeline]:
    """Load and check the configuration, open the MLflow run, and close it as what the body made of it.

    Raises InputError, with everything that is wrong, before anything heavy starts.
    """
    logging.getLogger("flows").setLevel(
        logging.INFO
    )  # Prefect shows our lines on a run's page, but leaves the level
    settings, warnings = checked_config(config, overrides, retry_store=True)
    for warning in warnings:
        log.warning("%s", warning)
    run = Pipeline(pinned(settings), config, start, until)
    if differs := run.left_unfinished():
        log.warning("%s", differs)
    if warnings:
        tags = {"rlhf.warnings": "\n".join(warnings)[:_LONGEST_TAG], **tags}
    made_by = versions()
    origin = origin_tags(config, made_by.get("git", ""))
    run.tags = {"rlhf.config": config, "rlhf.versions": json.dumps(made_by), **origin, **tags}
    run.ensure_parent()
    run.save_state("running")
    state: str = "stopped"
    status: Status = "KILLED"
    failure = ""
    reused = False
    followed = False
    """Whether another process goes on with this run."""
    try:
        yield run
        state, status = "finished", "FINISHED"
        run.ensure_parent()
        summary = run.summary()
        write_json(run.summary_file, summary)
        run.tracking.log_results(run.key, run.results())
        reused = nothing_made(summary)
        sentence = reuse_sentence(summary, datetime.now(UTC)) if reused else ""
        run.tracking.describe(run.parent_run_id, run_markdown(summary), sentence)
        _finished.append(run)
    except Exception as error:
        state, status, failure = "failed", "FAILED", f"{type(error).__name__}: {error}"
        followed = isinstance(error, StageHeld | Superseded)
        raise
    finally:
        run.save_state(state, failure)
        if not followed:
            run.tracking.finish(run.parent_run_id, status, reused=reused)


def warm_up(config: PipelineConfig) -> None:
    """Import MLflow and open its database, which takes seconds, while something else starts."""
    tracking = open_tracking(config)
    if tracking.uri.startswith("sqlite:"):
        with suppress(Exception):  # whatever it is, the run itself will say it
            _ = tracking.mlflow.experiment_id


def outside_digests(config: PipelineConfig) -> dict[str, str]:
    """Digests of all that the pipeline reads from outside: data, base model, template, and the Python files
    that rewards come from (not what those import), because a changed reward is another PPO run.
    """
    rewards = {}
    for index, source in enumerate(config.ppo.rewards):
        if isinstance(source, PythonReward):
            file = Path(source.file) if source.file else module_file(source.function.partition(":")[0])
            if file is not None and file.is_file():
                rewards[f"ppo.rewards.{index}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return source_digests(config) | rewards


def data_sets(config: PipelineConfig, digests: Mapping[str, str]) -> list[DataSet]:
    """Return the data sources of `config` as MLflow data sets. `digests` uses the names of `source_digests`."""
    found = []
    for section in ("sft", "preference", "prompts"):
        sources: tuple[Source, ...] = getattr(config.data, section)
        for index, source in enumerate(sources):
            place = f"data.{section}[{index}]"
            kind, address = _address(source)
            # Files have a sha256. The digests of hub data sets and of the demo task are names that can be too
            # long for MLflow.
            digest = (
                digests[place]
                if kind in ("local", "s3")
                else hashlib.sha256(digests[place].encode()).hexdigest()
            )
            found.append(DataSet(f"{place} {source_name(source)}", digest, kind, address))
    return found


def _address(source: Source) -> tuple[str, dict[str, Any]]:
    """Return the type and the address of a source in the format of MLflow's own sources."""
    kind = parse_address(source.path).kind
    if kind == "hub":
        return "hugging_face", {"path": source.path, "split": source.split, "revision": source.revision}
    if kind == "synthetic":
        return "code", {
            "tags": {"mlflow.source.name": "rlhf_core/data/synthetic.py", "mlflow.source.type": "LOCAL"}
        }
    return kind, {"uri": source.path}
