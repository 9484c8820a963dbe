"""How busy the processes of PPO are, computed from scripted counters.

- shares of idle time, tokens per second, the latency of a token and the time without any call, by hand
- engines that take prompts from a queue have a rate of tokens too
- the time in which memory moves between devices and host is a share of its own: it is neither idle nor wait
- a process that was replaced counts from 0; without all counters, and if an engine was given up, there are no
  metrics
- the figures of GPUs are shares of phases and of roles
- padded rows cost what their longest row costs; packed rows cost nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from rlhf_core.cluster.rpc import Usage
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.placement import Group, PPOSettings
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.ppo.fleet.fleet import ENGINES, WorkerGroup
from rlhf_core.ppo.training.batch import Places, RolloutBatch, route
from rlhf_core.ppo.watching.utilisation import (
    StepsSinceSync,
    Utilisation,
    padding_share,
    sync_metrics,
)
from rlhf_core.types import PromptExample
from tests.support.scripted_fleet import ScriptedFleet


def batch_of(lengths: list[int], prompt: int) -> RolloutBatch:
    """Return responses of these lengths to prompts of one length, in one chunk."""
    numbers = np.arange(len(lengths))
    chunk: Any = SimpleNamespace()
    return RolloutBatch(
        [chunk],
        Places(0 * numbers, numbers),
        np.array(lengths, np.int32),
        np.ones(len(lengths), np.bool_),
        [PromptExample("p", "", (1,) * prompt)] * len(lengths),
    )


BATCH = batch_of([60, 40], prompt=50)  # 100 tokens of responses, 200 in all
ENGINE = {"seconds/sample": 2.0, "decode_steps": 100.0, "seconds/update_weights": 1.0}
POLICY = {"seconds/logprobs": 2.0, "seconds/make_experience": 0.5, "seconds/update_policy": 2.0}
CRITIC = {"seconds/values": 0.5, "seconds/scores": 0.5, "seconds/update_critic": 4.0}
TIMINGS = {"timing/rollout": 2.5, "timing/scoring": 3.0, "timing/training": 4.0, "timing/sync": 1.0}


def times(counters: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in counters.items()}


class Fleet(ScriptedFleet):
    """Two engines, the second of which samples for half the time, and two pairs of roles.

    Args:
        device: "cpu" or "cuda".
        engine: Counters of an engine in a step.
        policy: Counters of the policy's rank in a step.
    """

    def __init__(
        self,
        device: str = "cuda",
        engine: Mapping[str, float] = ENGINE,
        policy: Mapping[str, float] = POLICY,
    ) -> None:
        super().__init__(device=device)
        self._engine_counters, self._policy_counters = engine, policy
        for pair in (("policy", "reference"), ("critic", "reward")):
            self.groups |= dict.fromkeys(pair, WorkerGroup(Group(pair, 1), ()))
        self.steps = 0
        self.lost = False
        self.engine_starts = 0
        self.first_engine = 0

    @override
    def usage_by_group(self) -> dict[str, list[Usage]] | None:
        """Return the usage after each step."""
        self.steps += 1
        if self.lost:
            return None
        first = self._engine_counters
        second = {**first, "seconds/sample": 1.0}
        of_engines = [times(first, self.steps), times(second, self.steps - self.engine_starts)]
        counters = {
            ENGINES: of_engines[self.first_engine :],
            "policy+reference": [times(self._policy_counters, self.steps) | {"seconds/load": 30.0}],
            "critic+reward": [times(CRITIC, self.steps) | {"seconds/save_checkpoint": 9.0 * self.steps}],
        }
        return {name: [Usage(0.0, 0, each) for each in group] for name, group in counters.items()}


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def measured(utilisation: Utilisation) -> dict[str, float]:
    return utilisation.measure(StepsSinceSync(TIMINGS | {"timing/step": 10.0}, [BATCH]), [BATCH])


def test_metrics_of_a_step_are_those_computed_by_hand(fleet: Fleet) -> None:
    utilisation = Utilisation(PPOSettings.of(config_from_tree({"ppo": {"epochs": 2}}, "test")), fleet)
    assert measured(utilisation) == {}, "the first step is the base"
    assert measured(utilisation) == pytest.approx(
        {
            "utilisation/idle/engines": 1 - (3.0 + 2.0) / 2 / 10,
            "utilisation/idle/policy": 0.55,
            "utilisation/idle/reference": 0.55,
            "utilisation/idle/critic": 0.5,  # without the checkpoint
            "utilisation/idle/reward": 0.5,
            "utilisation/tokens_per_s/engines": 100 / 2.0,
            "utilisation/tokens_per_s/policy": 2 * 200 / 2.0,
            "utilisation/tokens_per_s/reference": 2 * 200 / 2.0,  # 200 by each of two models
            "utilisation/tokens_per_s/critic": 2 * 200 / 4.0,
            "utilisation/tokens_per_s/reward": 200 / 0.5,
            "rollout/token_latency": 3.0 / 200,
            "rollout/decode_steps": 100.0,
            "rollout/engine_balance": 0.75,
            "utilisation/padding": 0.0,
            # Rollout 2.5 - 2, scoring 3 - 2.5, training 4 - 4, sync 1 - 1.
            "utilisation/data_wait": 0.1,
            "utilisation/tokens_per_minibatch": 200 / 4,
        }
    )


class GpuFleet(Fleet):
    """A fleet whose processes have sampled their GPUs."""

    @override
    def usage_by_group(self) -> dict[str, list[Usage]] | None:
        found = super().usage_by_group()
        assert found is not None
        memory: dict[str, list[float | None]] = {
            ENGINES: [0.9, 0.85],
            "policy+reference": [0.5],
            "critic+reward": [None],
        }
        gpu = {
            "policy+reference": {"gpu_samples/update_policy": 8.0, "gpu_busy/update_policy": 2.0},
            "critic+reward": {
                "gpu_samples/update_critic": 12.0, "gpu_busy/update_critic": 10.0,
                "gpu_samples/save_checkpoint": 9.0,
            },
        }  # fmt: skip
        return {
            name: [
                Usage(0.0, 0, {**each.counters, **times(gpu.get(name, {}), self.steps)}, share)
                for each, share in zip(usages, memory[name], strict=True)
            ]
            for name, usages in found.items()
        }


def test_gpus_are_counted_by_phase_and_role() -> None:
    utilisation = Utilisation(PPOSettings.of(config_from_tree({}, "test")), GpuFleet())
    measured(utilisation)
    found = {name: value for name, value in measured(utilisation).items() if name.startswith("gpu/")}
    assert found == {
        "gpu/utilisation/training": 12 / 20,
        "gpu/memory/engines": 0.9,
        "gpu/memory/policy": 0.5,
        "gpu/memory/reference": 0.5,
    }


def test_a_sync_has_size_time_and_rate() -> None:
    report = SyncReport(version=1, tensors=2, bytes=9_000_000_000, seconds=0.5)
    assert sync_metrics(report) == {"sync/bytes": 9e9, "sync/seconds": 0.5, "sync/gb_per_s": 18.0}


def test_moving_memory_is_neither_idle_nor_wait() -> None:
    engine = ENGINE | {"seconds/sleep": 0.5, "seconds/wake": 1.0}
    policy = POLICY | {"seconds/offload_states": 0.25, "seconds/reload_states": 0.25}
    utilisation = Utilisation(
        PPOSettings.of(config_from_tree({}, "test")), Fleet(engine=engine, policy=policy)
    )
    more = {"timing/rollout": 4.0, "timing/sync": 1.5, "timing/step": 12.0}  # 2 s more
    steps = StepsSinceSync(TIMINGS | more, [BATCH])
    utilisation.measure(steps, [BATCH])
    found = utilisation.measure(steps, [BATCH])
    assert found["moving/share"] == pytest.approx(2.0 / 12)
    assert found["utilisation/data_wait"] == pytest.approx(1.0 / 12), "as without"
    assert found["utilisation/idle/policy"] == pytest.approx(1 - (4.5 + 0.5) / 12)
    assert found["utilisation/idle/engines"] == pytest.approx(1 - (2.5 + 1.5) / 12)


def test_a_replaced_engine_counts_from_zero(fleet: Fleet) -> None:
    utilisation = Utilisation(PPOSettings.of(config_from_tree({}, "test")), fleet)
    measured(utilisation)
    measured(utilisation)
    fleet.engine_starts = 2
    assert measured(utilisation)["utilisation/idle/engines"] == pytest.approx(1 - (3.0 + 2.0) / 2 / 10)


def test_an_evaluation_between_steps_does_not_count(fleet: Fleet) -> None:
    utilisation = Utilisation(PPOSettings.of(config_from_tree({}, "test")), fleet)
    utilisation.begin()
    assert measured(utilisation) == {}
    fleet.usage_by_group()  # what a step costs, here for an evaluation
    utilisation.begin()
    assert measured(utilisation)["utilisation/idle/policy"] == pytest.approx(0.55)


def test_without_all_counters_there_are_no_metrics(fleet: Fleet) -> None:
    utilisation = Utilisation(PPOSettings.of(config_from_tree({}, "test")), fleet)
    measured(utilisation)
    fleet.lost = True
    assert measured(utilisation) == {}
    fleet.lost = False
    assert measured(utilisation) == {}, "the counters before are not known"
    assert measured(utilisation)["utilisation/idle/policy"] == pytest.approx(0.55)


def test_a_step_in_which_an_engine_was_given_up_has_no_metrics(fleet: Fleet) -> None:
    """The engine after it has another position in the next usage."""
    utilisation = Utilisation(PPOSettings.of(config_from_tree({}, "test")), fleet)
    measured(utilisation)
    fleet.first_engine = 1
    assert measured(utilisation) == {}
    assert measured(utilisation)["utilisation/idle/engines"] == pytest.approx(1 - 2.0 / 10)


def test_padding_share_is_the_one_computed_by_hand() -> None:
    batch = batch_of([10, 2, 6, 6], prompt=4)
    batch.routes[1] = route(batch, 1, 28, pack=False)
    # Rows of 14 and 10 tokens, then 10 and 6: 2 x 14 + 2 x 10 computed, 40 needed.
    assert padding_share([batch]) == pytest.approx(1 - 40 / 48)
    batch.routes[1] = route(batch, 1, 14, pack=False)
    assert padding_share([batch]) == pytest.approx(0.0)
    assert padding_share([batch_of([3], prompt=1)]) == 0.0
