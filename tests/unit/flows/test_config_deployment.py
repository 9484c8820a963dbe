"""The deployment that `rlhf up --config` describes. `tests/integration/test_deploy.py` sends it to a server.

- it has the name of the file and its absolute path
- a misspelled schedule, time zone, parameter or name is an error that names the option
- the time zone is that of this machine
"""

from __future__ import annotations

import re
import zoneinfo
from pathlib import Path
from typing import Any

import pytest

from flows.config_deployment import config_deployment, local_timezone
from rlhf_core.errors import InputError


def test_a_file_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    deployment = config_deployment("own/my-policy.yaml")
    assert deployment.name == "my-policy"
    assert deployment.parameters == {"config": str(tmp_path / "own" / "my-policy.yaml")}
    assert deployment.schedule is None
    assert deployment.full_name == "rlhf/my-policy"


def test_other_parameters_are_those_of_the_flow() -> None:
    deployment = config_deployment(
        "my.yaml", ("ppo.steps=3",), name="small", parameters=("min_new_rows=1000",), if_changed=True
    )
    assert deployment.name == "small"
    assert dict(deployment.parameters) | {"config": ""} == {
        "config": "",
        "overrides": ["ppo.steps=3"],
        "min_new_rows": 1000,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cron": "0 26 * * 0"}, "--schedule: must be minute, hour, day, month and day of the week, .*'0 26"),
        ({"cron": "weekly"}, "--schedule: "),
        ({"cron": "0 2 * * 0", "timezone": "Berlin"}, "--timezone: must be a time zone .*; got 'Berlin'"),
        ({"parameters": ("min_new_rows",)}, "--param: must be name=value; got 'min_new_rows'"),
        ({"parameters": ("min_rows=3",)}, "--param: .*the parameters of rlhf are config, name, seed"),
        ({"parameters": ("min_rows=3",), "if_changed": True}, "of rlhf-retrain are config, overrides, min"),
        ({"parameters": ("seed=-1",)}, "--param: .*seed"),
        ({"name": "my/policy"}, "--name: must have letters"),
    ],
)
def test_what_is_misspelled_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        config_deployment("my.yaml", **options)
    assert re.search(message, refused.value.message.replace("\n", " ")), refused.value.message


def test_the_time_zone_is_the_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    schedule = config_deployment("my.yaml", cron="0 2 * * 0").schedule
    assert schedule is not None and schedule.timezone == "Asia/Tokyo"
    for path in (":Asia/Tokyo", "/made/zoneinfo/Asia/Tokyo", ":/made/zoneinfo/Asia/Tokyo"):
        monkeypatch.setenv("TZ", path)
        assert local_timezone() == "Asia/Tokyo"
    monkeypatch.delenv("TZ")
    assert local_timezone() in zoneinfo.available_timezones()
