"""`rlhf up --config --schedule` with the real Prefect, MLflow and worker.

- after `rlhf down` and `rlhf up`, the deployment is there with its parameters, and its schedule is active
- the same command while the servers are up updates it; a schedule that was paused is paused afterwards
- a misspelled schedule is an error before anything starts
"""

from __future__ import annotations

from pathlib import Path

import pytest

import rlhf_cli.main as cli
from rlhf_core.ops.servers.prefect_server import read_auth_string
from rlhf_core.system.home import Home
from rlhf_core.system.serving import patch
from tests.chaos.harness import CONFIG
from tests.chaos.servers import Servers

KEPT = ("id", "parameters", "schedules", "tags", "paused", "entrypoint", "pull_steps")


def test_schedule_is_as_before_after_down_and_up(tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = ["--config", str(CONFIG), "--name", "weekly", "--schedule", "0 2 * * 0"]
    command += ["--timezone", "Asia/Tokyo", "--if-changed", "--param", "min_new_rows=5", "ppo.steps=2"]
    servers = Servers(home, tmp_path)
    printed = servers.up(*command)
    try:
        assert f'rlhf-retrain/weekly: {CONFIG}, "0 2 * * 0" in Asia/Tokyo, active' in printed
        created = servers.deployment("weekly")
        overrides = [f'run.home="{home}"', "ppo.steps=2"]
        expected = {"config": str(CONFIG), "overrides": overrides, "min_new_rows": 5}
        assert created["parameters"] == expected
        [schedule] = created["schedules"]
        assert schedule["active"] and not created["paused"]

        servers.down()
        servers.up()
        after = servers.deployment("weekly")
        assert {name: after[name] for name in KEPT} == {name: created[name] for name in KEPT}

        url = f"{servers.state['prefect']}/deployments/{created['id']}/schedules/{schedule['id']}"
        patch(url, {"active": False}, auth=read_auth_string(Home.of(home)))
        assert "paused: turn it on on its page" in servers.up(*command)
        assert [each["active"] for each in servers.deployment("weekly")["schedules"]] == [False]
    finally:
        servers.down()


def test_misspelled_schedule_is_an_error_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["up", "--home", str(tmp_path / "home"), "--config", str(CONFIG), "--schedule", "0 26 * * 0"]
    assert cli.main(line) == 2
    assert "--schedule: must be minute, hour, day, month" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
