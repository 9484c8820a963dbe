"""Prefect's pages.

Tested here:
- the key of an artifact is valid in Prefect for the name of any stage
- progress has its percentage and the time left.
"""

from __future__ import annotations

import pytest
from prefect.client.schemas.actions import ArtifactCreate

from flows.pages import _artifact_key, describe
from rlhf_core.pipeline import STAGES


@pytest.mark.parametrize("stage", [*STAGES, "best_of_n"])
@pytest.mark.parametrize("content", ["progress", "report"])
def test_artifact_key_is_valid_in_prefect(stage: str, content: str) -> None:
    ArtifactCreate(key=_artifact_key(stage, content), type="markdown", data="")


def test_progress_has_its_percentage_and_the_time_left() -> None:
    event = {"task": "ppo", "done": 3, "total": 12, "unit": "steps", "metrics": {"kl": 2.5}}
    assert describe(event | {"left": 42.0}) == (25.0, "ppo: 3 of 12 steps, 25 %, 42.0 s left (kl 2.5)")
    assert describe(event | {"metrics": {}}) == (25.0, "ppo: 3 of 12 steps, 25 %")
