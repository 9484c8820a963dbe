"""`ppo.staleness` through the real Ray, vLLM and DeepSpeed (slow set).

- with 1, each step from the second on is sampled from the version before the last one; with 3, three
  steps are sampled from one version
- the comparison of engines and policy after a sync changes no bit
- attempts in which an engine and a training rank are killed, before and after a checkpoint, end together in
  the bits of the run that nobody disturbed; with 3, several batches wait in the checkpoint
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import InfrastructureError
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.fleet import fleet
from rlhf_core.storage.bundles import weights_sha256
from tests.support.small_ppo import finished_ppo, save_small_model, small_config

pytestmark = pytest.mark.slow

STALE = {"steps": 5, "checkpoint_every": 2, "prompts_per_step": 8, "max_new_tokens": 8}


def attempt(
    model: Path, store: Path, work: Path, staleness: int, *, canary: bool = True
) -> tuple[list[dict[str, Any]], str]:
    """Run the steps that no checkpoint has, and return the metrics of all and the digest of the policy."""
    ppo: dict[str, Any] = {**STALE, "staleness": staleness, "minibatches": 2}
    ppo["weight_sync"] = {"canary": canary}
    with finished_ppo(small_config(model, ppo), model, store, work, PPOController) as (controller, rows):
        controller.save_policy(work / "policy")
    return rows, weights_sha256(work / "policy")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("staleness", "behind"), [(1, [0, 1, 1, 1, 1]), (3, [0, 1, 2, 3, 1])])
def test_killed_attempts_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, behind: list[int]
) -> None:
    monkeypatch.setattr(fleet, "MAX_RESTARTS", 0)
    model = save_small_model(tmp_path / "model")
    undisturbed = attempt(model, tmp_path / "undisturbed", tmp_path / "whole", staleness)
    assert [row["rollout/staleness"] for row in undisturbed[0]] == behind
    assert attempt(model, tmp_path / "other", tmp_path / "without", staleness, canary=False) == undisturbed
    store = tmp_path / "store"
    # Checkpoints are after steps 2 and 4. The engine also answers after the first two syncs, so its fifth
    # call with 1 and its fourth one with 3 are for step 3, which the checkpoint of step 2 needs. The next
    # attempt begins again and is killed in step 3.
    during_step_3 = {1: 5, 3: 4}[staleness]
    for number, fault in enumerate((f"engine.generate:{during_step_3}:kill", "critic.update:3:kill")):
        monkeypatch.setenv("RLHF_FAIL", fault)
        with pytest.raises(InfrastructureError):
            attempt(model, store, tmp_path / f"killed-{number}", staleness)
    assert [path.name for path in sorted((store / "checkpoints" / "key").glob("step-*"))] == ["step-00000002"]
    monkeypatch.delenv("RLHF_FAIL")
    assert attempt(model, store, tmp_path / "last", staleness) == undisturbed
