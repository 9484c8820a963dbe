"""Prefect's settings.

- they are those of the environment, even if they were read for another server before
- an invalid one is an InputError that names its variable, at the first reading and at a later one
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.isolated import isolate_prefect
from rlhf_core.errors import InputError


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A patch for the environment. Prefect reads its settings again afterwards."""
    from prefect.context import refresh_global_settings_context

    with monkeypatch.context() as patch:
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


INVALID = [
    ("PREFECT_LOGGING_LEVEL", "nonsense", ("PREFECT_LOGGING_LEVEL: ", "'nonsense'", "'DEBUG'", "unset")),
    ("PREFECT_LOGGING_SERVER_LEVEL", "x", ("PREFECT_LOGGING_SERVER_LEVEL: ", "'x'", "unset")),
    ("PREFECT_API_REQUEST_TIMEOUT", "x", ("PREFECT_API_REQUEST_TIMEOUT: ", "'x'", "number", "unset")),
    ("PREFECT_CLIENT_CUSTOM_HEADERS", "x", ("PREFECT_*: ", "custom_headers", "correct")),
]


@pytest.mark.parametrize(("name", "value", "words"), INVALID)
def test_an_invalid_setting_is_an_input_error_that_names_its_variable(
    settings: pytest.MonkeyPatch, name: str, value: str, words: tuple[str, ...]
) -> None:
    settings.setenv(name, value)
    with pytest.raises(InputError) as caught:
        isolate_prefect()
    settings.delenv(name)
    assert [word for word in words if word not in caught.value.message] == [], caught.value.message
    assert "pydantic" not in caught.value.message


def test_an_invalid_setting_is_found_at_the_import_of_prefect(tmp_path: Path) -> None:
    code = (
        "import flows.isolated as it\ntry: it.isolate_prefect()\n"
        "except it.InputError as error: print(error.message)"
    )
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path), "PREFECT_LOGGING_LEVEL": "nonsense"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("PREFECT_LOGGING_LEVEL: ") and done.stderr == ""
