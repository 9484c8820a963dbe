"""Checks of rewards before training.

`material` has the rows and the texts, `views` what a check sees of a source, and `checks` is the table of
what is looked for, which makes the card for `rlhf check-reward` and `ppo.check_rewards`.
"""
