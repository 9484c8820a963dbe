"""The reward sources of `ppo.rewards`, told apart by `type`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlhf_core.config.base import FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class RewardSource(Section):
    """What all sources have."""

    name: str | None = Field(None, pattern=r"^[a-z0-9_]{1,32}$", description="Name in metrics; the type if not given")
    weight: FiniteFloat = Field(1.0, description="Factor in the sum")
    normalize: Literal["none", "batch"] = Field(
        "none", description="`batch`: mean 0, std 1 over the rollout batch, before the weight"
    )


class ModelReward(RewardSource):
    """The trained reward model, normalised with the statistics stored beside it."""

    type: Literal["model"] = "model"


class GoldReward(RewardSource):
    """The demo task's true reward; a rule like others, used by evaluation and for upper bounds."""

    type: Literal["gold"] = "gold"


class LengthReward(RewardSource):
    """1 at `target` response tokens, falling linearly to 0 at `tolerance` away."""

    type: Literal["length"] = "length"
    target: PositiveInt = Field(description="Wanted length in tokens")
    tolerance: PositiveInt = Field(description="Distance in tokens at which the reward is 0")


class KeywordsReward(RewardSource):
    """Occurrences of the words (whole, any case), at most `cap`, times `per_word`."""

    type: Literal["keywords"] = "keywords"
    words: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1, description="Words counted")
    per_word: FiniteFloat = Field(1.0, description="Reward for each occurrence; negative forbids")
    cap: PositiveInt = Field(5, description="Occurrences beyond this do not count")
    distinct: bool = Field(False, description="Count each word once")


class FormatReward(RewardSource):
    """1 if the whole response matches the regular expression, else 0."""

    type: Literal["format"] = "format"
    pattern: str = Field(min_length=1, description="Python regular expression, matched against the whole response")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"pattern must be a Python regular expression; got {pattern!r}, which does not compile: {error}"
            ) from error
        return pattern


class RepetitionReward(RewardSource):
    """Minus the share of repeated n-grams of words: 0 if all are distinct, towards -1 if one is repeated."""

    type: Literal["repetition"] = "repetition"
    ngram: PositiveInt = Field(3, description="Words per n-gram")


class RelevanceReward(RewardSource):
    """Share of the prompt's content words that the response mentions."""

    type: Literal["relevance"] = "relevance"
    min_letters: PositiveInt = Field(4, description="Shorter words of the prompt are not content words")


class WellFormedReward(RewardSource):
    """Mean of four checks: ended by EOS, not empty, ends with a full stop or like mark, begins with a capital or digit."""

    type: Literal["well_formed"] = "well_formed"


class TokenShareReward(RewardSource):
    """Share of response tokens whose id is below `below`: a bare rule for benchmarks and learning tests."""

    type: Literal["token_share"] = "token_share"
    below: PositiveInt = Field(description="Token ids under this count")


class AnswerReward(RewardSource):
    """1 if the response's final answer equals the one that the prompt's row gives, else 0: for problems with a known result."""

    type: Literal["answer"] = "answer"
    field: str = Field("answer", min_length=1, description="Field of the prompt's row that holds the right answer")
    extract: Literal["auto", "final_number", "boxed"] = Field(
        "auto",
        description="Where the response's answer stands: its last number (behind `####` if there is one), its last \\boxed{}, or `auto`: boxed if there is one",
    )


class PythonReward(RewardSource):
    """A function of yours: `list[RewardInput] -> list[float]`."""

    type: Literal["python"] = "python"
    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="`package.module:function`")
    file: str | None = Field(
        None, description="Python file that holds it, if it is not importable; then `function` is `anything:function`"
    )
    timeout: PositiveFloat = Field(30.0, description="Seconds for one batch")
    retries: NonNegativeInt = Field(1, description="Further tries before the step fails")


AnyReward = Annotated[
    ModelReward
    | GoldReward
    | LengthReward
    | KeywordsReward
    | FormatReward
    | RepetitionReward
    | RelevanceReward
    | WellFormedReward
    | TokenShareReward
    | AnswerReward
    | PythonReward,
    Field(discriminator="type"),
]
