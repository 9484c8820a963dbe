"""Every override that the command line accepts is one that the flows accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.retrain import retrain
from flows.rlhf import rlhf
from flows.rounds import rounds
from rlhf_core.config.load import load_config


@pytest.mark.parametrize(
    "override",
    [
        "ppo.kl.coef=0.02",
        "ppo.kl.coef = 0.02",
        "data.prompts.0.rename.my-question=prompt",
        "data.prompts.0.rename.Frage (de)=prompt",
    ],
)
@pytest.mark.parametrize("flow", [rlhf, rounds, retrain], ids=["rlhf", "rounds", "retrain"])
def test_an_override_of_the_command_line_is_a_parameter_of_the_flows(
    tmp_path: Path, flow: Any, override: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({"run": {"name": "demo"}, "data": {"prompts": [{"path": "synthetic"}]}}))
    load_config(file, [override])
    given = {"config": str(file), "overrides": (override,)}
    assert flow.validate_parameters(given)["overrides"] == (override,)
