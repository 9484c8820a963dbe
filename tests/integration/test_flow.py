"""The command line with real child processes, real store and MLflow, around stages that only count; with a
Prefect server and without one.

- a stage whose process is killed is tried again and continues from its checkpoint; the run ends with its
  summary
- typed again, every stage shows as `Skipped` in Prefect and nothing is made again, in the same MLflow run
- a server that does not answer is a warning; without one, Prefect is not imported
- `run_pipeline` reuses what the command made, and the other way round
- of two of the same command at once, the second waits for the first and reuses what it made
- kill -9 of the flow leaves no process behind, and the same command continues from the checkpoint
- Ctrl-C stops the stage's process, says how to continue and ends with 130; twice, at once; SIGTERM likewise
  with 143
- a secret in the words of a failing stage is in no log and no database afterwards
- Prefect's folder holds no pickle, and its storage nothing
- files of the working folder are neither imported nor taken for settings
- a stage's InputError ends the command with 2, without a second try and without a traceback
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.system.processes import ProcessId, processes_with_env
from tests.support import secret_search
from tests.support.prefect_server import PrefectServer, prefect_server
from tests.unit.test_public_api import WITHOUT_PREFECT

STAGES = '''
import importlib.abc, importlib.machinery, json, os, signal, sys, time
from pathlib import Path

NAMES = {f"rlhf_core.stages.{name}" for name in ("data", "sft")}


class Toys(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in NAMES else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.run = lambda config, context: run(module.__name__.rpartition(".")[2], config, context)


def run(stage, config, context):
    """Counts to `ppo.steps` with a checkpoint each time; `TOY_FAULT` is "stage:step:what", once."""
    from rlhf_core.errors import DataError
    from rlhf_core.types import StageResult

    folder = Path(os.environ["TOY_FOLDER"])
    latest = context.checkpoints.latest()
    start = int((latest[1] / "step").read_text()) if latest else 0
    for step in range(start, config.ppo.steps):
        where, at, what = os.environ.get("TOY_FAULT", "none:0:none").split(":")
        if (where, int(at)) == (stage, step) and not (folder / what).exists():
            (folder / what).write_text(str(os.getpid()))
            if what == "input":
                raise DataError("rows.jsonl:3: no prompt; add one")
            if what == "secret":
                raise OSError(f"403: {os.environ['HF_TOKEN']} may not read http://me:{os.environ['HF_TOKEN']}@host/x")
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "suspend":
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "stubborn":
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            if what in ("hang", "stubborn"):
                time.sleep(600)
        context.metrics.log_metrics({"loss": 1.0 / (step + 1)}, step)
        context.progress(stage, step + 1, config.ppo.steps, "steps")
        checkpoint = context.scratch / str(step)
        checkpoint.mkdir()
        (checkpoint / "step").write_text(str(step + 1))
        context.checkpoints.save(step + 1, checkpoint)
    context.metrics.flush()
    (context.output / "start.json").write_text(json.dumps({"start": start, "inputs": sorted(context.inputs)}))
    return StageResult({"loss": 0.5, "start": start}, {"weights_sha256": "w"})


sys.meta_path.insert(0, Toys())
'''

CANARY = "canary-5b0f3c9a71"
Command = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: making the databases takes longest."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[PrefectServer]:
    with prefect_server(home / "prefect") as server:
        yield server


@pytest.fixture
def command(home: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Command:
    """`rlhf run` of a two-stage pipeline that shares nothing with those of other tests but databases, store
    and, with `served`, Prefect's server.
    """
    toys = tmp_path / "toys"
    toys.mkdir()
    name = re.sub(r"\W+|_", "-", request.node.name)[:40].rstrip("-")
    seed = zlib.crc32(request.node.name.encode()) % 10**6
    (toys / "sitecustomize.py").write_text(STAGES)
    config = tmp_path / "toy.yaml"
    config.write_text(
        f"run: {{name: {name}, seed: {seed}, home: {home}, device: cpu, threads:"
        " 1, prepare_next: false}\nppo: {steps: 4}\ntracking: {system_metrics: false}\n"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))
    }
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(toys), *sys.path]),
        "TOY_FOLDER": str(tmp_path),
        "HF_TOKEN": CANARY,
    }

    def start(
        fault: str = "none:0:none",
        until: str = "sft",
        folder: Path | None = None,
        served: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        used = request.getfixturevalue("server").environment if served else {}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "rlhf_cli.main", "run", str(config), "--until", until],
            cwd=folder,
            env={**environment, **used, **(variables or {}), "TOY_FAULT": fault},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out, err


def summary_of(out: str) -> dict[str, Any]:
    last = out.splitlines()[-1]
    assert last.startswith("summary: ")
    content: dict[str, Any] = json.loads(Path(last.removeprefix("summary: ")).read_text())
    return content


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 120.0) -> ProcessId:
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path.name} was not written"
        time.sleep(0.1)
    found = ProcessId.of(int(path.read_text()))
    assert found is not None
    return found


def nothing_left(folder: Path, seconds: float = 10.0) -> bool:
    """Whether all processes of this test's commands are gone: they carry its folder in their environment."""
    deadline = time.monotonic() + seconds
    while any(value == str(folder) for _, value in processes_with_env("TOY_FOLDER")):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def task_states(home: Path) -> list[str]:
    """State names of the task runs of the latest flow run, as Prefect has them."""
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        (latest,) = database.execute("select id from flow_run order by created desc limit 1").fetchone()
        rows = database.execute(
            "select state_name from task_run where flow_run_id = ? order by start_time", (latest,)
        )
        return [name for (name,) in rows]


def metrics_of(home: Path, run: str) -> list[tuple[str, float]]:
    """All rows of an MLflow run's metrics."""
    with sqlite3.connect(home / "mlflow.db") as database:
        return list(
            database.execute("select key, value from metrics where run_uuid = ? order by key", (run,))
        )


LIBRARY = """
from rlhf_core import load_config, run_pipeline, run_stage

if __name__ == "__main__":
    config = load_config(sys.argv[1])
    stages = run_pipeline(config, until="sft")["stages"]
    assert run_stage(config, "sft").uri == stages["sft"]["artifact"]
    print(json.dumps({name: [stage["how"], stage["artifact"]] for name, stage in stages.items()}))
"""


def test_library_without_prefect_reuses_what_the_command_made(command: Command, tmp_path: Path) -> None:
    made = summary_of(finish(command(until="data"))[0])["stages"]["data"]["artifact"]
    script = tmp_path / "library.py"
    script.write_text(f"{WITHOUT_PREFECT}\nimport json\n{LIBRARY}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "toys"), *sys.path]),
        "TOY_FOLDER": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "toy.yaml")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    stages = json.loads(done.stdout.splitlines()[-1])
    assert stages["data"] == ["reused", made]
    assert stages["sft"][0] == "ran"
    assert all(entry["reused"] for entry in summary_of(finish(command())[0])["stages"].values())


@pytest.mark.parametrize("served", [True, False])
def test_a_killed_stage_continues_and_the_second_run_reuses_all(
    served: bool, command: Command, home: Path, tmp_path: Path
) -> None:
    out, err = finish(command("sft:2:kill", served=served))
    first = summary_of(out)
    assert "trying again from the last checkpoint" in err
    assert {name: entry["reused"] for name, entry in first["stages"].items()} == {"data": False, "sft": False}
    assert first["stages"]["data"]["metrics"]["start"] == 0
    assert first["stages"]["sft"]["metrics"]["start"] == 2
    assert first["weights_sha256"] == "w", "those of the last stage that has weights"
    artifact = Path(first["stages"]["sft"]["artifact"].removeprefix("file://"))
    assert json.loads((artifact / "start.json").read_text()) == {"start": 2, "inputs": ["data"]}
    if served:
        assert task_states(home) == ["Completed", "Completed"]

    logs = sorted((home / "logs").rglob("*-??.log"))
    second = summary_of(finish(command(served=served))[0])
    assert all(entry["reused"] for entry in second["stages"].values())
    assert second["stages"]["sft"]["artifact"] == first["stages"]["sft"]["artifact"]
    assert second["mlflow_run_id"] == first["mlflow_run_id"]
    assert sorted((home / "logs").rglob("*-??.log")) == logs
    if served:
        assert task_states(home) == ["Skipped", "Skipped"]
    # Once, and of these stages there is no other main metric.
    assert [name for name, _ in metrics_of(home, second["mlflow_run_id"])] == ["hours"]
    assert nothing_left(tmp_path)


def test_second_concurrent_run_waits_and_reuses(command: Command, home: Path, tmp_path: Path) -> None:
    first = command("data:2:suspend", until="data")
    stage = wait_for(tmp_path / "suspend", first)
    second = command(until="data")
    assert second.stderr is not None
    waits = next(line for line in second.stderr if "is held by" in line)
    assert f"stage data is held by process {stage.pid} of this machine" in waits
    stage.send(signal.SIGCONT)
    (out, making), (_, waiting) = finish(first), finish(second)
    assert "data: done" in making and "data: reused" in waiting
    run = summary_of(out)["mlflow_run_id"]
    with sqlite3.connect(home / "mlflow.db") as database:
        same_pipeline = "select run_uuid from tags where key = 'mlflow.parentRunId' and value = ?"
        states = database.execute(
            f"select status from runs where run_uuid = ? or run_uuid in ({same_pipeline})",
            (run, run),
        )
        assert list(states) == [("FINISHED",)] * 2
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("served", [True, False])
def test_killed_command_leaves_no_process_and_continues(
    served: bool, command: Command, tmp_path: Path
) -> None:
    process = command("data:3:hang", until="data", served=served)
    stage = wait_for(tmp_path / "hang", process)
    process.kill()
    process.communicate(timeout=10)
    assert nothing_left(tmp_path)
    assert not stage.alive()
    summary = summary_of(finish(command(until="data"))[0])
    assert summary["stages"]["data"]["metrics"]["start"] == 3


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped by SIGTERM")]
)
def test_ctrl_c_and_sigterm_stop_the_stage(
    number: signal.Signals, end: str, served: bool, command: Command, home: Path, tmp_path: Path
) -> None:
    process = command("data:1:hang", until="data", served=served)
    stage = wait_for(tmp_path / "hang", process)
    process.send_signal(number)
    _, err = finish(process, 128 + number)
    assert err.splitlines()[-1] == f"{end}; type the same command again to continue from there"
    assert "Traceback" not in err
    assert not stage.alive()
    assert nothing_left(tmp_path)
    states = [json.loads(file.read_text()) for file in (home / "runs").glob("test-ctrl-c*/run.json")]
    [own] = [state for state in states if state["config"] == str(tmp_path / "toy.yaml")]
    assert own["state"] == "stopped"


def test_a_server_that_does_not_answer_is_a_warning(command: Command, tmp_path: Path) -> None:
    away = {"PREFECT_API_URL": "http://127.0.0.1:9/api", "RLHF_NOTIFY": "slack-webhook/team"}
    _, err = finish(command(until="data", variables=away))
    assert "no Prefect server answers at http://127.0.0.1:9/api: this run is not shown there" in err
    assert "RLHF_NOTIFY: no message is sent" in err
    # With this module, the import of Prefect fails.
    (tmp_path / "toys" / "prefect.py").write_text("raise ImportError('planted')\n")
    _, err = finish(command())
    assert "Prefect" not in err


def test_second_ctrl_c_does_not_wait(command: Command, tmp_path: Path) -> None:
    process = command("data:1:stubborn", until="data")
    stage = wait_for(tmp_path / "stubborn", process)
    time.sleep(0.5)  # between writing the file and turning deaf
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert process.poll() is None and stage.alive(), "the first one leaves the stage its time"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)
    assert not stage.alive()
    assert nothing_left(tmp_path)


def test_secret_in_an_error_message_is_stored_nowhere(command: Command, home: Path) -> None:
    out, err = finish(command("data:2:secret", until="data"))
    assert "403: (hidden) may not read http://(hidden)@host/x; trying again" in err
    assert secret_search.find_secret(CANARY, [home], out, err) == []
    assert secret_search.find_secret("403: (hidden) may not read", [home]) != []


def test_prefect_keeps_no_pickle(command: Command, home: Path) -> None:
    finish(command(until="data", served=True))
    stored = [
        path
        for path in (home / "prefect").rglob("*")
        if path.is_file() and path.suffix not in (".db", ".db-wal", ".db-shm")
    ]
    assert [
        path for path in stored if path.read_bytes()[:1] == b"\x80" or path.suffix in (".pkl", ".pickle")
    ] == []
    assert not any((home / "prefect" / "storage").rglob("*"))


def test_an_input_error_of_a_stage_ends_with_2_and_is_not_tried_again(command: Command, home: Path) -> None:
    out, err = finish(command("data:1:input", until="data"), 2)
    assert err.splitlines()[-1] == "error: rows.jsonl:3: no prompt; add one"
    assert "Traceback" not in err + out
    assert len(list((home / "logs").glob("test-an-input*/data-??.log"))) == 1


EVIL = """
version: 1
disable_existing_loggers: false
formatters: {evil: {(): subprocess.check_output, args: [sh, -c, "echo logging >> RAN"]}}
handlers: {}
loggers: {}
"""


def test_files_of_the_working_folder_are_not_used(command: Command, tmp_path: Path) -> None:
    folder, ran = tmp_path / "folder", tmp_path / "ran"
    folder.mkdir()
    for name in (
        "queue",
        "random",
        "secrets",
        "datasets",
        "uvicorn",
        "prefect",
        "torch",
        "ray",
        "mlflow",
        "flows",
        "rlhf_cli",
        "yaml",
    ):
        (folder / f"{name}.py").write_text(
            f"open({str(ran)!r}, 'a').write('{name} ')\nraise ImportError('planted')\n"
        )
    logging = folder / "evil.yml"
    logging.write_text(EVIL.replace("RAN", str(ran)))
    (folder / ".env").write_text(
        f"PREFECT_LOGGING_CONFIG_PATH={logging}\nPREFECT_API_URL=http://127.0.0.1:9/api\n"
    )
    (folder / "prefect.toml").write_text(f'profiles_path = "none"\n[logging]\nconfig_path = "{logging}"\n')
    (folder / "pyproject.toml").write_text(f'[tool.prefect.logging]\nconfig_path = "{logging}"\n')
    (folder / "matplotlibrc").write_text("text.usetex: True\n")
    for served in (True, False):
        finish(command(until="data", folder=folder, served=served))
    assert not ran.exists(), ran.read_text()
