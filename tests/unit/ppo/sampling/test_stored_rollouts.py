"""The rollouts in a checkpoint: exactly those that were written are read, without pickle, and none of another
step.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from rlhf_core.data.dataset import Rows
from rlhf_core.ppo.sampling.schedule import StoredRollouts
from rlhf_core.ppo.training.batch import Places, RolloutBatch, columns_of, header_of
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.types import PromptExample, Rollout
from tests.support.scripted_actors import ended
from tests.support.scripted_fleet import ScriptedFleet
from tests.support.scripted_rollouts import rollouts

REPEATED = [
    PromptExample(f"p{i // 2}", f"prompt {i // 2}", (1, 2 + i // 2), {"answer": str(i)}) for i in range(4)
]
"""Each prompt occurs twice, with different answers."""


def batch_with(rewards: RewardBatch | None = None) -> RolloutBatch:
    noise = random.Random(0)
    sampled = [
        Rollout(p.prompt_id, i, p.input_ids, (5, 6), (-noise.random(), -1e-17 * noise.random()), i == 0, 4)
        for p in REPEATED
        for i in range(2)
    ]
    header = header_of(sampled)
    return RolloutBatch(
        [ended(columns_of(sampled[:6], 2)), ended(columns_of(sampled[6:], 2))],
        Places(np.array([0] * 6 + [1] * 2), np.array([4, 5, 2, 3, 0, 1, 0, 1])),
        header.lengths,
        header.finished,
        [p for p in REPEATED for _ in range(2)],
        rewards,
        1,
        0.25,
        version=4,
        seeds_B=np.arange(8) + 2**62,
        numbers_B=np.repeat(np.arange(4), 2),
    )


@pytest.mark.parametrize(
    "rewards",
    [None, RewardBatch([0.1, float("nan")], {"length": [0.1, 0.3]}, {"length": {"requests": 2.0}})],
)
def test_what_was_written_is_read(tmp_path: Path, rewards: RewardBatch | None) -> None:
    written = batch_with(rewards)
    StoredRollouts(tmp_path, REPEATED, ScriptedFleet()).write(5, written)
    stored = StoredRollouts(tmp_path, Rows(4, lambda i: replace(REPEATED[i])), ScriptedFleet())
    read = stored.read(5)
    assert read is not None and len({id(prompt) for prompt in read.prompts}) == 4
    assert (rollouts(read), read.prompts, read.replaced) == (rollouts(written), written.prompts, 1)
    assert (read.scores_before, read.version) == (0.25, 4)
    assert repr(read.rewards) == repr(rewards)
    assert stored.read(3) is None and stored.read(6) is None


def test_a_checkpoint_without_rollouts_gives_none(tmp_path: Path) -> None:
    assert StoredRollouts(tmp_path, REPEATED, ScriptedFleet()).read(1) is None


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    stored = StoredRollouts(tmp_path, REPEATED, ScriptedFleet())
    stored.write(1, batch_with())
    (tmp_path / "rollouts" / "batch-0.safetensors").write_bytes(pickle.dumps({"objects": np.arange(3)}))
    with pytest.raises(SafetensorError):
        stored.read(1)
