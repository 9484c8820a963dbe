"""Behaviours of `run_child`, with real processes:

- the child's artifact comes back, and its progress in order
- an error comes back with its class and message
- a stage does not find packages that it does not use, and the benchmark does
- a child that dies, is suspended, exits without a result, or hangs, is a StageFailed that says how and quotes
  the log
- an interruption is answered at once, before the child has ended
- nothing of it survives: not after success, timeout or interruption, not in another session, not the flow's
  SIGKILL
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import (
    DataError,
    InfrastructureError,
    StageFailed,
    StageTimedOut,
    Superseded,
    UnexpectedError,
)
from rlhf_core.executors.child import log_excerpt, run_child, start_child
from rlhf_core.executors.spec import StageSpec
from rlhf_core.pipeline import StageName
from rlhf_core.system.processes import ProcessId, wait_gone
from rlhf_core.types import ArtifactRef
from tests.support.toy_stage import toy_environment

Run = Callable[..., ArtifactRef]


@pytest.fixture
def toy(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Environment of a child whose stage is the given body of `run_attempt(spec, events, stop)`."""

    return lambda body: toy_environment(tmp_path, body)


@pytest.fixture
def spec() -> StageSpec:
    return StageSpec("data", "0" * 16, PipelineConfig())


def run(
    spec: StageSpec, tmp_path: Path, environment: dict[str, str], timeout: float = 30.0, on_event: Any = None
) -> ArtifactRef:
    return run_child(spec, tmp_path / "data-01.log", environment, timeout, on_event or (lambda event: None))


def pid_of(path: Path, seconds: float = 20.0) -> ProcessId:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            process = ProcessId.of(int(text))
            assert process is not None
            return process
        time.sleep(0.05)
    raise AssertionError(f"{path} was not written")


def test_the_childs_artifact_and_progress_come_back_in_order(
    toy: Any, spec: StageSpec, tmp_path: Path
) -> None:
    environment = toy(
        "for done in range(4):\n"
        "    events._sent.clear()\n"  # without the limit on the rate
        "    events.progress('data', done, 4, 'rows', loss=float('nan') if done == 2 else done)\n"
        "return REF"
    )
    events: list[dict[str, Any]] = []
    ref = run(spec, tmp_path, environment, on_event=events.append)
    assert ref == ArtifactRef(
        "data", "0" * 16, "d" * 64, "/store/x", {"loss": 0.5}, "run1", {"weights_sha256": "w"}
    )
    assert [event["done"] for event in events] == [0, 1, 2, 3]
    assert [event["metrics"] for event in events] == [{"loss": 0.0}, {"loss": 1.0}, {}, {"loss": 3.0}]


def test_the_spec_reaches_the_child_unchanged(toy: Any, tmp_path: Path) -> None:
    config = PipelineConfig.model_validate_json('{"ppo": {"steps": 7}, "register": {"model": "m"}}')
    inputs: dict[StageName, ArtifactRef] = {"data": ArtifactRef("data", "1" * 16, "e" * 64, "/store/y")}
    spec = StageSpec("sft", "2" * 16, config, inputs, "parent", "3" * 16)
    environment = toy("(folder / 'seen').write_text(repr(spec))\nreturn REF")
    run(spec, tmp_path, environment)
    assert (tmp_path / "seen").read_text() == repr(spec)


@pytest.mark.parametrize(("stage", "is_found"), [("sft", False), ("benchmark", True)])
def test_a_stage_does_not_find_what_it_does_not_use(
    toy: Any, tmp_path: Path, stage: StageName, is_found: bool
) -> None:
    environment = toy(
        "from importlib.util import find_spec\n"
        "(folder / 'seen').write_text(str(find_spec('sklearn') is not None))\n"
        "return REF"
    )
    run(StageSpec(stage, "0" * 16, PipelineConfig()), tmp_path, environment)
    assert (tmp_path / "seen").read_text() == str(is_found)


@pytest.mark.parametrize(
    "error", [DataError("rows.jsonl:3: no prompt; add one"), Superseded("attempt 2 holds it")]
)
def test_an_error_keeps_its_class_and_message(
    toy: Any, spec: StageSpec, tmp_path: Path, error: Exception
) -> None:
    environment = toy(f"from rlhf_core import errors\nraise errors.{type(error).__name__}({error.args[0]!r})")
    with pytest.raises(type(error)) as caught:
        run(spec, tmp_path, environment)
    assert caught.value.args == error.args


@pytest.mark.parametrize(
    ("body", "kind"),
    [("return 1 // 0", UnexpectedError), ("raise ConnectionResetError('peer')", InfrastructureError)],
)
def test_unexpected_exception_is_distinguished_from_an_outage(
    toy: Any, spec: StageSpec, tmp_path: Path, body: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=r"ZeroDivisionError: |ConnectionResetError: peer"):
        run(spec, tmp_path, toy(body))


def test_killed_child_is_reported_with_signal_and_log(toy: Any, spec: StageSpec, tmp_path: Path) -> None:
    environment = toy(
        "print('CustomError: disk is full', file=sys.stderr)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    with pytest.raises(StageFailed, match=r"killed by SIGKILL.*data-01\.log.*CustomError: disk is full"):
        run(spec, tmp_path, environment)


def test_suspended_child_is_killed_and_named(toy: Any, tmp_path: Path) -> None:
    config = PipelineConfig.model_validate_json('{"run": {"timeouts": {"stall": 1.5}}}')
    started = time.monotonic()
    with pytest.raises(StageFailed, match=r"the stage's own process was suspended \(SIGSTOP\)"):
        run(StageSpec("sft", "0" * 16, config), tmp_path, toy("os.kill(os.getpid(), signal.SIGSTOP)"))
    assert time.monotonic() - started < 30


def test_an_exit_without_a_result_is_a_failure_even_with_code_0(
    toy: Any, spec: StageSpec, tmp_path: Path
) -> None:
    with pytest.raises(StageFailed, match="exit code 0 and no result"):
        run(spec, tmp_path, toy("os._exit(0)"))


def test_every_exit_code_is_reported_with_the_log(toy: Any, spec: StageSpec, tmp_path: Path) -> None:
    with pytest.raises(
        StageFailed, match=r"exit code 255 and no result; log: .*data-01\.log.*ValueError: last words"
    ):
        run(spec, tmp_path, toy("print('ValueError: last words', flush=True)\nos._exit(255)"))


def test_a_child_over_its_time_is_stopped(toy: Any, spec: StageSpec, tmp_path: Path) -> None:
    environment = toy("(folder / 'pid').write_text(str(os.getpid()))\ntime.sleep(600)")
    with pytest.raises(
        StageTimedOut, match=r"stopped after 4 seconds, all that run\.stage_timeout=604800 left it"
    ):
        run(spec, tmp_path, environment, timeout=4.0)
    assert ProcessId.of(int((tmp_path / "pid").read_text())) is None


def test_a_child_that_does_not_stop_is_killed(toy: Any, spec: StageSpec, tmp_path: Path) -> None:
    environment = toy("signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)")
    log_file = tmp_path / "data-01.log"
    child = start_child(spec, log_file, environment, waits=True, stop_seconds=0.5)
    began = time.monotonic()
    with pytest.raises(StageFailed, match=r"killed by SIGKILL|stopped after"):
        run_child(spec, log_file, environment, 4.0, lambda event: None, child)
    assert time.monotonic() - began < 15


def test_descendants_in_other_sessions_end_with_the_child(toy: Any, spec: StageSpec, tmp_path: Path) -> None:
    environment = toy(
        "for name, away in (('same', False), ('other', True)):\n"
        "    process = subprocess.Popen(['sleep', '600'], start_new_session=away)\n"
        "    (folder / name).write_text(str(process.pid))\n"
        "return REF"
    )
    run(spec, tmp_path, environment)
    for name in ("same", "other"):
        process = ProcessId.of(int((tmp_path / name).read_text()))
        assert process is None or not process.alive()


def test_an_interruption_of_the_flow_stops_the_child(toy: Any, spec: StageSpec, tmp_path: Path) -> None:
    environment = toy(
        "(folder / 'pid').write_text(str(os.getpid()))\nevents.progress('data', 1, 9,"
        " 'rows')\ntime.sleep(600)"
    )

    said: list[tuple[str, bool]] = []

    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            raise KeyboardInterrupt
        alive = ProcessId.of(int((tmp_path / "pid").read_text())) is not None
        said.append((event["message"], alive))

    with pytest.raises(KeyboardInterrupt):
        run(spec, tmp_path, environment, on_event=interrupt)
    assert ProcessId.of(int((tmp_path / "pid").read_text())) is None
    [(message, was_alive)] = said
    assert was_alive, "it is said before the wait for the end of the stage, not after it"
    assert message.startswith("is being stopped, which takes at most 20 s")
    assert "Another Ctrl-C ends the stage at once" in message


def test_sigterm_lets_the_stage_clean_up_and_ends_with_143(toy: Any, spec: StageSpec, tmp_path: Path) -> None:
    environment = toy(
        "(folder / 'pid').write_text(str(os.getpid()))\n"
        "try:\n    time.sleep(600)\nfinally:\n    (folder / 'cleaned').touch()\n"
    )
    spec.write(tmp_path / "spec.json")
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_core.run", str(tmp_path / "spec.json")],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    pid_of(tmp_path / "pid")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert (tmp_path / "cleaned").exists()


def test_child_and_descendants_die_with_a_killed_flow(toy: Any, spec: StageSpec, tmp_path: Path) -> None:
    environment = toy(
        "away = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "(folder / 'away').write_text(str(away.pid))\n"
        "(folder / 'pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    spec.write(tmp_path / "spec.json")
    script = (
        "import os, sys; from pathlib import Path; from rlhf_core.executors.child import run_child; from"
        " rlhf_core.executors.spec import StageSpec;run_child(StageSpec.read(Path(sys.argv[1])),"
        " Path(sys.argv[2]), os.environ, 600, print)"
    )
    flow = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "spec.json"), str(tmp_path / "a.log")], env=environment
    )
    stage, away = pid_of(tmp_path / "pid"), pid_of(tmp_path / "away")
    flow.kill()
    flow.wait(timeout=10)
    assert wait_gone([stage, away], 5.0)


def test_log_excerpt_begins_at_the_last_exception(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("ValueError: first\nnoise\nray.exceptions.ActorDiedError: gone \x1b[31m\nend\n")
    assert log_excerpt(log) == "ray.exceptions.ActorDiedError: gone \\x1b[31m | end"
    log.write_text("one\ntwo\nthree\nfour\n")
    assert log_excerpt(log) == "two | three | four"
    assert log_excerpt(tmp_path / "none.log") == ""
