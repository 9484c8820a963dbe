"""Checks of rewards before training.

`material` has the rows and the texts, `bench` scores them, and `checks` is the table of what is looked for.
`rlhf check-reward` and `ppo.check_rewards` use `bench.check_sources`.
"""
