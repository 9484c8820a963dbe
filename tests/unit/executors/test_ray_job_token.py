"""The token of a Ray cluster's job server.

- it is sent from RAY_AUTH_TOKEN or the file RAY_AUTH_TOKEN_PATH, also if ray was imported before
- a file that cannot be read is named
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.executors.ray_job import RayJobs
from tests.support.scripted_ray_jobs import ScriptedRayJobs


@pytest.mark.parametrize("given", ["variable", "file", "nothing"])
def test_the_token_is_sent(
    ray_cluster: ScriptedRayJobs, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret\n")
    if given == "variable":
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    elif given == "file":
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert RayJobs().status("none").state == "missing"
    assert set(ray_cluster.tokens) == {None if given == "nothing" else "Bearer secret"}


def test_a_file_that_cannot_be_read_is_named(
    ray_cluster: ScriptedRayJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"^RAY_AUTH_TOKEN_PATH: cannot read .*none"):
        RayJobs().status("none")
    assert ray_cluster.tokens == []
