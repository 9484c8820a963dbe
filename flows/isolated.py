"""Import Prefect without reading settings from the working folder.

Prefect reads `.env`, `prefect.toml` and `pyproject.toml` in the working folder. Settings such as the path of
a logging configuration can run code, and the working folder may contain files of other people. `rlhf run`
therefore calls `isolate_prefect` before Prefect is imported. Settings then come only from the environment and
the user's profile. `rlhf up` runs Prefect commands in the project's folder as `python -P -m flows.isolated
ARGUMENTS...`.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.config.redact import shown
from rlhf_core.errors import InputError
from rlhf_core.system.serving import basic_auth

_SAFE_FOLDER = Path(__file__).resolve().parent
"""The folder of this package, which contains none of the settings files that Prefect looks for."""


def isolate_prefect() -> None:
    """Import Prefect's settings without the sources in the working folder.

    Call this function before Prefect is imported and before other threads start: Prefect reads its settings
    during the import, and the function changes the working folder of the process for that time. A second call
    reads the settings again, for a server that was started in between.

    Raises InputError if a setting is invalid.
    """
    if "PREFECT_PROFILES_PATH" not in os.environ:  # otherwise Prefect looks for this path in the same files
        folder = Path(os.environ.get("PREFECT_HOME") or Path("~/.prefect").expanduser())
        os.environ["PREFECT_PROFILES_PATH"] = str(folder / "profiles.toml")
    printed = StringIO()  # Prefect prints the problem of an invalid setting during its import
    again = "prefect.settings" in sys.modules
    if not again:
        before = os.getcwd()
        os.chdir(_SAFE_FOLDER)
        try:
            with redirect_stderr(printed):
                import prefect.settings  # noqa: F401
        finally:
            os.chdir(before)
    from prefect.settings import get_current_settings, sources

    # Settings that are made later would read the files in the working folder of that time.
    sources.TomlConfigSettingsSourceBase._read_files = _nothing  # type: ignore[method-assign]
    sources.FilteredDotEnvSettingsSource._read_env_files = _nothing  # type: ignore[method-assign]
    try:
        if again:
            from prefect.context import refresh_global_settings_context

            refresh_global_settings_context()
        get_current_settings()
    except ValueError as error:  # of pydantic, or SettingsError of pydantic_settings
        raise InputError(_settings_problem(error)) from None
    if text := printed.getvalue():
        sys.stderr.write(text)


def _settings_problem(error: ValueError) -> str:
    """Return a line for each variable whose value is that of an invalid setting: a setting can have several
    variables.
    """
    problems = error.errors() if isinstance(error, ValidationError) else []
    # pydantic names the setting and not the variable that a value came from. The value leads to it.
    reasons = {str(problem["input"]).lower(): problem["msg"] for problem in problems}
    lines = []
    for name, value in os.environ.items():
        reason = reasons.get(value.strip().lower())
        if name.startswith("PREFECT_") and reason is not None:
            lines.append(
                f"{name}: Prefect cannot use the value {shown(value, name)} ({reason}); correct or unset it"
            )
    if lines:
        return "\n".join(lines)
    fields = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems]
    return (
        f"PREFECT_*: Prefect cannot use its settings ({', '.join(fields) or error}); correct these variables"
        " or Prefect's profile"
    )


def client_headers() -> dict[str, str]:
    """Return the headers that Prefect's client would send, from the environment or the user's profile."""
    isolate_prefect()
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    headers = dict(settings.client.custom_headers)
    if settings.api.auth_string is not None:
        headers |= basic_auth(settings.api.auth_string.get_secret_value())
    elif settings.api.key is not None:
        headers["Authorization"] = f"Bearer {settings.api.key.get_secret_value()}"
    return headers


def _nothing(*_arguments: Any, **_options: Any) -> dict[str, Any]:
    return {}


if __name__ == "__main__":
    isolate_prefect()
    from prefect.cli import app

    app()
