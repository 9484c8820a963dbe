"""Learning rates and batches as functions of the step.

- linear warm-up, then cosine or linear decay from the peak to the floor over the steps that are left, or
  constant
- every epoch is a fresh permutation that holds every sample once
- a batch costs the same for any number of samples
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from rlhf_core import seeds
from rlhf_core.config.training import OptimizerConfig
from rlhf_core.engines.deepspeed import learning_rate
from rlhf_core.seeds import derive_seed, epoch_batch


def test_the_warm_up_is_linear() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_ratio=0.1, schedule="cosine", min_lr_ratio=0.0)
    assert [learning_rate(config, step, 40) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_decay_is_halfway_in_the_middle(schedule: str) -> None:
    config = OptimizerConfig.model_validate(
        {"learning_rate": 1.0, "warmup_ratio": 0.0, "schedule": schedule, "min_lr_ratio": 0.2}
    )
    # 0.2 + 0.8 / 2
    assert learning_rate(config, 50, 100) == pytest.approx(0.6)
    assert learning_rate(config, 100, 100) == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_decay_starts_after_the_warm_up(schedule: str) -> None:
    config = OptimizerConfig.model_validate(
        {"learning_rate": 1.0, "warmup_ratio": 0.1, "schedule": schedule, "min_lr_ratio": 0.0}
    )
    # 4 steps of warm-up and 36 of decay, half of which are done at step 22.
    assert [learning_rate(config, step, 40) for step in (4, 22, 40)] == pytest.approx([1.0, 0.5, 0.0])


def test_a_constant_rate_stays() -> None:
    config = OptimizerConfig(learning_rate=3.0, warmup_ratio=0.0, schedule="constant")
    assert {learning_rate(config, step, 10) for step in range(10)} == {3.0}


def test_every_epoch_is_a_fresh_permutation_of_all_samples() -> None:
    first, second = ([epoch_batch(10, 4, 7, epoch, index) for index in range(3)] for epoch in range(2))
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert sorted(i for batch in first for i in batch) == list(range(10))
    assert first != second
    # The order of a shuffled list, which pinned trajectories have.
    order = list(range(10))
    random.Random(derive_seed(7, "epoch", 0)).shuffle(order)
    assert [i for batch in first for i in batch] == order


def test_a_batch_reads_its_own_part_of_the_order_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Order(list[int]):
        def __getitem__(self, part: Any) -> Any:
            read.append(part)
            return super().__getitem__(part)

    read: list[Any] = []
    monkeypatch.setattr(seeds, "permutation", lambda count, _seed: Order(range(count)))
    assert epoch_batch(1000, 4, 7, 0, 200) == (800, 801, 802, 803)
    assert read == [slice(800, 804)]
