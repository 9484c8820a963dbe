"""Checks of rewards before training.

`material` has the rows and the texts, `bench` scores them, `checks` is the table of what is looked for, and
`score_card` makes them. `rlhf check-reward` and `ppo.check_rewards` use `score_card.check_sources`.
"""
