"""Compares the data of a run with those of the champion, before anything is trained on them.

The champion is the version of the registered model with that alias. A process of its own measures
(`drift_measures.py`); this module finds the artifacts and writes the page: `drift.md` in the run's folder and
among the artifacts of its MLflow run.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_core.cluster.connect import on_cluster
from rlhf_core.config.data import DriftConfig
from rlhf_core.data.card import markdown_cell
from rlhf_core.data.tokenizer import tokenizer_digest
from rlhf_core.errors import CorruptArtifact, DataDrifted, GateFailed, StageFailed, StageTimedOut
from rlhf_core.executors.child import log_excerpt
from rlhf_core.executors.spec import stage_environment
from rlhf_core.ops.drift_measures import MIN_NEW_ROWS, Drift, DriftRequest, from_json
from rlhf_core.run.pipeline_run import PipelineRun
from rlhf_core.system.files import write_atomic
from rlhf_core.system.processes import launch, python_module
from rlhf_core.tracking.champions import CHAMPION, registry_errors
from rlhf_core.tracking.mlflow_client import ModelVersion
from rlhf_core.types import ArtifactRef

log = logging.getLogger(__name__)

State = Literal["stop", "warn", "not measured", "ok"]

PAGE, MEASURES = "drift.md", "drift.json"
_MLFLOW_SECONDS = 300.0
"""An MLflow server that is started again has some minutes for it."""


@dataclass(frozen=True)
class Finding:
    """A measure and its limits."""

    drift: Drift
    warn: float | None
    stop: float | None

    @property
    def state(self) -> State:
        """`stop` or `warn` if the value is above that limit. Where the value has an interval, its lower bound
        must be above the limit, so that chance alone is not drift.
        """
        if self.drift.value is None:
            return "not measured"
        value = self.drift.value
        if self.drift.low is not None:
            value = self.drift.low
        if self.stop is not None and value > self.stop:
            return "stop"
        if self.warn is not None and value > self.warn:
            return "warn"
        return "ok"

    @property
    def sentence(self) -> str:
        """The value and its limit, or why there is no value."""
        drift, state = self.drift, self.state
        if drift.value is None:
            return f"{drift.measure} was not measured: {drift.note}"
        value = f"{drift.label} {drift.value:.3g}{_interval(drift)} ({drift.place})"
        if state == "ok":
            return value
        limit = {"stop": self.stop, "warn": self.warn}[state]
        return f"{value}, above drift.{state}.{drift.measure}={limit:g}"


@dataclass(frozen=True)
class DriftReport:
    """The comparison with one champion."""

    champion: str
    """Model and version."""
    findings: list[Finding]
    markdown: str
    page: Path
    """File with the page."""

    def above(self, *states: State) -> list[str]:
        """Return the sentences of the values in these states."""
        return [finding.sentence for finding in self.findings if finding.state in states]

    def raise_stop(self) -> None:
        """Raise DataDrifted if a value is above its limit `stop`."""
        if above := self.above("stop"):
            raise DataDrifted(
                f"drift from the data of {self.champion}: {'; '.join(above)}; check data.sft, data.preference"
                f" and data.prompts, or raise the limit; the page is {self.page} and {PAGE} in the MLflow run"
            )


def compare_with_champion(run: PipelineRun, data: ArtifactRef) -> DriftReport | None:
    """Compare the data of a run with those of the champion, and write the page. Warnings are logged.

    Returns None if there is nothing to compare: no section `drift`, no champion, its data artifact is the
    same one, or the SFT model of the data exists already, so that a run that is continued is not stopped by a
    later champion.

    If the comparison is not possible or fails, this is logged, and None is returned, unless `drift.stop` has
    a limit.

    Raises:
        InfrastructureError: MLflow does not answer, or the comparison failed and `drift.stop` has a limit.
        CorruptArtifact: The champion's data are damaged, and `drift.stop` has a limit.
        GateFailed: The champion's data are not in this store, and `drift.stop` has a limit.
    """
    config = run.config
    if config.drift is None:
        return None
    # A run that was interrupted after SFT must not be stopped by a later champion.
    if run.artifacts.find("sft", run.spec("sft", {"data": data}).key) is not None:
        log.info("drift: not measured, because the SFT model of these data exists already")
        return None
    champion = _champion(run)
    if champion is None:
        log.info("drift: %s has no champion to compare with", config.registered_model)
        return None
    name = f"{config.registered_model} version {champion.version}"
    before = run.artifacts.find_registered("data", champion.tags)
    if before is None:
        problem = f"drift is not measured: the data of {name} are not in this store"
        if config.drift.can_stop:
            raise GateFailed(
                f"{problem} ({config.store.url}), and drift.stop has limits; use the store of its run, or set"
                " drift=null once, until a champion has its data here"
            )
        log.warning("%s", problem)
        return None
    if before.digest == data.digest:
        log.info("drift: the data are those of %s", name)
        return None
    measures = run.folder / MEASURES
    try:
        _measure(run, _request(run, champion, before, data, name, measures))
    except (StageFailed, CorruptArtifact) as error:
        if config.drift.can_stop:
            raise
        log.warning("drift is not measured: %s", error)
        return None
    content = json.loads(measures.read_text(encoding="utf-8"))
    found = findings(from_json(content["measures"]), config.drift)
    report = DriftReport(name, found, drift_markdown(found, name), run.folder / PAGE)
    write_atomic(report.page, report.markdown)
    _publish(run, report)
    run.remarks[f"drift from {name}"] = "; ".join(report.above("warn", "stop")) or "within the limits"
    return report


def _champion(run: PipelineRun) -> ModelVersion | None:
    model = run.config.registered_model
    run.tracking.wait(_MLFLOW_SECONDS)
    mlflow = run.tracking.mlflow
    with registry_errors(mlflow, f"name the champion of {model!r}"):
        # `by_alias` raises an error for a model that does not exist.
        if mlflow.model_tags(model) is None:
            return None
        return mlflow.by_alias(model, CHAMPION)


def _request(
    run: PipelineRun,
    champion: ModelVersion,
    before: ArtifactRef,
    data: ArtifactRef,
    name: str,
    result: Path,
) -> DriftRequest:
    """Return what the process measures. The artifacts are fetched.

    Args:
        run: The run.
        champion: The version.
        before: Its data artifact.
        data: The new data artifact.
        name: Name of the version, for messages.
        result: File for the measures.
    """
    made = run.artifacts.config(before)["data"]
    old, new = run.artifacts.fetch(before), run.artifacts.fetch(data)
    reward = run.artifacts.find_registered("reward", champion.tags)
    # The reward model reads the tokens of the new data.
    same_tokens = tokenizer_digest(old / "tokenizer") == tokenizer_digest(new / "tokenizer")
    note = ""
    drift = run.config.drift
    if drift is not None and drift.limits("agreement") == (None, None):
        note = "drift.warn.agreement and drift.stop.agreement are null"
    elif not run.config.reward.enabled:
        note = "reward.enabled is false"
    elif reward is None or "accuracy" not in reward.metrics:
        note = "this store has no reward model of the champion"
    elif not same_tokens or made["template"] != run.config.data.template:
        note = "the champion has another tokenizer or template"
    elif run.config.run.executor_of("reward") != "local" or on_cluster():
        note = "models run on a cluster, and drift is measured on the host of the flow"
    elif run.artifacts.config(reward)["reward"]["deepspeed"]["zero_stage"] == 3:
        note = "the champion's reward model was trained with ZeRO-3, so one device may be too small for it"
    reward_model, accuracy = None, 0.0
    if not note and reward is not None:
        reward_model = str(run.artifacts.fetch(reward) / "model")
        accuracy = reward.metrics["accuracy"]
    return DriftRequest(
        config=run.config.model_dump(mode="json", by_alias=True),
        champion=name,
        champion_data=str(old),
        data=str(new),
        reward_model=reward_model,
        accuracy=accuracy,
        note=note,
        result=str(result),
    )


def _measure(run: PipelineRun, request: DriftRequest) -> None:
    """Run the comparison in a process of its own, which writes its measures to a file."""
    run.logs.mkdir(parents=True, exist_ok=True)
    log_file, file = run.logs / "drift.log", run.logs / MEASURES
    request.write(file)
    process = launch(
        [*python_module("rlhf_core.ops.drift_measures"), str(file)],
        stage_environment(run.config),
        log_file=log_file,
        # It writes one file, at its end, so that nothing is lost.
        parent_death_signal=signal.SIGKILL,
    )
    try:
        code = process.wait(timeout=run.config.run.stage_timeout)
    except subprocess.TimeoutExpired:
        raise StageTimedOut(
            f"the comparison with the data of {request.champion} is stopped:"
            f" run.stage_timeout={run.config.run.stage_timeout:g} is over; log: {log_file}"
        ) from None
    finally:
        # For an interruption or the end of its time. A process that has ended is not signalled.
        process.kill()
    if code:
        raise StageFailed(
            f"the comparison with the data of {request.champion} ended with exit code {code}; log:"
            f" {log_file}; end of the log: {log_excerpt(log_file)}; if it is the champion's reward model that"
            " cannot be used here, set drift.warn.agreement and drift.stop.agreement to null"
        )


def _publish(run: PipelineRun, report: DriftReport) -> None:
    values = {finding.drift.metric: finding.drift.value for finding in report.findings}
    # Before a limit ends the run: whoever looks at the stopped run in MLflow finds the values and the page.
    run.tracking.log_results(run.key, {name: value for name, value in values.items() if value is not None})
    run.tracking.log_file(run.parent_run_id, report.page)
    for finding in report.findings:
        sentence = f"drift from the data of {report.champion}: {finding.sentence}"
        if finding.state == "warn":
            log.warning("%s; see %s", sentence, report.page)
        elif finding.state == "not measured" and finding.stop is not None:
            log.warning("%s; drift.stop.%s has no effect", sentence, finding.drift.measure)
    if not report.above("stop", "warn"):
        log.info("drift: no measure is above its limit; see %s", report.page)


# -- the page: the measures against their limits, in Markdown --


def findings(drifts: Sequence[Drift], config: DriftConfig) -> list[Finding]:
    """Return each measure with its limits."""
    return [Finding(drift, *config.limits(drift.measure)) for drift in drifts]


def drift_markdown(found: Sequence[Finding], champion: str) -> str:
    """Return the page.

    Args:
        found: All measures.
        champion: Name of the version whose data the new data are compared with.
    """
    states = {finding.state for finding in found}
    verdict = next((state for state in ("stop", "warn") if state in states), "ok")
    lines = [
        f"# Data drift: {verdict}",
        "",
        f"The data of this run, compared with those of {markdown_cell(champion)}.",
        "",
        "| measure | value | where | warns above | stops above | |",
        "|---|---|---|---|---|---|",
    ]
    for finding in found:
        drift = finding.drift
        value = "" if drift.value is None else f"{drift.value:.3f}{_interval(drift)}"
        bounds = f"{_limit(finding.warn)} | {_limit(finding.stop)}"
        lines.append(f"| {drift.label} | {value} | {drift.place} | {bounds} | {finding.state} |")
    lines += [
        "",
        "lengths, sources and vocabulary: Jensen-Shannon divergence in bits, 0 for equal and 1 for"
        " disjoint data. If a tenth of the new data is of a kind that the champion's data do not have, it is"
        " 0.05, for a fifth 0.11, for half 0.31. agreement: loss of a share, which is above a limit if its"
        " whole interval is.",
        "",
        f"of new rows: only the rows that the champion's data do not have, if there are at least"
        f" {MIN_NEW_ROWS} of them in the set, and other rows. The limits are the same.",
    ]
    for finding in found:
        drift = finding.drift
        if drift.note:
            lines += ["", f"{drift.measure} was not measured: {markdown_cell(drift.note)}."]
        if not drift.value:
            continue
        rows = "" if drift.new_rows is None else f", {drift.new_rows} rows"
        lines += ["", f"## {drift.label}, {drift.place}{rows}", ""]
        lines += ["| | champion | new |", "|---|---|---|"]
        for change in drift.changes:
            category = markdown_cell(change.category)
            lines.append(f"| {category} | {change.before:.2%} | {change.after:.2%} |")
    return "\n".join(lines) + "\n"


def _interval(drift: Drift) -> str:
    return "" if drift.low is None else f" [{drift.low:.3f}, {drift.high:.3f}]"


def _limit(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
