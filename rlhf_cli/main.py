"""The command line. `rlhf --help` lists the commands.

Slow imports are inside the commands, so that errors of the configuration are reported before them.

Exit codes:
    0       done
    1       `rlhf replay`, and `rlhf why` of runs: there is a difference; `rlhf check-reward`: a finding
    2       the user's input is wrong
    3       a failure; the same command continues
    4       `rlhf rounds`: votes of people are needed; the same command continues
    130     interrupted with Ctrl-C
    129, 143    stopped by SIGHUP or SIGTERM
    141     the reader of a help text, such as `head`, has ended
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from cyclopts import CycloptsError

# Each of these modules adds its commands to `app`.
from rlhf_cli import before, champions, look, runs, servers  # noqa: F401
from rlhf_cli.app import Stopped, app
from rlhf_core.config.redact import printable, scrubbed
from rlhf_core.errors import GateFailed, InputError, NonFiniteError, RLHFError, Superseded, UnexpectedError

log = logging.getLogger("rlhf_cli.main")  # not __name__, which is __main__ for `python -m rlhf_cli.main`

CONTINUE = "type the same command again to continue from there"


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
        # Exit code 0: a command that prints is done when its reader has seen enough.
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


def _what_next(error: RLHFError) -> str:
    if isinstance(error, GateFailed | NonFiniteError):
        return "the same configuration would end here again: change it first"
    if isinstance(error, UnexpectedError):
        return "this is a bug, here or in code that was given: the log has its traceback"
    if isinstance(error, Superseded):
        return "another run executes this stage: let it finish"
    return CONTINUE


def _print_error(text: str) -> None:
    # Line by line, because `printable` would escape the line feeds as well.
    lines = scrubbed(text).split("\n")
    print("\n".join(map(printable, lines)), file=sys.stderr)


def _on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    # A second signal must not interrupt the clean-up.
    signal.signal(signum, signal.SIG_IGN)
    raise Stopped(signum)


if __name__ == "__main__":
    sys.exit(main())
