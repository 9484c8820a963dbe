"""`rlhf up`, `down` and `status`: start the supervisor in the background, stop it, and show what is running.

Every process that `up` starts, and every process that these start, inherits an environment variable with the
home. No other process receives a signal.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf_core.config.redact import credential_problem, printable, shown
from rlhf_core.errors import InputError, StageFailed
from rlhf_core.executors.spec import past_proxies
from rlhf_core.ops.servers.prefect_server import (
    FLOW_SETTINGS,
    external_database_url,
    login_link,
    read_auth_string,
    server_environment,
)
from rlhf_core.ops.servers.reconcile import ENGINE_VARIABLE, FLOW_STOP_SECONDS
from rlhf_core.run.state import describe_runs
from rlhf_core.system.files import read_json, write_json
from rlhf_core.system.home import HOME_OF_RUNS, Home
from rlhf_core.system.processes import (
    SAFE_PATH,
    ProcessId,
    launch,
    processes_with_env,
    python_module,
    stop,
    wait_gone,
)
from rlhf_core.system.serving import post, responds
from rlhf_core.tracking.database import tracker_problem, training_page, ui_command

HOME_VARIABLE = "RLHF_SERVERS"
"""The home folder, in the environment of every process that `up` starts, flow runs and stages included."""
READY_SECONDS = 120.0
"""Maximum duration of the start of one server."""


class ServerState(BaseModel):
    """One server of `ServersState`."""

    model_config = ConfigDict(frozen=True, strict=True)

    pid: int | None
    restarts: int
    last_end: str = ""
    """Why it was started again the last time."""


class ServersState(BaseModel):
    """The content of {home}/servers/state.json, which the supervisor writes."""

    model_config = ConfigDict(frozen=True, strict=True)

    status: str
    """starting, ready, failed or stopping."""
    message: str
    """Why the start failed, or an empty string."""
    pid: int
    """Process id of the supervisor."""
    started: float
    """Start time of the supervisor, see `ProcessId`."""
    prefect: str
    """URL of Prefect's API."""
    mlflow: str
    """Tracking URI."""
    servers: dict[str, ServerState]
    """What the supervisor runs. External servers are missing."""

    @classmethod
    def read(cls, home: Home) -> ServersState | None:
        """Return the last state for `home`, or None if there is none or its format is invalid."""
        try:
            return cls.model_validate(read_json(home.servers_state))
        except ValidationError:
            return None

    def write(self, home: Home) -> None:
        """Replace the state of `home`."""
        write_json(home.servers_state, self.model_dump())


def up(home: Home, credentials: Callable[[], Mapping[str, str]], *, runs_in_home: bool = False) -> str:
    """Start the servers for `home` and return the text for the user.

    Args:
        home: Folder for logs and databases.
        credentials: Returns the headers of a request to the server of PREFECT_API_URL.
        runs_in_home: Whether `home` is `run.home` of the runs of all deployments.

    Raises InputError if they are running already, and StageFailed if they do not start.
    """
    home.servers.mkdir(parents=True, exist_ok=True)
    lock = (home.servers / "up.lock").open("w")  # held until this function returns
    try:
        # The kernel releases it at the end of the process, also after a kill. The file may stay.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another `rlhf up` starts the servers of {home.path}; wait for it") from None
    running = supervisor_of(home)
    if running is not None:
        raise InputError(
            f"servers for {home.path} are up already (supervisor pid {running.pid}); see `rlhf status`, or"
            " `rlhf down` first"
        )
    # Only for their errors, which are then reported before anything starts.
    external_database_url()
    external_mlflow_uri()
    # For httpx here and for all processes below: a proxy does not reach the loopback address of this machine.
    os.environ.update(past_proxies())
    url = external_prefect_url()
    if url is not None and not prefect_responds(url, credentials):
        raise InputError(
            f"PREFECT_API_URL: no Prefect server answers at {url}; start it, or unset the variable so that"
            " `rlhf up` starts one"
        )
    _stop_remaining(home)
    environment = {**os.environ, **SAFE_PATH, HOME_VARIABLE: str(home.path)}
    if runs_in_home:
        environment[HOME_OF_RUNS] = str(home.path)
    # No parent-death signal: the servers outlive this command.
    supervisor = launch(
        [*python_module("rlhf_core.ops.servers.supervisor"), str(home.path)],
        environment,
        log_file=home.supervisor_log,
    )
    return _describe_start(home, _wait_until_ready(home, supervisor))


def _wait_until_ready(home: Home, supervisor: subprocess.Popen[bytes]) -> ServersState:
    deadline = time.monotonic() + 3 * READY_SECONDS
    with ExitStack() as unready:
        unready.callback(supervisor.terminate)  # also after Ctrl-C
        while time.monotonic() < deadline:
            state = ServersState.read(home)
            # Until the supervisor has written its first state, the file may be of an earlier one.
            if state is not None and state.pid == supervisor.pid:
                if state.status == "ready":
                    unready.pop_all()
                    return state
                if state.message:
                    raise StageFailed(f"{state.message}; the supervisor's log is {home.supervisor_log}")
            if supervisor.poll() is not None:
                raise StageFailed(
                    f"the supervisor ended with exit code {supervisor.returncode}; see {home.supervisor_log}"
                )
            time.sleep(0.2)
        raise StageFailed(
            f"the servers were not ready within {3 * READY_SECONDS:g} s; see {home.supervisor_log}"
        )


def _describe_start(home: Home, state: ServersState) -> str:
    lines = [f"Prefect  {state.prefect.removesuffix('/api')}"]
    if "prefect" in state.servers:
        lines.append(f"         {_describe_login(home, state)}")
    else:
        lines.append("         (the server of PREFECT_API_URL; lost runs are not restarted automatically)")
    lines.append(f"MLflow   {_mlflow_page(state)}")
    if "mlflow" not in state.servers:
        lines.append("         (the tracker of MLFLOW_TRACKING_URI)")
    lines.append(f"logs     {home.servers}")
    lines += _describe_deployments(home, state)
    return "\n".join(lines)


def next_step(deployment: str, home: Home) -> str:
    """Return the line of `up` with the command that runs a deployment, in any shell.

    Args:
        deployment: Its name `FLOW/NAME`, and maybe parameters.
        home: Folder of the servers.
    """
    command = f"{shlex.quote(str(Path(sys.executable).parent / 'prefect'))} deployment run {deployment}"
    state = ServersState.read(home)
    # The project's prefect.toml refers to the profiles of the default home.
    is_found = Path("prefect.toml").exists() and home.path == Home.of(".rlhf").path
    if state is not None and "prefect" in state.servers and not is_found:
        command = f"PREFECT_PROFILES_PATH={shlex.quote(str(home.prefect_profiles.absolute()))} {command}"
    return f"next     {command}"


def _mlflow_page(state: ServersState) -> str:
    return training_page(state.mlflow) if state.mlflow.startswith("http") else state.mlflow


def _describe_deployments(home: Home, state: ServersState) -> list[str]:
    """Return a line for each schedule of a deployment that names a configuration, and for each such
    deployment without a schedule. Nothing is known of an external server.
    """
    if "prefect" not in state.servers:
        return []
    auth = read_auth_string(home)
    try:
        flows = {flow["id"]: flow["name"] for flow in post(f"{state.prefect}/flows/filter", {}, auth=auth)}
        found = post(f"{state.prefect}/deployments/filter", {"sort": "NAME_ASC"}, auth=auth)
    # An error of urllib is an OSError. ValueError: an answer that is no JSON.
    except (OSError, ValueError):
        return ["deployments: Prefect did not answer"]
    lines = []
    for each in found:
        if not each["parameters"].get("config"):
            continue
        name = f"{flows.get(each['flow_id'])}/{each['name']}"
        for schedule in each["schedules"]:
            times = schedule["schedule"]
            text = f'"{times["cron"]}" in {times.get("timezone") or "UTC"}' if "cron" in times else "times"
            state_of_it = "active" if schedule["active"] and not each["paused"] else "paused"
            lines.append(f"deployment {name}  {text}  {state_of_it}")
        if not each["schedules"]:
            lines.append(f"deployment {name}  no schedule")
    return lines


def _describe_login(home: Home, state: ServersState) -> str:
    auth = read_auth_string(home)
    if auth is None or not sys.stdout.isatty():  # other output may be logged
        return f"its UI asks for a password once: the line in {home.servers_login}"
    return f"open {login_link(state.prefect, auth)}"


def are_up(home: Home) -> bool:
    """Return whether the servers of `home` are ready."""
    state = ServersState.read(home)
    return state is not None and state.status == "ready" and supervisor_of(home) is not None


def use_servers(home: Home) -> None:
    """Have Prefect's clients of this process use the server of `up` for `home`, if it is up and the
    environment names no other one.

    Call this function before Prefect reads its settings.
    """
    state, auth = ServersState.read(home), read_auth_string(home)
    if os.environ.get("PREFECT_API_URL") or state is None or not are_up(home):
        return
    if "prefect" not in state.servers:
        os.environ["PREFECT_API_URL"] = state.prefect
    elif auth is not None:
        port = urlsplit(state.prefect).port or 0
        os.environ.update(FLOW_SETTINGS | server_environment(home.servers / "prefect", auth, port))


def use_auth_string(home: Home, url: str) -> None:
    """Set the password for Prefect clients in this process if `url` is the server of `up` for `home`."""
    state, auth = ServersState.read(home), read_auth_string(home)
    if state is not None and auth is not None and url == state.prefect and "prefect" in state.servers:
        os.environ.setdefault("PREFECT_API_AUTH_STRING", auth)


def down(home: Home) -> str:
    """Stop what `up` started for `home`, flow runs included, and return the text for the user."""
    supervisor = supervisor_of(home)
    # Counted before they are stopped, for the message.
    runs = flow_processes(home)
    if supervisor is None and not _processes_of(home):
        _remove_addresses(home)
        return f"nothing to stop: no servers of {home.path} are up"
    if supervisor is not None:
        supervisor.send(signal.SIGTERM)
        # The supervisor stops the flow runs, and then up to three servers, each of which has 10 s.
        wait_gone([supervisor], FLOW_STOP_SECONDS + 40.0)
    _stop_remaining(home)
    _remove_addresses(home)
    if not runs:
        return f"stopped the servers of {home.path}"
    return (
        f"stopped the servers of {home.path}; {len(runs)} flow run(s) were interrupted and go on if"
        " `rlhf up` is typed within a day (later: start the deployment again, and it continues from the last"
        " checkpoint)"
    )


def status(home: Home) -> str:
    """Return the status of the servers, the last runs and the relevant addresses for `home`.

    Names may come from files and servers and are printed without control characters.
    """
    locations = [f"logs:      {home.logs}", f"summaries: {home.runs}/*/summary.json"]
    if supervisor_of(home) is None:
        locations.append(f"MLflow:    {ui_command(f'sqlite:///{home.mlflow_database}')}")
    lines = [*_describe_servers(home), "", *describe_runs(home), "", *locations]
    return "\n".join(map(printable, lines))


def _describe_servers(home: Home) -> list[str]:
    state = ServersState.read(home)
    if state is None or supervisor_of(home) is None:
        return ["servers: none; start them with `rlhf up` (`rlhf run` needs none)"]
    lines = [f"servers: {state.status} (supervisor pid {state.pid})"]
    servers = {
        "prefect": (state.prefect, state.prefect.removesuffix("/api")),
        "mlflow": (state.mlflow, _mlflow_page(state)),
    }
    for name, (url, page) in servers.items():
        if name in state.servers:
            answer = "up" if responds(f"{url}/health") else "NO ANSWER"
            lines.append(f"  {name:<8} {answer:<10} {page}{_restarts(state, name)}")
        else:
            lines.append(f"  {name:<8} {'yours':<10} {page}")
    worker = state.servers.get("worker")
    answer = "up" if worker and worker.pid else "down"
    lines.append(f"  {'worker':<8} {answer:<10} {_restarts(state, 'worker')}")
    if "prefect" in state.servers:
        lines.append(f"  {_describe_login(home, state)}")
    return [*lines, *(f"  {line}" for line in _describe_deployments(home, state))]


def _restarts(state: ServersState, name: str) -> str:
    server = state.servers.get(name)
    if server is None or not server.restarts:
        return ""
    return f"  restarted {server.restarts} times, the last time after: {server.last_end or 'unknown'}"


def supervisor_of(home: Home) -> ProcessId | None:
    """Return the running supervisor of `home`, or None.

    A stale or modified state file is detected by comparing the pid, the start time and the environment
    variable.
    """
    state = ServersState.read(home)
    if state is None:
        return None
    process = ProcessId(state.pid, state.started)
    return process if process in _processes_of(home) else None


def flow_processes(home: Home) -> list[ProcessId]:
    """Return the processes of the flow runs that the worker of `home` has started."""
    of_home = set(_processes_of(home))
    return [process for process, _ in processes_with_env(ENGINE_VARIABLE) if process in of_home]


def _processes_of(home: Home) -> list[ProcessId]:
    """Return the processes that `up` started for `home`, and those that they started."""
    found = [process for process, value in processes_with_env(HOME_VARIABLE) if value == str(home.path)]
    # Typed in a flow run, or in a shell that one has started, this command has the variable as well.
    return [process for process in found if process.pid != os.getpid()]


def _stop_remaining(home: Home) -> None:
    """Stop what a killed supervisor left behind."""
    stop(_processes_of(home), 5.0)


def _remove_addresses(home: Home) -> None:
    """Remove the addresses of the servers, so that Prefect's commands do not use them any more."""
    for file in (home.servers_state, home.prefect_profiles):
        file.unlink(missing_ok=True)


# -- external servers, which replace the local ones: PREFECT_API_URL and MLFLOW_TRACKING_URI --

_ANSWER_SECONDS = 10.0
"""Time limit for the connection and for each read."""


def external_prefect_url() -> str | None:
    """Return PREFECT_API_URL. Raises InputError if it is not a valid address or contains credentials."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return None
    if problem := credential_problem(url, "give them by PREFECT_API_KEY or PREFECT_API_AUTH_STRING"):
        raise InputError(f"PREFECT_API_URL: {problem}")
    if not url.startswith(("http://", "https://")):
        raise InputError(
            f"PREFECT_API_URL: must be http(s)://host:port/api; got {shown(url)}; correct or unset it"
        )
    return url.rstrip("/")


def external_mlflow_uri() -> str | None:
    """Return MLFLOW_TRACKING_URI. Raises InputError if it is not a valid address or contains credentials."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return None
    instead = (
        "give them by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or by MLFLOW_TRACKING_TOKEN"
    )
    if problem := credential_problem(uri, instead) or tracker_problem(uri):
        raise InputError(f"MLFLOW_TRACKING_URI: {problem}")
    return uri


def prefect_responds(url: str, credentials: Callable[[], Mapping[str, str]]) -> bool:
    """Return whether a Prefect server responds at `url` and accepts the credentials.

    False if there is no response, or one of a proxy without a server behind it.

    Args:
        url: Address of the API.
        credentials: Returns headers of the query.

    Raises:
        InputError: The response is not from a Prefect server, or the server requires other credentials.
    """
    import httpx

    # Redirects are not followed, because a redirected request would contain the credentials.
    with httpx.Client(headers=dict(credentials()), timeout=_ANSWER_SECONDS) as client:
        try:
            # Not `/health`, which Prefect answers without a password.
            answer = client.post(f"{url}/flows/filter", json={"limit": 1})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # Something responds. Prefect's own TLS settings, which are not used here, may accept its
            # certificate.
            return "[SSL" in str(error)
    if answer.status_code in (401, 403):
        raise InputError(
            f"PREFECT_API_URL: the server at {url} requires authentication and refuses the credentials"
            f" (HTTP {answer.status_code}); set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect"
            " Cloud, or unset PREFECT_API_URL to run without it"
        )
    if answer.status_code >= 500:
        return False  # a proxy sends 5xx codes while the server behind it is down
    if answer.status_code != 200:
        raise _not_prefect(url, f"HTTP {answer.status_code}")
    try:
        flows = answer.json()
    except (ValueError, RecursionError):
        flows = None
    if not isinstance(flows, list):
        raise _not_prefect(url, shown(answer.text[:40]))
    return True


def _not_prefect(url: str, response: str) -> InputError:
    return InputError(
        f"PREFECT_API_URL: the server at {url} is not a Prefect API (it answered {response} to a query for"
        " flows); correct the address (http://host:port/api), or unset it to run without"
    )
