"""The environment of ranks and engines on other hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlhf_core.config import PipelineConfig
from rlhf_core.storage.s3 import ADDRESS_VARIABLES
from rlhf_core.system.environment import STAGE_PROCESS, THREAD_VARIABLES, WITH_GPU, WITHOUT_GPU

_FORWARDED = (*ADDRESS_VARIABLES, "RLHF_FAIL", "RLHF_FAIL_TRACE")
"""Variables of this process that other hosts get: where the store is, and the faults of tests."""


def rank_environment(
    config: PipelineConfig, device: str, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables of a rank or engine on a cluster. Ray adds them to those of its node.

    On this host alone, Ray's processes inherit all variables of the stage. On a cluster they inherit those of
    Ray on their node. Added are the settings that numbers and protections depend on, `run.env`, and the
    address of the store.

    Nothing secret is among them: Ray stores the environments of its workers without encryption, and shows
    them in its API and logs. Every node has the credentials of the store itself. Variables of this host such
    as NCCL_SOCKET_IFNAME are not sent either, because they may be wrong on another host.
    """
    environment = dict(STAGE_PROCESS)
    environment |= {name: environ[name] for name in _FORWARDED if name in environ}
    if config.run.threads:
        environment |= dict.fromkeys(THREAD_VARIABLES, str(config.run.threads))
    environment |= WITHOUT_GPU if device == "cpu" else WITH_GPU
    return environment | config.run.env
