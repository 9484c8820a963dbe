"""Behaviours of the command line and of what surrounds the processes:

- help is quick and imports nothing heavy; every command has an example
- bad input ends with exit code 2 and one message, a store that does not answer with 3, no traceback, before
  Prefect is imported
- overrides may stand before and after options; a word that is no override is refused
- errors, signals and interruptions become their exit codes
- stages get threads, no telemetry and nothing of Prefect in their environment
- servers: a dead one is started again, later each time, and a silent one is killed; a stale state file is
  recognised; a taken port is avoided
- progress is logged seldom without a terminal, and says what is left
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows import cli, managed, servers, supervisor
from flows.managed import Server
from flows.servers import down, supervisor_of, up
from flows.status import describe
from flows.supervisor import MARK
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import InputError, WorkerDied
from rlhf_core.run.display import Lines
from rlhf_core.run.environment import stage_environment
from rlhf_core.run.home import rotate_logs
from rlhf_core.system.files import write_json
from rlhf_core.system.processes import ProcessId, free_port, stop, wait_gone

DEMO = "deployments/configs/demo.yaml"
HEAVY = ("prefect", "torch", "ray", "mlflow", "vllm", "deepspeed", "transformers")


def rlhf(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter, which tells which heavy modules it imported."""
    script = (
        "import sys\nfrom flows.cli import main\ncode = 1\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as stop:\n    code = stop.code\n"
        f"print('heavy:', [name for name in {HEAVY} if name in sys.modules])\nsys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", ["run", "up", "down", "status"])
def test_each_command_explains_itself_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop_:
        cli.main([command, "--help"])
    assert stop_.value.code == 0
    assert f"example: rlhf {command}" in " ".join(capsys.readouterr().out.split())


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    began = time.monotonic()
    done = rlhf("--help")
    assert done.returncode == 0
    assert "heavy: []" in done.stdout
    assert time.monotonic() - began < 5  # well under 1 s on an idle machine


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", DEMO, "ppo.stepz=3"], ["ppo.stepz", "did you mean"]),
        (["run", DEMO, "ppo.steps=0"], ["ppo.steps"]),
        (["run", "no-such.yaml"], ["no-such.yaml"]),
        (["run", DEMO, "model.path=./no/such/model"], ["./no/such/model"]),
        (["run", DEMO, "--from", "ppo", "--until", "sft"], ["--from ppo comes after --until sft"]),
    ],
)
def test_bad_input_ends_with_2_and_one_message_before_anything_heavy(
    arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    done = rlhf(*arguments, f"run.home={tmp_path}")
    assert done.returncode == 2
    assert all(word in done.stderr for word in words)
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert "heavy: []" in done.stdout


def test_a_store_that_does_not_answer_is_one_message_before_anything_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    store = ["store.url=s3://no-such-bucket/x", "store.endpoint=http://127.0.0.1:9"]
    done = rlhf("run", DEMO, *store, f"run.home={tmp_path}")
    assert done.returncode == 3, "it may be right, and away"
    said, advice = done.stderr.splitlines()[-2:]
    assert said.startswith("failed: store.url='s3://no-such-bucket/x' cannot be used now: ")
    assert said.endswith("correct its address, or wait until it answers")
    assert advice == "type the same command again to continue from there"
    assert "Traceback" not in done.stderr and "canary-secret" not in done.stderr
    assert "heavy: []" in done.stdout


def test_overrides_may_stand_anywhere_after_the_config() -> None:
    arguments = cli._parse(["run", "a.yaml", "x.y=1", "--until", "sft", "z=[1, 2]"])
    assert arguments.overrides == ["x.y=1", "z=[1, 2]"]
    assert arguments.until == "sft"


@pytest.mark.parametrize("extra", [["nonsense"], ["--nosuch"], ["--nosuch=1"]])
def test_a_word_that_is_no_override_is_refused(extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop_:
        cli.main(["run", "a.yaml", "--until", "sft", *extra])
    assert stop_.value.code == 2
    assert extra[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (InputError("data.sft: no rows"), 2, "error: data.sft: no rows"),
        (WorkerDied("engine 0 died"), 3, "same command again"),
        (KeyboardInterrupt(), 130, "same command again"),
        (cli.Stopped(signal.SIGTERM), 143, "SIGTERM"),
        (RuntimeError("odd"), 3, "RuntimeError: odd"),
    ],
)
def test_every_end_has_its_exit_code(
    error: BaseException,
    code: int,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: Any) -> int:
        raise error

    monkeypatch.setattr(cli, "_status", fail)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert cli.main(["status"]) == code
    assert word in capsys.readouterr().err


def test_a_stage_gets_its_threads_and_nothing_of_prefect() -> None:
    config = PipelineConfig.model_validate_json('{"run": {"threads": 3, "device": "cpu"}}')
    child = stage_environment(
        config, {"PATH": "/bin", "PREFECT__FLOW_RUN_ID": "x", "PREFECT_API_URL": "y", "OMP_NUM_THREADS": "9"}
    )
    assert not [name for name in child if name.startswith("PREFECT")]
    assert (child["PATH"], child["OMP_NUM_THREADS"], child["MKL_NUM_THREADS"]) == ("/bin", "3", "3")
    assert (child["DS_ACCELERATOR"], child["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    assert (child["PYTHONHASHSEED"], child["RAY_USAGE_STATS_ENABLED"], child["TOKENIZERS_PARALLELISM"]) == (
        "0",
        "0",
        "false",
    )


def test_zero_threads_means_the_cores_this_process_may_use() -> None:
    child = stage_environment(PipelineConfig(), {})
    assert child["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))


def test_a_dead_server_is_started_again_but_not_at_once_for_ever(tmp_path: Path) -> None:
    server = Server("x", [sys.executable, "-c", "pass"], {}, tmp_path / "x.log")
    server.keep_running()
    pids = set()
    for _ in range(2):
        assert server.process is not None
        pids.add(server.process.pid)
        server.process.wait(timeout=20)
        server.keep_running()
    assert len(pids) == 2
    assert server.restarts == 2
    assert server.process is None  # the second restart waits
    assert server.next_start > time.monotonic() + 1


def test_a_server_that_no_longer_answers_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed, "SILENT_SECONDS", 0.3)
    healthy = [True]
    child = tmp_path / "child"
    command = ["sh", "-c", f"sleep 60 & echo $! > {child}; wait"]  # as MLflow's command starts its server
    server = Server("x", command, {}, tmp_path / "x.log", lambda: healthy[0])
    server.look_after()
    server.keep_running()
    first = server.process
    assert first is not None
    time.sleep(0.4)
    server.look_after()
    assert first.poll() is None
    healthy[0] = False
    server.look_after()
    assert first.poll() is None, "one answer may be late"
    served = ProcessId.of(int(child.read_text()))
    assert served is not None
    time.sleep(0.4)
    server.look_after()
    assert first.returncode == -signal.SIGKILL
    assert wait_gone([served], 5.0), "what it had started would keep the port"
    server.keep_running()
    assert server.process is not None and server.process.pid != first.pid
    server.look_after()
    assert server.process.poll() is None, "a new one has its time as well"
    server.process.kill()
    server.process.wait(timeout=10)


def test_a_port_that_was_taken_after_it_was_chosen_is_noticed(tmp_path: Path) -> None:
    def server(port: int) -> Server:
        return Server(
            "x", [sys.executable, "-m", "http.server", str(port)], {}, tmp_path / "x.log", port=port
        )

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        late = server(other.getsockname()[1])
        late.keep_running()
        assert late.process is not None and not late.lost_its_port()
        late.process.wait(timeout=20)
        late.keep_running()
        assert late.restarts == 1 and late.lost_its_port() and not late.serves()
    well = server(free_port(0))
    well.restarts = 1
    well.keep_running()
    deadline = time.monotonic() + 20
    while not well.serves() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert well.serves() and not well.lost_its_port(), "it has the port itself"
    for each in (late, well):
        if each.process is not None:
            each.process.kill()
            each.process.wait(timeout=10)


def test_servers_whose_port_was_taken_are_started_again_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter((11, 12, 13, 14))
    monkeypatch.setattr(supervisor, "free_port", lambda preferred: next(ports))
    own = supervisor.Supervisor(tmp_path)
    asked = []

    def start() -> None:
        asked.append((own.api, own.environment["PREFECT_API_URL"], own.servers["mlflow"].port))
        if len(asked) == 1:
            raise supervisor.PortTaken("port 11 was taken")
        own.stopping = True

    monkeypatch.setattr(own, "_start", start)
    own.run()
    first, second = ((f"http://127.0.0.1:{port}/api",) * 2 + (port + 1,) for port in (11, 13))
    assert asked == [first, second]


def test_a_worker_is_judged_by_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = supervisor.Supervisor(tmp_path)
    now = datetime.now(UTC)
    workers = [{"last_heartbeat_time": (now - timedelta(days=1)).isoformat()}, {"last_heartbeat_time": None}]
    monkeypatch.setattr(supervisor, "post", lambda url, body, login: workers)
    assert not own._worker_lives()
    workers.append({"last_heartbeat_time": (now - timedelta(seconds=20)).isoformat()})
    assert own._worker_lives()

    def away(url: str, body: Any, login: str) -> Any:
        raise ConnectionRefusedError

    monkeypatch.setattr(supervisor, "post", away)
    assert own._worker_lives(), "that is the server's fault"


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[ProcessId]:
    """A process that carries what the supervisor of `tmp_path` carries, and does nothing."""
    with _carrier(["-P", "-m", "flows.supervisor"], tmp_path) as process:
        yield process


_SLEEP = "import time; print(flush=True); time.sleep(60)"


@contextmanager
def _carrier(arguments: list[str], home: Path) -> Iterator[ProcessId]:
    """Python with these arguments. The modules that it finds do nothing."""
    for name in ("flows/supervisor.py", "prefect/__main__.py"):
        file = home / "modules" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(_SLEEP)
    command = [sys.executable, *arguments]
    environment = {**os.environ, MARK: str(home), "PYTHONPATH": str(home / "modules")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        known = ProcessId.of(process.pid)
        assert known is not None
        try:
            yield known
        finally:
            process.kill()


def state_of(process: ProcessId, **changes: Any) -> dict[str, Any]:
    """What a supervisor with this process writes."""
    texts = {
        "status": "ready",
        "message": "",
        "prefect": "http://127.0.0.1:9/api",
        "mlflow": "http://127.0.0.1:9",
    }
    return {**texts, "pid": process.pid, "started": process.started, "servers": {}, **changes}


def test_a_stale_state_file_is_not_taken_for_a_running_supervisor(
    tmp_path: Path, stand_in: ProcessId
) -> None:
    state = tmp_path / "servers" / "state.json"
    write_json(state, state_of(stand_in))
    assert supervisor_of(tmp_path) == stand_in
    write_json(state, state_of(stand_in, started=stand_in.started - 100))  # the pid was used again
    assert supervisor_of(tmp_path) is None
    state.write_text("{")
    assert supervisor_of(tmp_path) is None


def test_a_state_file_that_names_a_foreign_process_has_nothing_signalled(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as foreign:
        known = ProcessId.of(foreign.pid)
        assert known is not None
        write_json(tmp_path / "servers" / "state.json", state_of(known))
        assert "nothing to stop" in down(tmp_path)
        assert known.alive()
        foreign.kill()


def test_a_program_that_a_flow_run_opened_is_not_stopped_by_down(tmp_path: Path) -> None:
    shell, worker = ["-c", _SLEEP, "/srv/mlflow/prefect.log"], ["-P", "-m", "prefect", "worker", "start"]
    with _carrier(shell, tmp_path) as opened, _carrier(worker, tmp_path) as started:
        assert down(tmp_path) == f"stopped the servers of {tmp_path}"
        assert opened.alive() and not started.alive()


@pytest.mark.parametrize(
    "command",
    [
        "/x/.venv/bin/python -P -m flows.supervisor /x/.rlhf",
        (
            "/x/.venv/bin/python -P -m uvicorn --factory flows.application:create_app --log-level warning"
            " --port 4200"
        ),
        "/x/.venv/bin/python -P -m mlflow server --host 127.0.0.1 --port 5000",
        (
            "/x/.venv/bin/python -m uvicorn --host 127.0.0.1 --port 5000 --workers 1 --factory"
            " flows.application:create_mlflow_app"
        ),
        (
            "/x/.venv/bin/python -m uvicorn --log-config /x/mlflow/c.yaml --workers 1"
            " mlflow.server.fastapi_app:app"
        ),
        "/x/.venv/bin/python -P -m prefect worker start --pool rlhf --type process",
        "python3.11 -X dev -W error -m prefect.engine",
        "/x/.venv/bin/python -m prefect.flow_engine flows/rlhf.py:rlhf",
        "/x/.venv/bin/python /x/.venv/bin/prefect worker start",
        "/x/.venv/bin/python -P -m flows.isolated --no-prompt deploy --all",
        "/x/.venv/bin/python -P -m rlhf_core.tracking.database /x/mlflow.db",
        "/x/.venv/bin/python -P -m rlhf_core.run spec.json",
    ],
)
def test_what_up_starts_is_known_by_its_program(command: str) -> None:
    assert servers._is_ours(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "",
        "python",
        "tail -f /x/.rlhf/servers/mlflow.log",
        "vim prefect.toml",
        "bash --rcfile /srv/mlflow",
        "grep -m mlflow",
        "python -c pass -m prefect",
        "python -m pytest tests/prefect",
        "python notes.py -m mlflow",
        "python prefect.py",
        "python -m uvicorn my:app --log-config /srv/mlflow.server.json",
        "python -m prefecture",
        "python -m flows.cli status",
    ],
)
def test_a_program_with_such_a_word_in_its_arguments_is_foreign(command: str) -> None:
    assert not servers._is_ours(command.split())


STATES: list[Any] = [
    {},
    [],
    None,
    {"pid": "x"},
    {"pid": 1, "started": None},
    {"servers": []},
    {"servers": {"worker": 1}},
]


@pytest.mark.parametrize("content", STATES, ids=json.dumps)
def test_a_state_file_that_no_supervisor_wrote_is_none(
    tmp_path: Path, content: Any, stand_in: ProcessId
) -> None:
    if isinstance(content, dict) and content:
        content = state_of(stand_in, **content)
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "state.json").write_text(json.dumps(content))
    assert "servers: none" in describe(tmp_path)
    assert supervisor_of(tmp_path) is None


def test_up_refuses_a_second_supervisor_and_a_folder_without_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: ProcessId
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    write_json(tmp_path / "servers" / "state.json", state_of(stand_in))
    with pytest.raises(InputError, match="are up already"):
        up(tmp_path)
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "mysql://me:secret@host/db")
    with pytest.raises(
        InputError, match=r"must begin with postgresql\+asyncpg://; got mysql://\.\.\.; correct"
    ) as refused:
        up(tmp_path / "other")
    assert "secret" not in refused.value.message
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="project's folder"):
        up(tmp_path)


def test_servers_of_a_team_are_used_and_none_is_started_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    own = supervisor.Supervisor(tmp_path)
    assert list(own.servers) == ["worker"]
    worker = {**os.environ, **own.servers["worker"].environment}
    assert worker["PREFECT_API_URL"] == "https://prefect.example/api"
    assert worker["MLFLOW_TRACKING_URI"] == "https://mlflow.example"
    assert "PREFECT_API_AUTH_STRING" not in own.environment, "ours is none of theirs"


def test_logs_that_grow_are_moved_aside_and_their_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with log.open("ab", buffering=0) as writer:
        for text in (b"first " * 20, b"second " * 20):
            writer.write(text)
            rotate_logs(tmp_path, most=100)
            assert (log.read_bytes(), (tmp_path / "worker.log.1").read_bytes()) == (b"", text)
        writer.write(b"third")
        rotate_logs(tmp_path, most=100)
    assert log.read_bytes() == b"third"


def test_a_log_that_cannot_be_read_keeps_no_other_from_being_moved_aside(tmp_path: Path) -> None:
    for name in ("a.log", "z.log"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    (tmp_path / "mlflow.log").write_bytes(b"text " * 40)
    rotate_logs(tmp_path, most=100)
    assert (tmp_path / "mlflow.log").read_bytes() == b""
    assert (tmp_path / "mlflow.log.1").read_bytes() == b"text " * 40


def test_down_and_status_without_servers_say_so(tmp_path: Path) -> None:
    assert "nothing to stop" in down(tmp_path)
    assert "servers: none" in describe(tmp_path)
    assert "pipeline runs: none yet" in describe(tmp_path)


def test_status_tells_a_running_pipeline_from_a_killed_and_a_failed_one(tmp_path: Path) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    run = {"updated": time.time(), "config": "a.yaml", "stages": {"data": {"seconds": 7.0, "reused": False}}}
    making = {"making": {"stage": "sft", "log": "/logs/sft-01.log"}}
    write_json(
        tmp_path / "runs" / "lives" / "run.json",
        {**run, **making, "state": "running", "error": "", "process": [*astuple(me), socket.gethostname()]},
    )
    write_json(
        tmp_path / "runs" / "killed" / "run.json",
        {
            **run,
            **making,
            "state": "running",
            "error": "",
            "process": [me.pid, me.started - 9, socket.gethostname()],
        },
    )
    write_json(
        tmp_path / "runs" / "failed" / "run.json",
        {
            **run,
            **making,
            "state": "failed",
            "error": "WorkerDied: rank 1",
            "process": [*astuple(me), socket.gethostname()],
        },
    )
    write_json(
        tmp_path / "runs" / "elsewhere" / "run.json",
        {**run, **making, "state": "running", "error": "", "process": [me.pid, me.started - 9, "host"]},
    )
    damaged = {"no.json": {}, "a list": {**run, "state": "failed", "stages": []}, "a text": {**run, "state": "failed", "updated": "x"},
               "a short process": {**run, "state": "running", "process": [1]}}  # fmt: skip
    for name, content in damaged.items():
        write_json(tmp_path / "runs" / name / "run.json", content)
    write_json(
        tmp_path / "runs" / "steers" / "run.json", {**run, "state": "failed", "config": "\x1b]0;owned\x07"}
    )
    text = describe(tmp_path)
    assert text.replace("\n", "").isprintable() and "owned" in text
    assert not [name for name in damaged if f"{name}: " in text]
    assert "elsewhere: running, " in text
    assert re.search(
        r"lives: running, .*\n    finished: data 7\.0 s\n    now: sft, log /logs/sft-01\.log\n", text
    )
    assert re.search(r"killed: killed; the same command continues it, .*\n.*\n    was at: sft, ", text)
    assert re.search(r"failed: failed, .*\n.*\n    was at: sft, .*\n    WorkerDied: rank 1", text)


def test_a_process_that_ignores_sigterm_is_killed_and_others_are_not_touched() -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True);"
        " time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    known = ProcessId.of(process.pid)
    assert known is not None
    stop([ProcessId(known.pid, known.started - 100)], patience=0.2)  # another process that had this pid
    assert known.alive()
    stop([known], patience=0.3)
    assert process.wait(timeout=5) == -signal.SIGKILL
    assert wait_gone([known], 1.0)
    process.stdout.close()


def test_a_taken_port_is_avoided() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) not in (port, 0)
    assert free_port(port) == port


def test_progress_lines_are_few_and_say_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rlhf_core.run.display")
    lines = Lines(seconds=0.05)
    for done in range(1, 101):
        lines.event(
            "ppo",
            {
                "event": "progress",
                "task": "ppo",
                "done": done,
                "total": 100,
                "unit": "steps",
                "metrics": {"kl": 1.5},
            },
        )
        time.sleep(0.002)
    messages = [record.getMessage() for record in caplog.records]
    assert 3 <= len(messages) <= 11
    assert messages[0] == "ppo: 1/100 steps  kl=1.5"
    assert "s left  kl=1.5" in messages[1]
    assert messages[-1] == "ppo: 100/100 steps  kl=1.5"


def test_a_plan_whose_reader_goes_away_ends_with_0() -> None:
    command = [sys.executable, "-m", "flows.cli", "plan", DEMO, "run.device=cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as plan:
        assert plan.stdout is not None and plan.stderr is not None
        plan.stdout.close()
        assert plan.wait(60) == 0, plan.stderr.read()
        assert plan.stderr.read() == b""
