"""What a rank keeps of a batch between the calls of a step, with real models.

- a call that names the batch computes the bits of one that brings its chunks
- a rank that has another batch, or none, says so
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.placement import PPOSettings
from rlhf_core.engines.distributed import Rank
from rlhf_core.errors import InfrastructureError
from rlhf_core.models.policy import load_policy
from rlhf_core.ppo.fleet.worker import ModelWorker
from rlhf_core.ppo.training.batch import Places, RolloutColumns, SentShare, columns_of
from rlhf_core.ppo.training.rank_rows import ExperienceInputs
from rlhf_core.types import Rollout
from tests.support.tiny_llama import save_tiny_llama


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> ModelWorker:
    folder: Path = save_tiny_llama(tmp_path_factory.mktemp("model"))
    config = config_from_tree(
        {"run": {"device": "cpu"}, "ppo": {"algorithm": "grpo", "samples_per_prompt": 2}}, "test"
    )
    made: Any = ModelWorker.__new__(ModelWorker)
    made.participant = SimpleNamespace(name="policy rank 0", timeouts=config.run.timeouts)
    made.counters = Counter()
    made._settings, made._rank, made._pad_id, made._batch = PPOSettings.of(config), Rank(), 0, None
    policy = load_policy(folder, dtype="float32", attention="sdpa", device="cpu").eval()
    made._models = {"policy": policy, "reference": policy}
    found: ModelWorker = made
    return found


def chunks() -> list[RolloutColumns]:
    rollouts = [
        Rollout(f"p{i}", 0, (3, 4 + i), tuple(range(5, 8 + i)), (-1.0,) * (3 + i), True, 0) for i in range(4)
    ]
    return [columns_of(rollouts[:2], 1), columns_of(rollouts[2:], 1)]


SHARE = SentShare(7, Places(np.array([0, 1, 1]), np.array([1, 0, 1])), [[0, 2], [1]])


def test_a_call_that_names_the_batch_computes_the_same_bits(worker: ModelWorker) -> None:
    with pytest.raises(InfrastructureError, match="policy rank 0 does not have the responses of batch 7"):
        worker.logprobs("policy", True, 7)
    _, sent = worker.logprobs("policy", True, SHARE, *chunks())
    _, kept = worker.logprobs("reference", True, 7)
    for name in ("logprobs", "entropy"):
        assert kept.values[name].tobytes() == sent.values[name].tobytes()
    assert sent.offsets.tolist() == [0, 4, 9, 15]
    places = Places(np.zeros(3, np.int64), np.arange(3))
    advantages = np.array([0.5, -0.5, 0.0])
    inputs = ExperienceInputs(7, places, places, None, np.ones(3, np.float32), advantages, 0.1)
    sums, _ = worker.make_experience(inputs, sent)
    assert [len(response) for response in worker._experience.responses] == [4, 5, 6]
    assert sums.kl.tolist() == [0.0] * 3, "policy and reference are the same"


def test_a_rank_with_another_batch_raises(worker: ModelWorker) -> None:
    worker.logprobs("policy", False, SentShare(8, SHARE.places, SHARE.micro_batches), *chunks())
    with pytest.raises(InfrastructureError, match="of batch 7"):
        worker.logprobs("reference", False, 7)
