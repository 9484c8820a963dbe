"""Reward functions of `tests.benchmarks.bad_rewards`: bad ones and sound ones."""
