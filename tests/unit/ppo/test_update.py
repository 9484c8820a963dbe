"""The optimizer steps of each rank, and the metrics from the sums of the ranks, which are scripted.

- every scored response is used once per epoch over all ranks; all ranks have the same number of
  micro-batches; a response without a score is left out and not counted in a denominator
- there are epochs x minibatches optimizer steps, in an order that follows from seed and step; the policy is
  not trained during the critic's warm-up
- with a pretraining loss, every optimizer step has its own demonstrations, each used once per pass
- metrics are means over the tokens and steps of all ranks
- each rank sends what the others train on, once; rows arrive with their bits
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.algo.losses import step_denominator
from rlhf_core.cluster.rpc import Pending
from rlhf_core.config.load import config_from_tree
from rlhf_core.ppo.fleet.fleet import Scattered
from rlhf_core.ppo.training.batch import Places, RolloutBatch, route
from rlhf_core.ppo.training.experience import Whitening
from rlhf_core.ppo.training.loss_step import OptimizerStep
from rlhf_core.ppo.training.rank_rows import CriticInputs, Exchange, _packed, _unpacked
from rlhf_core.ppo.update import CriticWarmup, Experience, Updater
from rlhf_core.types import PromptExample, SFTExample
from tests.support.scripted_fleet import ScriptedFleet, ScriptedRank

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]  # of the responses: 52 tokens
UNSCORED = (2, 5)  # 4 + 9 tokens
PROMPTS = [PromptExample(f"p{i}", "", (i,) * (1 + i % 3)) for i in range(len(LENGTHS))]
DEMONSTRATIONS = [
    SFTExample((i,) * (3 + i % 5), (0,) * (i % 3) + (1,) * (3 + i % 5 - i % 3)) for i in range(14)
]
PACKED: dict[str, Any] = {"pack": True, "micro_batch_tokens": 11}
PADDED: dict[str, Any] = {"pack": False, "micro_batch_tokens": 11}
WAYS = pytest.mark.parametrize(
    ("ranks", "cut"), [(1, {}), (2, PACKED), (2, PADDED), (3, PACKED), (3, PADDED)]
)


def batch_on(*groups: int) -> RolloutBatch:
    """Return a batch of four chunks, distributed over groups with these numbers of ranks."""
    none: Any = None
    numbers = np.arange(len(LENGTHS))
    batch = RolloutBatch(
        [Pending(none)] * 4,
        Places(numbers // 3, numbers % 3),
        np.array(LENGTHS, np.int32),
        np.ones(len(LENGTHS), np.bool_),
        PROMPTS,
    )
    for ranks in groups:
        batch.routes[ranks] = route(batch, ranks, 11, pack=True)
    return batch


def experience(batch: RolloutBatch, ranks: int, unscored: Sequence[int] = ()) -> Experience:
    scores_B = torch.tensor([math.nan if i in unscored else 0.0 for i in range(len(LENGTHS))])
    parts: list[tuple[Pending[Any], list[Pending[Any]]]] = [
        (Pending(None), [Pending(f"rank {rank}")]) for rank in range(ranks)
    ]
    fleet: Any = None
    columns = Scattered(fleet, "values", batch.routes[ranks], parts)
    return Experience(
        scores_B, np.zeros(len(LENGTHS)), Whitening(0.5, 2.0), {}, columns, columns, columns, columns
    )


class _Rank(ScriptedRank):
    """A rank of policy or critic that stores the last call and returns `sums`."""

    samples: list[int]
    """Numbers of the responses that the rank trains on."""
    steps: list[OptimizerStep]
    options: dict[str, Any]
    """Other arguments of the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, float] = {}
        self.asked = 0

    def update_policy(
        self,
        exchange: Exchange,
        steps: list[OptimizerStep],
        whitening: Whitening | None,
        *,
        kl_coef: float,
        demonstrations: list[Any],
    ) -> dict[str, float]:
        assert whitening == Whitening(0.5, 2.0)
        self.rows = demonstrations
        return self._update(exchange, steps, {"kl_coef": kl_coef, "demonstrations": demonstrations})

    def update_critic(
        self,
        inputs: CriticInputs,
        exchange: Exchange,
        steps: list[OptimizerStep],
        clip_values: bool,
        *objects: Any,
    ) -> dict[str, float]:
        assert len(inputs.values) == len(inputs.returns)
        return self._update(exchange, steps, {"clip_values": clip_values})

    def _update(
        self, exchange: Exchange, steps: list[OptimizerStep], options: dict[str, Any]
    ) -> dict[str, float]:
        self.exchange, self.steps, self.options = exchange, steps, options
        self.asked += 1
        return self.sums


class _Made:
    """An updater over scripted ranks of policy and critic."""

    def __init__(self, ranks: int = 2, *, seed: int = 7, **ppo: Any) -> None:
        tree = {"steps": 9, "prompts_per_step": 12, "minibatches": 3, "epochs": 2, **ppo}
        self.policy, self.critic = ([_Rank() for _ in range(ranks)] for _ in range(2))
        config = config_from_tree({"ppo": tree}, "test")
        fleet = ScriptedFleet(config, ranks={"policy": self.policy, "critic": self.critic})
        settings = config.ppo
        self._updater = Updater(settings, fleet, seed, DEMONSTRATIONS)
        self._warmup = CriticWarmup(settings)
        self._ranks = ranks

    def update(self, step: int = 1, unscored: Sequence[int] = ()) -> dict[str, float]:
        batch = batch_on(self._ranks)
        made = experience(batch, self._ranks, unscored)
        trains_policy = self._warmup.is_over({}, step)
        metrics = self._updater.update(batch, made, step, 0.125, trains_policy=trains_policy)
        for group in (self.policy, self.critic):
            if not any(rank.asked for rank in group):
                continue
            for number, rank in enumerate(group):
                rank.samples = self._exchanged(batch, [other.exchange for other in group], number)
        return metrics

    def _exchanged(self, batch: RolloutBatch, exchanges: Sequence[Exchange], rank: int) -> list[int]:
        """Return the responses that a rank has after all have sent what they were asked to."""
        arrived: list[int] = []
        for home, share in enumerate(batch.routes[self._ranks]):
            sent = exchanges[home]
            start = int(sent.send_counts[:rank].sum())
            rows = sent.send_rows[start : start + int(sent.send_counts[rank])]
            assert len(rows) == exchanges[rank].receive_counts[home]
            arrived += share.indices[rows].tolist()
        assert exchanges[rank].lengths.tolist() == [LENGTHS[i] for i in arrived]
        assert exchanges[rank].prompt_lengths.tolist() == [1 + i % 3 for i in arrived]
        return [arrived[position] for position in exchanges[rank].order]


def minibatches(ranks: Sequence[_Rank]) -> list[list[int]]:
    """Numbers of the responses of each optimizer step, over all ranks."""
    (count,) = {len(rank.steps) for rank in ranks}
    return [
        sorted(rank.samples[k] for rank in ranks for k in chain(*rank.steps[step].micro_batches))
        for step in range(count)
    ]


# -- samples and steps --


@WAYS
def test_every_scored_response_is_used_once_per_epoch(ranks: int, cut: dict[str, Any]) -> None:
    made, whole = _Made(ranks, **cut), _Made(1)
    whole.update()
    made.update(unscored=UNSCORED)
    full = minibatches(whole.policy)
    assert [len(batch) for batch in full] == [4] * 6
    assert sorted(chain(*full[:3])) == sorted(chain(*full[3:])) == list(range(12))
    for group in (made.policy, made.critic):
        assert minibatches(group) == [[i for i in batch if i not in UNSCORED] for batch in full]


@WAYS
def test_all_ranks_have_the_same_number_of_micro_batches(ranks: int, cut: dict[str, Any]) -> None:
    made = _Made(ranks, **cut)
    made.update(unscored=UNSCORED)
    for group in (made.policy, made.critic):
        for step in range(6):
            assert len({len(rank.steps[step].micro_batches) for rank in group}) == 1
        for rank in group:
            indices = [k for step in rank.steps for k in chain(*step.micro_batches)]
            assert sorted(set(indices)) == list(range(len(rank.samples)))
            assert len(set(rank.samples)) == len(rank.samples), "each response is sent once"


# 52 tokens of 12 responses, without those that have no score 39 of 10.
@pytest.mark.parametrize(
    ("aggregation", "whole", "scored"),
    [
        ("token-mean", 52, 39),
        ("seq-mean-token-mean", 12, 10),
        ("seq-mean-token-sum", 12, 10),
        ("seq-mean-token-sum-norm", 12 * 64, 10 * 64),
        ("token-sum", 1, 1),
    ],
)
def test_the_denominator_counts_scored_responses_of_all_ranks(
    aggregation: Any, whole: int, scored: int
) -> None:
    made = _Made(2, aggregation=aggregation, minibatches=1, epochs=1, **PACKED)
    for unscored, expected in (((), whole), (UNSCORED, scored)):
        made.update(unscored=unscored)
        assert [rank.steps[0].denominator for rank in made.policy + made.critic] == [expected] * 4
    parts = _Made(2, aggregation=aggregation)
    parts.update(unscored=UNSCORED)
    for step, batch in enumerate(minibatches(parts.policy)):
        plain = aggregation.removesuffix("-norm")
        of_batch = step_denominator(plain, sum(LENGTHS[i] for i in batch), len(batch))
        of_batch *= 1 if plain == aggregation else 64  # ppo.max_new_tokens
        assert [rank.steps[step].denominator for rank in parts.policy + parts.critic] == [of_batch] * 4


@pytest.mark.parametrize("ptx", [None, {"coef": 1.0, "batch_size": 4}])
def test_a_minibatch_without_scores_makes_no_optimizer_step(ptx: dict[str, Any] | None) -> None:
    made = _Made(2, epochs=1, ptx=ptx)
    made.update()
    whole = minibatches(made.policy)
    made.update(unscored=whole[1])
    for group in (made.policy, made.critic):
        assert minibatches(group) == [whole[0], whole[2]]
        assert all(any(rank.steps[n].micro_batches != [[]] for rank in group) for n in range(2))


@pytest.mark.parametrize(("epochs", "parts"), [(1, 1), (1, 4), (3, 2)])
def test_optimizer_steps_are_epochs_times_minibatches(epochs: int, parts: int) -> None:
    made = _Made(2, epochs=epochs, minibatches=parts, **PACKED)
    made.update(unscored=UNSCORED)
    assert [len(rank.steps) for rank in made.policy + made.critic] == [epochs * parts] * 4


def test_the_order_depends_on_seed_step_and_epoch() -> None:
    def order(made: _Made, step: int) -> list[list[int]]:
        made.update(step)
        assert minibatches(made.policy) == minibatches(made.critic)
        return minibatches(made.policy)

    used = _Made()
    first, second = order(used, 1), order(used, 2)
    assert order(_Made(), 2) == second == order(used, 2)
    orders = [first, second, order(_Made(seed=8), 2)]
    epochs = [tuple(map(tuple, part)) for whole in orders for part in (whole[:3], whole[3:])]
    assert len(set(epochs)) == len(epochs) == 6


def test_only_the_critic_trains_during_its_warm_up() -> None:
    made = _Made(2, critic_warmup_steps=2)
    for step, asked in ((1, 0), (2, 0), (3, 1)):
        metrics = made.update(step)
        assert [rank.asked for rank in made.policy] == [asked] * 2
        assert [rank.asked for rank in made.critic] == [step] * 2
        assert [rank.options for rank in made.critic] == [{"clip_values": step > 2}] * 2
        assert ("loss/policy" in metrics, "loss/value" in metrics) == (bool(asked), True)


@pytest.mark.parametrize(
    ("most", "explained", "trains"),
    [
        (None, [-1.0, -1.0, -1.0, -1.0], [False, False, True, True]),
        (4, [-1.0, 0.5, -1.0, -1.0, -1.0], [False, False, False, False, True]),
        (4, [-1.0, -1.0, 0.1, -1.0], [False, False, True, True]),
        (4, [-1.0, -1.0, None, 0.0, 0.0], [False, False, False, False, True]),
    ],
)
def test_the_warm_up_continues_until_the_critic_explains_variance(
    most: int | None, explained: list[float | None], trains: list[bool]
) -> None:
    tree = {"steps": 9, "critic_warmup_steps": 2, "critic_warmup_max_steps": most}
    ppo = config_from_tree({"ppo": tree}, "test").ppo
    warmup = CriticWarmup(ppo)
    found = []
    for step, value in enumerate(explained, 1):
        found.append(warmup.is_over({} if value is None else {"value/explained_variance": value}, step))
        continued = CriticWarmup(ppo)
        continued.load_state_dict(warmup.state_dict())
        warmup = continued
    assert found == trains


def test_a_critic_that_explains_nothing_after_the_longest_warm_up_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for last, level in ((-0.5, "WARNING"), (0.5, "INFO")):
        caplog.clear()
        caplog.set_level("INFO")
        ppo = {"steps": 9, "critic_warmup_steps": 1, "critic_warmup_max_steps": 2}
        warmup = CriticWarmup(config_from_tree({"ppo": ppo}, "test").ppo)
        for step, value in enumerate([-1.0, -1.0, last, 0.1], 1):
            warmup.is_over({"value/explained_variance": value}, step)
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            (level, f"step 3: the critic's warm-up ended after 2 steps with an explained variance of {last}")
        ]


def test_without_a_critic_only_the_policy_trains() -> None:
    made = _Made(2, algorithm="reinforce_pp")
    metrics = made.update()
    assert [rank.asked for rank in made.policy + made.critic] == [1, 1, 0, 0]
    assert [rank.options for rank in made.policy] == [{"kl_coef": 0.125, "demonstrations": []}] * 2
    assert "loss/value" not in metrics


# -- pretraining loss --


def drawn(made: _Made, step: int) -> list[list[int]]:
    """Numbers of the demonstrations of each optimizer step, over all ranks."""
    made.update(step)
    return [
        sorted(rank.rows[k][0][0] for rank in made.policy for k in chain(*rank.steps[n].ptx_micro_batches))
        for n in range(6)
    ]


@WAYS
@pytest.mark.parametrize(("size", "each", "per_pass"), [(7, 7, 2), (3, 3, 4), (50, 14, 1)])
def test_each_pass_uses_every_demonstration_once(
    ranks: int, cut: dict[str, Any], size: int, each: int, per_pass: int
) -> None:
    made, alone = (
        _Made(n, ptx={"coef": 1.0, "batch_size": size}, **how) for n, how in ((ranks, cut), (1, {}))
    )
    batches = drawn(made, 1) + drawn(made, 2)
    assert [len(batch) for batch in batches] == [each] * 12
    passes = [list(chain(*batches[i : i + per_pass])) for i in range(0, 12, per_pass)]
    assert all(len(set(used)) == each * per_pass for used in passes)
    assert batches == drawn(alone, 1) + drawn(alone, 2)
    assert per_pass == 1 or batches[:per_pass] != batches[per_pass : 2 * per_pass], (
        "every pass has an order of its own"
    )


@WAYS
def test_demonstrations_are_added_to_the_optimizer_steps(ranks: int, cut: dict[str, Any]) -> None:
    made, plain = _Made(ranks, ptx={"coef": 1.0, "batch_size": 4}, **cut), _Made(ranks, **cut)
    batches = drawn(made, 3)
    plain.update(3)
    for number, batch in enumerate(batches):
        steps = [rank.steps[number] for rank in made.policy]
        assert len({len(step.ptx_micro_batches) for step in steps}) == 1
        # The masks count 2 + i % 5 - i % 2 targets.
        assert [step.ptx_targets for step in steps] == [sum(3 + i % 5 - max(1, i % 3) for i in batch)] * ranks
    assert [rank.steps for rank in made.critic] == [rank.steps for rank in plain.critic]
    for rank, other in zip(made.policy, plain.policy, strict=True):
        assert [replace(step, ptx_micro_batches=[], ptx_targets=0) for step in rank.steps] == other.steps
        indices = [k for step in rank.steps for k in chain(*step.ptx_micro_batches)]
        assert sorted(indices) == list(range(len(rank.rows)))
        assert set(rank.rows) <= {(d.input_ids, d.loss_mask) for d in DEMONSTRATIONS}


def test_demonstrations_depend_on_seed_and_step() -> None:
    ptx = {"coef": 1.0, "batch_size": 4}
    used = _Made(ptx=ptx)
    first, later = drawn(used, 1), drawn(used, 2)
    assert drawn(_Made(ptx=ptx), 2) == later == drawn(used, 2) != first
    assert drawn(_Made(ptx=ptx, seed=8), 2) != later
    without = _Made()
    assert drawn(without, 2) == [[]] * 6
    assert not any(rank.rows or rank.steps[n].ptx_targets for rank in without.policy for n in range(6))


# -- metrics and rows --


def test_metrics_are_means_over_all_ranks() -> None:
    # 2 epochs of 2 minibatches: 4 optimizer steps, of which one is skipped, and 2 x 39 = 78 tokens with a
    # score.
    made = _Made(2, minibatches=2)
    both = {"grad_norm": 6.0, "skipped": 1.0, "grad_nonfinite": 0.0}
    made.policy[0].sums = {
        "loss": 1.0,
        "clipped": 5.8,
        "approx_kl": 0.5,
        "kl_loss": 0.4,
        "ptx_loss": 2.0,
        **both,
    }
    made.policy[1].sums = {"loss": 2.0, "clipped": 2.0, "approx_kl": 1.06, "kl_loss": 0.8, **both}
    made.critic[0].sums = {"loss": 0.5, "clipped": 39.0, "grad_norm": 8.0}
    made.critic[1].sums = {"loss": 0.5, "grad_norm": 8.0}
    assert made.update(unscored=UNSCORED) == pytest.approx(
        {
            "loss/policy": 3.0 / 4,
            "loss/kl": 1.2 / 4,
            "loss/ptx": 2.0 / 4,
            "policy/clipfrac": 7.8 / 78,
            "policy/approxkl": 1.56 / 78,
            "policy/grad_norm": 6.0 / 3,  # the norm is of all ranks' gradient
            "policy/skipped_steps": 1.0,
            "loss/value": 1.0 / 4,
            "value/clipfrac": 39.0 / 78,
            "value/grad_norm": 8.0 / 4,
            "value/skipped_steps": 0.0,
        }
    )


def test_nonfinite_steps_are_counted_per_model() -> None:
    for stumbling, calm in (("policy", "value"), ("value", "policy")):
        made = _Made(2)
        for rank in made.policy if stumbling == "policy" else made.critic:
            rank.sums = {"skipped": 6.0, "grad_nonfinite": 2.0}
        metrics = made.update()
        assert metrics[f"{stumbling}/non_finite_steps"] == 2.0
        assert metrics[f"{stumbling}/skipped_steps"] == 6.0
        assert metrics[f"{stumbling}/grad_norm"] == 0.0
        assert f"{calm}/non_finite_steps" not in metrics


def test_rows_arrive_with_the_bits_that_were_sent() -> None:
    sent = [
        (
            np.arange(i, dtype=np.int32) + 7,
            np.arange(length, dtype=np.int32),
            [np.linspace(-1e30, 1e-40, length).astype(np.float32), np.full(length, math.nan, np.float32)],
        )
        for i, length in enumerate((3, 1, 5))
    ]
    buffer = _packed(sent)
    prompts, lengths = np.array([0, 1, 2], np.int32), np.array([3, 1, 5], np.int32)
    arrived = _unpacked(buffer, prompts, lengths, 2)
    assert [[a.tobytes() for a in (p, r, *c)] for p, r, c in arrived] == [
        [a.tobytes() for a in (p, r, *c)] for p, r, c in sent
    ]
    assert len(buffer) == 3 + 9 * 3
    assert _packed([]).tolist() == [] and _unpacked(_packed([]), prompts[:0], lengths[:0], 2) == []


def test_a_skipped_step_has_no_loss() -> None:
    made = _Made(2)
    for rank in made.policy:
        rank.sums = {"loss": math.nan, "skipped": 1.0, "grad_nonfinite": 1.0, "grad_norm": 5.0}
    metrics = made.update()
    assert "loss/policy" not in metrics and metrics["policy/non_finite_steps"] == 1.0
    assert all(map(math.isfinite, metrics.values()))
