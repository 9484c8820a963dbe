"""A stage trains with its own number of threads, and goes on with that of its process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.stages.training import train_on_ranks
from rlhf_core.testing import stage_context
from rlhf_core.testing.ranks import scripted_ranks


@pytest.mark.parametrize(("threads", "expected"), [(3, 3), (None, 1)])
def test_a_stage_trains_with_its_own_threads(threads: int | None, expected: int, tmp_path: Path) -> None:
    def train(_rank: Any, _config: PipelineConfig, _folders: Any, _context: Any) -> dict[str, float]:
        return {"threads": float(torch.get_num_threads())}

    config = PipelineConfig()
    two_ranks = config.sft.deepspeed.model_copy(update={"ranks": 2})
    settings = config.sft.model_copy(update={"threads": threads, "deepspeed": two_ranks})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with scripted_ranks():
            found = train_on_ranks(
                train, settings, config, stage_context(tmp_path, inputs={"data": tmp_path})
            )
        assert (found, torch.get_num_threads()) == ({"threads": expected}, 1)
    finally:
        torch.set_num_threads(before)


def test_the_demo_trains_with_both_cores_and_samples_with_one_thread() -> None:
    config = load_config("deployments/configs/demo.yaml", [])
    assert (config.sft.threads, config.reward.threads, config.run.threads) == (2, 2, 1)
