"""The command line. `rlhf --help` lists the commands.

Slow imports are inside the commands, so that errors of the configuration are reported before them.

Exit codes:
    0       done
    1       `rlhf replay`, and `rlhf why` of runs: there is a difference
    2       the user's input is wrong
    3       a failure; the same command continues
    4       `rlhf rounds`: votes of people are needed; the same command continues
    130     interrupted with Ctrl-C
    129, 143    stopped by SIGHUP or SIGTERM
    141     the reader of the output, such as `head`, has ended
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from cyclopts import CycloptsError, Parameter

# Each of these modules adds its commands to `app`.
from rlhf_cli import (  # noqa: F401
    champions,
    compare,
    init,
    inspect,
    prune,
    rehearse,
    replay,
    rescore,
    review,
    rounds,
    tune,
    why,
)
from rlhf_cli.app import (
    BEFORE,
    HOME,
    RUNS,
    SERVERS,
    Config,
    Endpoint,
    HomeFolder,
    Overrides,
    RunHome,
    app,
    usage,
    with_home,
)
from rlhf_core.config.redact import printable, scrubbed
from rlhf_core.errors import GateFailed, InputError, NonFiniteError, RLHFError, Superseded, UnexpectedError
from rlhf_core.logs import set_up_logging
from rlhf_core.pipeline import FIRST_STAGE, LAST_STAGE, StageName
from rlhf_core.system.home import Home, default_home

if TYPE_CHECKING:
    from rich.console import Console

    from flows.config_deployment import ConfigDeployment

log = logging.getLogger("rlhf_cli.main")  # not __name__, which is __main__ for `python -m rlhf_cli.main`

CONTINUE = "type the same command again to continue from there"


class Stopped(BaseException):
    """SIGTERM or SIGHUP. Like KeyboardInterrupt, it is not an Exception, so that `except Exception` does not
    catch it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _prepare_streams()
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGHUP, _on_signal)  # a closed terminal ends a run in order, too
    return exit_code(
        lambda: app(
            argv,
            # `exit_code` prints the errors of the parser like those of the commands.
            exit_on_error=False,
            print_error=False,
            result_action="return_int_as_exit_code_else_zero",  # `--help` returns None
        )
    )


def exit_code(command: Callable[[], int]) -> int:
    """Return the exit code of a command. Its error, if it raises one, is printed to stderr."""
    try:
        code = command()
        sys.stdout.flush()  # report a closed pipe here if a reader such as `head` has ended
        return code
    except CycloptsError as error:
        line = " ".join(("rlhf", *(error.command_chain or ())))
        _print_error(f"error: {error}\n{line} --help has what it takes")
        return InputError.exit_code
    except InputError as error:
        _print_error(f"error: {error.message}")
        return error.exit_code
    except RLHFError as error:
        _print_error(f"failed: {error.message}\n{_what_next(error)}")
        return error.exit_code
    except KeyboardInterrupt:
        _print_error(f"interrupted; {CONTINUE}")
        return 128 + signal.SIGINT
    except Stopped as stop:
        _print_error(f"stopped by {stop}; {CONTINUE}")
        return stop.exit_code
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 the interpreter flushes it at its end
        return 0
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich ends so, as in the help
            return 128 + signal.SIGPIPE
        raise
    except Exception as error:
        # The terminal gets the traceback of a bug if the command has no log. A full disk is no bug.
        if log.hasHandlers() or not isinstance(error, OSError):
            log.exception("unexpected error")
        _print_error(f"failed: {type(error).__name__}: {error}\n{CONTINUE}")
        return RLHFError.exit_code


def _prepare_streams() -> None:
    """Open /dev/null for a closed stdin, stdout or stderr, and have characters that stdout cannot encode
    escaped.

    Without /dev/null, a file or socket would get that descriptor, and printed text would be written to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free descriptor
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the default of stderr


@app.command(group=RUNS, usage=usage("run"))
def _run(
    config: Config,
    /,
    *overrides: Overrides,
    start: Annotated[StageName, Parameter(name="--from")] = FIRST_STAGE,
    until: StageName = LAST_STAGE,
    home: RunHome = None,
) -> int:
    """Run the pipeline on this machine; no server is needed.

    The same command continues a run that was stopped.

    Example: rlhf run my.yaml run.seed=1 ppo.kl.coef=0.02 --until reward

    Args:
        start: First stage; those before it must have been made already.
        until: Last stage.
    """
    from rlhf_core.pipeline import stages_between
    from rlhf_core.run.checks import load_and_check, remember_check

    # Only for its error, before anything is read.
    stages_between(start, until)
    overrides = with_home(overrides, home)
    checked = load_and_check(config, overrides, start=start, until=until)
    remember_check(checked)
    run = checked.config.run
    folder = Home.of(run.home)
    console = set_up_logging(folder)
    log.info("%s, seed %d: starting", run.name, run.seed)
    from rlhf_cli.with_prefect import with_prefect

    flow = {"config": config, "overrides": overrides, "start": start, "until": until}
    return with_prefect(checked.config, lambda: _run_flow(flow, folder, console))


def _run_flow(parameters: dict[str, Any], home: Home, console: Console) -> int:
    """Run the flow in this process, show its progress, and print its results."""
    import httpx

    from flows.rlhf import rlhf
    from rlhf_core.run.display import showing_progress
    from rlhf_core.run.summary import result_table, stage_table, verdict

    with showing_progress(console) as display:
        try:
            summary = rlhf(**parameters)
        except httpx.HTTPError as error:  # of Prefect's client
            if display.summary is None:
                raise
            # Only the flow's last state could not be reported. All results are stored.
            name = type(error).__name__
            log.warning("all stages are done, but Prefect's server did not take that (%s)", name)
            summary = display.summary
    from rich.console import Console

    # In a file or a pipe, rich would break lines at 80 characters.
    output = Console(soft_wrap=not sys.stdout.isatty())
    if line := verdict(summary):
        print(line)
    output.print(stage_table(summary))
    if (found := result_table(summary)).row_count:
        output.print(found)
    for name, address in summary["where"].items():
        print(f"{name}: {address}")
    if "version" in (registered := summary.get("registration", {})):
        print(f"model folder: rlhf publish {registered['model']}@{registered['version']} FOLDER")
    print(f"summary: {home.run(summary['run']) / 'summary.json'}")
    return 0


@app.command(group=BEFORE, usage=usage("plan"))
def _plan(
    config: Config,
    /,
    *overrides: Overrides,
    gpus: Annotated[str | None, Parameter(metavar="8xA100-80G")] = None,
    link: Annotated[str | None, Parameter(metavar="8x400gbit")] = None,
    host_memory: Annotated[float | None, Parameter(metavar="GIB")] = None,
    model_config: Annotated[str | None, Parameter(metavar="FILE|NAME")] = None,
    details: bool = False,
    json: bool = False,
    home: RunHome = None,
) -> int:
    """Show the rows, time and memory that a run needs.

    The exit code is 2 if it does not fit into the machine.

    Example: rlhf plan production.yaml --gpus 8xA100-80G ppo.minibatches=8 'sft.lora={r: 16}'

    Args:
        gpus: Number and kind of GPUs; for several machines 2x8xA100-80G (default: those of this machine).
        link: Network between machines: its speed, or number and speed of the adapters of each.
        host_memory: Main memory of a machine, for what is moved there from GPUs.
        model_config: config.json of the model, or a known name such as llama-3-70b, for a model of the hub.
        details: Also show batches, and the memory of each process.
        json: Print rows, bytes and seconds as JSON.
    """
    from rlhf_core.ops.data_table import ROWS
    from rlhf_core.ops.plan.plan import as_json, make_plan, show

    overrides = with_home(overrides, home)
    plan = make_plan(config, overrides, gpus, model_config, link=link, host_memory_gib=host_memory, rows=ROWS)
    if json:
        print(as_json(plan))
    else:
        from rich.console import Console

        console = Console()
        console.on_broken_pipe = _raise_broken_pipe  # type: ignore[method-assign] # rich would exit with 1
        show(plan, console, details=details)
    return 0 if plan.verdict.fits else InputError.exit_code


def _raise_broken_pipe() -> NoReturn:
    raise BrokenPipeError


@app.command(group=SERVERS)
def _serve_reward(
    artifact: str,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8600,
    home: HomeFolder = HOME,
    endpoint: Endpoint = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    attention: Literal["sdpa", "eager"] = "sdpa",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    micro_batch_tokens: int = 16384,
) -> int:
    """Serve a reward model over HTTP, for rewards of type remote.

    Example: rlhf serve-reward .rlhf/store/artifacts/reward/0123456789abcdef --port 8600

    Args:
        artifact: Address of a reward artifact, or a model's folder.
        host: Address to listen on. Others than loopback need RLHF_REWARD_TOKEN.
        port: 0 takes any that is free.
        dtype: Number format of the weights.
        attention: eager also computes sliding windows, chunks and caps.
        device: auto takes a GPU if there is one.
        micro_batch_tokens: Tokens that are scored at a time; fewer need less memory.
    """
    from rlhf_core.ops.serve_reward import serve_reward

    folder = _home(home).make()
    set_up_logging(folder)
    with suppress(KeyboardInterrupt, Stopped):  # the normal end of a service
        serve_reward(
            artifact,
            host=host,
            port=port,
            home=folder,
            endpoint=endpoint,
            dtype=dtype,
            attention=attention,
            device=device,
            micro_batch_tokens=micro_batch_tokens,
            ready=lambda url: print(f"serving {artifact} at {url}", flush=True),
        )
    return 0


@app.command(group=SERVERS, usage=usage("up", ""))
def _up(
    *overrides: Overrides,
    config: Annotated[str | None, Parameter(metavar="CONFIG")] = None,
    name: str | None = None,
    schedule: Annotated[str | None, Parameter(metavar="CRON")] = None,
    timezone: Annotated[str | None, Parameter(metavar="ZONE")] = None,
    if_changed: bool = False,
    param: Annotated[tuple[str, ...], Parameter(metavar="NAME=VALUE")] = (),
    home: Annotated[str | None, Parameter(metavar="FOLDER")] = None,
) -> int:
    """Start Prefect, MLflow and a worker on this machine; with --config, deploy a configuration.

    Example: rlhf up --config my.yaml --schedule "0 2 * * 0"

    Args:
        config: YAML file; creates a deployment for it, or updates it.
        name: Name of the deployment (default: that of the file).
        schedule: When it runs: minute, hour, day, month, day of the week.
        timezone: Of the schedule, such as Europe/Berlin (default: of this machine).
        if_changed: Run only if data, models, code or settings have changed.
        param: Another parameter of the deployment, such as min_new_rows=1000 with --if-changed. It may be
            given several times.
        home: Folder of logs and databases, and run.home of the runs of all deployments (default: run.home of
            --config, else RLHF_HOME in the environment, else .rlhf).
    """
    from flows.isolated import client_headers, isolate_prefect
    from rlhf_core.config.load import load_config
    from rlhf_core.ops.servers.servers import are_up, next_step, up, use_servers
    from rlhf_core.planning.check import full_disk

    if timezone and not schedule:
        raise InputError("--timezone: is that of --schedule; give both")
    deployment = None
    wanted = home or default_home()
    if config is not None:
        # Before anything starts, for its errors.
        checked = load_config(config, overrides)
        deployment = _config_deployment(
            config,
            # So that its runs keep the folder, whoever starts the servers.
            with_home(overrides, home and str(Path(home).absolute())),
            name=name,
            parameters=param,
            cron=schedule,
            timezone=timezone,
            if_changed=if_changed,
        )
        wanted = home or checked.run.home
    elif schedule or timezone or name or param or if_changed or overrides:
        raise InputError("--config: the deployment needs a configuration; name its YAML file")
    folder = _home(wanted)
    # The servers could not write the reason to their logs.
    if problem := full_disk(folder.path):
        raise InputError(f"--home: {problem}, or choose another")
    if deployment is None or not are_up(folder):
        print(up(folder.make(), client_headers, runs_in_home=home is not None))
    runnable = "rlhf/full-pipeline --param ppo_steps=5"
    if deployment is not None:
        use_servers(folder)
        isolate_prefect()
        print(deployment.apply())
        runnable = deployment.full_name
    print(next_step(runnable))
    return 0


def _config_deployment(config: str, overrides: tuple[str, ...], **options: Any) -> ConfigDeployment:
    level = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"
    given = os.environ.get(level)
    os.environ[level] = "CRITICAL"  # read when Prefect is imported
    from flows.isolated import isolate_prefect

    isolate_prefect()
    from flows.config_deployment import config_deployment

    # The servers, which inherit the environment, write to their logs.
    del os.environ[level]
    if given is not None:
        os.environ[level] = given
    return config_deployment(config, overrides, **options)


@app.command(group=SERVERS)
def _down(*, home: HomeFolder = HOME) -> int:
    """Stop what rlhf up started, and nothing else.

    Example: rlhf down
    """
    from rlhf_core.ops.servers.servers import down

    print(down(_home(home, writable=False)))
    return 0


@app.command(group=SERVERS)
def _status(*, home: HomeFolder = HOME) -> int:
    """Show servers, recent runs and where things are.

    Example: rlhf status
    """
    from rlhf_core.ops.servers.servers import status

    print(status(_home(home, writable=False)))
    return 0


def _home(home: str, *, writable: bool = True) -> Home:
    from rlhf_core.system.home import home_problem

    problem = home_problem(Path(home), writable=writable)
    if problem:
        raise InputError(f"--home: the folder {home} cannot be used: {problem}; choose another")
    return Home.of(home)


def _what_next(error: RLHFError) -> str:
    if isinstance(error, GateFailed | NonFiniteError):
        return "the same configuration would end here again: change it first"
    if isinstance(error, UnexpectedError):
        return "this is a bug, here or in code that was given: the log has its traceback"
    if isinstance(error, Superseded):
        return "another run executes this stage: let it finish"
    return CONTINUE


def _print_error(text: str) -> None:
    lines = scrubbed(text).split("\n")
    print("\n".join(printable(line) for line in lines), file=sys.stderr)


def _on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    # A second signal must not interrupt the clean-up.
    signal.signal(signum, signal.SIG_IGN)
    raise Stopped(signum)


if __name__ == "__main__":
    sys.exit(main())
