"""`ppo.staleness: 1` through the real Ray, vLLM and DeepSpeed (slow set).

- each step from the third on is sampled from the version before the last one
- a run that is killed in the controller, an engine and a training rank, before and after a checkpoint, ends
  in the bits of the run that nobody disturbed
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.harness import Case, Golden, run_case

pytestmark = pytest.mark.slow


def test_a_killed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    golden = Golden(tmp_path / "golden", ("ppo",), ("ppo.staleness=1", "ppo.steps=6"))
    behind = golden.outcomes["ppo"]["mlflow rollout/staleness"]
    assert behind == [(step, float(step > 1)) for step in range(1, 7)]
    # Checkpoints are after steps 2 and 4. The first two kills are before the first one.
    points = (
        "ppo.after_next_rollout:1:kill",
        "engine.generate:3:kill",
        "ppo.after_checkpoint:1:kill",
        "critic.update:4:kill",
    )
    result = run_case(golden, Case("ppo", points), tmp_path / "case")
    assert result.ended and result.same, result.why
    assert len(result.kills) == len(points)
