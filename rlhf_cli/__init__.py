"""The command line and the local servers of `rlhf up`.

This is the first code of the project that runs. An empty entry in `PYTHONPATH` (`PYTHONPATH=:`, often caused
by `$PYTHONPATH:/folder` with an unset variable) and relative entries refer to the working folder. They come
before the standard library, so Python would import a `queue.py` from that folder. This module removes such
entries before anything else is imported, for this process and for its child processes.
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


drop_relative_paths()
