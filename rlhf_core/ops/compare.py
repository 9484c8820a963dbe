"""`rlhf compare`: what differs between finished runs, and whether their results do.

The first run is what the others are compared with. A difference of results is paired: it is the mean over the
held-out prompts that both runs answered, of the scores that both evaluations have kept, with the interval of
the evaluation. Where they answered mostly different prompts, as with two seeds, it is that of two independent
means. Scores of two reward models are not comparable, so a measure whose digest differs has none.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml

from rlhf_core.config.keys import leaves
from rlhf_core.config.redact import printable
from rlhf_core.data.dataset import load_prompts
from rlhf_core.errors import InputError
from rlhf_core.evaluation.measures import MEASURES
from rlhf_core.evaluation.plots import GOLD, StepMetrics, compared_curves, read_step_metrics, to_image
from rlhf_core.evaluation.report import Plot
from rlhf_core.evaluation.statistics import Interval, difference_of_means
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.ops import tables as shown
from rlhf_core.ops.finished_run import FinishedRun, find_run
from rlhf_core.ops.first_difference import Recording, differing, first_difference
from rlhf_core.pipeline import STAGES, StageName
from rlhf_core.record.reader import RECORD, read_rollouts
from rlhf_core.record.schema import REWARD
from rlhf_core.run.summary import policy_of
from rlhf_core.system.files import read_json
from rlhf_core.types import finite_or_none

if TYPE_CHECKING:
    from rich.console import Console

CURVES = {"score": "objective/scores", "KL": "objective/kl", "length": "rollout/length"}
"""Metrics of the steps of PPO by the names that are shown."""
_GOLD = {"gold": GOLD}
"""Shown as well if all runs have it."""
_SHOWN_STEPS = 10
_VERDICTS = 2
"""Measures in the first line."""
_LINK = re.compile(r"(https?://.+)/#/experiments/(\d+)/")


@dataclass(frozen=True)
class Row:
    """Something that the runs have in common, or that differs."""

    what: str
    values: tuple[Any, ...]
    """Of each run: a value, or a table with `mean`, `low` and `high`; None if it has none."""
    differences: tuple[dict[str, float] | None, ...] = ()
    """`mean`, `low`, `high` and `prompts` of each further run minus the first one; None if they are not
    comparable. It is paired by prompt, or has `other_prompts` of the further run and is not.
    """


@dataclass(frozen=True)
class Comparison:
    """What differs between runs."""

    runs: tuple[str, ...]
    differing: Mapping[str, Sequence[Row]]
    """By kind: `configuration`, `data`, `code` and `versions`."""
    results: Sequence[Row]
    held_out: int
    """Held-out prompts of the first run."""
    curves: Sequence[tuple[int, Mapping[str, Sequence[float | None]]]]
    """Steps of PPO with the values of each run by name, at most ten, evenly spaced. None: not measured."""
    parted: str
    """The first difference of the steps of PPO, in words; empty without common steps."""
    mlflow: str
    """Address of MLflow's page that compares the runs; empty if they are in different servers."""
    histories: Mapping[str, StepMetrics]
    """All metrics of the steps of PPO by run."""
    metrics: Mapping[str, str]
    """Metrics of `curves` by name."""

    @property
    def verdict(self) -> str:
        """Which run is better at what, on one line."""
        first = self.runs[0]
        sentences = []
        for number, name in enumerate(self.runs[1:]):
            found = [(row.what, each) for row in self.results if (each := row.differences[number])]
            if not found:
                sentences.append(f"no measure of {name} is comparable with {first}")
            for what, each in found[:_VERDICTS]:
                claim = f"no difference in {what} between {name} and {first} that the prompts show"
                if each["low"] > 0:
                    claim = f"{name} is better at {what} than {first}"
                elif each["high"] < 0:
                    claim = f"{first} is better at {what} than {name}"
                sentences.append(f"{claim}: {signed(each)} for {name} on {counted(each)} prompts")
        return "; ".join(sentences)

    def to_json(self) -> dict[str, Any]:
        found = asdict(self) | {"verdict": self.verdict}
        del found["histories"], found["metrics"]
        return found


def signed(difference: Mapping[str, float]) -> str:
    """Return a difference with its interval."""
    return f"{difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]"


def counted(difference: Mapping[str, float]) -> str:
    """Return the number of prompts of a difference: one if it is paired, and else one of each run."""
    others = difference.get("other_prompts")
    return f"{difference['prompts']}" if others is None else f"{difference['prompts']} and {others} other"


def compare(names: Sequence[str], home: str, endpoint: str | None = None) -> Comparison:
    """Compare finished runs with the first of them.

    Args:
        names: Names of at least two runs, or paths of their folders or summaries.
        home: Folder of the runs.
        endpoint: URL of an S3-compatible server.

    Raises:
        InputError: There are not two runs, or one does not exist.
        CorruptArtifact: An artifact is damaged or gone.
    """
    if len(names) < 2:
        raise InputError(f"rlhf compare needs at least two runs; got {len(names)}; name another one")
    runs = [_Run(find_run(name, home, endpoint)) for name in names]
    facts = [_facts(run.finished) for run in runs]
    has_gold = all(any(map(isfinite, run.history.column(GOLD))) for run in runs)
    metrics = CURVES | _GOLD if has_gold else CURVES
    curves = [run.curve(metrics.values()) for run in runs]
    found: dict[str, list[Row]] = {}
    for kind in facts[0]:
        if rows := differing(*(each[kind] for each in facts)):
            found[kind] = [Row(*each) for each in rows.items()]
    steps = sorted(set.intersection(*map(set, curves)))
    return Comparison(
        tuple(run.name for run in runs),
        found,
        _results(runs),
        int(runs[0].evaluation.get("prompts", 0)),
        [(step, _values([curve[step] for curve in curves], metrics)) for step in _spaced(steps)],
        _parted(runs, steps[-1]) if steps else "",
        _mlflow_link([run.finished for run in runs]),
        {run.name: run.history for run in runs},
        metrics,
    )


def _facts(run: FinishedRun) -> dict[str, dict[str, Any]]:
    """Return what can differ between runs, by kind and name."""
    folder = run.file.parent
    state = read_json(folder / "run.json") or {}
    config = folder / "config.yaml"
    # That of the run's folder. An artifact that was reused has the configuration of the run that made it.
    settings = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    data, code = {}, {}
    for name, value in state.get("decided_by", {}).items():
        if name.startswith("sources."):
            data[f"content of {name.removeprefix('sources.')}"] = value
        elif name.startswith("schema."):
            code[f"version of the stage {name.removeprefix('schema.')}"] = value
    # A set: a reused artifact has the versions of the run that made it, so that one run can have several.
    versions: dict[str, set[str]] = defaultdict(set)
    for stage in (each for each in STAGES if each in run.stages):
        for name, value in run.stages[stage].get("metrics", {}).items():
            if name.startswith("data/"):
                data[name.removeprefix("data/")] = value
        with suppress(InputError):  # `rlhf prune` has deleted it
            artifacts, ref = run.artifact(stage)
            for name, version in artifacts.origin(ref).versions.items():
                versions[name].add(version)
    in_words = {name: ", ".join(sorted(found)) for name, found in versions.items()}
    code |= {f"digest ({name})": in_words.pop(name, None) for name in ("code", "git")}
    in_words["device"] = state.get("decided_by", {}).get("device")
    # `RecordedProcess` is a list in JSON, and its third field is the host.
    in_words["host"] = state.get("process", [None] * 3)[2]
    fields = {name.removeprefix("."): value for name, value in leaves("", settings)}
    return {"configuration": fields, "data": data, "code": code, "versions": in_words}


class _Run:
    """A run and what its artifacts have."""

    def __init__(self, finished: FinishedRun) -> None:
        self.finished = finished
        self.name = finished.name
        self.policy = policy_of(finished.summary)
        self.folders: dict[StageName, Path] = {}
        for stage in ("ppo", "evaluate"):
            if stage in finished.stages:
                artifacts, ref = finished.artifact(stage)
                # The record of PPO can be large, and is needed only if the runs have common steps.
                self.folders[stage] = artifacts.fetch(ref, weights=False, record=stage == "evaluate")
        self.history = StepMetrics([])
        """Metrics of the steps of PPO."""
        if "ppo" in self.folders:
            self.history = read_step_metrics(self.folders["ppo"] / "metrics.jsonl")
        self.evaluation: Mapping[str, Any] = {}
        """Content of `evaluation.json`."""
        self.scores: Mapping[str, Mapping[str, float]] = {}
        """Mean score of the policy's answers by measure and prompt, as far as they are kept."""
        if "evaluate" in self.folders:
            self.evaluation = json.loads((self.folders["evaluate"] / "evaluation.json").read_bytes())
            self.scores = _scores(self.folders["evaluate"], self.policy, self._digests)

    def curve(self, metrics: Iterable[str]) -> dict[int, tuple[float, ...]]:
        """Return the values of these metrics by step."""
        columns = zip(*map(self.history.column, ("step", *metrics)), strict=True)
        return {int(step): tuple(map(float, values)) for step, *values in columns}

    def interval(self, measure: str, prompts: Sequence[str], values: Sequence[float]) -> Interval:
        """Return the mean of values of held-out prompts, with the interval of the evaluation."""
        intervals = Intervals(self.finished.config("evaluate"), load_prompts(self.finished.data(), "eval"))
        return intervals.mean(measure, values, intervals.groups_of(prompts))

    def judge_digest(self, measure: str) -> str | None:
        """Return what the scores of two runs must share to be comparable; None if this is not known."""
        # All rules of an evaluation have one digest.
        name = "rules" if measure.startswith("rule/") else measure
        return self._digests.get(name)

    @property
    def _digests(self) -> Mapping[str, str]:
        digests: Mapping[str, str] = self.evaluation.get("judge_digests", {})
        return digests

    def results(self) -> dict[str, Any]:
        """Return the headline measures of `summary.json`: numbers, or tables with `mean`, `low`, `high`."""
        summary = self.finished.summary
        evaluation = dict(summary.get("evaluate", {}))
        found = dict(evaluation.pop("policies", {}).get(self.policy, {}))
        for name, by_model in evaluation.items():
            if isinstance(by_model, dict) and self.policy in by_model:
                found[name] = by_model[self.policy]
        if (accuracy := summary.get("reward", {})) and "accuracy" in accuracy:
            parts = {"mean": "", "low": "_low", "high": "_high"}
            found["reward_accuracy"] = {part: accuracy[f"accuracy{end}"] for part, end in parts.items()}
        return found


def _scores(folder: Path, policy: str, measures: Collection[str]) -> dict[str, dict[str, float]]:
    """Read the scores of an evaluation from its record, or without one from its samples.

    `measures` are those that are no single rules, whose names begin with `rule/` as in samples.
    """
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    if (folder / RECORD).is_dir():
        table = read_rollouts(folder)
        names = [name.removeprefix(REWARD) for name in table.column_names if name.startswith(REWARD)]
        columns = {f"{REWARD}{name}": name if name in measures else f"rule/{name}" for name in names}
        rows = table.select(["prompt_id", "model", *columns]).to_pylist()
        answers = [
            (row["prompt_id"], {measure: row[name] for name, measure in columns.items()})
            for row in rows
            if row["model"] == policy
        ]
    else:
        # It has the first `evaluate.samples` prompts only, so that such a comparison is over fewer prompts.
        lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        answers = [(row["prompt_id"], row["scores"][policy]) for row in map(json.loads, lines)]
    for prompt, scores in answers:
        for measure, value in scores.items():
            if value is not None and isfinite(value):
                found[measure][prompt].append(value)
    return {name: {prompt: fmean(v) for prompt, v in of.items()} for name, of in found.items()}


def _differences(first: _Run, second: _Run) -> dict[str, dict[str, float]]:
    """Return `mean`, `low`, `high` of the second run minus the first, and the numbers of prompts."""
    found: dict[str, dict[str, float]] = {}
    for measure, ours in first.scores.items():
        theirs = second.scores.get(measure, {})
        digest = first.judge_digest(measure)
        if not theirs or digest is None or digest != second.judge_digest(measure):
            continue
        common = [prompt for prompt in ours if prompt in theirs]
        # A few common prompts would give a paired interval so wide that it hides what all prompts show.
        if 2 * len(common) >= min(len(ours), len(theirs)):
            values = [theirs[prompt] - ours[prompt] for prompt in common]
            difference = first.interval(measure, common, values)
            counts = {"prompts": len(common)}
        else:
            means = [
                run.interval(measure, list(scores), list(scores.values()))
                for run, scores in ((second, theirs), (first, ours))
            ]
            difference = difference_of_means(*means)
            counts = {"prompts": len(ours), "other_prompts": len(theirs)}
        # The other names are those of `summary.json`.
        name = {"gold": "gold_reward"}.get(measure, measure.replace("rule/", "rules/"))
        found[name] = {**difference.to_json(), **counts}
    return found


def _results(runs: Sequence[_Run]) -> list[Row]:
    """Return the results of all runs, those first that are paired and most trustworthy."""
    differences = [_differences(runs[0], other) for other in runs[1:]]
    by_run = [run.results() for run in runs]
    # The order of `MEASURES` is that of trust.
    names = dict.fromkeys(
        [*MEASURES, *(n for each in differences for n in each), *(n for f in by_run for n in f)]
    )
    rows = []
    for name in names:
        values = tuple(found.get(name) for found in by_run)
        rows.append(Row(name, values, tuple(each.get(name) for each in differences)))
    return [row for row in rows if any(value is not None for value in (*row.values, *row.differences))]


def _spaced(steps: Sequence[int]) -> list[int]:
    count = min(len(steps), _SHOWN_STEPS)
    return [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]


def _values(
    of_runs: Sequence[Sequence[float]], metrics: Iterable[str]
) -> dict[str, tuple[float | None, ...]]:
    by_run = [map(finite_or_none, values) for values in of_runs]
    return dict(zip(metrics, zip(*by_run, strict=True), strict=True))


def _parted(runs: Sequence[_Run], last: int) -> str:
    """Return in words the first difference of each run from the first one, in the steps until `last`."""
    first, *others = (Recording(run.finished.recorded("ppo"), run.name) for run in runs)
    sentences = []
    for other in others:
        found = first_difference(first, other, last)
        what = "no difference" if found is None else f"the first difference is in {found.describe()}"
        sentences.append(f"steps 1 to {last} of {first.name} and {other.name}: {what}")
    return "; ".join(sentences)


def _mlflow_link(runs: Sequence[FinishedRun]) -> str:
    """Return the address of MLflow's page that compares the pipeline runs; empty if there is none."""
    links = [match for run in runs for text in run.summary["where"].values() if (match := _LINK.match(text))]
    # Without an address, MLflow's database is that of the home.
    servers = {run.summary.get("tracking_uri") or run.home.path for run in runs}
    ids = [run.summary.get("mlflow_run_id") for run in runs]
    # One page shows runs of one server only.
    if len(servers) > 1 or None in ids or not links:
        return ""
    experiments = sorted({link[2] for link in links})
    # MLflow's page reads both parameters as JSON.
    lists = (quote(json.dumps(each, separators=(",", ":"))) for each in (ids, experiments))
    command = runs[0].summary["where"].get("MLflow", "")
    running = "" if command.startswith("http") else f" while this runs: {command}"
    return "{}/#/compare-runs?runs={}&experiments={}{}".format(links[0][1], *lists, running)


def tables(found: Comparison) -> dict[str, shown.Table]:
    """Return what is shown, in words, by the title of the table. A run has a letter."""
    letters = [chr(ord("A") + number) for number in range(len(found.runs))]
    differing = []
    for kind, rows in found.differing.items():
        differing += [[kind, row.what, *map(_in_words, row.values)] for row in rows]
    results = []
    for row in found.results:
        minus = ["-" if each is None else f"{signed(each)} on {counted(each)}" for each in row.differences]
        results.append([row.what, *map(_in_words, row.values), *minus])
    curves = []
    for step, values in found.curves:
        cells = [each for of_runs in values.values() for each in of_runs]
        curves.append([str(step), *("-" if each is None else f"{each:.3g}" for each in cells)])
    note = (
        f"Differences are paired by prompt. They are of those of the {found.held_out} held-out prompts of A"
        " that both runs answered and whose scores both have kept. Where they have mostly other prompts, the"
        " difference is that of two independent means. All intervals are over prompts: one seed of each says"
        " nothing about the noise of training."
    )
    columns = [f"{name} {letter}" for name in found.metrics for letter in letters]
    found_tables: dict[str, shown.Table] = {
        "Runs": (["", "run"], list(map(list, zip(letters, found.runs, strict=True))), ""),
        "What differs": (["kind", "what", *letters], differing, ""),
        "Results": (["measure", *letters, *(f"{other} - A" for other in letters[1:])], results, note),
        "PPO": (["step", *columns], curves, found.parted),
    }
    return {title: table for title, table in found_tables.items() if table[1]}


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = "-" if value is None else str(value)
    return text if len(text) <= 50 else f"{text[:12]}..."


def show(found: Comparison, console: Console) -> None:
    """Print the verdict, what differs, the results and the curves."""
    shown.show(found.verdict, tables(found), console)
    if found.mlflow:
        console.print(f"MLflow: {printable(found.mlflow)}", soft_wrap=True, markup=False)


def render(found: Comparison) -> str:
    """Return the comparison as one HTML document without scripts."""
    plots = {}
    if found.curves:
        image = to_image(compared_curves(found.histories, found.metrics))
        plots["PPO"] = Plot("Steps of PPO", found.parted, image)
    return shown.render(
        "comparison", found.runs, found.verdict, tables(found), plots=plots, link=found.mlflow
    )
