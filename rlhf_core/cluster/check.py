"""Check of the Ray cluster that the environment names, before anything is started.

Without it, the error would only appear when PPO starts, after hours. The module does not import ray.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import shown
from rlhf_core.errors import ConfigError, Finding

_CONNECT_SECONDS = 5.0
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[\w.-]+):(\d{1,5})")


def check_cluster(config: PipelineConfig) -> Iterator[Finding]:
    """Check that a server answers at RAY_ADDRESS, or that Ray on this machine requires its token.

    This is the only network connection of the preflight.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        mode = os.environ.get("RAY_AUTH_MODE", "token")
        if mode.lower() != "token":
            yield ConfigError(
                f"RAY_AUTH_MODE: must be token where Ray runs on this machine; got {shown(mode)}; unset it"
            )
        return
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None or int(match[2]) > 65_535:
        yield ConfigError(
            f"RAY_ADDRESS: must be host:port of a running cluster's head; got {shown(address)}; give it (`ray"
            " status` shows it), or unset it to start Ray on this machine"
        )
        return
    host, port = match[1].strip("[]"), int(match[2])
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return
    # A label of the host name that is empty or too long is a UnicodeError, which is a ValueError.
    except (OSError, ValueError, OverflowError) as error:
        yield ConfigError(
            f"RAY_ADDRESS: no Ray cluster answers at {shown(address)} ({error}); start it, or unset it to"
            " start Ray on this machine"
        )
