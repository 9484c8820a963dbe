"""Comparison of the policy with the SFT model on held-out prompts: sampling, scores, win rate, plots and
report.
"""
