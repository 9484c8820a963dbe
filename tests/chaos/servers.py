"""Kill processes of `rlhf up` in the middle of PPO, and write a table of the results of the flow runs.

    python -m tests.chaos.servers [--times 10] [--only KIND] [--postgres] [--folder .rlhf/chaos-servers]
    [--table FILE]

Each trial runs PPO of the tiny pipeline as a run of the deployment. When its first checkpoint is committed
(or, for "still pending", as soon as a process has the run), the victims get SIGKILL. If the supervisor is a
victim, `rlhf up` is run again; otherwise nothing is done. The result is compared with that of an undisturbed
run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from rlhf_core.ops.servers.prefect_server import DATABASE_VARIABLES, read_auth_string
from rlhf_core.ops.servers.reconcile import ENGINE_VARIABLE
from rlhf_core.ops.servers.servers import flow_processes
from rlhf_core.system.files import read_json
from rlhf_core.system.home import Home
from rlhf_core.system.processes import ProcessId, processes_with_env
from rlhf_core.system.serving import post
from tests.chaos.harness import CONFIG, TRACE, Golden, difference, outcome, read_passes
from tests.support.postgres import postgres

KINDS = {
    "flow": ("flow",),
    "run still pending": ("flow",),
    "run still pending, and worker": ("worker", "flow"),
    "worker and flow": ("worker", "flow"),
    "server, worker and flow": ("prefect", "worker", "flow"),
    "MLflow server": ("mlflow",),
    "everything, `up` again": ("supervisor", "prefect", "mlflow", "worker", "flow"),
}
"""Kind of kill -> killed processes."""


@dataclass(frozen=True)
class Trial:
    """The result of one flow run."""

    kind: str
    state: str
    """The last state in Prefect."""
    same: bool
    back: float
    """Seconds from the kill until a process had the run again; 0 if it was not killed, -1 if none had it."""
    finished: float
    """Seconds from the kill to the end of the run."""
    attempts: int
    """How often Prefect started the run."""
    why: str = ""


class Servers:
    """The servers of `rlhf up --home`, and requests to them."""

    def __init__(self, home: Path, trace: Path, database: str | None = None) -> None:
        """`database` is the address of Prefect's database, or None for SQLite."""
        self.home = home
        self._environment = {**os.environ, TRACE: str(trace)}
        if database is not None:
            self._environment[DATABASE_VARIABLES[0]] = database
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
            self._environment.pop(name, None)

    def up(self, *options: str) -> str:
        """Type `rlhf up`, and return what it prints."""
        return self._rlhf("up", *options)

    def down(self) -> None:
        self._rlhf("down")

    def _rlhf(self, command: str, *options: str) -> str:
        line = [sys.executable, "-m", "rlhf_cli.main", command, "--home", str(self.home), *options]
        done = subprocess.run(
            line, env=self._environment, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def state(self) -> dict[str, Any]:
        state = read_json(self.home / "servers" / "state.json")
        assert state is not None
        return state

    def ask(self, path: str, body: Mapping[str, Any] | Sequence[Any]) -> Any:
        """Send a POST request with the password to Prefect's API."""
        return post(f"{self.state['prefect']}{path}", body, auth=read_auth_string(Home.of(self.home)))

    def pids(self, victims: Sequence[str]) -> list[int]:
        """Return the pids of the victims: `flow`, `supervisor`, or names of servers."""
        pids = []
        if "flow" in victims:
            pids += [process.pid for process in flow_processes(Home.of(self.home))]
        if "supervisor" in victims:
            pids.append(self.state["pid"])
        return pids + [server["pid"] for name, server in self.state["servers"].items() if name in victims]

    def deployment(self, name: str) -> dict[str, Any]:
        """Return a deployment from Prefect's API."""
        (deployment,) = [d for d in self.ask("/deployments/filter", {}) if d["name"] == name]
        return dict(deployment)

    def deploy(self, *overrides: str, until: str = "ppo") -> str:
        """Start a run of the pipeline and return the id of the flow run."""
        parameters = {
            "config": str(CONFIG),
            "overrides": [f"run.home={self.home}", *overrides],
            "until": until,
        }
        return self.start("full-pipeline", parameters)

    def start(self, name: str, parameters: Mapping[str, Any]) -> str:
        """Start a run of the deployment `name` and return the id of the flow run."""
        deployment = self.deployment(name)
        for _ in range(20):
            try:
                run = self.ask(f"/deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})
                return str(run["id"])
            except HTTPError as error:
                # Its database is busy. Prefect's own client repeats such requests as well.
                if error.code != 503:
                    raise
                time.sleep(1)
        raise AssertionError("Prefect's server has answered with status 503 for 20 s")

    def cancel(self, name: str) -> None:
        """Cancel the run as the button in Prefect's UI does."""
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.ask(f"/flow_runs/{name}/set_state", {"state": state})

    def wait_for_end(self, name: str, seconds: float) -> bool:
        """Return whether the flow run ended within `seconds`."""
        return wait(lambda: (run := self.run(name)) is not None and run["state_type"] in _ENDS, seconds)

    def run(self, name: str) -> dict[str, Any] | None:
        """Return the flow run from Prefect's API, or None if the server does not respond."""
        try:
            (run,) = self.ask("/flow_runs/filter", {"flow_runs": {"id": {"any_": [name]}}})
        except (OSError, ValueError):
            return None
        return dict(run)


def trial(golden: Golden, kind: str, folder: Path, database: str | None) -> Trial:
    """Run one trial in `folder`."""
    home, trace = folder / "home", folder / "trace"
    shutil.copytree(golden.before("ppo"), home)
    trace.mkdir()
    servers = Servers(home, trace, database)
    servers.up()
    try:
        name = servers.deploy()
        if kind.startswith("run still pending"):
            wait(lambda: any(value == name for _, value in processes_with_env(ENGINE_VARIABLE)), 120)
        else:
            wait(lambda: any(p.point == "ppo.after_checkpoint" for p in read_passes(trace)), 400)
        before = (servers.run(name) or {"state_type": "UNKNOWN"})["state_type"]
        victims = servers.pids(KINDS[kind])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        killed = time.time()
        if "supervisor" in KINDS[kind]:
            servers.up()
        gone = {process for process in map(ProcessId.of, victims) if process is not None}
        back = 0.0
        if "flow" in KINDS[kind]:
            resumed = wait(
                lambda: any(v == name and p not in gone for p, v in processes_with_env(ENGINE_VARIABLE)), 200
            )
            back = time.time() - killed if resumed else -1.0
        servers.wait_for_end(name, 400)
        if kind == "MLflow server" and any(file.is_file() for file in (home / "spool").rglob("*")):
            # The run ended before MLflow was back. The next run sends what it kept.
            servers.wait_for_end(servers.deploy(), 400)
        run = servers.run(name) or {"state_type": "UNKNOWN", "run_count": 0}
        finished = time.time() - killed
    finally:
        servers.down()
    ended = run["state_type"] == "COMPLETED"
    why = (
        difference(golden.outcomes["ppo"], outcome(home, "ppo"))
        if ended
        else str(run.get("state", {}).get("message"))
    )
    if before != ("PENDING" if "pending" in kind else "RUNNING"):
        why = f"the run was {before} at the time of the kill, so this is not the intended trial; {why}"
    return Trial(kind, run["state_type"], ended and not why, back, finished, int(run["run_count"]), why)


_ENDS = ("COMPLETED", "FAILED", "CANCELLED")


def wait(ready: Callable[[], bool], seconds: float) -> bool:
    """Return whether `ready` became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            return True
        time.sleep(0.2)
    return False


def table(trials: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table of the trials."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in trials:
        groups[row["kind"]].append(row)
    lines = [
        (
            "| killed in the middle of PPO | times | same run completed | same bits | running again, median |"
            " longest |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for kind in (kind for kind in KINDS if kind in groups):
        group = groups[kind]
        back = [row["back"] for row in group if row["back"] > 0]
        middle = f"{statistics.median(back):.1f} s" if back else "continued"
        longest = f"{max(back):.1f} s" if back else ""
        completed, same = sum(row["state"] == "COMPLETED" for row in group), sum(row["same"] for row in group)
        lines.append(f"| {kind} | {len(group)} | {completed} | {same} | {middle} | {longest} |")
    return "\n".join(lines) + "\n"


def main(given: list[str] | None = None) -> int:
    """Return 0 if every run completed with bit-identical results."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.servers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument(
        "--only", action="append", choices=KINDS, help="this kind of kill; may be given several times"
    )
    parser.add_argument(
        "--postgres", action="store_true", help="use PostgreSQL instead of SQLite for Prefect's server"
    )
    parser.add_argument("--folder", type=Path, default=Path(".rlhf/chaos-servers"))
    parser.add_argument("--table", type=Path, help="write the table to this Markdown file")
    arguments = parser.parse_args(given)
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"

    def trials() -> list[dict[str, Any]]:
        return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []

    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    golden: Golden | None = None
    for number in range(arguments.times):
        for kind in arguments.only or KINDS:
            if sum(row["kind"] == kind for row in trials()) > number:
                continue
            golden = golden or Golden(work, ("data", "sft", "reward", "ppo"))
            with postgres(work / "trial" / "postgres") if arguments.postgres else nullcontext() as database:
                row = asdict(trial(golden, kind, work / "trial", database))
            shutil.rmtree(work / "trial")
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{time.strftime('%H:%M:%S')} {row}", flush=True)
    text = table(trials())
    print(text)
    if arguments.table:
        arguments.table.write_text(text)
    return 0 if all(row["same"] for row in trials()) else 1


if __name__ == "__main__":
    sys.exit(main())
