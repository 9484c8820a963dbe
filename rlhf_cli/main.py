"""The command line: `rlhf run`, `rounds`, `plan`, `tune`, `serve-reward`, `champions`, `rollback`, `promote`,
`serve`, `chat`, `publish`, `review`, `prune`, `up`, `down`, `status`.

Slow imports are inside the commands, so that errors of the configuration are reported before them.

Exit codes:
    0       done
    2       the user's input is wrong
    3       a failure; the same command continues
    4       `rlhf rounds`: votes of people are needed; the same command continues
    130     interrupted with Ctrl-C
    129, 143    stopped by SIGHUP or SIGTERM
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rlhf_cli.arguments import add_command, add_config, add_endpoint, add_home
from rlhf_cli.champions import add_champion_commands
from rlhf_cli.init import add_init_commands
from rlhf_cli.prune import add_prune_command
from rlhf_cli.review import add_review_command
from rlhf_cli.rounds import add_rounds_command
from rlhf_cli.tune import add_tune_command
from rlhf_core.config.redact import printable, scrubbed
from rlhf_core.errors import GateFailed, InputError, NonFiniteError, RLHFError, Superseded, UnexpectedError
from rlhf_core.logs import set_up_logging
from rlhf_core.pipeline import STAGES
from rlhf_core.system.home import Home

if TYPE_CHECKING:
    from rich.console import Console

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
    arguments = _parse(argv)
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGHUP, _on_signal)
    return exit_code(lambda: arguments.command(arguments))


def exit_code(command: Callable[[], int]) -> int:
    """Return the exit code of a command. Its error, if it raises one, is printed to stderr."""
    try:
        code = command()
        sys.stdout.flush()  # report a closed pipe here if a reader such as `head` has ended
        return code
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


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    # argparse accepts the overrides only in one block. Those after an option are in `rest`.
    arguments, rest = parser.parse_known_args(argv)
    takes_overrides = hasattr(arguments, "overrides")
    unknown = [text for text in rest if text.startswith("-") or "=" not in text or not takes_overrides]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlhf", description="End-to-end RLHF: raw data to a registered, evaluated policy."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_init_commands(commands)
    _add_run(commands)
    add_rounds_command(commands)
    _add_plan(commands)
    add_tune_command(commands)
    _add_serve_reward(commands)
    add_champion_commands(commands)
    add_review_command(commands)
    add_prune_command(commands)
    for name, text, command in (
        ("up", "start Prefect, MLflow and a worker on this machine", _up),
        ("down", "stop what `rlhf up` started, and nothing else", _down),
        ("status", "show servers, recent runs and where things are", _status),
    ):
        sub = add_command(commands, name, text, command, f"rlhf {name} --home .rlhf")
        add_home(sub, "folder for logs and databases")
    return parser


def _add_run(commands: Any) -> None:
    sub = add_command(
        commands, "run", "run the pipeline here, with no server needed", _run,
        "rlhf run deployments/configs/demo.yaml run.seed=1 ppo.kl.coef=0.02 --until reward",
    )  # fmt: skip
    add_config(sub, "ppo.steps=50")
    sub.add_argument(
        "--from",
        dest="start",
        choices=tuple(STAGES),
        default=next(iter(STAGES)),
        help="stages before this one must have been made already",
    )
    sub.add_argument(
        "--until", choices=tuple(STAGES), default=next(reversed(STAGES)), help="stop after this stage"
    )


def _add_plan(commands: Any) -> None:
    text = "show the memory and time a configuration needs, and whether it fits (exit code 2: it does not)"
    example = "rlhf plan deployments/configs/production.yaml --gpus 8xA100-80G ppo.minibatches=8"
    sub = add_command(commands, "plan", text, _plan, example)
    add_config(sub, "'sft.lora={r: 16}'")
    sub.add_argument(
        "--gpus",
        metavar="8xA100-80G",
        help="count and kind of GPUs, or hosts, GPUs of each and kind: 2x8xA100-80G (default: those of this"
        " machine)",
    )
    sub.add_argument(
        "--link",
        metavar="8x400gbit",
        help="network of each host where there are several: speed, or number of adapters and speed of each",
    )
    sub.add_argument(
        "--host-memory",
        metavar="GIB",
        type=float,
        help="memory of a host, to compare offloaded state with",
    )
    sub.add_argument(
        "--model-config",
        metavar="FILE_OR_NAME",
        help="config.json with the model's shape, or a known model such as llama-3-70b, where model.path is"
        " on the hub",
    )
    sub.add_argument("--json", action="store_true", help="print bytes and seconds as JSON")


def _add_serve_reward(commands: Any) -> None:
    text = "serve a trained reward model over HTTP, for rewards of type remote"
    example = "rlhf serve-reward .rlhf/store/artifacts/reward/0123456789abcdef --port 8600"
    sub = add_command(commands, "serve-reward", text, _serve_reward, example)
    add = sub.add_argument
    add("artifact", metavar="ARTIFACT_OR_FOLDER", help="address of a `reward` artifact, or a model folder")
    add(
        "--host",
        default="127.0.0.1",
        help="others than loopback need RLHF_REWARD_TOKEN (default: %(default)s)",
    )
    add("--port", type=int, default=8600, help="0 takes any free one (default: %(default)s)")
    add_home(sub, "folder for logs and for copies of artifacts")
    add_endpoint(sub)
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="float32", help="default: %(default)s")
    add(
        "--attention",
        choices=("sdpa", "eager"),
        default="sdpa",
        help="eager also computes sliding windows, chunks and caps (default: %(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    add(
        "--micro-batch-tokens",
        type=int,
        default=16384,
        help="tokens of one forward pass (default: %(default)s)",
    )


def _run(arguments: argparse.Namespace) -> int:
    from rlhf_core.pipeline import stages_between
    from rlhf_core.run.checks import load_and_check, remember_check

    # Only for its error, before anything is read.
    stages_between(arguments.start, arguments.until)
    checked = load_and_check(
        arguments.config, arguments.overrides, start=arguments.start, until=arguments.until
    )
    remember_check(checked)
    config = checked.config
    home = Home.of(config.run.home)
    console = set_up_logging(home)
    log.info("%s, seed %d: starting", config.run.name, config.run.seed)
    from rlhf_cli.with_prefect import with_prefect

    return with_prefect(config, lambda: _run_flow(arguments, home, console))


def _run_flow(arguments: argparse.Namespace, home: Home, console: Console) -> int:
    """Run the flow in this process, show its progress, and print its results."""
    import httpx

    from flows.rlhf import rlhf
    from rlhf_core.run.display import showing_progress
    from rlhf_core.run.summary import result_table, stage_table, verdict

    with showing_progress(console) as display:
        try:
            summary = rlhf(
                config=arguments.config,
                overrides=tuple(arguments.overrides),
                start=arguments.start,
                until=arguments.until,
            )
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
    print(f"summary: {home.run(summary['run']) / 'summary.json'}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from rlhf_core.ops.plan.plan import as_json, make_plan, show

    plan = make_plan(
        arguments.config,
        arguments.overrides,
        arguments.gpus,
        arguments.model_config,
        link=arguments.link,
        host_memory_gib=arguments.host_memory,
    )
    if arguments.json:
        print(as_json(plan))
    else:
        from rich.console import Console

        console = Console()
        console.on_broken_pipe = _raise_broken_pipe  # type: ignore[method-assign] # rich would exit with 1
        show(plan, console)
    return 0 if plan.verdict.fits else InputError.exit_code


def _raise_broken_pipe() -> NoReturn:
    raise BrokenPipeError


def _serve_reward(arguments: argparse.Namespace) -> int:
    from rlhf_core.ops.serve_reward import serve_reward

    home = _home(arguments).make()
    set_up_logging(home)
    with suppress(KeyboardInterrupt, Stopped):  # the normal end of a service
        serve_reward(
            arguments.artifact,
            host=arguments.host,
            port=arguments.port,
            home=home,
            endpoint=arguments.endpoint,
            dtype=arguments.dtype,
            attention=arguments.attention,
            device=arguments.device,
            micro_batch_tokens=arguments.micro_batch_tokens,
            ready=lambda url: print(f"serving {arguments.artifact} at {url}", flush=True),
        )
    return 0


def _up(arguments: argparse.Namespace) -> int:
    from flows.isolated import client_headers
    from rlhf_core.ops.servers.servers import up
    from rlhf_core.planning.check import full_disk

    home = _home(arguments)
    # The servers could not write the reason to their logs.
    if problem := full_disk(home.path):
        raise InputError(f"--home: {problem}, or choose another")
    print(up(home.make(), client_headers))
    return 0


def _down(arguments: argparse.Namespace) -> int:
    from rlhf_core.ops.servers.servers import down

    print(down(_home(arguments, writable=False)))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from rlhf_core.ops.servers.servers import status

    print(status(_home(arguments, writable=False)))
    return 0


def _home(arguments: argparse.Namespace, *, writable: bool = True) -> Home:
    from rlhf_core.system.home import home_problem

    problem = home_problem(Path(arguments.home), writable=writable)
    if problem:
        raise InputError(f"--home: the folder {arguments.home} cannot be used: {problem}; choose another")
    return Home.of(arguments.home)


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
