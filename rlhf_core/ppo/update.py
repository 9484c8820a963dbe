"""The update of one step: experience -> optimizer steps of every rank -> the loss's own means as metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlhf_core.algo.losses import step_denominator
from rlhf_core.config.placement import Role
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models.packing import plan_ranks
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.fleet import Fleet
from rlhf_core.ppo.samples import OptimizerStep, TrainSample
from rlhf_core.ppo.scatter import renumber
from rlhf_core.seeds import derive_seed, epoch_batches
from rlhf_core.types import Rollout, SFTExample

Metrics = dict[str, float]
_IdsAndMask = tuple[tuple[int, ...], tuple[int, ...]]
"""(input ids, target mask) of a demonstration."""


class Updater:
    """Epochs x minibatches optimizer steps on policy and critic, at the same time."""

    def __init__(
        self, ppo: PPOConfig, fleet: Fleet, seed: int, demonstrations: Sequence[SFTExample] = ()
    ) -> None:
        """`demonstrations`: for the pretraining loss, where `ppo.ptx` asks for it."""
        self._ppo = ppo
        self._fleet = fleet
        self._seed = seed
        self._demonstrations = demonstrations

    def update(
        self, rollouts: Sequence[Rollout], experience: Experience, step: int, kl_coef: float
    ) -> Metrics:
        """Train on the experience of one step. Responses without a score are left out.

        A minibatch that only contains such responses causes no optimizer step, because Adam's moments would
        change the weights even with zero gradients.
        """
        ppo = self._ppo
        samples = train_samples(rollouts, experience)
        scored = experience.mask_BT.any(1).tolist()
        batches = [
            [i for i in batch if scored[i]]
            for epoch in range(ppo.epochs)
            for batch in epoch_batches(
                len(samples), ppo.minibatch_size, derive_seed(self._seed, "minibatches", step), epoch
            )
        ]
        batches = [batch for batch in batches if batch]
        running: dict[Role, list[Any]] = {}
        if step > ppo.warmup_steps:
            running["policy"] = self._start_policy(samples, batches, step, kl_coef)
        if ppo.uses_critic:
            mine, steps = self._cut("critic", samples, batches)
            running["critic"] = self._fleet.groups["critic"].submit_each(
                # Value clipping is disabled during the warm-up, because the values must change a lot.
                "update_critic",
                [(*given, step > ppo.warmup_steps) for given in zip(mine, steps, strict=True)],
            )
        metrics: Metrics = {}
        tokens = max(1, sum(len(samples[i].response_ids) for batch in batches for i in batch))
        for role, references in running.items():
            ranks = self._fleet.wait(references, f"the {role}'s update of step {step}")
            metrics |= self._metrics(role, ranks, len(batches), tokens)
        return metrics

    def _metrics(self, role: Role, ranks: list[Metrics], steps: int, tokens: int) -> Metrics:
        names = sorted({name for rank in ranks for name in rank})
        sums = {name: sum(rank.get(name, 0.0) for rank in ranks) for name in names}
        prefix = "policy" if role == "policy" else "value"
        skipped = sums.get("skipped", 0.0) / len(ranks)
        metrics = {
            f"loss/{prefix}": sums.get("loss", 0.0) / steps,
            f"{prefix}/clipfrac": sums.get("clipped", 0.0) / tokens,
            f"{prefix}/grad_norm": sums.get("grad_norm", 0.0) / len(ranks) / max(1.0, steps - skipped),
            f"{prefix}/skipped_steps": skipped,
        }
        if sums.get("grad_nonfinite"):
            metrics[f"{prefix}/non_finite_steps"] = sums["grad_nonfinite"] / len(ranks)
        if role == "policy":
            metrics["policy/approxkl"] = sums.get("approx_kl", 0.0) / tokens
        for name in ("kl_loss", "ptx_loss"):
            if name in sums:
                metrics[f"loss/{name.removesuffix('_loss')}"] = sums[name] / steps
        # The loss of a step that was skipped is none.
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _start_policy(
        self, samples: list[TrainSample], batches: list[list[int]], step: int, kl_coef: float
    ) -> list[Any]:
        group = self._fleet.groups["policy"]
        mine, steps = self._cut("policy", samples, batches)
        rows: list[list[_IdsAndMask]] = [[] for _ in range(group.ranks)]
        if self._ppo.ptx is not None:
            rows, steps = self._with_demonstrations(steps, step)
        arguments = [(mine[rank], steps[rank], kl_coef, rows[rank]) for rank in range(group.ranks)]
        return group.submit_each("update_policy", arguments)

    def _cut(
        self, role: Role, samples: list[TrainSample], batches: list[list[int]]
    ) -> tuple[list[list[TrainSample]], list[list[OptimizerStep]]]:
        """Samples and optimizer steps of each rank."""
        ranks = self._fleet.groups[role].ranks
        mine: list[list[TrainSample]] = [[] for _ in range(ranks)]
        steps: list[list[OptimizerStep]] = [[] for _ in range(ranks)]
        for batch in batches:
            chosen = [samples[i] for i in batch]
            tokens = sum(len(s.response_ids) for s in chosen)
            denominator = (
                max(1.0, step_denominator(self._ppo.loss_sum, tokens, len(chosen))) * self._ppo.loss_divisor
            )
            lengths = [len(s.prompt_ids) + len(s.response_ids) for s in chosen]
            plan = plan_ranks(lengths, ranks, self._ppo.micro_batch_tokens, pack=self._ppo.packs)
            for rank, micros in enumerate(plan):
                numbered = renumber(micros, start=len(mine[rank]))
                mine[rank] += [chosen[i] for micro in micros for i in micro]
                steps[rank].append(OptimizerStep(numbered, denominator))
        return mine, steps

    def _with_demonstrations(
        self, steps: list[list[OptimizerStep]], step: int
    ) -> tuple[list[list[_IdsAndMask]], list[list[OptimizerStep]]]:
        """Each optimizer step's own demonstrations: a walk over one fresh permutation after the other."""
        ppo = self._ppo
        assert ppo.ptx is not None
        size, per_iteration = ppo.ptx.batch_size, ppo.epochs * ppo.minibatches
        rows: list[list[_IdsAndMask]] = [[] for _ in steps]
        joined: list[list[OptimizerStep]] = [[] for _ in steps]
        for number in range(len(steps[0])):
            batch = self._demonstrations_at((step - 1) * per_iteration + number, size)
            targets = sum(sum(d.loss_mask[1:]) for d in batch)  # nothing predicts the first token
            plan = plan_ranks(
                [len(d.input_ids) for d in batch], len(steps), ppo.micro_batch_tokens, pack=ppo.packs
            )
            for rank, micros in enumerate(plan):
                old = steps[rank][number]
                numbered = renumber(micros, start=len(rows[rank]))
                rows[rank] += [(batch[i].input_ids, batch[i].loss_mask) for micro in micros for i in micro]
                joined[rank].append(OptimizerStep(old.micro_batches, old.denominator, numbered, targets))
        return rows, joined

    def _demonstrations_at(self, number: int, size: int) -> list[SFTExample]:
        count = len(self._demonstrations)
        size = min(size, count)
        epoch, index = divmod(number, count // size)
        batch = epoch_batches(count, size, derive_seed(self._seed, "ptx"), epoch)[index]
        return [self._demonstrations[i] for i in batch]


def train_samples(rollouts: Sequence[Rollout], experience: Experience) -> list[TrainSample]:
    """One per rollout, in order."""

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
