"""Prefect's settings are those of the environment, even if they were read for another server before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.isolated import isolate_prefect


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A patch for the environment. Prefect's settings are restored afterwards."""
    from prefect.context import refresh_global_settings_context
    from prefect.settings import sources

    with monkeypatch.context() as patch:
        files, dotenv = sources.TomlConfigSettingsSourceBase, sources.FilteredDotEnvSettingsSource
        patch.setattr(files, "_read_files", files._read_files)
        patch.setattr(dotenv, "_read_env_files", dotenv._read_env_files)
        patch.setenv("PREFECT_HOME", str(tmp_path))
        patch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "none.toml"))
        yield patch
    refresh_global_settings_context()


def test_settings_are_read_again_after_the_environment_changed(
    settings: pytest.MonkeyPatch,
) -> None:
    from prefect.settings import get_current_settings

    for url in ("http://127.0.0.1:9/api", "http://127.0.0.1:4321/api"):
        settings.setenv("PREFECT_API_URL", url)
        isolate_prefect()
        assert get_current_settings().api.url == url
