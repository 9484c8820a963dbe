"""The flows, and the command line.

This is the first code of the project that runs. `PYTHONPATH=:` (often `$PYTHONPATH:/folder` with an unset variable) and
relative entries name the working folder, before the standard library: a `queue.py` there would be run. They are taken
out here, before anything else is imported, for this process and for those that it starts.
"""

import os
import sys


def drop_relative_paths() -> None:
    """Leave only the absolute entries of PYTHONPATH, in the variable and in `sys.path`."""
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
        relative |= {os.path.abspath(entry) for entry in relative}  # as Python has written them into sys.path
    except OSError:
        pass  # the working folder is gone
    relative -= set(absolute)
    library = os.path.dirname(os.__file__)
    first = sys.path.index(library) if library in sys.path else len(sys.path)
    sys.path[:first] = [entry for entry in sys.path[:first] if entry not in relative]
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if ours in relative and ours not in sys.path:
        sys.path.append(ours)  # an installation that is a link to the working folder: behind the standard library


drop_relative_paths()
