"""The Prefect server of `rlhf up`: its command, settings and password.

It listens on loopback. Its files are in {home}/servers/prefect, and its password is in {home}/servers/login.
Prefect calls the password an auth string. Its clients read it from PREFECT_API_AUTH_STRING. Its UI stores it
in the browser: `login_link` does so, or the UI asks for it once.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
from pathlib import Path

from rlhf_core.errors import InputError
from rlhf_core.system.environment import NO_TELEMETRY
from rlhf_core.system.files import write_atomic
from rlhf_core.system.home import Home
from rlhf_core.system.processes import SAFE_PATH, python_module

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
_AUTH_STRING = re.compile(r"rlhf:[\w-]{20,}")


def server_command(port: int) -> list[str]:
    """Return the command of a Prefect server with the access checks of `flows.application`."""
    return [
        # Not `prefect server start`, which has no setting for the checks of Host and Origin (decision 14).
        *python_module("uvicorn"), "--factory", "flows.application:create_app", "--log-level", "warning",
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
