"""The policy against the SFT model on held-out prompts: sampling, scores, win rate with intervals, plots,
report.
"""
