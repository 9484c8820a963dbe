"""Behaviours of the command line:

- help is fast and imports nothing heavy; every command has an example, and `rlhf` alone prints the help
- a misspelled command or option gets a suggestion
- configurations of the package are listed and copied; a copy works in another folder
- invalid input ends with exit code 2 and one message, an unreachable store with 3, without a traceback and
  before Prefect is imported
- overrides may be before and after options; an argument that is not an override is refused
- `up` refuses a full disk; `status` and `down` also work where nothing can be written
- errors, signals and interruptions have their exit codes
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import rlhf_core
from rlhf_cli import main as cli
from rlhf_cli.app import Stopped, app, with_home
from rlhf_core.config.load import load_config
from rlhf_core.errors import InputError, WorkerDied
from rlhf_core.system.machine import Disk
from tests.support.scripted_machine import ScriptedMachine, on_machine
from tests.support.users import as_unprivileged_user

ROOT = Path(__file__).resolve().parents[3]
DEMO = "deployments/configs/demo.yaml"
FEW_ROWS = "data.synthetic={sft_examples: 100, pairs: 100, prompts: 100}"
HEAVY = ("prefect", "torch", "ray", "mlflow", "vllm", "deepspeed", "transformers")


class Ended(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str
    imported: list[str]
    """What its interpreter has imported of `HEAVY` and pydantic."""


SCRIPT = f"""
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from rlhf_cli.main import main

ended = []
for arguments in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    imported = [name for name in {(*HEAVY, "pydantic")} if name in sys.modules]
    ended.append([code, out.getvalue(), err.getvalue(), imported])
print(json.dumps(ended))
"""


def rlhf(*commands: list[str]) -> list[Ended]:
    """Run commands one after the other in a new interpreter."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return [Ended(*each) for each in json.loads(done.stdout)]


@pytest.mark.parametrize("command", [name for name in app if not name.startswith("-")])
def test_each_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert f"Example: rlhf {command}" in " ".join(capsys.readouterr().out.split())


def test_help_ends_quietly_if_its_reader_has_ended() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "rlhf_cli.main", "--help"]
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGPIPE and done.stderr == b""


def test_help_says_that_a_configuration_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prune", "--help"]) == 0
    assert "rlhf prune [OPTIONS] [CONFIG] [FIELD=VALUE...]" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_has_the_commands_in_groups(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    words = ("Before a run", "init", "Runs", "rounds", "Registered policies", "champions", "Servers", "up")
    places = [out.index(f" {word} ") for word in words]
    assert places == sorted(places)


def test_configurations_are_listed_with_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [file.stem for file in Path("deployments/configs").glob("*.yaml")]
    assert [line.split()[0] for line in lines] == sorted(names)
    assert lines[1].split(maxsplit=1)[1].startswith("The demo: a tiny Llama from scratch on a generated task")


def test_copy_of_a_configuration_works_in_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["configs", "production"]) == 0
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(capsys.readouterr().out)
    config = load_config("my.yaml", [])
    assert config.data.chat_template is not None
    assert Path(config.data.chat_template).samefile(ROOT / "deployments/configs/hh-chat.jinja")


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == rlhf_core.__version__


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["rnu", DEMO], '"run"'),
        (["run", DEMO, "--unitl", "sft"], "--until"),
        (["run", DEMO, "--until", "rewrd"], '"reward"'),
    ],
)
def test_misspelled_command_or_option_gets_a_suggestion(
    arguments: list[str], suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and suggestion in error


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    began = os.times().children_user
    [done] = rlhf(["--help"])
    assert done.returncode == 0
    assert done.imported == []  # the classes of the configuration, with pydantic, take most of the time
    assert os.times().children_user - began < 5  # well under 1 s; other programs do not change it


INVALID: list[tuple[list[str], list[str]]] = [
    (["run", DEMO, "ppo.stepz=3"], ["ppo.stepz", "did you mean"]),
    (["run", DEMO, "ppo.steps=0"], ["ppo.steps"]),
    (["run", "no-such.yaml"], ["no-such.yaml"]),
    (["run", DEMO, "model.path=./no/such/model"], ["./no/such/model"]),
    (
        ["run", DEMO, "--from", "ppo", "--until", "sft"],
        ["ppo (--from), comes after the last stage, sft (--until)"],
    ),
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    home = tmp_path_factory.mktemp("refused")
    return rlhf(*([*arguments, f"run.home={home}"] for arguments, _ in INVALID))


@pytest.mark.parametrize("number", range(len(INVALID)))
def test_invalid_input_ends_with_code_2_and_one_message(number: int, refused: list[Ended]) -> None:
    done = refused[number]
    assert done.returncode == 2
    assert all(word in done.stderr for word in INVALID[number][1])
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.imported == ["pydantic"]


def test_unreachable_store_ends_with_code_3_and_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    store = ["store.url=s3://no-such-bucket/x", "store.endpoint=http://127.0.0.1:9"]
    [done] = rlhf(["run", DEMO, *store, f"run.home={tmp_path}"])
    assert done.returncode == 3, "the address may be right and the store unreachable"
    problem, advice = done.stderr.splitlines()[-2:]
    assert problem.startswith("failed: store.url='s3://no-such-bucket/x' cannot be used now: ")
    assert problem.endswith("correct its address, or wait until it answers")
    assert advice == "type the same command again to continue from there"
    assert "Traceback" not in done.stderr and "canary-secret" not in done.stderr
    assert done.imported == ["pydantic"]


def test_overrides_are_accepted_anywhere_after_the_config() -> None:
    given = ["run", "a.yaml", "x.y=1", "--until", "sft", "z=[1, 2]"]
    assert app.parse_args(given)[1].arguments == {
        "config": "a.yaml",
        "overrides": ("x.y=1", "z=[1, 2]"),
        "until": "sft",
    }


@pytest.mark.parametrize("extra", [["nonsense"], ["--nosuch"], ["--nosuch=1"]])
def test_argument_that_is_not_an_override_is_refused(
    extra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", DEMO, "--until", "sft", *extra]) == 2
    assert extra[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (InputError("data.sft: no rows"), 2, "error: data.sft: no rows"),
        (WorkerDied("engine 0 died"), 3, "same command again"),
        (KeyboardInterrupt(), 130, "same command again"),
        (Stopped(signal.SIGTERM), 143, "SIGTERM"),
        (RuntimeError("odd"), 3, "RuntimeError: odd"),
    ],
)
def test_each_error_and_signal_has_its_exit_code(
    error: BaseException, code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert cli.exit_code(fail) == code
    assert word in capsys.readouterr().err


def test_failure_of_the_system_shows_no_traceback() -> None:
    script = (
        "from rlhf_cli.main import exit_code\n"
        "def fail(): raise OSError(28, 'No space left on device', '/x')\n"
        "raise SystemExit(exit_code(fail))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("failed: OSError: [Errno 28] No space left on device: '/x'")


def test_tune_checks_the_configuration_before_it_logs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [done] = rlhf(["tune", DEMO, f"run.home={tmp_path / 'file'}", "--out", str(tmp_path / "tuned.yaml")])
    assert done.returncode == 2
    assert f"run.home: the folder '{tmp_path / 'file'}' cannot be used" in done.stderr
    assert done.stderr.startswith("error: ")


def test_servers_are_not_started_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with on_machine(ScriptedMachine(disk=Disk(total=10**9, free=10**6))):
        assert cli.main(["up", "--home", str(tmp_path / "home")]) == 2
    assert "1 MB free; databases and logs alone need 30 MB; free some, or choose" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_folder_that_may_not_be_written_has_a_status_and_servers_that_are_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, words in (("status", "servers: none"), ("down", "nothing to stop")):
        assert cli.main([command, "--home", str(tmp_path)]) == 0  # imports what it needs
        with as_unprivileged_user():
            assert cli.main([command, "--home", "/"]) == 0
        assert capsys.readouterr().out.count(words) == 2


def test_a_missing_configuration_is_the_only_argument_that_is_required(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["run"]) == 2
    problem, advice = capsys.readouterr().err.splitlines()
    assert problem == 'error: Command "run" parameter CONFIG requires an argument.'
    assert advice == "rlhf run --help has what it takes"


def test_ctrl_c_during_the_imports_of_a_command_prints_one_line() -> None:
    script = "import os, signal, rlhf_cli\nos.kill(os.getpid(), signal.SIGINT)\nimport rlhf_cli.main"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "interrupted\n"
    assert done.returncode == -signal.SIGINT  # a shell makes 130 of it


def test_plan_ends_with_code_0_if_its_output_pipe_is_closed() -> None:
    command = [sys.executable, "-m", "rlhf_cli.main", "plan", DEMO, "run.device=cpu", FEW_ROWS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as plan:
        assert plan.stdout is not None and plan.stderr is not None
        plan.stdout.close()
        assert plan.wait(60) == 0, plan.stderr.read()
        assert plan.stderr.read() == b""


def test_home_of_a_command_with_a_configuration_is_short_for_run_home() -> None:
    given = app.parse_args(["run", "my.yaml", "run.seed=1", "--home", "1e3", "ppo.steps=2"])[1].arguments
    overrides = with_home(given["overrides"], given["home"])
    assert overrides == ('run.home="1e3"', "run.seed=1", "ppo.steps=2")
    assert with_home(("run.seed=1",), None) == ("run.seed=1",)


@pytest.mark.parametrize(
    "option", [["--schedule", "0 2 * * 0"], ["--name", "a"], ["--if-changed"], ["run.seed=1"]]
)
def test_a_deployment_needs_a_configuration(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["up", "--home", str(tmp_path / "home"), *option]) == 2
    assert "error: --config: the deployment needs a configuration" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_a_time_zone_needs_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--config", DEMO, "--timezone", "Asia/Tokyo"]) == 2
    assert "error: --timezone: is that of --schedule" in capsys.readouterr().err
