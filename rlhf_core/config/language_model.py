"""A language model at an OpenAI-compatible address, as a judge or a reward, and `evaluate.language_model`."""

from __future__ import annotations

from typing import Self

from pydantic import field_validator, model_validator

from rlhf_core.config.allowed_hosts import AllowedHosts, check_url
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

    url: str | None = result(None)
    """Address of an OpenAI-compatible server, `http(s)://host[:port]/v1`; requests go to
    `{url}/chat/completions`; null: `path`
    """
    model: str | None = result(
        None, pattern=r"^[^\x00-\x1f\x7f]{1,200}$", form="1 to 200 characters on one line"
    )
    """Name of the model at `url`"""
    allowed_hosts: AllowedHosts = execution(())
    """Hosts that may receive requests. If a name resolves to a private or loopback address, that address, or
    a network such as 10.0.0.0/8, must be listed as well
    """
    api_key_env: str | None = execution(
        None, pattern=r"^[A-Z][A-Z0-9_]{0,63}$", form="1 to 64 of A-Z, 0-9 and `_`, the first a letter"
    )
    """Name of the environment variable that has the key of the server; null: no key"""
    rubric: UserPath | None = content(None, min_length=1)
    """Text file with the criteria of a good answer; null: a short general one"""
    max_tokens: PositiveInt = result(16, within=Range(1, 65536, "tokens of one answer"))
    """Tokens of a reply of the server. More are needed if the rubric asks for reasons before the verdict on
    the last line
    """
    concurrency: PositiveInt = execution(8, within=Range(1, 1024, "connections to one service"))
    """Concurrent requests"""
    timeout: PositiveFloat = execution(
        60.0, within=Range(0.01, 1e6, "shorter times end before an answer, longer times never end")
    )
    """Seconds for one request, from the address look-up to the last byte"""
    retries: NonNegativeInt = execution(5, within=TRIES)
    """Retries of a request that failed"""
    backoff: PositiveFloat = execution(1.0, within=PAUSE)
    """Seconds before the first retry; doubles for each further one, and is multiplied by 0.5 to 1.5"""

    @field_validator("api_key_env")
    @classmethod
    def _check_key(cls, name: str | None) -> str | None:
        if name is not None and not is_secret_variable(name):
            raise ValueError(
                f"api_key_env must have a name whose value logs hide; got {name}; use a name such as"
                " JUDGE_API_KEY"
            )
        return name


class LanguageModelConfig(ChatServiceConfig):
    """A language model that judges answers. Either `path`, or `url` and `model`, must be given."""

    path: UserPath | None = content(None, min_length=1)
    """Folder of a model in Hugging Face layout, which vLLM runs in the stage with the settings of
    `ppo.engine`, and which replies with one token; null: `url`
    """
    pairs: PositiveInt = result(100, within=Range(10, 100_000, "with fewer, chance decides"))
    """Held-out preference pairs that the agreement is measured with, or all if there are fewer"""
    min_agreement: PositiveFloat = execution(0.6, within=Range(0.51, 1.0, "agreement by chance is 0.5"))
    """If the judge agrees with less than this share of the held-out pairs, or not significantly more often
    than by chance, the stage `evaluate` fails. A pair on which the judge has no preference counts half
    """

    @property
    def name(self) -> str:
        """The name of the model in reports."""
        return self.model or str(self.path).rstrip("/").rpartition("/")[2]

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        field = "evaluate.language_model"
        if (self.path is None) == (self.url is None):
            raise ValueError(f"{field} needs either path or url; got {'both' if self.path else 'neither'}")
        if self.url is None:
            if self.model or self.allowed_hosts or self.api_key_env:
                raise ValueError(
                    f"{field}.path is run here; got model, allowed_hosts or api_key_env as well; leave them"
                    " out"
                )
            return self
        if self.model is None:
            raise ValueError(f"{field}.url needs {field}.model, the name of the model there")
        check_url(self.url, self.allowed_hosts, f"{field}.url")
        return self
