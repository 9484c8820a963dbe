"""The models and measures of an evaluation. Reports, model cards and rounds show them in this order."""

from __future__ import annotations

MODELS = {"sft": "SFT", "ppo": "PPO", "dpo": "DPO"}
"""Titles of all models that there can be. An evaluation has those with responses."""
DPO_WIN_RATES = {"win_rate_dpo": "win rate, DPO over SFT", "win_rate_ppo_over_dpo": "win rate, PPO over DPO"}
"""Titles of the win rates of an evaluation with DPO."""
MEASURES = {
    "gold_reward": "Gold reward",
    "judge_model": "Second reward model",
    "reward_model": "Reward model",
}
"""Titles by the name in `evaluation.json`, the most trustworthy measure first. The measures of rules are in
`rules`.
"""
