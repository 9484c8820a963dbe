"""A Prefect server for a command: the one at PREFECT_API_URL, that of `rlhf up` for the same home, or one
that runs as long as the command.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from rlhf_core.config import PipelineConfig
from rlhf_core.system.home import Home

log = logging.getLogger(__name__)


def with_prefect(config: PipelineConfig, call: Callable[[], int]) -> int:
    """Return the result of `call`, which runs a flow, with a Prefect server that responds.

    Args:
        config: Checked configuration.
        call: Imports and runs the flow. Prefect must not be imported before, because its import reads the
            settings that are made here.
    """
    from flows.isolated import EMBEDDED, client_headers, isolate_prefect
    from rlhf_core.executors.environment import past_proxies
    from rlhf_core.ops.servers.prefect_server import EmbeddedPrefect
    from rlhf_core.ops.servers.servers import (
        external_prefect_url,
        prefect_responds,
        use_auth_string,
        use_servers,
    )
    from rlhf_core.system.environment import NO_TELEMETRY

    home = Home.of(config.run.home)
    os.environ.update(past_proxies())
    use_servers(home)
    url = external_prefect_url()
    if url is not None:
        use_auth_string(home, url)
        if prefect_responds(url, client_headers):
            os.environ.update(NO_TELEMETRY)
            isolate_prefect()
            return call()
        log.warning(
            "no Prefect server answers at %s: this run has one of its own, and is not shown there", url
        )

    server = EmbeddedPrefect(home)  # sets variables that Prefect reads during its import
    os.environ[EMBEDDED] = "1"
    isolate_prefect()
    # The import of Prefect takes about as long as the start of its server, so both happen at the same time.
    import flows.rlhf  # noqa: F401
    from rlhf_core.tracking.tracker import open_tracking

    open_tracking(config).warm_up()
    server.wait()
    return call()
