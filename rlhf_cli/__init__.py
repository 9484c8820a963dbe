"""The command line.

This is the first code of the project that runs. An empty entry in `PYTHONPATH` (`PYTHONPATH=:`, often caused
by `$PYTHONPATH:/folder` with an unset variable) and relative entries refer to the working folder. They come
before the standard library, so Python would import a `queue.py` from that folder. This module removes such
entries before anything else is imported, for this process and for its child processes.

`rlhf_cli.main` handles Ctrl-C while a command runs. Before and after that, during the imports and at the end
of the interpreter, `print_interruption` handles it.
"""

import os
import sys


def drop_relative_paths() -> None:
    """Keep only the absolute entries of PYTHONPATH, in the variable and in `sys.path`."""
    given = os.environ.get("PYTHONPATH", "")
    entries = given.split(os.pathsep)
    absolute = [entry for entry in entries if os.path.isabs(entry)]
    if not given or len(absolute) == len(entries):
        return
    if absolute:
        os.environ["PYTHONPATH"] = os.pathsep.join(absolute)
    else:
        del os.environ["PYTHONPATH"]
    relative = {entry for entry in entries if entry not in absolute}
    try:  # noqa: SIM105 contextlib may be one of the working folder's
        # Python stores these entries in sys.path as absolute paths
        relative |= {os.path.abspath(entry) for entry in relative}
    except OSError:
        pass  # the working folder does not exist any more
    relative -= set(absolute)
    library = os.path.dirname(os.__file__)
    first = sys.path.index(library) if library in sys.path else len(sys.path)
    sys.path[:first] = [entry for entry in sys.path[:first] if entry not in relative]
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if ours in relative and ours not in sys.path:
        # if the package is installed as a link to the working folder, search it after the standard library
        sys.path.append(ours)


def print_interruption(kind: object, error: BaseException, trace: object) -> None:
    """Print one line for a KeyboardInterrupt that nothing has caught, and the traceback of other exceptions.

    An exception hook (`sys.excepthook`). After it the interpreter ends by SIGINT, which is exit code 130 in a
    shell.
    """
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(type(error), error, error.__traceback__)


drop_relative_paths()
sys.excepthook = print_interruption
