"""The access token of reward services, from the environment."""

from __future__ import annotations

import os

from rlhf_core.errors import ConfigError

TOKEN_VARIABLE = "RLHF_REWARD_TOKEN"
_MIN_CHARACTERS = 16


def reward_token(*, guards: bool = False) -> str | None:
    """Return the value of `TOKEN_VARIABLE` without surrounding blanks and line breaks, or None if it is empty
    or not set.

    Raises a `ConfigError` that does not contain the value if it cannot be sent in an HTTP header. If `guards`
    is true, the token is the only protection of a service, and a short token is refused because it could be
    guessed.
    """
    value = os.environ.get(TOKEN_VARIABLE) or None
    if value is None:
        return None
    token = value.strip()
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} must not be blank; give a token, or unset it")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} must be printable ASCII characters without blanks; its {len(token)} characters"
            " hold others; make one by `openssl rand -hex 24`"
        )
    if guards and len(token) < _MIN_CHARACTERS:
        raise ConfigError(
            f"{TOKEN_VARIABLE} must have at least {_MIN_CHARACTERS} characters to protect a service; got"
            f" {len(token)}; make one by `openssl rand -hex 24`"
        )
    return token
