"""The models and measures of an evaluation. Reports, model cards and rounds show them in this order."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.config.data import never_ends

MODELS = {"sft": "SFT", "ppo": "PPO", "dpo": "DPO"}
"""Titles of all models that there can be. An evaluation has those with responses."""
DPO_WIN_RATES = {"win_rate_dpo": "win rate, DPO over SFT", "win_rate_ppo_over_dpo": "win rate, PPO over DPO"}
"""Titles of the win rates of an evaluation with DPO."""
WIN_RATES = {"win_rate": "win rate, PPO over SFT", **DPO_WIN_RATES}
"""Titles of all win rates between models."""
LENGTH_CONTROLLED = "_length_controlled"
"""Suffix of the name of a win rate with responses of equal length."""
NOT_IDENTIFIED = "not identified: one model's responses are nearly always longer"
"""Remark about a length-controlled win rate that has `identified` 0."""
WIN_RATE_NAMES = tuple(name + suffix for name in WIN_RATES for suffix in ("", LENGTH_CONTROLLED))
"""Names in `evaluation.json` of all win rates, each followed by the length-controlled one."""
MEASURES = {
    "gold_reward": "Gold reward",
    "judge_model": "Second reward model",
    "reward_model": "Reward model",
}
"""Titles by the name in `evaluation.json`, the most trustworthy measure first. The measures of rules are in
`rules`.
"""


def endless_models(eos_rates: Mapping[str, float]) -> list[str]:
    """Return one sentence for each model whose responses never end, by its share of responses with EOS."""
    found = [never_ends(rate, f"the {MODELS.get(name, name)} model") for name, rate in eos_rates.items()]
    return [problem for problem in found if problem is not None]
