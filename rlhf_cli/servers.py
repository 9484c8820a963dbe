"""Commands for servers: `rlhf up`, `down`, `status`, `serve-reward`."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from rlhf_cli.app import HOME, SERVERS, Endpoint, HomeFolder, Overrides, Stopped, app, usage, with_home
from rlhf_core.errors import InputError
from rlhf_core.logs import set_up_logging
from rlhf_core.system.home import Home, default_home

if TYPE_CHECKING:
    from flows.config_deployment import ConfigDeployment


@app.command(group=SERVERS)
def _serve_reward(
    artifact: str,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8600,
    home: HomeFolder = HOME,
    endpoint: Endpoint = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    attention: Literal["sdpa", "eager"] = "sdpa",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    micro_batch_tokens: int = 16384,
) -> int:
    """Serve a reward model over HTTP, for rewards of type remote.

    Example: rlhf serve-reward .rlhf/store/artifacts/reward/0123456789abcdef --port 8600

    Args:
        artifact: Address of a reward artifact, or a model's folder.
        host: Address to listen on. Others than loopback need RLHF_REWARD_TOKEN.
        port: 0 takes any that is free.
        dtype: Number format of the weights.
        attention: eager also computes sliding windows, chunks and caps.
        device: auto takes a GPU if there is one.
        micro_batch_tokens: Tokens that are scored at a time; fewer need less memory.
    """
    from rlhf_core.ops.serve import serve_reward

    folder = _home(home).make()
    set_up_logging(folder)
    with suppress(KeyboardInterrupt, Stopped):  # the normal end of a service
        serve_reward(
            artifact,
            host=host,
            port=port,
            home=folder,
            endpoint=endpoint,
            dtype=dtype,
            attention=attention,
            device=device,
            micro_batch_tokens=micro_batch_tokens,
            ready=lambda url: print(f"serving {artifact} at {url}", flush=True),
        )
    return 0


@app.command(group=SERVERS, usage=usage("up", ""))
def _up(
    *overrides: Overrides,
    config: Annotated[str | None, Parameter(metavar="CONFIG")] = None,
    name: str | None = None,
    schedule: Annotated[str | None, Parameter(metavar="CRON")] = None,
    timezone: Annotated[str | None, Parameter(metavar="ZONE")] = None,
    if_changed: bool = False,
    param: Annotated[tuple[str, ...], Parameter(metavar="NAME=VALUE")] = (),
    home: Annotated[str | None, Parameter(metavar="FOLDER")] = None,
) -> int:
    """Start Prefect, MLflow and a worker on this machine; with --config, deploy a configuration.

    Example: rlhf up --config my.yaml --schedule "0 2 * * 0"

    Args:
        config: YAML file; creates a deployment for it, or updates it.
        name: Name of the deployment (default: that of the file).
        schedule: When it runs: minute, hour, day, month, day of the week.
        timezone: Of the schedule, such as Europe/Berlin (default: of this machine).
        if_changed: Run only if data, models, code or settings have changed.
        param: Another parameter of the deployment, such as min_new_rows=1000 with --if-changed. It may be
            given several times.
        home: Folder of logs and databases, and run.home of the runs of all deployments (default: run.home of
            --config, else RLHF_HOME in the environment, else .rlhf).
    """
    from flows.isolated import client_headers, isolate_prefect
    from rlhf_core.config.load import load_config
    from rlhf_core.ops.servers.servers import are_up, next_step, up, use_servers
    from rlhf_core.planning.check import full_disk

    if timezone and not schedule:
        raise InputError("--timezone: is that of --schedule; give both")
    deployment = None
    wanted = home or default_home()
    if config is not None:
        # Before anything starts, for its errors.
        checked = load_config(config, overrides)
        deployment = _config_deployment(
            config,
            # So that its runs keep the folder, whoever starts the servers.
            with_home(overrides, home and str(Path(home).absolute())),
            name=name,
            parameters=param,
            cron=schedule,
            timezone=timezone,
            if_changed=if_changed,
        )
        # An option on the command line wins over the file.
        wanted = home or checked.run.home
    elif schedule or timezone or name or param or if_changed or overrides:
        raise InputError("--config: the deployment needs a configuration; name its YAML file")
    folder = _home(wanted)
    # The servers could not write the reason to their logs.
    if problem := full_disk(folder.path):
        raise InputError(f"--home: {problem}, or choose another")
    if deployment is None or not are_up(folder):
        print(up(folder.make(), client_headers, runs_in_home=home is not None))
    runnable = "rlhf/full-pipeline --param ppo_steps=5"
    if deployment is not None:
        use_servers(folder)
        isolate_prefect()
        print(deployment.apply())
        runnable = deployment.full_name
    print(next_step(runnable, folder))
    return 0


def _config_deployment(config: str, overrides: tuple[str, ...], **options: Any) -> ConfigDeployment:
    # Prefect logs a parameter that it refuses with a dump of pydantic's errors. The command prints one line.
    level = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"
    given = os.environ.get(level)
    os.environ[level] = "CRITICAL"  # read when Prefect is imported
    from flows.isolated import isolate_prefect

    isolate_prefect()
    from flows.config_deployment import config_deployment

    # The servers, which inherit the environment, write to their logs.
    del os.environ[level]
    if given is not None:
        os.environ[level] = given
    return config_deployment(config, overrides, **options)


@app.command(group=SERVERS)
def _down(*, home: HomeFolder = HOME) -> int:
    """Stop what rlhf up started, and nothing else.

    Example: rlhf down
    """
    from rlhf_core.ops.servers.servers import down

    # The servers of a folder that can no longer be written are to be stopped, too.
    print(down(_home(home, writable=False)))
    return 0


@app.command(group=SERVERS)
def _status(*, home: HomeFolder = HOME) -> int:
    """Show servers, recent runs and where things are.

    Example: rlhf status
    """
    from rlhf_core.ops.servers.servers import status

    print(status(_home(home, writable=False)))
    return 0


def _home(home: str, *, writable: bool = True) -> Home:
    from rlhf_core.system.home import home_problem

    problem = home_problem(Path(home), writable=writable)
    if problem:
        raise InputError(f"--home: the folder {home} cannot be used: {problem}; choose another")
    return Home.of(home)
