"""The token that reward services are asked with, from the environment."""

from __future__ import annotations

import os

from rlhf_core.errors import ConfigError

TOKEN_VARIABLE = "RLHF_REWARD_TOKEN"
_LEAST = 16


def reward_token(*, guards: bool = False) -> str | None:
    """The value of `TOKEN_VARIABLE` without the blanks and line breaks around it; None where it is empty or not set.

    Raises `ConfigError`, without the value, for one that no HTTP header can carry. `guards`: it is all that protects a
    service, and a short one could be guessed.
    """
    value = os.environ.get(TOKEN_VARIABLE) or None
    if value is None:
        return None
    token = value.strip()
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} must not be blank; give a token, or unset it")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} must be printable ASCII characters without blanks; its {len(token)} characters hold others; "
            "make one by `openssl rand -hex 24`"
        )
    if guards and len(token) < _LEAST:
        raise ConfigError(
            f"{TOKEN_VARIABLE} must have at least {_LEAST} characters to protect a service; got {len(token)}; "
            "make one by `openssl rand -hex 24`"
        )
    return token
