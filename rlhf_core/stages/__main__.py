"""Entry point of a stage's child process: `python -m rlhf_core.stages SPEC.json`.

    flow process                                child (own session)                     grandchildren
    ------------                                -------------------                     -------------
    writes SPEC.json, opens a pipe   ------->   dies with its parent (PR_SET_PDEATHSIG)
    reads JSON lines                 <-------   progress ... result | error             Ray, vLLM, training ranks
    SIGTERM, then SIGKILL of group   ------->   ends its MLflow run, exits 143

Exit codes: 0 a result was sent; 2 and 3 an error was sent (`rlhf_core.errors`); 143 asked to stop.
The flow sets the environment (threads, telemetry) before this interpreter starts: see `flows/environment.py`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rlhf_core.errors import RLHFError, to_record
from rlhf_core.stages.events import PARENT_VARIABLE, Events

EXIT_STOPPED = 128 + signal.SIGTERM
_PR_SET_PDEATHSIG = 1
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main() -> int:
    """Run the stage of the spec named on the command line; the exit code."""
    _die_with_parent()
    events = Events.from_environment()
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, stream=sys.stderr)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    log = logging.getLogger("rlhf_core.stages")
    try:
        from rlhf_core.stages.run import execute
        from rlhf_core.stages.spec import StageSpec

        ref = execute(StageSpec.read(Path(sys.argv[1])), events)
    except RLHFError as error:
        log.error("%s: %s", type(error).__name__, error.message, exc_info=error)
        events.send("error", **to_record(error))
        return error.exit_code
    except Exception as error:
        log.exception("the stage failed")
        events.send("error", **to_record(error))
        return RLHFError.exit_code
    except BaseException:
        # Ray replaces the SIGTERM handler by one with an exit code of its own, so any request to exit means "stop".
        log.warning("stopped by a signal")
        return EXIT_STOPPED
    events.send("result", artifact=ref.to_json())
    return 0


def _die_with_parent() -> None:
    """The kernel kills this process when the flow dies, even by SIGKILL.

    SIGKILL and not SIGTERM: nobody would be left to enforce it on a process stuck in native code.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent.isdigit() or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(EXIT_STOPPED)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    # A second signal must not interrupt the clean-up that the first one started.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(EXIT_STOPPED)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m rlhf_core.stages SPEC.json")
    code = main()
    logging.shutdown()
    sys.exit(code)
