"""The names of the numbers of each policy, and the results of one of them under names for any policy.

In `evaluation.json` and in the metrics, the numbers of PPO's policy have the plain names, such as `win_rate`,
and those of DPO's policy have others, such as `win_rate_dpo`. If PPO is not trained, the plain names are
missing. Gate, model card, report and pages for people read the results of one policy (`evaluation_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_core.config.register import POLICIES, PolicyStage
from rlhf_core.errors import CorruptArtifact
from rlhf_core.evaluation.measures import MEASURES

_OWN_NAMES = {
    "win_rate": "win_rate_dpo",
    "win_rate_length_controlled": "win_rate_dpo_length_controlled",
    "verdicts": "verdicts_dpo",
    "kl_interval": "kl_dpo",
    "judge_trained_on": "judge_trained_on_dpo",
    "eos_rate_difference": "eos_rate_difference_dpo",
    "difference": "difference_dpo",
    "winner": "winner_dpo",
}
"""Names of the numbers of PPO's policy, and of the same numbers of DPO's."""
_REQUIRED = ("win_rate", "win_rate_length_controlled", "verdicts", "kl_interval", "judge_trained_on")
_RATES_OVER_CHOSEN = ("win_rate", "win_rate_length_controlled")


def main_policy(models: Iterable[str]) -> PolicyStage:
    """Return the policy that an evaluation of these models is about: PPO's, or DPO's if there is no other."""
    present = set(models)
    return next(policy for policy in POLICIES if policy in present)


def own_name(name: str, policy: str) -> str:
    """Return the name of a number of `policy`, from its plain name."""
    return name if policy == "ppo" else _OWN_NAMES[name]


def with_own_names(numbers: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """Return the numbers of `policy`, given by their plain names, under their own names. `kl` of DPO's policy
    is in `kl_dpo`, which is an interval.
    """
    if policy == "ppo":
        return dict(numbers)
    return {_OWN_NAMES.get(name, name): value for name, value in numbers.items() if name != "kl"}


def evaluation_of(evaluation: Mapping[str, Any], policy: PolicyStage) -> dict[str, Any]:
    """Return the content of `evaluation.json` with the results of one policy under plain names: `win_rate`,
    `verdicts`, `kl` and so on, and of each measure the means `policy` and `difference`, policy minus SFT
    model.

    Raises CorruptArtifact if there are none of this policy.
    """
    own = dict(evaluation)
    if policy != "ppo":
        missing = [name for name in map(_OWN_NAMES.__getitem__, _REQUIRED) if name not in evaluation]
        if missing:
            raise CorruptArtifact(
                f"evaluation.json has no {missing[0]}; the evaluate stage must be run again"
            )
        own = _plain(evaluation)
    for name in (*MEASURES, "gold_reward_exchanged", "lengths"):
        if evaluation.get(name):
            own[name] = _of_policy(evaluation[name], policy)
    if "rules" in evaluation:
        own["rules"] = {name: _of_policy(rule, policy) for name, rule in evaluation["rules"].items()}
    if chosen := evaluation.get("over_chosen"):
        own["over_chosen"] = chosen | {name: _of_policy(chosen[name], policy) for name in _RATES_OVER_CHOSEN}
    if "regression" in evaluation:
        own["regression"] = regression_of(evaluation["regression"], policy)
    if "by_source" in evaluation:
        own["by_source"] = {
            name: _of_source(numbers, policy) for name, numbers in evaluation["by_source"].items()
        }
    return own


def _plain(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers with those of DPO's policy under the plain names, which are not those of PPO's."""
    others = {name: value for name, value in numbers.items() if name not in ("kl", *_OWN_NAMES)}
    found = {plain: numbers[own] for plain, own in _OWN_NAMES.items() if own in numbers}
    if "kl_interval" in found:
        found["kl"] = found["kl_interval"]["mean"]
    return others | found


def _of_source(numbers: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """Return the same for the prompts of one data source, which have the win rate of the main policy only."""
    own = dict(numbers) if policy == "ppo" else _plain(numbers)
    for name in MEASURES:
        if numbers.get(name):
            own[name] = _of_policy(numbers[name], policy)
    own["rules"] = {name: _of_policy(rule, policy) for name, rule in numbers["rules"].items()}
    return own


def _of_policy(by_model: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """Return the values of the models, with those of `policy` as `policy` and `difference`."""
    own = dict(by_model) | {"policy": by_model[policy]}
    difference = own_name("difference", policy)
    return own | ({"difference": by_model[difference]} if difference in by_model else {})


def regression_of(found: Mapping[str, Mapping[str, Any]], policy: str) -> dict[str, dict[str, Any]]:
    """Return the results of regression sets with those of one policy as `policy` and `difference`."""
    return {name: _of_policy(each, policy) for name, each in found.items()}


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
