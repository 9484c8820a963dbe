"""The results of the policy that is registered (`register.policy`), from those of all policies.

In `evaluation.json`, the numbers of PPO's policy have the plain names, such as `win_rate`, and those of DPO's
policy have others, such as `win_rate_dpo`. Gate, model card and pages for people read the plain names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.config.register import PolicyStage
from rlhf_core.errors import CorruptArtifact
from rlhf_core.evaluation.measures import MEASURES

_OWN_NAMES = {
    "win_rate": "win_rate_dpo",
    "win_rate_length_controlled": "win_rate_dpo_length_controlled",
    "verdicts": "verdicts_dpo",
    "kl_interval": "kl_dpo",
    "judge_trained_on": "judge_trained_on_dpo",
}
"""Names of the numbers of PPO's policy, and of the same numbers of DPO's."""
_RATES_OVER_CHOSEN = ("win_rate", "win_rate_length_controlled")


def evaluation_of(evaluation: Mapping[str, Any], policy: PolicyStage) -> Mapping[str, Any]:
    """Return the content of `evaluation.json` with the numbers of `policy` in place of those of PPO's policy.

    Raises CorruptArtifact if it has none of them.
    """
    if policy == "ppo":
        return evaluation
    missing = [name for name in _OWN_NAMES.values() if name not in evaluation]
    if missing:
        raise CorruptArtifact(f"evaluation.json has no {missing[0]}; the evaluate stage must be run again")
    own = dict(evaluation) | {name: evaluation[of_dpo] for name, of_dpo in _OWN_NAMES.items()}
    own["kl"] = own["kl_interval"]["mean"]
    for name in MEASURES:
        if evaluation.get(name):
            own[name] = evaluation[name] | {"ppo": evaluation[name]["dpo"]}
    if chosen := evaluation.get("over_chosen"):
        rates = {name: chosen[name] | {"ppo": chosen[name]["dpo"]} for name in _RATES_OVER_CHOSEN}
        own["over_chosen"] = chosen | rates
    if "regression" in evaluation:
        own["regression"] = regression_of(evaluation["regression"], policy)
    return own


def regression_of(found: Mapping[str, Mapping[str, Any]], policy: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the results of regression sets with those of `policy` in place of those of PPO's policy."""
    if policy == "ppo":
        return found
    return {
        name: {**each, "ppo": each["dpo"], "difference": each["difference_dpo"]}
        for name, each in found.items()
    }


def metrics_of(metrics: Mapping[str, float], policy: PolicyStage) -> dict[str, float]:
    """Return the metrics of an evaluation with those of `policy` under the plain names, such as
    `win_rate/mean`.
    """
    if policy == "ppo":
        return dict(metrics)
    own = dict(metrics)
    for name, value in metrics.items():
        head, slash, rest = name.partition("/")
        if head in ("win_rate_dpo", "win_rate_dpo_length_controlled", "kl_dpo"):
            own[head.replace("_dpo", "") + slash + rest] = value
        elif head == "regression" and "/difference_dpo/" in rest:
            own[name.replace("/difference_dpo/", "/difference/")] = value
    return own
