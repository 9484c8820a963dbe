"""Settings of a language model at an OpenAI-compatible address: a judge, or a reward source."""

from __future__ import annotations

from pydantic import field_validator

from rlhf_core.config.allowed_hosts import ALLOWED_HOSTS, AllowedHosts
from rlhf_core.config.base import (
    PAUSE,
    TRIES,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Section,
    UserPath,
    content,
    execution,
    result,
)
from rlhf_core.config.redact import is_secret_variable


class ChatServiceConfig(Section):
    """A language model at an OpenAI-compatible address."""

    url: str | None = result(
        None,
        "Address of an OpenAI-compatible server, `http(s)://host[:port]/v1`; requests go to"
        " `{url}/chat/completions`; null: `path`",
    )
    model: str | None = result(
        None,
        "Name of the model at `url`",
        pattern=r"^[^\x00-\x1f\x7f]{1,200}$",
        form="1 to 200 characters on one line",
    )
    allowed_hosts: AllowedHosts = execution((), ALLOWED_HOSTS)
    api_key_env: str | None = execution(
        None,
        "Name of the environment variable that has the key of the server; null: no key",
        pattern=r"^[A-Z][A-Z0-9_]{0,63}$",
        form="1 to 64 of A-Z, 0-9 and `_`, the first a letter",
    )
    rubric: UserPath | None = content(
        None,
        "Text file with the criteria of a good answer; null: a short general one",
        min_length=1,
    )
    max_tokens: PositiveInt = result(
        16,
        "Tokens of a reply of the server. More are needed if the rubric asks for reasons before the verdict"
        " on the last line",
        within=Range(1, 65536, "tokens of one answer"),
    )
    concurrency: PositiveInt = execution(
        8, "Concurrent requests", within=Range(1, 1024, "connections to one service")
    )
    timeout: PositiveFloat = execution(
        60.0,
        "Seconds for one request, from the address look-up to the last byte",
        within=Range(0.01, 1e6, "shorter times end before an answer, longer times never end"),
    )
    retries: NonNegativeInt = execution(5, "Retries of a request that failed", within=TRIES)
    backoff: PositiveFloat = execution(
        1.0,
        "Seconds before the first retry; doubles for each further one, and is multiplied by 0.5 to 1.5",
        within=PAUSE,
    )

    @field_validator("api_key_env")
    @classmethod
    def _check_key(cls, name: str | None) -> str | None:
        if name is not None and not is_secret_variable(name):
            raise ValueError(
                f"api_key_env must have a name whose value logs hide; got {name}; use a name such as"
                " JUDGE_API_KEY"
            )
        return name
