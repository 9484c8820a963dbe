"""The models, policies and measures of an evaluation, and what their results are named.

`evaluation.json` and `summary.json` have one table per policy, `policies`, and in each measure one
`difference` per policy. Metrics, rows of samples and attributes of artifacts have no tables: `flat_name`
names the number of a policy there. Reports, model cards and rounds show models and measures in the order of
this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.errors import CorruptArtifact
from rlhf_core.pipeline import POLICIES, PolicyStage

MODELS = ("sft", "ppo", "dpo")
"""All models that there can be. An evaluation has those with responses."""
LENGTH_CONTROLLED = "_length_controlled"
"""Suffix of the name of a win rate with responses of equal length."""
NOT_IDENTIFIED = "not identified: one model's responses are nearly always longer"
"""Remark about a length-controlled win rate that has `identified` 0."""
OVER_SFT, PPO_OVER_DPO = "win_rate", "win_rate_ppo_over_dpo"
"""Names of the win rates of a policy over the SFT model, and of PPO's policy over DPO's."""
MEASURES = {
    "gold_reward": "Gold reward",
    "judge_model": "Second reward model",
    "reward_model": "Reward model",
}
"""Titles by the name in `evaluation.json`, the most trustworthy measure first. The measures of rules are in
`rules`.
"""


def titles_of(algorithm: str) -> dict[str, str]:
    """Return the titles of all models, where `algorithm` trained the policy of the stage `ppo`."""
    return {"sft": "SFT", "ppo": algorithm, "dpo": "DPO"}


def main_policy(models: Iterable[str]) -> PolicyStage:
    """Return the policy that an evaluation of these models is about: PPO's, or DPO's if there is no other."""
    present = set(models)
    return next(policy for policy in POLICIES if policy in present)


def flat_name(name: str, policy: str) -> str:
    """Return the name of a number of `policy` where there is no table: `win_rate` of PPO's policy,
    `win_rate_dpo` of DPO's.
    """
    # Without a prefix such as `ppo/`: earlier runs would no longer be in the same plots (decision 18).
    if policy == "ppo":
        return name
    # Also where DPO's is the only policy: the plain names have been those of PPO (decision 41).
    rate, suffix, _ = name.partition(LENGTH_CONTROLLED)
    return f"{rate}_{policy}{suffix}"


def results_of(evaluation: Mapping[str, Any], policy: PolicyStage) -> Mapping[str, Any]:
    """Return the table of a policy in `evaluation.json`.

    Raises CorruptArtifact if there is none, as in evaluations of earlier releases.
    """
    found = evaluation.get("policies", {}).get(policy)
    if found is None:
        raise CorruptArtifact(
            f"evaluation.json has no table policies.{policy}; the evaluate stage must be run again"
        )
    table: Mapping[str, Any] = found
    return table


def endless_models(eos_rates: Mapping[str, float], titles: Mapping[str, str]) -> list[str]:
    """Return one sentence about the models whose responses never end, by the shares of those with EOS, or
    none.
    """
    # `rlhf champions` reads evaluations without the classes of the configuration, whose import takes longer.
    from rlhf_core.config.data import never_ends

    problem = never_ends({f"the {titles[name]} model": rate for name, rate in eos_rates.items()})
    return [] if problem is None else [problem]
