"""Prefect's pages.

Tested here:
- the key of an artifact is valid in Prefect for the name of any stage.
"""

from __future__ import annotations

import pytest
from prefect.client.schemas.actions import ArtifactCreate

from flows.pages import _artifact_key
from rlhf_core.pipeline import STAGES


@pytest.mark.parametrize("stage", [*STAGES, "best_of_n"])
@pytest.mark.parametrize("content", ["progress", "report", "metrics", "mlflow"])
def test_artifact_key_is_valid_in_prefect(stage: str, content: str) -> None:
    ArtifactCreate(key=_artifact_key(stage, content), type="markdown", data="")
