"""The comparison of engines and policy after some syncs, with `ppo.staleness`.

    sync of version k  -->  a few prompts --> engines --> responses --> policy: the same log-probabilities?

Rollouts of a step are then of an older version than the policy, so their log-probabilities say nothing about
the weights of the engines. Checksums prove that the weights arrived, but not that the engines use them.
Seeds are not those of a step and the engines forget the prompts, so the comparison changes no rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.sampling.rollouts import Collector, Composer, read_rollout_logprobs
from rlhf_core.seeds import derive_seed
from rlhf_core.types import PromptExample

PROMPTS = 4
"""Prompts of each engine."""
TOKENS = 16
"""Largest number of tokens of each response."""
EVERY = 10
"""Syncs from one comparison to the next, which takes as long as a short rollout."""


class SyncCheck:
    """Compares log-probabilities of the same tokens.

    Args:
        ppo: Section `ppo`.
        fleet: Engines and policy.
        prompts: All prompts.
        decode: Converts token ids of a response to text.
        composer: Combines the sources of rewards.
        seed: Seed of the stage.
    """

    def __init__(
        self,
        ppo: PPOConfig,
        fleet: Fleet,
        prompts: Sequence[PromptExample],
        decode: Callable[[Sequence[int]], str],
        composer: Composer,
        seed: int,
    ) -> None:
        # With a queue, one engine could take all prompts.
        engine = ppo.engine.model_copy(update={"dispatch": "fixed"})
        own = ppo.model_copy(
            update={
                "samples_per_prompt": 1,
                "max_new_tokens": min(TOKENS, ppo.response_limit),
                "engine": engine,
            }
        )
        self._fleet = fleet
        self._prompts = list(prompts[: PROMPTS * engine.count])
        seed = derive_seed(seed, "sync check")
        self._collector = Collector(own, fleet, prompts, decode, composer, seed)

    @staticmethod
    def is_due(syncs: int) -> bool:
        """Return whether engines and policy are compared, by the number of syncs after steps so far.

        The first one is: before it, no weights are new.
        """
        return syncs <= 1 or syncs % EVERY == 0

    def gap(self, version: int) -> float:
        """Return the mean absolute difference over all tokens. Engines and policy have this version."""
        batch = self._collector.sample(self._prompts, version, 0, version)
        scoring = self._fleet.logprobs("policy", batch, with_entropy=False)
        by_engine = read_rollout_logprobs(self._fleet, batch)
        self._fleet.forget_prefixes("the compared prompts")
        pairs = zip(scoring.gather("logprobs"), by_engine, strict=True)
        return sum(float(abs(policy - engine).sum()) for policy, engine in pairs) / int(batch.lengths_B.sum())
