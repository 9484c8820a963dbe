"""Bytes that weekly runs leave, by kind, with and without `rlhf prune`: `python -m tests.benchmarks.year`.

Store, registry, MLflow's database and the command are the real ones. Runs are scripted: files of stated sizes
take the place of trainings, and their times are set, so that week 52 is a year after week 1. Every
`CROWNED`th run becomes champion, and every `STOPPED`th one ends before its policy and is never continued.

never       nothing is deleted
--older-than 30d                      only weights
--older-than 30d --also KIND=90d ...  also all other kinds, in every `--every`th week
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from typing_extensions import override

from rlhf_core.ops.prune import DAY, Pruning
from rlhf_core.ops.retention import KINDS
from rlhf_core.pipeline import StageName
from rlhf_core.storage import bundles
from rlhf_core.storage.bundles import bytes_below
from rlhf_core.storage.store import Store
from rlhf_core.system.home import Home
from rlhf_core.tracking.mlflow_client import Mlflow, Point
from rlhf_core.tracking.tracker import PARENT, PIPELINE_KEY, STAGE, STAGE_KEY
from rlhf_core.types import ArtifactRef, artifact_prefix
from tests.support.old_runs import INPUTS, WITH_WEIGHTS, OldRuns

WEIGHTS, DATA, EVALUATION, LOG, SUMMARY, PAGE = 200_000, 60_000, 90_000, 20_000, 30_000, 30_000
"""Bytes of the files of a run. A demo has ten times as much of weights and data."""
CROWNED, STOPPED = 6, 10
SHOWN = 4
"""Times of the year at which the bytes are shown."""
POLICIES: Mapping[str, tuple[float, Mapping[str, float]] | None] = {
    "never": None,
    "--older-than 30d": (30 * DAY, {}),
    "--older-than 30d, --also all kinds 90d": (30 * DAY, dict.fromkeys(KINDS, 90 * DAY)),
}


class Year(OldRuns):
    """Runs of one week after another in a new home."""

    def __init__(self, folder: Path, points: int) -> None:
        self.home = Home.of(folder / "home").make()
        self.mlflow = Mlflow(f"sqlite:///{self.home.mlflow_database}", "year")
        super().__init__(Store(self.home.store), folder / "work", self.mlflow)
        self._points = points
        self._begun = time.time()
        self.now = self._begun

    @override
    def publish(self, run: str, stage: StageName, *more: Any, **options: Any) -> ArtifactRef:
        ref = super().publish(run, stage, *more, **options)
        prefix = artifact_prefix(stage, ref.key)
        manifest = bundles.read(self.store, prefix)
        assert manifest is not None
        created = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(self.now))
        changed = replace(manifest, body={**manifest.body, "created": created})
        self.store.put_bytes(f"{prefix}/{bundles.MANIFEST}", bundles.encode(changed))
        return ref

    @override
    def fill(self, run: str, stage: StageName, folder: Path) -> None:
        size = DATA if stage == "data" else EVALUATION
        name = "rows.parquet"
        if stage in WITH_WEIGHTS:
            size, name = WEIGHTS, "model.safetensors"
        content = f"{run} {stage} ".encode()
        (folder / name).write_bytes(content * (size // len(content)))

    def week(self, number: int) -> None:
        """Make the run of a week."""
        self.now = self._begun + number * 7 * DAY
        name = f"week-{number}"
        is_stopped = number % STOPPED == STOPPED - 1
        made: dict[StageName, ArtifactRef] = {}
        if is_stopped:
            for stage in ("data", "sft"):
                made[stage] = self.publish(name, stage, {each: made[each] for each in INPUTS[stage]})
        else:
            made = self.run(name)
        self._leave(name, made, "failed" if is_stopped else "finished")
        if not is_stopped:
            version = self.register(name, made)
            if number % CROWNED == 0:
                self.crown(version)

    def _leave(self, name: str, made: Mapping[StageName, ArtifactRef], state: str) -> None:
        stages = {stage: {"key": ref.key} for stage, ref in made.items()}
        content = {"state": state, "config": "c.yaml", "updated": self.now, "stages": stages}
        for file, size in ((self.home.run(name) / "summary.json", SUMMARY), (self.log(name), LOG)):
            file.parent.mkdir(parents=True)
            file.write_bytes(b"x" * size)
        (self.home.run(name) / "run.json").write_text(json.dumps(content))
        status = "FINISHED" if state == "finished" else "FAILED"
        pipeline = self._tracked(name, {PIPELINE_KEY: name}, 0, status)
        for stage, ref in made.items():
            tags = {PARENT: pipeline, STAGE: stage, STAGE_KEY: ref.key}
            self._tracked(stage, tags, self._points // len(INPUTS), "FINISHED")

    def log(self, name: str) -> Path:
        return self.home.run_logs(name) / "ppo-01.log"

    def _tracked(self, name: str, tags: Mapping[str, str], points: int, status: str) -> str:
        """Make a run in MLflow, and return its id."""
        client, milliseconds = self.mlflow._client, int(self.now * 1000)
        run = client.create_run(self.mlflow.experiment_id, milliseconds, dict(tags), name)
        run_id: str = run.info.run_id
        self.mlflow.log_params(run_id, {f"param-{number}": number for number in range(74)})
        rows = [Point(f"m{row % 30}", float(row), row // 30, milliseconds) for row in range(points)]
        self.mlflow.log_points(run_id, rows)
        page = self.home.path / "page.html"
        page.write_bytes(b"x" * PAGE)
        self.mlflow.log_file(run_id, page, "")
        page.unlink()
        client.set_terminated(run_id, status, milliseconds)
        return run_id

    def prune(self, age: float, also: Mapping[str, float]) -> None:
        """Delete what `rlhf prune --delete` deletes in this week."""
        command = Pruning(self.store, self.mlflow, self.home, age, also=also, now=lambda: self.now)
        for _ in command.delete(command.plan()):
            pass

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each kind."""
        artifacts, home = self.home.store / "artifacts", self.home
        trained = sum(bytes_below(artifacts / stage) for stage in WITH_WEIGHTS)
        data = bytes_below(artifacts / "data")
        return {
            "trained models": trained,
            "data": data,
            "evaluations": bytes_below(artifacts) - trained - data,
            "claims": bytes_below(home.store / "checkpoints"),
            "MLflow's database": home.mlflow_database.stat().st_size,
            "MLflow's artifacts": bytes_below(home.mlflow_artifacts),
            "runs": bytes_below(home.runs),
            "logs": bytes_below(home.logs),
        }


def measure(policy: str, weeks: int, every: int, points: int) -> list[dict[str, int]]:
    """Return the bytes by kind at `SHOWN` times of a year."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        year = Year(Path(folder), points)
        for week in range(1, weeks + 1):
            year.week(week)
            ages = POLICIES[policy]
            if ages is not None and week % every == 0:
                year.prune(*ages)
            if week % (weeks // SHOWN) == 0:
                found.append(year.sizes())
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one table for each policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weeks", type=int, default=52)
    parser.add_argument("--every", type=int, default=4, help="weeks between two prunes")
    parser.add_argument("--points", type=int, default=900, help="metric rows of a run")
    given = parser.parse_args(arguments)
    console = Console(highlight=False)
    for policy in POLICIES:
        sizes = measure(policy, given.weeks, given.every, given.points)
        table = Table(title=f"{policy}: MB after each {given.weeks // SHOWN} weeks")
        for column in ("kind", *(f"week {(index + 1) * (given.weeks // SHOWN)}" for index in range(SHOWN))):
            table.add_column(column, justify="left" if column == "kind" else "right")
        for kind in sizes[0]:
            table.add_row(kind, *(f"{each[kind] / 1e6:.2f}" for each in sizes))
        table.add_row("all", *(f"{sum(each.values()) / 1e6:.2f}" for each in sizes))
        console.print(table)


if __name__ == "__main__":
    main()
