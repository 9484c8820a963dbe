"""A Prefect server on loopback: its command, settings and password, and the server of a single `rlhf run`.

    rlhf run    `EmbeddedPrefect`: ends with the command; files in {home}/prefect, password only in memory
    rlhf up     the supervisor's server: files in {home}/servers/prefect, password in {home}/servers/login

Prefect calls the password an auth string. Its clients read it from PREFECT_API_AUTH_STRING. Its UI stores it
in the browser: `login_link` does so, or the UI asks for it once.
"""

from __future__ import annotations

import atexit
import base64
import os
import re
import secrets
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_core.errors import InputError, StageFailed
from rlhf_core.logs import rotate_logs
from rlhf_core.system.environment import NO_TELEMETRY
from rlhf_core.system.files import write_atomic
from rlhf_core.system.home import Home
from rlhf_core.system.processes import SAFE_PATH, SupervisedProcess, free_port, python_module
from rlhf_core.system.serving import responds

DATABASE_VARIABLES = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
"""Prefect's names for the address of its database. The first one has priority."""
LOGIN_PATH = "/rlhf-login"
"""The page that logs a browser in (`flows.application`)."""
FLOW_SETTINGS = {
    # The smallest that Prefect accepts; the default is 180 s. Rules about zombie runs wait for several.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "5",  # each batch locks the database
    # The loggers below are also used outside of flows. By default, Prefect warns of each such record.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # Without it, the page of a flow run has the lines of Prefect's own loggers only.
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,rlhf_core",
}
"""Settings of flows whose runs the server of `rlhf up` shows."""
START_SECONDS = 120.0
_POLL_SECONDS = 0.5
_AUTH_STRING = re.compile(r"rlhf:[\w-]{20,}")


def server_command(port: int, log_level: str) -> list[str]:
    """Return the command of a Prefect server with the access checks of `flows.application`."""
    return [
        # Not `prefect server start`, which has no setting for the checks of Host and Origin (decision 14).
        *python_module("uvicorn"), "--factory", "flows.application:create_app", "--log-level", log_level,
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def server_environment(folder: Path, auth: str, port: int) -> dict[str, str]:
    """Return the settings of a server on `port` with its files in `folder`, and of its clients."""
    return {
        **NO_TELEMETRY,
        **SAFE_PATH,
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_AUTH_STRING": auth,
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        # The default is `*`: any web page could start flow runs, and so commands (decision 14).
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port}",
        "PREFECT_UI_API_URL": "/api",  # the page's own origin, so that any host name or forwarded port works
        "PREFECT_HOME": str(folder),
        "PREFECT_PROFILES_PATH": str(folder / "none.toml"),  # no such file: profiles of the user do not count
        # PREFECT_HOME does not move these two: Prefect 3.7 would write to ~/.prefect, which all homes share.
        "PREFECT_LOCAL_STORAGE_PATH": str(folder / "storage"),
        "PREFECT_MEMO_STORE_PATH": str(folder / "memo_store.toml"),
        **dict.fromkeys(DATABASE_VARIABLES, f"sqlite+aiosqlite:///{folder / 'prefect.db'}"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",  # the default is pickle
    }


def external_database_url() -> str | None:
    """Return the database address for Prefect's server that the environment names, or None for SQLite.

    Raises InputError if it is not a PostgreSQL address with the driver that Prefect needs.
    """
    given = [os.environ[name] for name in DATABASE_VARIABLES if os.environ.get(name)]
    if not given:
        return None
    if not given[0].startswith("postgresql+asyncpg://"):
        # Only the scheme is shown, because the rest may contain a password.
        raise InputError(
            f"{DATABASE_VARIABLES[0]} must begin with postgresql+asyncpg://; got"
            f" {given[0].partition('://')[0]}://...; correct it, or unset it to have SQLite in the home"
        )
    return given[0]


def new_auth_string() -> str:
    """Return a random password of the form user:password, which `curl -u` accepts as well."""
    return f"rlhf:{secrets.token_urlsafe(24)}"


def read_auth_string(home: Home) -> str | None:
    """Return the password of `rlhf up` for `home`, or None if there is no valid one."""
    try:
        text = home.servers_login.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return text if _AUTH_STRING.fullmatch(text) else None


def login_link(url: str, auth: str) -> str:
    """Return the address that logs a browser in. It contains the password.

    Args:
        url: Address of Prefect's API.
        auth: The password.
    """
    return f"{url.removesuffix('/api')}{LOGIN_PATH}#{base64.b64encode(auth.encode()).decode()}"


def ensure_auth_string(home: Home) -> str:
    """Return the password of `rlhf up` for `home`, and create it if necessary.

    An existing password is kept, so that browsers do not ask again after `rlhf down` and `rlhf up`.
    """
    file = home.servers_login
    auth = read_auth_string(home)
    if auth is None or file.stat().st_uid != os.getuid() or file.stat().st_mode & 0o077:
        auth = new_auth_string()  # another user may have read or written the old password
        write_atomic(file, auth + "\n", private=True)
    return auth


class EmbeddedPrefect:
    """The Prefect server of a single `rlhf run`.

    Prefect can start such a server itself, but that server is in the terminal's process group, where Ctrl-C
    ends it before the flow has reported its last state, and it keeps running if the command is killed. This
    server has its own session, is restarted when it ends, and ends with this process in every case.

    Create it before Prefect is imported, because Prefect reads the address during its import, and call `wait`
    afterwards: the import takes about as long as the start of the server.
    """

    def __init__(self, home: Home) -> None:
        self._folder = home.prefect
        self._folder.mkdir(parents=True, exist_ok=True)
        home.logs.mkdir(parents=True, exist_ok=True)
        rotate_logs(home.logs)
        self._complete = home.prefect_complete
        self._lock = FileLock(home.prefect_lock)
        self._lock_database()
        port = free_port()
        self.auth = new_auth_string()
        os.environ.update(server_environment(self._folder, self.auth, port))
        # Nobody sees the logs of this server, which has no page, and each batch locks its database.
        os.environ["PREFECT_LOGGING_TO_API_ENABLED"] = "false"
        self.url = os.environ["PREFECT_API_URL"]
        # The logging settings of this command hide lines on the terminal. The server's log must have them.
        inherited = dict(os.environ)
        for name in os.environ:
            if name.startswith("PREFECT_LOGGING_"):
                del inherited[name]
        self._server = SupervisedProcess(
            "Prefect's embedded server",
            server_command(port, "error"),
            # An ephemeral server runs only the services that a single run needs, and not the scheduler.
            # The types of blocks, a third of its start, are for its UI.
            {
                **inherited,
                "PREFECT_UI_ENABLED": "0",
                "PREFECT__SERVER_EPHEMERAL": "1",
                "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
            },
            home.logs / "prefect.log",
            # SIGKILL loses nothing: the run's own records are in the store and in MLflow.
            parent_death_signal=signal.SIGKILL,
        )
        self._server.ensure_running()
        self._stopping = threading.Event()
        # A daemon: Python waits for all other threads before it calls exit handlers, and so `stop`.
        self._thread = threading.Thread(target=self._keep_running, daemon=True, name="embedded-prefect")
        # Prefect's client registers its exit handler later, when it is imported. Exit handlers run in reverse
        # order, so the client can still reach the server.
        atexit.register(self.stop)

    @property
    def pid(self) -> int | None:
        """The process id of the server, or None between its end and its restart."""
        return None if self._server.process is None else self._server.process.pid

    def _lock_database(self) -> None:
        """Keep the lock if the database must be created, and release it otherwise.

        Only one process at a time may create the database in many migrations. A database whose creation was
        interrupted is deleted.
        """
        try:
            self._lock.acquire(timeout=START_SECONDS)
        except Timeout as error:
            raise StageFailed(
                f"another run has been making Prefect's database for {START_SECONDS:g} s, or hangs: it holds "
                f"{self._lock.lock_file}; end it and type the command again"
            ) from error
        database = self._folder / "prefect.db"
        if self._complete.exists() and database.exists():
            os.utime(database)  # `rlhf prune` deletes none that was used a moment ago
            self._lock.release()
            return
        # The marker first: if this process is killed now, the next one must not accept half a database.
        self._complete.unlink(missing_ok=True)
        for file in self._folder.glob("prefect.db*"):
            file.unlink()

    def wait(self) -> None:
        """Wait until the API responds, then supervise the server.

        Raises StageFailed after `START_SECONDS`, or as soon as the server has ended.
        """
        process = self._server.process
        deadline = time.monotonic() + START_SECONDS
        # Prefect answers `/health` without the password.
        while not responds(f"{self.url}/health"):
            ended = process is None or process.poll() is not None
            if ended or time.monotonic() > deadline:
                problem = "ended at once" if ended else f"did not answer within {START_SECONDS:g} s"
                free = shutil.disk_usage(self._folder).free / 1e6
                raise StageFailed(
                    f"Prefect's embedded server {problem} ({free:.0f} MB are free in {self._folder}); see"
                    f" {self._server.log_file}; if its database is damaged, delete {self._folder}"
                )
            time.sleep(0.1)
        # The API responds only after all migrations.
        if not self._complete.exists():  # its time is that of the creation
            self._complete.touch()
        self._lock.release()
        self._thread.start()

    def _keep_running(self) -> None:
        """Restart the server when it ends.

        The flow does not notice: the database outlives the server, and Prefect's client repeats its requests
        for some time.
        """
        while not self._stopping.wait(_POLL_SECONDS):
            with suppress(OSError):  # for example no memory for another process; later there may be some
                self._server.ensure_running()

    def stop(self) -> None:
        """End the server."""
        self._stopping.set()
        if self._thread.is_alive():
            # Bounded: a server that is being started at this moment ends with this process in any case.
            self._thread.join(timeout=10)
        if self._server.process is not None:
            self._server.process.kill()
            self._server.process.wait(timeout=10)
