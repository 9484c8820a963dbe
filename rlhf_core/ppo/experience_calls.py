"""The experience of a step, which the policy ranks make: the calls of the controller.

    scores of the batch --+
    old_logprobs, entropy +--> `ModelWorker.make_experience` --> sums of each response -> metrics, whitening
    ref_logprobs, values -+     (references, not numbers)        returns (references) --> update of the critic

Axis: `B` responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from rlhf_core.cluster.rpc import as_argument
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo.fleet.fleet import Fleet, Scattered
from rlhf_core.ppo.fleet.routes import ObjectArguments
from rlhf_core.ppo.fleet.worker import ModelWorker
from rlhf_core.ppo.training.batch import RankShare, RolloutBatch
from rlhf_core.ppo.training.experience import (
    ResponseSums,
    Whitening,
    response_advantages,
    shaped_scores,
    summarize,
)
from rlhf_core.ppo.training.rank_rows import ExperienceInputs


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
    """Returns from unwhitened advantages, for the critic."""
    values: Scattered[None] | None
    """Values by the critic before the update; None without a critic."""

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
    """
    scores_B = shaped_scores(batch.lengths_B, batch.finished_B, scores, ppo)
    advantages_B = response_advantages(scores_B, ppo)
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
        )
        arguments = [as_argument(pending) for pending in objects.pending]
        parts.append(worker.call_parts(2, ModelWorker.make_experience, inputs, *arguments))
    returns = Scattered(fleet, "policy.make_experience", old.shares, parts)
    sums = sums_in_batch_order(old.shares, returns.complete())
    summary = summarize(sums, scores_B, batch.lengths_B, batch.finished_B, ppo)
    return Experience(scores_B, sums.kl, summary.whitening, summary.metrics, returns, values)


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
