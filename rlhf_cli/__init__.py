"""The command line.

`rlhf_cli.main` handles Ctrl-C while a command runs. Before and after that, during the imports and at the end
of the interpreter, `print_interruption` handles it.
"""

import sys


def print_interruption(kind: object, error: BaseException, trace: object) -> None:
    """Print one line for a KeyboardInterrupt that nothing has caught, and the traceback of other exceptions.

    An exception hook (`sys.excepthook`). After it the interpreter ends by SIGINT, which is exit code 130 in a
    shell.
    """
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(type(error), error, error.__traceback__)


sys.excepthook = print_interruption
