"""Reward sources and their composition into one score per response.

`compose.RewardComposer` is what PPO and evaluation use; `rules` are the rule rewards, `python_function` runs
a function of the user's in a process of its own, `remote` asks a service, and `failures` says what is done
when these two fail. `server` is such a service: a trained reward model (`scorer`) over HTTP.
"""
