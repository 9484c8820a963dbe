"""Checks of each PPO step before it is used for training.

is_finite   returns False   metrics are not finite: the step is skipped; the third one in a row ends the run
verify      raises          engines have other weights, the KL is above its limit for three steps, or nearly
                            all responses are empty
            warns           a gap to the engines, empty responses, equal scores, and the conditions of
                            `guards.py`, which end the run if `ppo.guards` is set to `stop`

`SyncCheck`: the comparison of engines and policy after some syncs, with `ppo.staleness`.

    sync of version k  -->  a few prompts --> engines --> responses --> policy: the same log-probabilities?

Rollouts of a step are then of an older version than the policy, so their log-probabilities say nothing about
the weights of the engines. Checksums prove that the weights arrived, but not that the engines use them.
Seeds are not those of a step and the engines forget the prompts, so the comparison changes no rollout.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import GateFailed, NonFiniteError, WeightSyncError
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.sampling.rollouts import Collector, Composer, read_rollout_logprobs
from rlhf_core.ppo.watching.guards import Guards, alarm
from rlhf_core.seeds import derive_seed
from rlhf_core.types import PromptExample

log = logging.getLogger(__name__)

WATCHED = (
    "objective/kl",
    "objective/rlhf_reward",
    "policy/entropy",
    "value/mean",
    "rollout/logprob_gap_mean",
)
"""Each is not finite as soon as one log-probability or value of a response with a score is not finite. A NaN
score only masks its own response.
"""
_BAD_STEPS = 3
"""Bad steps in a row that end the run."""


class StepChecks:
    """The checks with their counters, which are part of the checkpoint, so that a restart does not reset
    them.
    """

    def __init__(self, ppo: PPOConfig) -> None:
        self._ppo = ppo
        self._high_kl = 0
        self._nonfinite = 0
        self._uniform = False
        """Whether the previous step had only equal scores. The warning is logged once per series."""
        self._guards = Guards(ppo)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of consecutive bad steps and the metrics of the first step."""
        return {
            "high_kl": self._high_kl,
            "unusable": self._nonfinite,
            "uniform": self._uniform,
            "alarms": self._guards.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters."""
        self._high_kl, self._nonfinite = int(state["high_kl"]), int(state["unusable"])
        self._uniform = bool(state["uniform"])
        self._guards.load_state_dict(state["alarms"])

    def is_finite(self, metrics: Mapping[str, float], responses: int, step: int) -> bool:
        """Return False if the step must be skipped. Raises NonFiniteError for the third such step in a row.

        Args:
            metrics: Metrics of the experience.
            responses: Number of responses of the step.
            step: Number of the step.
        """
        # Without a critic there is no `value/mean`.
        bad = [name for name in WATCHED if not math.isfinite(metrics.get(name, 0.0))]
        if metrics["rollout/unscored"] == responses:
            bad.append("every score")
        if not bad:
            self._nonfinite = 0
            return True
        self._nonfinite += 1
        if self._nonfinite >= _BAD_STEPS:
            raise NonFiniteError(
                f"ppo steps {step - _BAD_STEPS + 1} to {step} had to be skipped: {', '.join(bad)} not finite;"
                " see the tables `skipped/` of the run for their samples"
            )
        log.warning("step %d is skipped: %s not finite", step, ", ".join(bad))
        return False

    def verify(self, metrics: dict[str, float], step: int) -> None:
        """Warn of a failing policy and of engines with other weights, or raise an error before they train.

        Adds `rollout/logprob_gap_alarm` and `warnings/*` to `metrics`. Raises WeightSyncError or GateFailed.
        """
        self._check_gap(metrics, step)
        self._check_text(metrics, step)
        self._check_scores(metrics, step)
        failures = self._guards.check(metrics, step)
        if failures:
            raise GateFailed(
                f"ppo step {step}: {'; '.join(failures)}; ppo.guards is set to stop, which ends the run"
            )
        limit = self._ppo.kl_limit
        self._high_kl += 1
        if metrics["objective/kl"] <= limit:
            self._high_kl = 0
        if self._high_kl >= _BAD_STEPS:
            raise GateFailed(
                f"ppo step {step}: KL {metrics['objective/kl']:.1f} has been above ppo.max_kl="
                f"{limit:g} for three steps; raise ppo.kl.coef or lower ppo.policy.learning_rate, or raise "
                f"ppo.max_kl to continue from the last checkpoint"
            )

    def _check_gap(self, metrics: dict[str, float], step: int) -> None:
        if metrics.get("rollout/staleness", 0.0) > 0:
            return  # The trainer has other weights than the engines had; see `ppo.watching.step_checks`.
        far = self.compare(metrics["rollout/logprob_gap_mean"], step)
        metrics["rollout/logprob_gap_alarm"] = metrics["warnings/engine_gap"] = float(far)

    def compare(self, gap: float, step: int) -> bool:
        """Return whether engines and trainer, which have the same version, differ by so much that it is
        logged. Raises WeightSyncError if the weights must be different ones.

        Args:
            gap: Mean absolute difference of log-probabilities.
            step: Number of the step.
        """
        sync = self._ppo.weight_sync
        exact = self._ppo.engine.dtype == self._ppo.policy_deepspeed.dtype == "float32"
        # Kernels in low precision differ by more than a stale weight would in float32.
        # 0.05 is also `_LARGEST_GAP_16_BIT` of `evaluation.during_ppo`, by which the published files are
        # checked.
        limit = sync.canary_tolerance if exact else max(sync.canary_tolerance, 0.05)
        if sync.canary and gap > limit:
            raise WeightSyncError(
                f"ppo step {step}: engines and trainer differ by {gap:.2g} in mean log-probability for the"
                f" same weights (ppo.weight_sync.canary_tolerance allows {limit:g}); either the engines hold"
                " other weights, or both round differently: float32 for ppo.engine.dtype and"
                " ppo.policy_deepspeed.dtype tells which; raise the tolerance if it is rounding"
            )
        far = gap > limit / 2
        if far:
            alarm(
                "engine_gap",
                f"step {step}: engine and trainer log-probabilities differ by {gap:.3g} on average",
            )
        return far

    def _check_text(self, metrics: dict[str, float], step: int) -> None:
        empty = metrics["rollout/empty_rate"]
        if empty >= 0.9:
            raise GateFailed(
                f"ppo step {step}: {empty:.0%} of the responses are empty; the policy has collapsed: raise"
                f" ppo.kl.coef, lower ppo.policy.learning_rate, or check the reward"
            )
        metrics["warnings/empty"] = float(empty >= 0.2)
        if empty >= 0.2:
            alarm("empty", f"step {step}: {100 * empty:.0f} % of the responses are empty")

    def _check_scores(self, metrics: dict[str, float], step: int) -> None:
        if self._ppo.teacher is not None and not any(source.weight for source in self._ppo.rewards):
            return  # the policy learns from the KL alone
        # Other algorithms learn from differences between prompts as well.
        groups = metrics.get("rollout/zero_variance_groups", 0.0) if self._ppo.by_group else 0.0
        # Exactly 0: `experience._std` is exact for equal scores.
        uniform = groups >= 0.9 or metrics["objective/scores_std"] == 0.0
        metrics["warnings/uniform_scores"] = float(uniform)
        if uniform and not self._uniform:
            problem = "nearly all scores that are compared with each other are equal"
            fix = "check the reward, or raise ppo.samples_per_prompt or ppo.temperature"
            if metrics["objective/scores"] == metrics["objective/scores_std"] == 0.0:
                problem = "all scores are 0"
                fix = "use easier prompts, a larger model, or more SFT before; or check the reward"
            alarm("uniform_scores", f"step {step}: {problem}, so nothing is learned from them; {fix}")
        self._uniform = uniform


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
        # Few and short, because all engines and ranks wait for them.
        own = ppo.model_copy(
            update={"samples_per_prompt": 1, "max_new_tokens": min(TOKENS, ppo.response_limit)}
        )
        self._fleet = fleet
        self._prompts = list(prompts[: PROMPTS * ppo.engine.count])
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
        # While the ranks compute.
        by_engine = read_rollout_logprobs(self._fleet, batch)
        self._fleet.forget_prefixes("the compared prompts")
        pairs = zip(scoring.gather("logprobs"), by_engine, strict=True)
        return sum(float(abs(policy - engine).sum()) for policy, engine in pairs) / int(batch.lengths_B.sum())
