"""Checks of rewards before training.

`material` has the rows and the texts, `views` what a check sees of a source, `checks` is the table of what is
looked for, and `score_card` makes the card for `rlhf check-reward` and `ppo.check_rewards`.
"""
