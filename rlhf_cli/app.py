"""The application of the command line: its groups of commands, and the parameters that several of them have.

A command is a function with the decorator `@app.command(group=...)` that returns the exit code. Its signature
is the parser, and its docstring is the help.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Group, Parameter

import rlhf_core

BEFORE = Group.create_ordered("Before a run")
RUNS = Group.create_ordered("Runs")
REGISTRY = Group.create_ordered("Registered policies")
SERVERS = Group.create_ordered("Servers")

app = App(
    name="rlhf",
    help="End-to-end RLHF: raw data to a registered, evaluated policy.\n\n"
    "rlhf COMMAND --help has the arguments of a command and an example.",
    help_format="plaintext",
    version=lambda: rlhf_core.__version__,
    group_commands=Group.create_ordered("Options"),
    default_parameter=Parameter(negative=(), show_default=lambda value: value if value else None),
    suppress_keyboard_interrupt=False,
)
app["--help"].help = "Show this text."
app["--version"].help = "Show the version."
app.register_install_completion_command(help="Complete commands and options with TAB in this shell.")

HOME = ".rlhf"
"""Default of `--home`."""

Config = Annotated[str, Parameter(help="YAML file; rlhf configs lists those that come with the package.")]
Overrides = Annotated[
    str, Parameter(help="Fields of CONFIG to override, each as KEY=VALUE, such as ppo.steps=50.")
]
HomeFolder = Annotated[
    str,
    Parameter(
        name="--home", metavar="FOLDER", help="Folder of the runs, as run.home of their configuration."
    ),
]
Endpoint = Annotated[
    str | None,
    Parameter(
        metavar="URL",
        help="Server of a store with an address s3://, if it is not AWS: such as http://127.0.0.1:9000.",
    ),
]
