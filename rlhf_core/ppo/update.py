"""Experience and update of one PPO step: the calls of the controller.

The policy ranks make the experience:

    scores of the batch --+
    old_logprobs, entropy +--> `ModelWorker.make_experience` --> sums of each response -> metrics, whitening
    ref_logprobs, values -+     (references, not numbers)        returns (references) --> update of the critic

The update goes from experience to the optimizer steps of each rank, and from the sums of the ranks to
metrics. The controller distributes indices; the ranks exchange the rows (`ppo.training.rank_rows`).

Axis: `B` responses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_core.algo.advantages import AdvantageInputs
from rlhf_core.algo.losses import step_denominator
from rlhf_core.cluster.rpc import Pending, as_argument
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models.batching import plan_ranks
from rlhf_core.ppo.fleet.fleet import Fleet, Scattered
from rlhf_core.ppo.fleet.worker import ModelWorker
from rlhf_core.ppo.training.batch import Indices, ObjectArguments, RankShare, RolloutBatch, places_of, reindex
from rlhf_core.ppo.training.experience import (
    OwnAdvantages,
    ResponseSums,
    Whitening,
    groups_of,
    response_advantages,
    shaped_scores,
    summarize,
)
from rlhf_core.ppo.training.loss_step import OptimizerStep
from rlhf_core.ppo.training.rank_rows import CriticInputs, Exchange, ExperienceInputs
from rlhf_core.seeds import derive_seed, epoch_batch
from rlhf_core.types import SFTExample, finite

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experience:
    """The controller's data about the experience of a step. The columns are on the policy ranks."""

    scores_B: torch.Tensor
    """Composed scores with penalties, before the KL. NaN if a response has no score."""
    kl_B: NDArray[np.float64]
    """Token sum of k1 per response, in nats; 0 without a score."""
    whitening: Whitening | None
    """None if advantages are not whitened."""
    metrics: dict[str, float]
    returns: Scattered[ResponseSums]
    """`returns` from unwhitened advantages, for the critic, and these `advantages` if they are recorded."""
    values: Scattered[None] | None
    """Values by the critic before the update; None without a critic."""
    old: Scattered[None]
    """`logprobs` of the policy before the update."""
    ref: Scattered[None]
    """`logprobs` of the reference."""

    @property
    def scored_B(self) -> NDArray[np.bool_]:
        """Whether the response has a score. Others are not used for training."""
        scored: NDArray[np.bool_] = (~self.scores_B.isnan()).numpy()
        return scored


def make_experience(
    fleet: Fleet,
    batch: RolloutBatch,
    *,
    old: Scattered[None],
    ref: Scattered[None],
    values: Scattered[None] | None,
    scores: Sequence[float],
    ppo: PPOConfig,
    kl_coef: float,
    own_advantages: OwnAdvantages | None = None,
    keep_advantages: bool = False,
) -> Experience:
    """Let the policy ranks make the experience of a step. The samples of a prompt must be consecutive.

    Args:
        fleet: Its policy ranks make the experience.
        batch: Rollouts of the step.
        old: `logprobs` and `entropy` of the policy before the update.
        ref: `logprobs` of the reference.
        values: `values` of the critic; None without one.
        scores: One per response. A response with the score NaN is masked.
        ppo: Section `ppo`.
        kl_coef: Coefficient of the KL penalty, used with `kl.place: reward`.
        own_advantages: The user's advantages, instead of those of the algorithm.
        keep_advantages: Whether the controller reads the advantages of the tokens.
    """
    scores_B = shaped_scores(batch.lengths_B, batch.finished_B, scores, ppo)
    own_metrics: dict[str, float] = {}
    if own_advantages is None:
        advantages_B = response_advantages(scores_B, ppo)
    else:
        advantages_B, own_metrics = own_advantages(
            AdvantageInputs(
                scores_B,
                groups_of(scores_B, ppo),
                torch.from_numpy(batch.lengths_B.astype(np.int64)),
                # A copy, so that a user's function cannot change the batch.
                torch.from_numpy(np.array(batch.finished_B)),
            )
        )
    parts = []
    # Divided as `old`, because a policy rank has the tokens of these responses.
    for rank, (share, worker) in enumerate(zip(old.shares, fleet.groups["policy"].workers, strict=True)):
        indices, objects = share.indices, ObjectArguments()
        inputs = ExperienceInputs(
            batch.number,
            old.add_rows(objects, rank, old.shares),
            ref.add_rows(objects, rank, old.shares),
            None if values is None else values.add_rows(objects, rank, old.shares),
            scores_B.numpy()[indices],
            None if advantages_B is None else advantages_B.numpy()[indices],
            kl_coef,
            keep_advantages,
        )
        arguments = [as_argument(pending) for pending in objects.pending]
        parts.append(worker.call_parts(2, ModelWorker.make_experience, inputs, *arguments))
    returns = Scattered(fleet, "policy.make_experience", old.shares, parts)
    sums = sums_in_batch_order(old.shares, returns.complete())
    summary = summarize(sums, scores_B, batch.lengths_B, batch.finished_B, ppo)
    metrics = summary.metrics | {f"advantages/user/{name}": value for name, value in own_metrics.items()}
    return Experience(scores_B, sums.kl, summary.whitening, metrics, returns, values, old, ref)


def sums_in_batch_order(shares: Sequence[RankShare], sums: Sequence[ResponseSums]) -> ResponseSums:
    """Return the sums of all ranks in the order of the batch."""
    count = sum(len(share.indices) for share in shares)
    ordered = {}
    for field in fields(ResponseSums):
        values = np.zeros(count)
        for share, of_rank in zip(shares, sums, strict=True):
            values[share.indices] = getattr(of_rank, field.name)
        ordered[field.name] = values
    return ResponseSums(**ordered)


Metrics = dict[str, float]
_IdsAndMask = tuple[tuple[int, ...], tuple[int, ...]]
"""(input ids, target mask) of a demonstration."""


class CriticWarmup:
    """Which steps train the critic only: the first `ppo.warmup_steps`, and those after them until the
    explained variance of the critic's values is above 0, at most `ppo.longest_warmup` in total.

    The explained variance of a step is that before its update.
    """

    def __init__(self, ppo: PPOConfig) -> None:
        self._ppo = ppo
        self._is_over = False

    def state_dict(self) -> dict[str, Any]:
        return {"critic_warmup_is_over": self._is_over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._is_over = bool(state["critic_warmup_is_over"])

    def is_over(self, metrics: Metrics, step: int) -> bool:
        """Return whether `step` trains the policy. `metrics` are those of its experience."""
        if self._is_over:
            return True
        if step <= self._ppo.warmup_steps:
            return False
        explained = metrics.get("value/explained_variance", 0.0)  # equal returns have none
        self._is_over = explained > 0 or step > self._ppo.longest_warmup
        if self._is_over and self._ppo.longest_warmup > self._ppo.warmup_steps:
            level = logging.INFO if explained > 0 else logging.WARNING
            log.log(
                level,
                "step %d: the critic's warm-up ended after %d steps with an explained variance of %.2g",
                step,
                step - 1,
                explained,
            )
        return self._is_over


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
        self,
        batch: RolloutBatch,
        experience: Experience,
        step: int,
        kl_coef: float,
        *,
        trains_policy: bool = True,
    ) -> Metrics:
        """Train on the experience of one step. Responses without a score are left out.

        Args:
            batch: Batch of the step.
            experience: Experience in the order of `batch`.
            step: Number of the step, 1-based.
            kl_coef: Coefficient of the KL loss, used with `kl.place: loss`.
            trains_policy: Whether the policy is trained too, and not only the critic.
        """
        scored = experience.scored_B.tolist()
        batches = []
        for epoch in range(self._ppo.epochs):
            # A permutation of its own for each step and epoch, without a generator whose state a checkpoint
            # would need.
            seed = derive_seed(self._seed, "minibatches", step)
            for index in range(math.ceil(len(batch) / self._ppo.minibatch_size)):
                indices = epoch_batch(len(batch), self._ppo.minibatch_size, seed, epoch, index)
                minibatch = [i for i in indices if scored[i]]
                # An empty one makes no optimizer step: with zero gradients Adam's moments would still change
                # the weights.
                if minibatch:
                    batches.append(minibatch)
        plans: dict[int, list[RankUpdate]] = {}
        """Plans by the number of ranks."""
        for role in self._ppo.trained_roles:
            ranks = self._fleet.groups[role].ranks
            # Policy and critic with equally many ranks have the same plan.
            if ranks not in plans:
                plans[ranks] = plan_update(batch, batches, ranks, self._ppo)
        policy = self._start_policy(plans, experience, step, kl_coef) if trains_policy else []
        # Without clipping during the warm-up, because the values must change a lot.
        critic = self._start_critic(plans, batch, experience, trains_policy) if self._ppo.uses_critic else []

        metrics: Metrics = {}
        tokens = max(1, sum(int(batch.lengths_B[minibatch].sum()) for minibatch in batches))
        if policy:
            sums = self._fleet.wait(policy, f"the policy's update of step {step}")
            metrics |= _update_metrics("policy", sums, len(batches), tokens)
        if critic:
            sums = self._fleet.wait(critic, f"the critic's update of step {step}")
            metrics |= _update_metrics("value", sums, len(batches), tokens)
        return metrics

    def _start_policy(
        self, plans: Mapping[int, list[RankUpdate]], experience: Experience, step: int, kl_coef: float
    ) -> list[Pending[Metrics]]:
        workers = self._fleet.groups["policy"].workers
        plan = plans[len(workers)]
        rank_steps = [rank.steps for rank in plan]
        demonstrations: list[list[_IdsAndMask]] = [[] for _ in workers]
        if self._ppo.ptx is not None:
            demonstrations, rank_steps = self._with_demonstrations(rank_steps, step)
        calls = []
        for rank, worker in enumerate(workers):
            call = worker.call(
                ModelWorker.update_policy,
                plan[rank].exchange,
                rank_steps[rank],
                experience.whitening,
                kl_coef=kl_coef,
                demonstrations=demonstrations[rank],
            )
            calls.append(call)
        return calls

    def _start_critic(
        self,
        plans: Mapping[int, list[RankUpdate]],
        batch: RolloutBatch,
        experience: Experience,
        clip_values: bool,
    ) -> list[Pending[Metrics]]:
        """Start the update of the critic on all of its ranks."""
        workers = self._fleet.groups["critic"].workers
        assert experience.values is not None, "the critic has values"
        # Divided as the values, because a critic rank has the tokens of these responses.
        shares = experience.values.shares
        calls = []
        for rank, worker in enumerate(workers):
            objects = ObjectArguments()
            inputs = CriticInputs(
                batch.number,
                experience.values.add_rows(objects, rank, shares),
                experience.returns.add_rows(objects, rank, shares),
            )
            update = plans[len(workers)][rank]
            calls.append(
                worker.call(
                    ModelWorker.update_critic,
                    inputs,
                    update.exchange,
                    update.steps,
                    clip_values,
                    *(as_argument(pending) for pending in objects.pending),
                )
            )
        return calls

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
        # With fewer demonstrations than a batch, `count // size` would be 0.
        size = min(size, count)
        epoch, index = divmod(number, count // size)
        # The smaller batch at the end of a permutation is never used.
        indices = epoch_batch(count, size, derive_seed(self._seed, "ptx"), epoch, index)
        return [self._demonstrations[i] for i in indices]


def _update_metrics(prefix: str, ranks: list[Metrics], steps: int, tokens: int) -> Metrics:
    """Return metrics from the sums of all ranks (see `ppo.training.loss_step`).

    Args:
        prefix: "policy" or "value".
        ranks: Sums of each rank.
        steps: Optimizer steps.
        tokens: Response tokens of all ranks and steps.
    """
    # A rank whose micro-batches were all empty has no sums.
    names = sorted({name for rank in ranks for name in rank})
    sums = {name: sum(rank.get(name, 0.0) for rank in ranks) for name in names}
    # Norms and skipped steps are those of the whole gradient, so every rank has counted the same.
    skipped = sums.get("skipped", 0.0) / len(ranks)
    metrics = {
        f"loss/{prefix}": sums.get("loss", 0.0) / steps,
        f"{prefix}/clipfrac": sums.get("clipped", 0.0) / tokens,
        # A skipped step has added no norm, because it is not finite (`_Sums.end_step`).
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
    for name, total in sums.items():
        if name.startswith("user/"):
            metrics[f"{prefix}/{name}"] = total / tokens
    return finite(metrics)


# -- which rank trains on which response --


@dataclass(frozen=True)
class RankUpdate:
    """The part of one rank in an update."""

    exchange: Exchange
    """The responses that it trains on, each once."""
    steps: list[OptimizerStep]
    """Steps with indices into these responses."""


def plan_update(
    batch: RolloutBatch, batches: Sequence[Sequence[int]], ranks: int, ppo: PPOConfig
) -> list[RankUpdate]:
    """Distribute the minibatches of an update over ranks.

    Args:
        batch: Batch of the step. Its distribution over this number of ranks is known.
        batches: Indices of the responses of each optimizer step.
        ranks: Number of ranks of the group.
        ppo: Section `ppo`.
    """
    lengths_B = (batch.prompt_lengths_B + batch.lengths_B).tolist()
    rows: list[dict[int, int]] = [{} for _ in range(ranks)]
    """Position of each response among those that a rank trains on, by its index in the batch."""
    steps: list[list[OptimizerStep]] = [[] for _ in range(ranks)]
    for minibatch in batches:
        tokens = int(batch.lengths_B[minibatch].sum())
        denominator = max(1.0, step_denominator(ppo.loss_sum, tokens, len(minibatch))) * ppo.loss_divisor
        lengths = [lengths_B[i] for i in minibatch]
        plan = plan_ranks(lengths, ranks, ppo.micro_batch_tokens, pack=ppo.packs)
        for rank, micro_batches in enumerate(plan):
            positions = rows[rank]
            indices = []
            for micro_batch in micro_batches:
                chosen = [minibatch[k] for k in micro_batch]
                indices.append([positions.setdefault(i, len(positions)) for i in chosen])
            steps[rank].append(OptimizerStep(indices, denominator))
    # A dict keeps the order of insertion, and the steps have indices into this order.
    used = [np.fromiter(positions, np.int64, len(positions)) for positions in rows]
    exchanges = plan_exchange(batch, used, ranks)
    return [RankUpdate(exchange, steps[rank]) for rank, exchange in enumerate(exchanges)]


def plan_exchange(batch: RolloutBatch, used: Sequence[Indices], ranks: int) -> list[Exchange]:
    """Return what each rank sends and gets, if rank r needs the responses `used[r]` in this order."""
    home_B = places_of(batch.routes[ranks])
    prompt_lengths_B = batch.prompt_lengths_B
    needed = np.concatenate(used)
    target = np.repeat(np.arange(ranks), [len(indices) for indices in used])
    home = home_B.objects[needed]
    # Both sorts are stable, so the rows from one rank to another are in the same order at both ends.
    # `lexsort` sorts by its last argument first.
    sending, receiving = np.lexsort((target, home)), np.lexsort((home, target))
    counts = np.bincount(home * ranks + target, minlength=ranks * ranks).reshape(ranks, ranks)
    send_rows = np.split(home_B.rows[needed[sending]], np.cumsum(counts.sum(1))[:-1])
    ends = np.cumsum(counts.sum(0))
    arriving = np.split(needed[receiving], ends[:-1])
    positions = np.empty_like(receiving)
    positions[receiving] = np.arange(len(receiving))
    orders = np.split(positions, ends[:-1])
    exchanges = []
    for rank, (rows, order) in enumerate(zip(arriving, orders, strict=True)):
        from_first = order - (ends[rank] - len(order))  # counted from the first row that this rank gets
        exchange = Exchange(
            send_rows[rank],
            counts[rank],
            counts[:, rank].copy(),
            prompt_lengths_B[rows],
            batch.lengths_B[rows],
            from_first,
        )
        exchanges.append(exchange)
    return exchanges
