"""Reward sources and their composition into one score per response.

PPO and evaluation use `compose.RewardComposer`. `rules` are the rule rewards. Three sources are asked and may
fail: `python_function` runs a user's function in a separate process, `remote` calls a service, and
`language_model` asks a language model, with `chat_service`, which judges use as well. All three are called
with a batch and return a `failures.Outcome`; `failures` repeats what failed. `scorer` is the model that
`rlhf serve-reward` serves.
"""
