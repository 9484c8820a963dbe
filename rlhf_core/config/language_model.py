"""`evaluate.language_model`: a language model that compares two answers."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from rlhf_core.config.allowed_hosts import check_url
from rlhf_core.config.base import PositiveFloat, PositiveInt, Range, UserPath, content, execution, result
from rlhf_core.config.chat_service import ChatServiceConfig


class LanguageModelConfig(ChatServiceConfig):
    """A language model that judges answers. Either `path`, or `url` and `model`, must be given."""

    path: UserPath | None = content(
        None,
        "Folder of a model in Hugging Face layout, which vLLM runs in the stage with the settings of"
        " `ppo.engine`, and which replies with one token; null: `url`",
        min_length=1,
    )
    pairs: PositiveInt = result(
        100,
        "Held-out preference pairs that the agreement is measured with, or all if there are fewer",
        within=Range(10, 100_000, "with fewer, chance decides"),
    )
    min_agreement: PositiveFloat = execution(
        0.6,
        "If the judge agrees with less than this share of the held-out pairs, or not significantly more"
        " often than by chance, the stage `evaluate` fails. A pair on which the judge has no preference"
        " counts half",
        within=Range(0.51, 1.0, "agreement by chance is 0.5"),
    )

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
