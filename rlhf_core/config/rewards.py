"""The reward sources of `ppo.rewards`, selected by `type`, and what services with a language model have in
common.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import regex
from pydantic import Field, field_validator

from rlhf_core.config.base import (
    PAUSE,
    TRIES,
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Section,
    UserPath,
    content,
    execution,
    result,
    url_problem,
)
from rlhf_core.config.redact import is_secret_variable, shown

_FUZZY = re.compile(r"(?<!\\)(?<!\\[pPN])\{(?!\d+,?\d*\}|,\d+\})")
"""A brace that `re` would take for itself, and `regex` for fuzzy matching, as in `{e<2}`."""


def pattern_problem(pattern: str) -> str | None:
    """Return why `pattern` cannot be used, or None."""
    if _FUZZY.search(pattern):
        return "has a brace that begins no repetition; write \\{ for the character"
    try:
        compiled(pattern)
    except RecursionError:
        return "is nested too deeply; flatten it"
    # ValueError: flags in the pattern that exclude each other, such as (?V1).
    except (regex.error, ValueError, OverflowError, MemoryError) as error:
        return f"does not compile: {error}"
    return None


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """Compile `pattern` with `regex`, because `re` has no time limit. Its `fullmatch` accepts a `timeout`.

    A dot matches line feeds, because responses have several lines.
    """
    # VERSION0 behaves as `re`; VERSION1 has nested sets, so `[[a]b]` would mean something else.
    return regex.compile(pattern, regex.VERSION0 | regex.DOTALL)


_TIMEOUT = Range(0.01, 1e6, "shorter times end before an answer, longer times never end")


class RewardSource(Section):
    """Fields of all sources. Each has a field `type`, which selects it."""

    # For the type checker alone. As a field it would be required, and each source has its own literal.
    if TYPE_CHECKING:
        type: str

    name: str | None = result(None, pattern=r"^[a-z0-9_]{1,32}$", form="1 to 32 of a-z, 0-9 and `_`")
    """Name in metrics; the type if not given"""
    weight: FiniteFloat = result(1.0)
    """Factor in the sum"""
    normalize: Literal["none", "batch"] = result("none")
    """`batch`: mean 0, std 1 over the rollout batch, before the weight"""

    @property
    def used_name(self) -> str:
        """`name`, or the type if it has none."""
        return self.name or self.type


class ModelReward(RewardSource):
    """The trained reward model, normalised with the statistics stored with it."""

    type: Literal["model"] = "model"


class GoldReward(RewardSource):
    """The true reward of the demo task, used by evaluation and for upper bounds."""

    type: Literal["gold"] = "gold"


class LengthReward(RewardSource):
    """1 at `target` response tokens, falling linearly to 0 at `tolerance` away."""

    type: Literal["length"] = "length"
    target: PositiveInt = result(...)
    """Wanted length in tokens"""
    tolerance: PositiveInt = result(...)
    """Distance in tokens at which the reward is 0"""


class KeywordsReward(RewardSource):
    """Occurrences of the words (whole, any case), at most `cap`, times `per_word`."""

    type: Literal["keywords"] = "keywords"
    words: tuple[Annotated[str, Field(min_length=1)], ...] = result(..., min_length=1)
    """Words counted"""
    per_word: FiniteFloat = result(1.0)
    """Reward for each occurrence; negative for words to avoid"""
    cap: PositiveInt = result(5)
    """Occurrences beyond this do not count"""
    distinct: bool = result(False)
    """Count each word once"""


class FormatReward(RewardSource):
    """1 if the whole response, without the white space around it, matches the regular expression, else 0."""

    type: Literal["format"] = "format"
    pattern: str = result(..., min_length=1)
    """Regular expression for the whole response, as for the package `regex`, which has those of Python's
    `re` and more. A dot matches line feeds as well; a brace that is meant as itself is written `\\{`
    """

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        problem = pattern_problem(pattern)
        if problem:
            raise ValueError(f"pattern must be a regular expression; got {shown(pattern)}, which {problem}")
        return pattern


class RepetitionReward(RewardSource):
    """Minus the share of repeated n-grams of words: 0 if all are distinct, towards -1 if one is repeated. In
    scripts without blanks, such as Chinese, Japanese and Thai, each character counts as a word.
    """

    type: Literal["repetition"] = "repetition"
    ngram: PositiveInt = result(3)
    """Words per n-gram"""


class RelevanceReward(RewardSource):
    """Share of the prompt's content words that the response mentions. In scripts without blanks, two
    characters in a row count as a content word.
    """

    type: Literal["relevance"] = "relevance"
    min_letters: PositiveInt = result(4)
    """Shorter words of the prompt are not content words"""


class WellFormedReward(RewardSource):
    """Mean of four checks: ends with EOS, is not empty, ends with a mark such as a full stop, begins with a
    capital letter or digit.
    """

    type: Literal["well_formed"] = "well_formed"


class TokenShareReward(RewardSource):
    """Share of response tokens whose id is below `below`: a simple rule for benchmarks and learning tests."""

    type: Literal["token_share"] = "token_share"
    below: PositiveInt = result(...)
    """Token ids below this value"""


class AnswerReward(RewardSource):
    """1 if the final answer of the response equals that of the prompt's row, else 0: for problems with a
    known result.
    """

    type: Literal["answer"] = "answer"
    field: str = result("answer", min_length=1)
    """Field of the prompt's row with the correct answer; `reward_model.ground_truth` is a field inside of
    another one
    """
    extract: Literal["auto", "final_number", "boxed"] = result("auto")
    """What the answer of a response is: `final_number`: the number after the last `####`, if nothing else is
    on that line, else after `answer is`, else the last one; `boxed`: its last \\boxed{}; `auto`: boxed if
    there is one, else the number, formula, letter or text
    """


class SmokeRow(Section):
    """A response with a known value."""

    prompt: str = execution(...)
    """The prompt as plain text"""
    response: str = execution(...)
    """The response as plain text"""
    finished: bool = execution(True)
    """Whether EOS ended it"""
    meta: dict[str, Any] = execution({})
    """The other fields of the prompt's row"""
    score: FiniteFloat | None = execution(None)
    """The value that it must get, up to rounding"""
    min: FiniteFloat | None = execution(None)
    """The least value that it may get"""
    max: FiniteFloat | None = execution(None)
    """The largest value that it may get"""

    def problems(self) -> Iterator[str]:
        if self.score is None and self.min is None and self.max is None:
            yield "needs the value of the response: score, min or max; give one"

    @property
    def expected(self) -> str:
        """The values that are right, in words."""
        given = self.model_dump(include={"score", "min", "max"}, exclude_none=True)
        return " and ".join(f"{name} {value:g}" for name, value in given.items())

    def accepts(self, value: float) -> bool:
        """Return whether a value is right; NaN is not."""
        is_score = self.score is None or math.isclose(value, self.score, rel_tol=1e-6, abs_tol=1e-9)
        is_above = self.min is None or value >= self.min
        return is_score and is_above and (self.max is None or value <= self.max)


class ExternalReward(RewardSource):
    """Rewards that run code of users, which may fail."""

    on_error: Literal["abort", "mask"] = result("abort")
    """A response without a value after all retries: `abort` ends the step with an error that names it, `mask`
    leaves it out of the update and the metrics, and counts it
    """
    pure: bool = execution(True)
    """Whether a response always gets the same value. `false`: replies of a language model are not kept, and
    [rescoring](rescore.md) says that its values can differ from those of the run
    """
    smoke: tuple[SmokeRow, ...] = execution(())
    """Responses with known values. They are scored before all others, and a wrong value is an error that
    names the row. They have no tokens
    """


class UserFunction(Section):
    """A function that a user has written."""

    function: str = result(..., pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", form="`package.module:function`")
    """`package.module:function`"""
    file: UserPath | None = content(None)
    """Python file with the function, if it is not importable; then `function` is `anything:function`"""


class PythonReward(UserFunction, ExternalReward):
    """A user-defined function: `list[RewardInput] -> list[float]`."""

    type: Literal["python"] = "python"
    needs_group: bool = result(False, later=True)
    """Call the function once for each prompt, with all of its responses in the batch"""
    # With `on_error: mask` a time limit decides which responses count. It is not in the key, because what is
    # too slow depends on the machine.
    timeout: PositiveFloat = execution(30.0, within=_TIMEOUT)
    """Seconds for one batch"""
    retries: NonNegativeInt = execution(1, within=TRIES)
    """Retries of a batch that failed"""


class RemoteReward(ExternalReward):
    """A service that scores over HTTP, such as `rlhf serve-reward`; the protocol is in
    `rlhf_core/rewards/remote.py`.
    """

    type: Literal["remote"] = "remote"
    urls: tuple[str, ...] = result(..., min_length=1)
    """`http(s)://host[:port]/path` of each replica; requests go to the least busy one"""
    items_per_request: PositiveInt = execution(64, within=Range(1, 65536, "a request has at most 16 MiB"))
    """Responses in one request"""
    concurrency: PositiveInt = execution(4, within=Range(1, 1024, "connections to one service"))
    """Concurrent requests to each replica"""
    needs_group: bool = result(False, later=True)
    """Send all responses to a prompt in the batch in one request of their own, whatever `items_per_request`
    """
    send_tokens: bool = result(False)
    """Also send token ids, for a service with the tokenizer of the policy"""
    timeout: PositiveFloat = execution(30.0, within=_TIMEOUT)
    """Seconds for one request, from the address look-up to the last byte"""
    retries: NonNegativeInt = execution(4, within=TRIES)
    """Retries of a request that failed"""
    # A status 500 counts too: a replica whose GPU is lost answers so, faster than the others (decision 8).
    breaker_failures: PositiveInt = execution(5)
    """Consecutive failures after which a replica is not used"""
    breaker_seconds: PositiveFloat = execution(15.0, within=PAUSE)
    """Seconds for which it is not used"""

    def problems(self) -> Iterator[str]:
        for index, url in enumerate(self.urls):
            if problem := url_problem(url, "RLHF_REWARD_TOKEN"):
                yield f"urls.{index}: {problem}"


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
    timeout: PositiveFloat = execution(60.0, within=_TIMEOUT)
    """Seconds for one request, from the address look-up to the last byte"""
    retries: NonNegativeInt = execution(5, within=TRIES)
    """Retries of a request that failed"""

    @field_validator("api_key_env")
    @classmethod
    def _check_key(cls, name: str | None) -> str | None:
        if name is not None and not is_secret_variable(name):
            raise ValueError(
                f"api_key_env must have a name whose value logs hide; got {name}; use a name such as"
                " JUDGE_API_KEY"
            )
        return name


_REASONS_TOKENS = 64
"""Least `max_tokens` for a few sentences and a verdict."""


class LanguageModelReward(ChatServiceConfig, ExternalReward):
    """A language model at an OpenAI-compatible address that grades each response, or compares the responses
    to one prompt (`compare`); the reward is from 0 to 1.
    """

    type: Literal["language_model"] = "language_model"
    # No folder: PPO's engines have the devices, and `rlhf serve` gives a folder an address (decision 8).
    url: str = result(...)
    """Address of an OpenAI-compatible server, `http(s)://host[:port]/v1`; requests go to
    `{url}/chat/completions`
    """
    model: str = result(..., pattern=r"^[^\x00-\x1f\x7f]{1,200}$", form="1 to 200 characters on one line")
    """Name of the model at `url`"""
    # Not the log-probabilities of grades, which many servers do not return (decision 8).
    scale: PositiveInt = result(10, within=Range(2, 1000, "a grade needs two values"))
    """The model replies with a whole number from 1 to this. 1 is the reward 0, and this number the reward 1
    """
    # By default one question for each response, because `ppo.samples_per_prompt` may be 1 (decision 8).
    compare: Literal["pairs", "ranking", "scores"] | None = result(None, later=True)
    """The model sees several responses to one prompt, in both orders, and gives its reasons before the
    verdict. `pairs`: which of two is better; `ranking`: the order of all; `scores`: a grade for each, of all
    in one question. null: it grades each response by itself
    """
    # Neighbours on a circle of the texts, so that all have equally many comparisons and a continued run asks
    # the same. In a tournament the rounds wait for each other (decision 8).
    opponents: PositiveInt | None = result(None, later=True)
    """With `compare: pairs`: the number of other responses that each one is compared with, at random; null:
    all
    """
    max_questions: PositiveInt | None = execution(None)
    """With `compare`: a configuration that asks more questions in a step is refused; null: no limit"""
    min_agreement: PositiveFloat | None = execution(
        0.6, within=Range(0.51, 1.0, "agreement by chance is 0.5")
    )
    """Before PPO, the model grades or compares both answers of up to 100 held-out pairs that people have
    labelled. If it prefers the chosen answer in less than this share, or not significantly more often than by
    chance, the stage `ppo` fails. Equal grades count half. null, or weight 0: not measured
    """

    def problems(self) -> Iterator[str]:
        if problem := url_problem(self.url):
            yield f"url: {problem}"
        if self.compare is not None and self.max_tokens < _REASONS_TOKENS:
            yield (
                f"max_tokens must be at least {_REASONS_TOKENS} with compare, because the reasons come before"
                f" the verdict; got {self.max_tokens}; use 512"
            )
        if self.opponents is not None and self.compare != "pairs":
            yield f"opponents needs compare=pairs; got {self.compare or 'no compare'}; leave one of them out"

    def used_opponents(self, responses: int) -> int:
        """Return the number of others that each of several responses to a prompt is compared with."""
        others = min(self.opponents or responses, responses - 1)
        # An odd number of responses cannot all have an odd number of comparisons.
        return others + others * responses % 2

    def questions(self, responses: int) -> int:
        """Return the number of questions about several responses to one prompt that all differ."""
        if self.compare is None:
            return responses
        return self.used_opponents(responses) * responses if self.compare == "pairs" else 2


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
    | PythonReward
    | RemoteReward
    | LanguageModelReward,
    Field(discriminator="type"),
]


def comparing_sources(rewards: Iterable[AnyReward]) -> list[LanguageModelReward]:
    """Return the language models that compare the responses to one prompt."""
    return [each for each in rewards if isinstance(each, LanguageModelReward) and each.compare is not None]


def measured_graders(rewards: Iterable[AnyReward]) -> list[LanguageModelReward]:
    """Return the language models whose agreement with people must reach `min_agreement`."""
    return [
        source
        for source in rewards
        if isinstance(source, LanguageModelReward) and source.weight and source.min_agreement is not None
    ]
