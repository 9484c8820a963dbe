"""Reward sources and their composition into one score per response.

PPO and evaluation use `compose.RewardComposer`. `rules` are the rule rewards, `python_function` runs a user's
function in a separate process, `remote` calls a service, and `failures` handles failures of these two.
`language_model` asks a language model, with `chat_service`, which judges use as well. `server` is a service:
it serves a trained reward model (`scorer`) over HTTP.
"""
