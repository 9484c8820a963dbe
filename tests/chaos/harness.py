"""Run, kill, type the same command again, compare with an undisturbed run.

golden    each stage once, alone and undisturbed: its points (failpoints passed) and its outcome are noted,
          and the home folder is copied before it
case      such a copy; `rlhf run --until STAGE` with kills, again until it ends well
outcome   what the stage made: files by sha256, the record of rollouts by its rows, metrics in the artifact
          and in MLflow, each value and how often; not what is measured in seconds
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.config.keys import is_enabled
from rlhf_core.config.load import load_config
from rlhf_core.pipeline import StageName, stages_between
from rlhf_core.record.reader import RECORD, read_rollouts
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.bundles import is_record
from rlhf_core.storage.store import Store

CONFIG = Path(__file__).parents[1] / "assets" / "tiny.yaml"
STAGES: tuple[StageName, ...] = ("data", "sft", "reward", "ppo", "evaluate", "register")
"""Those of this configuration."""
TRACE = "RLHF_FAIL_TRACE"
MEASURED_IN_SECONDS = (
    "seconds", "per_s", "timing/", "system/", "gpu/", "sync/gb", "sync/share",
    "stage/", "utilisation/", "rollout/token_latency", "rollout/decode_steps", "rollout/engine_balance",
)  # fmt: skip
COMMANDS = 12
"""How often the command is typed at most."""
PROBLEMS_END_WITH = (3, 130, 143, -signal.SIGKILL)
"""Exit codes after which the user types the command again."""

Outcome = dict[str, Any]


@dataclass(frozen=True)
class Pass:
    """A process came by a failpoint."""

    time: float
    pid: int
    point: str
    started: float = 0.0
    """When the process started."""


@dataclass(frozen=True)
class Case:
    """What is done to one stage."""

    stage: StageName
    points: tuple[str, ...] = ()
    """`point:nth:kill`, or another action of `failpoints`; each acts once, whichever comes first."""
    random: tuple[float, ...] = ()
    """A process of the run, chosen by chance, is killed after this share of the stage's undisturbed time, and
    another after the next share of it.
    """
    seed: int = 0
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        what = "+".join(self.points) or "random:" + "+".join(f"{share:.2f}" for share in self.random)
        return f"{self.stage}/{what}/{self.seed}"


@dataclass(frozen=True)
class Kill:
    """One kill that took place."""

    what: str
    """The point, or the process chosen by chance."""
    recovery: float
    """Seconds until a process that was started after the kill passed the same point or, if none did, until
    the stage was done.
    """


@dataclass
class Result:
    """What became of a case."""

    case: Case
    ended: bool
    same: bool
    commands: int
    kills: list[Kill] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Processes that were still there 10 s after the end."""
    why: str = ""
    """What differs, or the end of the last command's output."""


class Golden:
    """The undisturbed run below `folder`; made by the first use.

    `overrides` are settings for all its runs, such as `ppo.steps=5`.
    """

    def __init__(
        self,
        folder: Path,
        stages: Sequence[StageName] = STAGES,
        overrides: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.overrides = overrides
        self.points: dict[str, Counter[str]] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.seconds: dict[str, float] = {}
        home = folder / "home"
        config = load_config(CONFIG, overrides)
        for stage in stages_between("data", stages[-1]):
            if not is_enabled(config, stage):
                continue
            if stage in stages:
                (
                    shutil.copytree(home, self.before(stage))
                    if home.exists()
                    else self.before(stage).mkdir(parents=True)
                )
            trace = folder / f"trace-{stage}"
            trace.mkdir(parents=True)
            started = time.monotonic()
            done = _command(home, stage, trace, {}, overrides)
            out, _ = done.communicate(timeout=900)
            assert done.returncode == 0, out[-3000:]
            self.seconds[stage] = time.monotonic() - started
            self.points[stage] = _most_of_a_process(read_passes(trace))
            self.outcomes[stage] = outcome(home, stage)

    def before(self, stage: StageName) -> Path:
        """The home folder as it was before `stage`."""
        return self.folder / f"before-{stage}"


def run_case(golden: Golden, case: Case, folder: Path) -> Result:
    """Do it, and compare."""
    home, trace = folder / "home", folder / "trace"
    shutil.copytree(golden.before(case.stage), home)
    trace.mkdir()
    environment = {"RLHF_FAIL": ",".join(case.points), **dict(case.environment)}
    killer = _Killer(
        trace, [share * golden.seconds[case.stage] for share in case.random], random.Random(case.seed)
    )
    result = Result(case, ended=False, same=False, commands=0)
    while not result.ended and result.commands < COMMANDS:
        result.commands += 1
        process = _command(home, case.stage, trace, environment, golden.overrides)
        out, _ = process.communicate(timeout=900)
        result.ended, result.why = process.returncode == 0, out[-2000:]
        if not result.ended and process.returncode not in PROBLEMS_END_WITH:
            result.why = f"exit code {process.returncode}: {result.why}"
            break
    finished = time.time()
    killer.stop()
    result.left = _left(trace)
    result.kills = _kills(trace, killer.done, finished)
    if result.ended:
        result.why = difference(golden.outcomes[case.stage], outcome(home, case.stage))
        result.same = not result.why
    return result


# -- commands and processes --


def _command(
    home: Path, stage: StageName, trace: Path, environment: Mapping[str, str], overrides: Sequence[str]
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlhf_cli.main", "run", str(CONFIG), f"run.home={home}", *overrides]
    return subprocess.Popen(
        [*command, "--until", stage],
        env={**os.environ, **environment, TRACE: str(trace)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


class _Killer(threading.Thread):
    """Kills processes of a run, chosen by chance: one after each of these waits, in seconds."""

    def __init__(self, trace: Path, waits: Sequence[float], chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._trace, self._waits, self._chance = trace, waits, chance
        self._stopped = threading.Event()
        self.done: list[tuple[float, str]] = []
        """(time, kind of process) of each kill."""
        self.start()

    def stop(self) -> None:
        """No more kills."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        for seconds in self._waits:
            if self._stopped.wait(seconds):
                return
            self._kill()

    def _kill(self) -> None:
        victims = sorted(processes(self._trace))
        while victims:
            pid = victims.pop(self._chance.randrange(len(victims)))
            kind = _kind(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.done.append((time.time(), kind))
                return


def processes(trace: Path) -> Iterator[int]:
    """All that carry the folder `trace` in their environment: the command and what it started."""
    mark = f"{TRACE}={trace}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
        except OSError:
            continue


def _kind(pid: int) -> str:
    """What a process is, by its command line."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"
    known = {
        "rlhf_cli.main": "flow",
        "rlhf_core.run": "stage",
        "ray::EngineActor": "engine",
        "ray::Worker": "worker",
        "ray::": "ray worker",
        "raylet": "raylet",
        "gcs_server": "gcs",
        "spawn_main": "training rank",
    }
    return next((name for part, name in known.items() if part in line), line[:40] or "gone")


def _left(trace: Path, seconds: float = 10.0) -> list[str]:
    deadline = time.monotonic() + seconds
    while (found := list(processes(trace))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [_kind(pid) for pid in found]


# -- what happened --


def read_passes(trace: Path) -> list[Pass]:
    """In the order of time."""
    file = trace / "passes"
    lines = file.read_text().splitlines() if file.exists() else []
    passes = []
    for line in lines:
        at, pid, point, started = line.split()
        passes.append(Pass(float(at), int(pid), point, float(started)))
    return sorted(passes, key=lambda p: p.time)


def _most_of_a_process(passes: Sequence[Pass]) -> Counter[str]:
    by_process: dict[tuple[str, int], int] = defaultdict(int)
    for p in passes:
        by_process[p.point, p.pid] += 1
    most: Counter[str] = Counter()
    for (point, _), count in by_process.items():
        most[point] = max(most[point], count)
    return most


def _kills(trace: Path, by_chance: Sequence[tuple[float, str]], finished: float) -> list[Kill]:
    passes = read_passes(trace)
    found = []
    for marker in trace.glob("*:*:*"):
        at, _ = marker.read_text().split()
        found.append((float(at), marker.name.removesuffix(":kill"), marker.name.split(":")[0]))
    for when, kind in by_chance:
        before = [p.point for p in passes if p.time <= when]
        found.append((when, kind, before[-1] if before else ""))
    kills = []
    for when, what, point in sorted(found):
        # Processes that were not killed pass the point as well: other ranks, engines and frozen models.
        again = [p.time for p in passes if p.started > when and p.point == point]
        kills.append(Kill(what, (again[0] if again else finished) - when))
    return kills


def outcome(home: Path, stage: StageName) -> Outcome:
    """What the stage made, as far as it must not depend on kills."""
    config = load_config(CONFIG, [f"run.home={home}"])
    (key,) = (path.name for path in (home / "store" / "artifacts" / stage).iterdir())
    store = ArtifactStore(Store(config.store_url), cache=home / "cache")
    ref = store.find(stage, key)
    assert ref is not None, f"{stage} has no artifact"
    folder = store.fetch(ref, record=True)
    made: Outcome = {f"metric {name}": value for name, value in ref.metrics.items() if not _in_seconds(name)}
    if (folder / RECORD).exists():
        # Its parts end where the stage was interrupted. As text: NaN is not equal to itself.
        rows = repr(read_rollouts(folder).to_pylist())
        made[RECORD] = hashlib.sha256(rows.encode()).hexdigest()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if is_record(name):
            continue
        if name == "registration.json":
            facts = json.loads(file.read_text())
            made[name] = {k: v for k, v in facts.items() if k not in ("source", "created", "reason", "rule")}
        else:
            made[name] = _digest(file)
    return made | _tracked(home, key)


def _tracked(home: Path, key: str) -> Outcome:
    """Every value of every metric of the stage's MLflow run, and its files, in this home."""
    database = sqlite3.connect(f"file:{home}/mlflow.db?mode=ro", uri=True)
    try:
        rows = database.execute(
            "select m.key, m.step, m.value from metrics m join params p on p.run_uuid = m.run_uuid "
            "where p.key = 'stage_key' and p.value = ? order by m.key, m.step, m.value",
            (key,),
        ).fetchall()
        runs = database.execute(
            "select run_uuid from params where key = 'stage_key' and value = ?", (key,)
        ).fetchall()
    finally:
        database.close()
    values: dict[str, list[Any]] = defaultdict(list)
    for name, step, value in rows:
        if not _in_seconds(name):
            values[f"mlflow {name}"].append((step, value))
    made: Outcome = dict(values)
    for (run,) in runs:
        folder = home / "mlartifacts" / run / "artifacts"
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            made[f"mlflow file {file.relative_to(folder).as_posix()}"] = _digest(file)
    return made


def _digest(file: Path) -> str:
    """The digest of a file; of a figure or report, which has times, that it is there."""
    if file.suffix in (".html", ".png"):
        return "there"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _in_seconds(name: str) -> bool:
    return any(part in name for part in MEASURED_IN_SECONDS)


def difference(expected: Outcome, got: Outcome) -> str:
    """Names of what differs; '' if nothing does."""
    names = sorted(name for name in {*expected, *got} if expected.get(name) != got.get(name))
    return f"differs: {', '.join(names)}" if names else ""
