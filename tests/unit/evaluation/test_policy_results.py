"""Results of one policy under names for any policy: none of them is a number of the other policy."""

from __future__ import annotations

from typing import Any

from rlhf_core.evaluation.policy_results import evaluation_of


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}


def test_no_number_of_ppo_is_a_result_of_dpo() -> None:
    of_ppo: dict[str, Any] = {
        "win_rate": interval(0.9),
        "win_rate_length_controlled": interval(0.9),
        "verdicts": {"wins": 9},
        "kl": 9.0,
        "kl_interval": interval(9.0),
        "judge_trained_on": True,
        "eos_rate_difference": interval(0.9),
    }
    of_dpo: dict[str, Any] = {
        "win_rate_dpo": interval(0.4),
        "win_rate_dpo_length_controlled": interval(0.4),
        "verdicts_dpo": {"wins": 4},
        "kl_dpo": interval(4.0),
        "judge_trained_on_dpo": False,
    }
    by_source = {"a": {"win_rate": interval(0.9), "kl": 9.0, "rules": {}, "prompts": 3}}
    both = of_ppo | of_dpo | {"by_source": by_source, "rules": {}, "prompts": 9}
    found = evaluation_of(both, "dpo")
    assert {name: found[name] for name in of_ppo if name in found} == {
        "win_rate": interval(0.4),
        "win_rate_length_controlled": interval(0.4),
        "verdicts": {"wins": 4},
        "kl": 4.0,
        "kl_interval": interval(4.0),
        "judge_trained_on": False,
    }
    assert found["by_source"] == {"a": {"rules": {}, "prompts": 3}}
    assert {name: evaluation_of(both, "ppo")[name] for name in of_ppo} == of_ppo
