"""The application of the command line: its groups of commands, and the parameters that several of them have.

A command is a function with the decorator `@app.command(group=...)` that returns the exit code. Its signature
is the parser, and its docstring is the help.
"""

from __future__ import annotations

import signal
from typing import Annotated

# Every lock has it, because Prefect's command line uses it. typer is imported faster, but has help and
# defaults as arguments, and starts Python for each TAB (decision 22).
from cyclopts import App, Group, Parameter

import rlhf_core
from rlhf_core.system.home import HOME_OF_RUNS, default_home

# cyclopts shows groups of this kind in the order in which they are created, and others by name.
BEFORE = Group.create_ordered("Before a run")
RUNS = Group.create_ordered("Runs")
LOOK = Group.create_ordered("Look into runs")
REGISTRY = Group.create_ordered("Registered policies")
SERVERS = Group.create_ordered("Servers")

app = App(
    name="rlhf",
    help="End-to-end RLHF: raw data to a registered, evaluated policy.\n\n"
    "rlhf COMMAND --help has the arguments of a command and an example.",
    help_format="plaintext",
    version=lambda: rlhf_core.__version__,
    group_commands=Group.create_ordered("Options"),
    # cyclopts otherwise adds `--no-FLAG` for each flag, and shows empty defaults.
    default_parameter=Parameter(negative=(), show_default=lambda value: value if value else None),
    suppress_keyboard_interrupt=False,  # `rlhf_cli.main.exit_code` reports it
)
app["--help"].help = "Show this text."
app["--version"].help = "Show the version."
app.register_install_completion_command(help="Complete commands and options with TAB in this shell.")

Config = Annotated[str, Parameter(help="YAML file; rlhf configs lists those that come with the package.")]
Overrides = Annotated[
    str, Parameter(name="FIELD=VALUE", help="Fields of CONFIG to override, such as ppo.steps=50.")
]
RunHome = Annotated[str | None, Parameter(name="--home", metavar="FOLDER", help="Short for run.home=FOLDER.")]
HOME = default_home()
"""Default of `--home` of commands without a configuration."""
HomeFolder = Annotated[
    str,
    Parameter(
        name="--home",
        metavar="FOLDER",
        help=f"Folder of the runs, as run.home of their configuration (default: {HOME_OF_RUNS} in the"
        " environment, else .rlhf).",
        # It would be RLHF_HOME of who reads the help, and look like a constant.
        show_default=False,
    ),
]
Endpoint = Annotated[
    str | None,
    Parameter(
        metavar="URL",
        help="Server of a store with an address s3://, if it is not AWS: such as http://127.0.0.1:9000.",
    ),
]


def usage(command: str, config: str = "CONFIG ") -> str:
    """Return the first line of the help of a command that takes `Overrides`."""
    return f"Usage: rlhf {command} [OPTIONS] {config}[FIELD=VALUE...]"


def with_home(overrides: tuple[str, ...], home: str | None) -> tuple[str, ...]:
    """Return the overrides of a command with the folder that its option `--home` names, if it does."""
    from rlhf_core.config.load import overrides_of

    return tuple(overrides_of({"run.home": home}, overrides))


class Stopped(BaseException):
    """SIGTERM or SIGHUP. Like KeyboardInterrupt, it is not an Exception, so that `except Exception` does not
    catch it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum
