"""`ppo.weight_sync.keep_requests` through the real Ray, vLLM and DeepSpeed (slow set).

- responses are sampled through a sync: some have tokens of two versions, which vLLM has labelled
- each step has every response to its prompts once, and no token is more versions behind than allowed
- if the weights stay the same, the log-probabilities of all tokens are those of the trainer, so requests and
  their KV cache are unharmed by the syncs
- an attempt continues from a checkpoint, which has no rollouts
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.sampling.rollouts import prompts_of_step
from rlhf_core.ppo.training.batch import RolloutBatch
from rlhf_core.seeds import derive_seed
from tests.support.small_ppo import finished_ppo, save_small_model, small_config, small_prompts

pytestmark = pytest.mark.slow

KEPT = {
    "staleness": 1,
    "prompts_per_step": 12,
    "samples_per_prompt": 2,
    "max_new_tokens": 48,
    "minibatches": 2,
    # Sampling a step takes longer than scoring and training it.
    "engine": {"dispatch": "queue", "max_num_seqs": 4},
    "weight_sync": {"keep_requests": True},
}


class Controller(PPOController):
    """Keeps the batches."""

    @override
    def collect(self) -> RolloutBatch:
        batch = super().collect()
        self.__dict__.setdefault("batches", []).append(batch)
        return batch


def attempt(
    model: Path, store: Path, work: Path, **ppo: Any
) -> tuple[list[dict[str, Any]], list[RolloutBatch]]:
    """Run the steps that no checkpoint has. Return the metrics of all, and the batches of these."""
    config = small_config(model, {**KEPT, **ppo})
    with finished_ppo(config, model, store, work, Controller) as (controller, rows):
        pass
    return rows, controller.__dict__["batches"]


@pytest.mark.timeout(1800)
def test_responses_are_sampled_through_a_sync(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "model")
    rows, first = attempt(model, tmp_path / "store", tmp_path / "first", steps=3, checkpoint_every=2)
    more, second = attempt(model, tmp_path / "store", tmp_path / "second", steps=6, checkpoint_every=9)
    # The first attempt ended after step 3; its checkpoint is that of step 2.
    assert more[:2] == rows[:2] and len(second) == 4
    seed = derive_seed(0, "ppo")
    for step, batch in [*enumerate(first, 1), *enumerate(second, 3)]:
        used = prompts_of_step(20, 12, seed, step)
        expected = [small_prompts()[i] for i in used for _ in range(2)]
        assert [prompt.prompt_id for prompt in batch.prompts] == [prompt.prompt_id for prompt in expected]
        assert len(set(batch.places)) == len(batch) == 24 and min(batch.lengths_B) > 0
        versions = Counter(version for row in range(24) for _, version in batch.spans_of(row))
        assert step - 2 <= min(versions) and max(versions) <= step - 1
        for spans in batch.spans.values():
            assert [version for _, version in spans] == [step - 2, step - 1] and spans[1][0] > 0
    assert sum(bool(batch.spans) for batch in [*first, *second]) >= 3
    assert all(0 <= row["rollout/staleness"] <= 1 for row in more)


@pytest.mark.timeout(1800)
def test_a_sync_of_the_same_weights_changes_no_response(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "model")
    slow = {"policy": {"learning_rate": 1e-12, "schedule": "constant"}, "steps": 4}
    rows, batches = attempt(model, tmp_path / "store", tmp_path / "work", **slow)
    assert sum(len(batch.spans) for batch in batches) > 0
    assert max(row["rollout/logprob_gap_max"] for row in rows) < 1e-5
