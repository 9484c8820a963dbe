"""The environments of child processes.

Numbers of threads and visible devices must be set before torch is imported, so they are set by the parent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlhf_core.config import PipelineConfig
from rlhf_core.config.pipeline import runs_on_gpu
from rlhf_core.system.environment import STAGE_PROCESS, THREAD_VARIABLES, WITH_GPU, WITHOUT_GPU
from rlhf_core.system.machine import machine


def past_proxies(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return NO_PROXY with the addresses of this machine added, so that local requests do not use a proxy.

    Libraries prefer different spellings of the variable, so both spellings get the entries of both. `*` means
    all hosts only if it is the only entry.
    """
    values = [environ.get(name, "").strip() for name in ("no_proxy", "NO_PROXY")]
    if "*" in values:
        return {"NO_PROXY": "*", "no_proxy": "*"}
    names = [name.strip() for names in values for name in names.split(",")]
    value = ",".join(dict.fromkeys([*filter(None, names), "127.0.0.1", "localhost"]))
    return {"NO_PROXY": value, "no_proxy": value}


def stage_environment(config: PipelineConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the whole environment of a stage's child process.

    Prefect's variables are removed. The reconciler takes every process with `PREFECT__FLOW_RUN_ID` for the
    engine of that flow run, and the child is not one.
    """
    # Not os.cpu_count(): a container or `taskset` can allow fewer cores than the host has.
    threads = str(config.run.threads or machine().cores())
    child = {name: value for name, value in environ.items() if not name.startswith("PREFECT_")}
    # Over the variables of the user: numbers depend on these.
    child |= STAGE_PROCESS
    child |= past_proxies(environ)
    child |= dict.fromkeys(THREAD_VARIABLES, threads)
    if runs_on_gpu(config):
        # The user's own value wins here, but not over STAGE_PROCESS.
        child = WITH_GPU | child
    else:
        child |= WITHOUT_GPU
    return child | config.run.env
