"""Prefect without the working folder: its settings come from the environment and the user's own profile alone.

Prefect reads `.env`, `prefect.toml` and `pyproject.toml` of the working folder. A setting such as the path of a logging
configuration runs code, and a working folder may hold files of others. `rlhf run` therefore calls `isolate_prefect`
before anything imports Prefect. A command of Prefect that `rlhf up` starts in the project's folder runs as
`python -P -m flows.isolated ARGUMENTS...`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_SAFE_FOLDER = Path(__file__).resolve().parent
"""This package's own: it holds none of the files that Prefect looks for."""


def isolate_prefect() -> None:
    """Import Prefect's settings without the sources that lie in the working folder.

    Call it before Prefect is imported and before other threads exist: Prefect reads its settings while it is imported,
    and the working folder of the whole process is another one meanwhile. Called again, it reads the settings again: the
    environment names another server after the first one did not answer.
    """
    if "PREFECT_PROFILES_PATH" not in os.environ:  # else Prefect looks for that path in the same files
        folder = Path(os.environ.get("PREFECT_HOME") or Path("~/.prefect").expanduser())
        os.environ["PREFECT_PROFILES_PATH"] = str(folder / "profiles.toml")
    again = "prefect.settings" in sys.modules
    if not again:
        before = os.getcwd()
        os.chdir(_SAFE_FOLDER)
        try:
            import prefect.settings  # noqa: F401
        finally:
            os.chdir(before)
    from prefect.settings import sources

    sources.TomlConfigSettingsSourceBase._read_files = _nothing  # type: ignore[method-assign]
    sources.FilteredDotEnvSettingsSource._read_env_files = _nothing  # type: ignore[method-assign]
    if again:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


def _nothing(*_arguments: Any, **_options: Any) -> dict[str, Any]:
    return {}


if __name__ == "__main__":
    isolate_prefect()
    from prefect.cli import app

    app()
