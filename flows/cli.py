"""The command line: `rlhf run`, `plan`, `serve-reward`, `up`, `down`, `status`.

Everything slow is imported inside the commands: a mistake in the configuration is reported before that.
Exit codes: 0 done; 2 the user's input is wrong; 3 a fault, the same command continues; 130, 143 stopped by a
signal.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rlhf_core.config.redact import ScrubbingFormatter, printable, scrubbed
from rlhf_core.errors import GateFailed, InputError, NonFiniteError, RLHFError, Superseded, UnexpectedError
from rlhf_core.types import STAGES

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger("flows.cli")  # also where this file is run as a script

CONTINUE = "type the same command again to continue from there"


class Stopped(BaseException):
    """SIGTERM or SIGHUP; unwinds like Ctrl-C, so that the stage's process is stopped."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    _open_missing_streams()
    arguments = _parse(argv)
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGHUP, _on_signal)
    try:
        _check_working_folder()
        code: int = arguments.command(arguments)
        sys.stdout.flush()  # report a closed pipe here if a reader such as `head` has ended
        return code
    except InputError as error:
        _complain(f"error: {error.message}")
        return error.exit_code
    except RLHFError as error:
        _complain(f"failed: {error.message}\n{_what_next(error)}")
        return error.exit_code
    except KeyboardInterrupt:
        _complain(f"interrupted; {CONTINUE}")
        return 128 + signal.SIGINT
    except Stopped as stop:
        _complain(f"stopped by {stop}; {CONTINUE}")
        return stop.exit_code
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 the interpreter flushes it at its end
        return 0
    except Exception as error:
        log.exception("unexpected error")
        _complain(f"failed: {type(error).__name__}: {error}\n{CONTINUE}")
        return RLHFError.exit_code


def _open_missing_streams() -> None:
    """Open /dev/null for a closed stdin, stdout or stderr.

    Otherwise a file or socket would get that descriptor, and printed text would be written to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free descriptor
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 for as long as the process lives


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise InputError(
            f"the working folder does not exist any more ({error.strerror}); change to an existing folder and"
            " run the command again"
        ) from None


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes the overrides only in one piece; here they may stand anywhere after CONFIG."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [
        text
        for text in rest
        if text.startswith("-") or "=" not in text or not hasattr(arguments, "overrides")
    ]
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

    run = _command(
        commands, "run", "run the pipeline here, with no server needed", _run,
        "rlhf run deployments/configs/demo.yaml run.seed=1 ppo.kl.coef=0.02 --until reward",
    )  # fmt: skip
    run.add_argument("config", metavar="CONFIG", help="YAML file; deployments/configs/ has examples")
    run.add_argument(
        "overrides", metavar="key=value", nargs="*", help="fields to override, such as ppo.steps=50"
    )
    run.add_argument(
        "--from",
        dest="start",
        choices=STAGES,
        default=STAGES[0],
        help="stages before this one must have been made already",
    )
    run.add_argument("--until", choices=STAGES, default=STAGES[-1], help="stop after this stage")

    plan = _command(
        commands, "plan", "show the memory and time a configuration needs, and whether it fits (exit code 2: it does not)",
        _plan, "rlhf plan deployments/configs/production.yaml --gpus 8xA100-80G ppo.minibatches=8",
    )  # fmt: skip
    plan.add_argument("config", metavar="CONFIG", help="YAML file; deployments/configs/ has examples")
    plan.add_argument(
        "overrides", metavar="key=value", nargs="*", help="fields to override, such as 'sft.lora={r: 16}'"
    )
    plan.add_argument(
        "--gpus", metavar="8xA100-80G", help="count and kind of GPUs (default: those of this machine)"
    )
    plan.add_argument(
        "--model-config",
        metavar="FILE",
        help=(
            "config.json with the model's shape, where model.path is on the hub; deployments/configs/shapes/"
            " has some"
        ),
    )
    plan.add_argument("--json", action="store_true", help="print bytes and seconds as JSON")
    _add_serve_reward(commands)

    for name, text, command in (
        ("up", "start Prefect, MLflow and a worker on this machine", _up),
        ("down", "stop what `rlhf up` started, and nothing else", _down),
        ("status", "show servers, recent runs and where things are", _status),
    ):
        sub = _command(commands, name, text, command, f"rlhf {name} --home .rlhf")
        sub.add_argument(
            "--home", default=".rlhf", help="folder for logs and databases (default: %(default)s)"
        )
    return parser


def _add_serve_reward(commands: Any) -> None:
    serve = _command(
        commands, "serve-reward", "serve a trained reward model over HTTP, for rewards of type remote", _serve_reward,
        "rlhf serve-reward .rlhf/store/artifacts/reward/0123456789abcdef --port 8600",
    )  # fmt: skip
    serve.add_argument(
        "artifact", metavar="ARTIFACT_OR_FOLDER", help="address of a `reward` artifact, or a model folder"
    )
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="others than loopback need RLHF_REWARD_TOKEN (default: %(default)s)",
    )
    serve.add_argument("--port", type=int, default=8600, help="0 takes any free one (default: %(default)s)")
    serve.add_argument(
        "--home", default=".rlhf", help="folder for logs and for copies of artifacts (default: %(default)s)"
    )
    serve.add_argument("--endpoint", help="of an S3-compatible store, such as http://127.0.0.1:9000")
    serve.add_argument(
        "--template",
        choices=("chat", "plain"),
        help="how prompts are rendered (default: as the artifact's data were)",
    )
    serve.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: %(default)s"
    )
    serve.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s"
    )
    serve.add_argument(
        "--micro-batch-tokens",
        type=int,
        default=16384,
        help="tokens of one forward pass (default: %(default)s)",
    )


def _command(commands: Any, name: str, text: str, command: Any, example: str) -> argparse.ArgumentParser:
    sub: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", epilog=f"example: {example}"
    )
    sub.set_defaults(command=command)
    return sub


def _run(arguments: argparse.Namespace) -> int:
    from rlhf_core.run.parameters import check_range
    from rlhf_core.run.settings import checked_config

    check_range(arguments.start, arguments.until)
    config, _ = checked_config(arguments.config, arguments.overrides)
    home = Path(config.run.home).resolve()
    console = _set_up_logging(home)
    log.info("%s, seed %d: starting", config.run.name, config.run.seed)
    from flows.embedded import EmbeddedPrefect
    from flows.isolated import isolate_prefect
    from flows.servers import use_login
    from flows.team import prefect_address, prefect_answers
    from rlhf_core.run.environment import NO_TELEMETRY, past_proxies

    os.environ.update(past_proxies())
    if url := prefect_address():
        use_login(home, url)
        if prefect_answers(url):
            os.environ.update(NO_TELEMETRY)
            isolate_prefect()
            return _run_flow(arguments, home, console)
        log.warning(
            "no Prefect server answers at PREFECT_API_URL=%s: this run has one of its own, and is not shown"
            " there",
            url,
        )

    server = EmbeddedPrefect(home)  # sets variables that Prefect reads during its import
    isolate_prefect()
    import flows.rlhf  # noqa: F401 Prefect takes as long to import as its server to start: let them overlap
    from rlhf_core.run.pipeline import warm_up

    warm_up(config)
    server.wait()
    return _run_flow(arguments, home, console)


def _run_flow(arguments: argparse.Namespace, home: Path, console: Console) -> int:
    import httpx

    from flows.rlhf import rlhf
    from rlhf_core.run.display import Bars, show_with
    from rlhf_core.run.pipeline import finished
    from rlhf_core.run.summary import result_table, stage_table

    bars = Bars(console) if console.is_terminal else None
    if bars is not None:
        show_with(bars)
    try:
        summary = rlhf(
            config=arguments.config,
            overrides=tuple(arguments.overrides),
            start=arguments.start,
            until=arguments.until,
        )
    except httpx.HTTPError as error:  # of Prefect's client
        if (done := finished()) is None:
            raise
        log.warning("all stages are done, but Prefect's server did not take that (%s)", type(error).__name__)
        summary = done.summary()
    finally:
        if bars is not None:
            bars.close()
    from rich.console import Console

    out = Console(soft_wrap=not sys.stdout.isatty())
    out.print(stage_table(summary))
    if summary.get("reward") or summary.get("evaluate"):
        out.print(result_table(summary))
    for name, place in summary["where"].items():
        print(f"{name}: {place}")
    print(f"summary: {home / 'runs' / summary['run'] / 'summary.json'}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from rlhf_core.run.plan import as_json, make_plan, show

    plan = make_plan(arguments.config, arguments.overrides, arguments.gpus, arguments.model_config)
    if arguments.json:
        print(as_json(plan))
    else:
        from rich.console import Console

        out = Console()
        out.on_broken_pipe = _raise_broken_pipe  # type: ignore[method-assign] # rich would exit with 1
        show(plan, out)
    return 0 if plan.verdict.fits else InputError.exit_code


def _raise_broken_pipe() -> NoReturn:
    raise BrokenPipeError


def _serve_reward(arguments: argparse.Namespace) -> int:
    from rlhf_core.run.serve_reward import serve_reward
    from rlhf_core.system.home import Home

    home = Home.of(_home(arguments)).make()
    _set_up_logging(home.path)
    with suppress(KeyboardInterrupt, Stopped):  # how a service ends
        serve_reward(
            arguments.artifact,
            host=arguments.host,
            port=arguments.port,
            home=home,
            endpoint=arguments.endpoint,
            template=arguments.template,
            dtype=arguments.dtype,
            device=arguments.device,
            micro_batch_tokens=arguments.micro_batch_tokens,
            ready=lambda url: print(f"serving {arguments.artifact} at {url}", flush=True),
        )
    return 0


def _up(arguments: argparse.Namespace) -> int:
    from flows.servers import up
    from rlhf_core.system.home import Home

    print(up(Home.of(_home(arguments)).make().path))
    return 0


def _down(arguments: argparse.Namespace) -> int:
    from flows.servers import down

    print(down(_home(arguments)))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from flows.status import describe

    print(describe(_home(arguments)))
    return 0


def _home(arguments: argparse.Namespace) -> Path:
    from rlhf_core.config.checkplaces import home_problem

    if problem := home_problem(Path(arguments.home)):
        raise InputError(f"--home: the folder {arguments.home} cannot be used: {problem}; choose another")
    return Path(arguments.home).resolve()


def _set_up_logging(home: Path) -> Console:
    """Our lines on the terminal; everything, tracebacks too, in `logs/rlhf.log`; Prefect's lines not on the
    terminal.
    """
    from rich.console import Console
    from rich.logging import RichHandler

    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    console = Console(stderr=True)
    (home / "logs").mkdir(parents=True, exist_ok=True)
    file = RotatingFileHandler(
        home / "logs" / "rlhf.log", maxBytes=2_000_000, backupCount=2, encoding="utf-8"
    )
    file.setFormatter(ScrubbingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal: logging.Handler = logging.StreamHandler(sys.stderr)
    if console.is_terminal:
        terminal = RichHandler(
            console=console, show_time=False, show_level=False, show_path=False, markup=False
        )
    terminal.setFormatter(ScrubbingFormatter())
    terminal.addFilter(lambda record: record.exc_info is None)
    for name in ("flows", "rlhf_core"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(file)
        logger.addHandler(terminal)
    return console


def _what_next(error: RLHFError) -> str:
    if isinstance(error, GateFailed | NonFiniteError):
        return "the same configuration would end here again: change it first"
    if isinstance(error, UnexpectedError):
        return "this is a bug, here or in code that was given: the log has its traceback"
    if isinstance(error, Superseded):
        return "another run goes on with this stage: let it finish"
    return CONTINUE


def _complain(text: str) -> None:
    print("\n".join(map(printable, scrubbed(text).split("\n"))), file=sys.stderr)


def _on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)
    raise Stopped(signum)


if __name__ == "__main__":
    sys.exit(main())
