"""Rollouts of a step, with their rewards where those decide which prompts are kept.

    prompts -> engines -> rollouts                                        plain
    prompts -> engines -> rollouts -> rewards -> groups that differ       dynamic filtering: rounds of new prompts
                 ^                                   | too few
                 +-----------------------------------+

Consumes the prompts of the data artifact; produces a `RolloutBatch` of always the same size. Waits for every
engine, and for the reward workers when filtering.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.ppo.dispatch import assign, prompts_of_step
from rlhf_core.ppo.experience import shaped_scores, uniform_groups
from rlhf_core.ppo.fleet import Fleet
from rlhf_core.ppo.scatter import Spread
from rlhf_core.rewards.compose import RewardBatch, RewardComposer, reward_inputs
from rlhf_core.seeds import derive_seed, permutation
from rlhf_core.types import PromptAndResponse, PromptExample, Rollout

log = logging.getLogger(__name__)


@dataclass
class RolloutBatch:
    """Samples of a prompt stand side by side."""

    rollouts: list[Rollout]
    prompts: list[PromptExample]
    """One per rollout."""
    rewards: RewardBatch | None = None
    """Known already when filtering needed them."""
    replaced: int = 0
    """Prompts whose samples all scored alike and that were replaced."""
    scores_before: float | None = None
    """Mean score with penalties of the first round, before any prompt was replaced. None without filtering.
    """
    kept: bool = False
    """Sampled by an earlier attempt."""

    @property
    def sequences(self) -> list[PromptAndResponse]:
        return [(r.prompt_ids, r.response_ids) for r in self.rollouts]


class Collector:
    """Samples and scores with a started fleet."""

    def __init__(
        self,
        ppo: PPOConfig,
        fleet: Fleet,
        prompts: Sequence[PromptExample],
        decode: Callable[[Sequence[int]], str],
        composer: RewardComposer,
        seed: int,
    ) -> None:
        self._ppo = ppo
        self._fleet = fleet
        self._prompts = prompts
        self._decode = decode
        self._composer = composer
        self._seed = seed

    def collect(self, step: int, version: int) -> RolloutBatch:
        """The rollout batch of a step, sampled by policy `version`."""
        ppo = self._ppo
        asked = prompts_of_step(len(self._prompts), ppo.prompts_per_step, self._seed, step)
        batch = self.sample([self._prompts[i] for i in asked], step, 0, version)
        filtering = ppo.dynamic_filtering
        if filtering is None:
            return batch
        batch.rewards = self.rewards(batch)
        first_B = shaped_scores(batch.rollouts, batch.rewards.total, ppo)
        batch.scores_before = first_B.nanmean().item()
        for round_ in range(1, filtering.max_rounds + 1):
            uniform = uniform_groups(shaped_scores(batch.rollouts, batch.rewards.total, ppo), ppo)
            replacements = self._replacements(step, round_, len(uniform), asked)
            if not replacements:
                break
            asked += replacements
            uniform = uniform[: len(replacements)]
            fresh = self.sample([self._prompts[i] for i in replacements], step, round_, version)
            fresh.rewards = self.rewards(fresh)
            self._replace(batch, uniform, fresh)
        return batch

    def rewards(self, batch: RolloutBatch, model_scores: Sequence[float] | None = None) -> RewardBatch:
        """Composed scores; `model_scores` as `start_scores` gave them, asked for here if needed and not
        given.
        """
        if model_scores is None and "reward" in self._fleet.groups:
            model_scores = self._fleet.insist(lambda: self.start_scores(batch).gather(), "the scoring")
        inputs = reward_inputs(self._decode, batch.prompts, batch.rollouts)
        return self._composer.score(inputs, model_scores)

    def start_scores(self, batch: RolloutBatch) -> Spread:
        """The reward model at work on a batch."""
        return Spread(self._fleet, self._ppo, "reward", "scores", batch.sequences)

    def _replacements(self, step: int, round_: int, count: int, asked: Sequence[int]) -> list[int]:
        """Return the indices of up to `count` prompts that are not in `asked`, the prompts already used in
        this step.
        """
        order = permutation(len(self._prompts), derive_seed(self._seed, "replacements", step, round_))
        used = set(asked)
        return [i for i in order if i not in used][:count]

    def sample(self, prompts: Sequence[PromptExample], step: int, round_: int, version: int) -> RolloutBatch:
        """`samples_per_prompt` responses to each prompt: all of them at once, over all engines."""
        ppo, fleet = self._ppo, self._fleet
        # The position joins the seed: a prompt that comes twice in a step is answered twice, not copied.
        where = (step,) if round_ == 0 else (step, "round", round_)
        seeds = [derive_seed(self._seed, "rollout", *where, p.prompt_id, i) for i, p in enumerate(prompts)]
        shares = assign([len(p.input_ids) for p in prompts], len(fleet.engines.serving))
        by_prompt = fleet.rollouts(
            shares,
            lambda share: (
                [prompts[i] for i in share],
                ppo.samples_per_prompt,
                ppo.max_new_tokens,
                ppo.temperature,
                [seeds[i] for i in share],
            ),
            version,
            f"the rollouts of step {step}",
        )
        ordered = [rollout for i in range(len(prompts)) for rollout in by_prompt[i]]
        stale = {r.policy_version for r in ordered} - {version}
        if stale:
            raise WeightSyncError(
                f"step {step} was sampled from policy version {sorted(stale)}, not {version}"
            )
        return RolloutBatch(ordered, [p for p in prompts for _ in range(ppo.samples_per_prompt)])

    def _replace(self, batch: RolloutBatch, groups: list[int], fresh: RolloutBatch) -> None:
        assert batch.rewards is not None and fresh.rewards is not None
        n = self._ppo.samples_per_prompt
        for place, group in enumerate(groups):
            here, there = slice(group * n, (group + 1) * n), slice(place * n, (place + 1) * n)
            batch.rollouts[here] = fresh.rollouts[there]
            batch.prompts[here] = fresh.prompts[there]
            for name, values in batch.rewards.by_source.items():
                values[here] = fresh.rewards.by_source[name][there]
        # Where a source is normalised over the batch, all scores have changed.
        batch.rewards.total[:] = self._composer.total(batch.rewards.by_source, len(batch.rollouts))
        batch.replaced += len(groups)
