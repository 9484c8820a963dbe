"""The update of one PPO step: from experience to the optimizer steps of each rank, and from the sums of the
ranks to metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlhf_core.algo.losses import step_denominator
from rlhf_core.cluster.rpc import Pending
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models.packing import plan_ranks
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.fleet import Fleet, reindex
from rlhf_core.ppo.loss_step import OptimizerStep, TrainSample
from rlhf_core.ppo.worker import ModelWorker
from rlhf_core.seeds import derive_seed, epoch_batches
from rlhf_core.types import Rollout, SFTExample

Metrics = dict[str, float]
_IdsAndMask = tuple[tuple[int, ...], tuple[int, ...]]
"""(input ids, target mask) of a demonstration."""


class Updater:
    """Makes epochs x minibatches optimizer steps with policy and critic, both at the same time.

    `demonstrations` are used if there is a pretraining loss (`ppo.ptx`).
    """

    def __init__(
        self, ppo: PPOConfig, fleet: Fleet, seed: int, demonstrations: Sequence[SFTExample] = ()
    ) -> None:
        self._ppo = ppo
        self._fleet = fleet
        self._seed = seed
        self._demonstrations = demonstrations

    def update(
        self, rollouts: Sequence[Rollout], experience: Experience, step: int, kl_coef: float
    ) -> Metrics:
        """Train on the experience of one step. Responses without a score are left out.

        Args:
            rollouts: Of the step.
            experience: In the order of `rollouts`.
            step: Number of the step, 1-based.
            kl_coef: Coefficient of the KL loss, used with `kl.place: loss`.
        """
        samples = train_samples(rollouts, experience)
        scored = experience.mask_BT.any(1).tolist()
        batches = []
        for epoch in range(self._ppo.epochs):
            seed = derive_seed(self._seed, "minibatches", step)
            for indices in epoch_batches(len(samples), self._ppo.minibatch_size, seed, epoch):
                batch = [i for i in indices if scored[i]]
                # An empty one makes no optimizer step: with zero gradients Adam's moments would still change
                # the weights.
                if batch:
                    batches.append(batch)
        trains_policy = step > self._ppo.warmup_steps
        policy = self._start_policy(samples, batches, step, kl_coef) if trains_policy else []
        # Without clipping during the warm-up, because the values must change a lot.
        critic = self._start_critic(samples, batches, trains_policy) if self._ppo.uses_critic else []

        metrics: Metrics = {}
        tokens = max(1, sum(len(samples[i].response_ids) for batch in batches for i in batch))
        if policy:
            ranks = self._fleet.wait(policy, f"the policy's update of step {step}")
            metrics |= _metrics("policy", ranks, len(batches), tokens)
        if critic:
            ranks = self._fleet.wait(critic, f"the critic's update of step {step}")
            metrics |= _metrics("value", ranks, len(batches), tokens)
        return metrics

    def _start_policy(
        self, samples: list[TrainSample], batches: list[list[int]], step: int, kl_coef: float
    ) -> list[Pending[Metrics]]:
        workers = self._fleet.groups["policy"].workers
        rank_samples, rank_steps = self._split(len(workers), samples, batches)
        demonstrations: list[list[_IdsAndMask]] = [[] for _ in workers]
        if self._ppo.ptx is not None:
            demonstrations, rank_steps = self._with_demonstrations(rank_steps, step)
        return [
            worker.call(
                ModelWorker.update_policy,
                rank_samples[rank],
                rank_steps[rank],
                kl_coef=kl_coef,
                demonstrations=demonstrations[rank],
            )
            for rank, worker in enumerate(workers)
        ]

    def _start_critic(
        self, samples: list[TrainSample], batches: list[list[int]], clip_values: bool
    ) -> list[Pending[Metrics]]:
        workers = self._fleet.groups["critic"].workers
        rank_samples, rank_steps = self._split(len(workers), samples, batches)
        return [
            worker.call(
                ModelWorker.update_critic, rank_samples[rank], rank_steps[rank], clip_values=clip_values
            )
            for rank, worker in enumerate(workers)
        ]

    def _split(
        self, ranks: int, samples: list[TrainSample], batches: list[list[int]]
    ) -> tuple[list[list[TrainSample]], list[list[OptimizerStep]]]:
        """Return the samples and the optimizer steps of each rank."""
        ppo = self._ppo
        rank_samples: list[list[TrainSample]] = [[] for _ in range(ranks)]
        rank_steps: list[list[OptimizerStep]] = [[] for _ in range(ranks)]
        for batch in batches:
            chosen = [samples[i] for i in batch]
            tokens = sum(len(s.response_ids) for s in chosen)
            denominator = max(1.0, step_denominator(ppo.loss_sum, tokens, len(chosen))) * ppo.loss_divisor
            lengths = [len(s.prompt_ids) + len(s.response_ids) for s in chosen]
            plan = plan_ranks(lengths, ranks, ppo.micro_batch_tokens, pack=ppo.packs)
            for rank, micro_batches in enumerate(plan):
                indices = reindex(micro_batches, start=len(rank_samples[rank]))
                rank_steps[rank].append(OptimizerStep(indices, denominator))
                for micro_batch in micro_batches:
                    rank_samples[rank] += [chosen[i] for i in micro_batch]
        return rank_samples, rank_steps

    def _with_demonstrations(
        self, rank_steps: list[list[OptimizerStep]], step: int
    ) -> tuple[list[list[_IdsAndMask]], list[list[OptimizerStep]]]:
        """Return the demonstrations of each rank, and the optimizer steps that include them."""
        ppo = self._ppo
        assert ppo.ptx is not None
        rows: list[list[_IdsAndMask]] = [[] for _ in rank_steps]
        joined: list[list[OptimizerStep]] = [[] for _ in rank_steps]
        # Counted as if no minibatch were left out, so that each step has its own place in the permutations.
        first = (step - 1) * ppo.epochs * ppo.minibatches
        for number in range(len(rank_steps[0])):
            batch = self._demonstrations_at(first + number, ppo.ptx.batch_size)
            targets = sum(sum(d.loss_mask[1:]) for d in batch)  # the first token is never predicted
            lengths = [len(d.input_ids) for d in batch]
            plan = plan_ranks(lengths, len(rank_steps), ppo.micro_batch_tokens, pack=ppo.packs)
            for rank, micro_batches in enumerate(plan):
                old = rank_steps[rank][number]
                indices = reindex(micro_batches, start=len(rows[rank]))
                joined[rank].append(OptimizerStep(old.micro_batches, old.denominator, indices, targets))
                for micro_batch in micro_batches:
                    rows[rank] += [(batch[i].input_ids, batch[i].loss_mask) for i in micro_batch]
        return rows, joined

    def _demonstrations_at(self, number: int, size: int) -> list[SFTExample]:
        """Return batch `number` of a walk through one permutation of the demonstrations after another."""
        count = len(self._demonstrations)
        size = min(size, count)
        epoch, index = divmod(number, count // size)
        batch = epoch_batches(count, size, derive_seed(self._seed, "ptx"), epoch)[index]
        return [self._demonstrations[i] for i in batch]


def _metrics(prefix: str, ranks: list[Metrics], steps: int, tokens: int) -> Metrics:
    """Return metrics from the sums of all ranks (see `ppo.loss_step`).

    Args:
        prefix: "policy" or "value".
        ranks: Sums of each rank.
        steps: Optimizer steps.
        tokens: Response tokens of all ranks and steps.
    """
    names = sorted({name for rank in ranks for name in rank})
    sums = {name: sum(rank.get(name, 0.0) for rank in ranks) for name in names}
    # Norms and skipped steps are those of the whole gradient, so every rank has counted the same.
    skipped = sums.get("skipped", 0.0) / len(ranks)
    metrics = {
        f"loss/{prefix}": sums.get("loss", 0.0) / steps,
        f"{prefix}/clipfrac": sums.get("clipped", 0.0) / tokens,
        f"{prefix}/grad_norm": sums.get("grad_norm", 0.0) / len(ranks) / max(1.0, steps - skipped),
        f"{prefix}/skipped_steps": skipped,
    }
    if sums.get("grad_nonfinite"):
        metrics[f"{prefix}/non_finite_steps"] = sums["grad_nonfinite"] / len(ranks)
    if prefix == "policy":
        metrics["policy/approxkl"] = sums.get("approx_kl", 0.0) / tokens
    for name in ("kl_loss", "ptx_loss"):
        if name in sums:
            metrics[f"loss/{name.removesuffix('_loss')}"] = sums[name] / steps
    # A skipped step has no loss.
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def train_samples(rollouts: Sequence[Rollout], experience: Experience) -> list[TrainSample]:
    """Return one sample per rollout, in order."""

    def row(tensor: Any, i: int) -> Any:
        return tensor[i, : len(rollouts[i].response_ids)].numpy()

    return [
        TrainSample(
            r.prompt_ids,
            r.response_ids,
            old_logprobs=row(experience.old_logprobs_BT, i),
            advantages=row(experience.advantages_BT, i),
            ref_logprobs=row(experience.ref_logprobs_BT, i),
            returns=row(experience.returns_BT, i),
            old_values=row(experience.values_BT, i),
            weights=row(experience.weights_BT, i),
        )
        for i, r in enumerate(rollouts)
    ]
