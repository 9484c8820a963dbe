"""The models and measures of an evaluation. Reports, model cards and rounds show them in this order."""

from __future__ import annotations

MODELS = ("sft", "ppo", "dpo")
"""All that there can be. An evaluation has those with responses."""
MEASURES = {
    "gold_reward": "Gold reward",
    "judge_model": "Second reward model",
    "reward_model": "Reward model",
}
"""Titles by the name in `evaluation.json`, the most trustworthy measure first. The measures of rules are in
`rules`.
"""
