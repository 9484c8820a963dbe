"""Entry point of a stage's child process: `python -m rlhf_core.run SPEC.json`.

    flow process                      reaper (own session)    stage                  its processes
    ------------                      -------------------     -----                  -------------
    writes SPEC.json, opens a pipe -> forks                -> runs                -> Ray, vLLM, training ranks
    reads JSON lines               <------------------------- progress ... result
    SIGTERM, or dies               -> SIGINT, SIGKILL      -> ends its MLflow run -> none is left (reaper.py)

With WAIT_VARIABLE, SPEC.json only has the stage and the configuration at first: the process imports what the
stage needs and waits for a line on that pipe. Then SPEC.json is complete.

Exit codes: 0 a result was sent; 2 and 3 an error was sent (`rlhf_core.errors`); 143 asked to stop.
The flow sets the environment (threads, telemetry) before this interpreter starts: see
`rlhf_core/executors/spec.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from rlhf_core.errors import classified
from rlhf_core.executors.events import (
    PARENT_VARIABLE,
    STOP_VARIABLE,
    SUSPEND_VARIABLE,
    WAIT_VARIABLE,
    Events,
    Warnings,
)
from rlhf_core.executors.spec import StageSpec
from rlhf_core.logs import log_to_stderr
from rlhf_core.pipeline import STAGES
from rlhf_core.run.reaper import fork_reaper
from rlhf_core.system.processes import EXIT_STOPPED, StopRequest, leave_out
from rlhf_core.tracking.mlflow_client import shorten_timeouts


def main() -> int:
    """Run the stage of the spec that the command line names. Returns the exit code."""
    # Before the imports of the stage: it forks, and the
    # threads of libraries do not survive that (decision 28).
    events = _startup()
    pipe = os.environ.pop(WAIT_VARIABLE, "")
    log_to_stderr()
    logging.getLogger("rlhf_core").addHandler(Warnings(events))
    stop = StopRequest()

    def on_signal(signum: int, frame: object) -> None:
        shorten_timeouts()  # a tracker that does not answer must not take the time that a checkpoint needs
        stop.on_signal(signum, frame)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    log = logging.getLogger("rlhf_core.run")
    try:
        # Imported here, so that a module that cannot be imported is sent as the error of the stage.
        from rlhf_core.run.attempt import run_attempt

        spec_file = Path(sys.argv[1])
        spec = StageSpec.read(spec_file)
        leave_out(STAGES[spec.stage].unused)
        if pipe:
            _prepare_and_wait(spec, int(pipe))
        ref = run_attempt(StageSpec.read(spec_file), events, stop)
    except Exception as error:  # whatever the stage, its libraries or a user's function raise
        ours = classified(error)
        log.error("%s: %s", type(ours).__name__, ours.message, exc_info=error)
        events.error(ours)
        return ours.exit_code
    except (SystemExit, KeyboardInterrupt):
        # `stop` raises SystemExit. One that a library raises means "stop" as well.
        log.info("stopped by a signal")
        return EXIT_STOPPED
    events.send("result", artifact=ref.to_json())
    return 0


def _startup() -> Events:
    """Remove the variables of the flow from the environment, and start the reaper if there is a flow."""
    flow, stop = os.environ.pop(PARENT_VARIABLE, ""), os.environ.pop(STOP_VARIABLE, "20")
    suspend = os.environ.pop(SUSPEND_VARIABLE, "600")
    if not flow.isdigit() or not sys.platform.startswith("linux"):
        return Events.from_environment()
    # If the flow died before `fork_reaper` asks the kernel for a signal, none would come.
    if os.getppid() != int(flow):
        sys.exit(EXIT_STOPPED)
    fork_reaper(int(flow), float(stop), float(suspend))
    return Events.from_environment()


def _prepare_and_wait(spec: StageSpec, pipe: int) -> None:
    """Import what the stage needs, and return when the flow has completed the spec.

    Exit if the flow has closed the pipe, or has died.
    """
    os.set_inheritable(pipe, False)
    try:
        from rlhf_core.run.attempt import import_for

        import_for(spec.stage, spec.config)
    except Exception:
        # The stage itself reports what cannot be imported.
        logging.getLogger("rlhf_core.run").info("the stage could not be prepared", exc_info=True)
    if not os.read(pipe, 100):
        sys.exit(EXIT_STOPPED)
    os.close(pipe)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m rlhf_core.run SPEC.json")
    code = main()
    logging.shutdown()
    sys.exit(code)
