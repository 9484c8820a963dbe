"""Sections `data` and `drift`: where texts, pairs and prompts come from, how they become tokens within length
limits, and how far they may be from those of the champion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field

from rlhf_core.config.base import (
    COEFFICIENT,
    TOKENS,
    Fraction,
    NonNegativeFloat,
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

# These limits may be null. The stage `data` then chooses them with `fitted_limits` and writes all four into
# its artifact, from which a later stage gets a configuration without nulls (`PipelineConfig.with_limits`).
PROMPT = "data.max_prompt_tokens"
RESPONSE = "data.max_response_tokens"
TEXT = "data.max_text_tokens"
NEW = "ppo.max_new_tokens"
LIMIT_FIELDS = (PROMPT, RESPONSE, TEXT, NEW)
"""In the order of `Limits`."""


class Limits(NamedTuple):
    """Tokens of the longest sequences, by the fields that limit them."""

    prompt: int
    response: int
    text: int
    new: int


class GivenLimits(NamedTuple):
    """The same fields as a configuration has them. None: from the data."""

    prompt: int | None
    response: int | None
    text: int | None
    new: int | None


DEMO_LIMITS = Limits(prompt=64, response=64, text=512, new=64)
"""Limits of the demo: a model from scratch that is trained on the generated task."""


_ENDLESS_RATE = 0.05


def never_ends(eos_rates: Mapping[str, float]) -> str | None:
    """Return a sentence if the responses of models do not end but are cut at the length limit, or None.

    Args:
        eos_rates: Share of the responses that end with EOS, by the name of the model in the sentence.
    """
    endless = [(model, rate) for model, rate in eos_rates.items() if rate < _ENDLESS_RATE]
    if not endless:
        return None
    (first, first_rate), *others = endless
    shares = [f"{first_rate:.1%} of the responses of {first}"]
    shares += [f"{rate:.1%} of those of {model}" for model, rate in others]
    return (
        f"{' and '.join(shares)} end with EOS; the others are cut at {NEW}, so scores, lengths and win rates"
        f" are those of cut texts. Raise {NEW}, or train SFT (sft.enabled, sft.epochs) on rows that end"
        f" within {TEXT} and {RESPONSE}"
    )


def fitted_limits(given: GivenLimits, needed: Limits, context: int) -> Limits:
    """Return the limits that are given, and for the others what is needed as far as the context has room.

    A prompt and its response share the context. If both need more than half of it, each gets half; otherwise
    the one that needs less gets all that it needs, and the other one the rest.

    Args:
        given: Limits of the configuration.
        needed: What the data need. `new` is not used: it follows the limit of responses.
        context: Context length of the model in tokens.
    """
    prompt, response = given.prompt, given.response
    if prompt is None:
        kept_free = response
        if kept_free is None:
            kept_free = min(needed.response, context - context // 2)
        # The responses of PPO follow the same prompts, and may be longer.
        kept_free = max(kept_free, given.new or 0)
        prompt = max(1, min(needed.prompt, context - kept_free))
    if response is None:
        response = max(1, min(needed.response, context - prompt))
    text = given.text
    if text is None:
        text = max(1, min(needed.text, context))
    new = response if given.new is None else given.new
    return Limits(prompt, response, text, new)


_EXAMPLES = Range(1, 2_000_000, "examples are held in memory, about 2 KiB each")

SetName = Literal["sft", "preference", "prompts"]
SETS: tuple[SetName, ...] = ("sft", "preference", "prompts")
"""The sets of rows that the sources of `data` are read into."""
Thoughts = Literal["keep", "drop"]
Format = Literal["auto", "text", "messages", "completion", "preference", "prompt"]


class Source(Section):
    """One file, folder, bucket or dataset of rows."""

    path: UserPath = content(..., min_length=1)
    """`synthetic`, a local file or folder, `s3://bucket/key`, a Hugging Face dataset id, or a
    [reference](rounds.md#references) to a file of an earlier run
    """
    split: str = result("train")
    """Split of a hub dataset, or of a folder whose files are named by splits (`train-*.parquet`); for rows
    with a `split` field, only used if `only_split`
    """
    subset: str | None = result(None, later=True)
    """Configuration of a hub dataset that has several (`name` of `load_dataset`); of a folder or bucket, the
    folder in it
    """
    only_split: bool = result(False)
    """Keep only the rows whose `split` field equals `split`"""
    revision: str | None = content(None)
    """Commit of a hub dataset. Without it, a change of the dataset is not noticed when stages are reused"""
    format: Format = result("auto")
    """`text`, `messages`, `completion` (prompt+completion), `preference` (prompt+chosen+rejected), `prompt`;
    `auto`: by the fields that are present
    """
    limit: PositiveInt | None = result(None)
    """Read at most this number of rows"""
    weight: PositiveFloat = result(
        1.0, within=Range(0.001, 1000, "the rows are used this many times"), later=True
    )
    """How often each training row is used in an epoch: 2: twice; 0.5: a [fixed half](data.md#weights) of the
    rows. Held-out rows are not affected
    """
    rename: dict[str, str] = result({})
    """New names of fields, for example {question: prompt}, {reward_model.ground_truth: answer}"""
    # One way past all refusals of fields, so that none of them needs an option of its own (decision 53).
    ignore: tuple[str, ...] = result((), later=True)
    """Fields of rows and of messages that no text or mask is made of, such as `tools`, `weight`. Without
    this, those that change what a row means are refused. Rewards can still read those of rows
    """
    labelled_by: Literal["reward", "judge_model", "language_model"] | None = result(None, later=True)
    """For rows of a stage `sample`: its `sample.judge`, see [rounds](rounds.md). Such pairs do not train the
    second reward model (`reward.judge`). With `judge_model` and `language_model` the results say that the
    policy was trained with this judge
    """


class SyntheticConfig(Section):
    """The demo task: a small generated language with a known (gold) reward."""

    sft_examples: PositiveInt = result(4000, within=_EXAMPLES)
    """Demonstrations"""
    pairs: PositiveInt = result(4000, within=_EXAMPLES)
    """Preference pairs labelled by simulated annotators"""
    prompts: PositiveInt = result(1200, within=Range(1, 1440, "the task has 1,440 different prompts"))
    """Prompts for PPO and evaluation, before the split"""
    label_temperature: NonNegativeFloat = result(0.25, within=COEFFICIENT)
    """Annotator noise: P(chosen) = sigmoid(gold difference / temperature); 0: no errors"""

    def rows(self, name: SetName) -> int:
        """Return the number of generated rows of a set."""
        return {"sft": self.sft_examples, "preference": self.pairs, "prompts": self.prompts}[name]


class DataConfig(Section):
    """Data sources and their conversion to token files."""

    sft: tuple[Source, ...] = result((Source(path="synthetic"),))
    """Demonstrations: text, messages or prompt+completion. With `model.path` there is no default. They are
    not needed with `sft.enabled: false`
    """
    preference: tuple[Source, ...] = result((Source(path="synthetic"),))
    """Pairs for the reward model and DPO; may be empty if PPO uses rule rewards only. With `model.path` there
    is no default
    """
    prompts: tuple[Source, ...] = result((Source(path="synthetic"),), min_length=1)
    """Prompts for PPO and evaluation; rows of any format with a prompt. With `model.path` there is no default
    """
    synthetic: SyntheticConfig = result(SyntheticConfig())
    """The demo task, used if a source is `synthetic`"""
    template: Literal["chat", "plain"] = result("chat")
    """`chat` applies the tokenizer's chat template, once; `plain` joins prompt and response without a
    template
    """
    chat_template: UserPath | None = content(None)
    """A Jinja file that replaces the tokenizer's chat template"""
    # No default: kept, they make a policy of another kind; dropped, half a set can be lost (decision 53).
    thoughts: Thoughts | None = result(None, later=True)
    """What the assistant thinks before it answers: `reasoning_content` of a message, or
    `<think>...</think>` at the beginning of its text. `keep`: a part of the answer, which is trained, scored,
    judged and counted; `drop`: left out of rows, and of what rewards and judges read. null: rows with
    thoughts are refused
    """
    max_prompt_tokens: PositiveInt | None = result(None, within=TOKENS)
    """Longer prompts are dropped and counted. null: [what the data need](data.md#lengths); for the demo 64"""
    max_response_tokens: PositiveInt | None = result(None, within=TOKENS)
    """Responses of pairs and demonstrations longer than this are dropped and counted. null: [what the data
    need](data.md#lengths); for the demo 64
    """
    max_text_tokens: PositiveInt | None = result(None, within=TOKENS)
    """`text` and `messages` rows are cut to this many tokens. null: [what the data need](data.md#lengths);
    for the demo 512
    """
    eval_fraction: Fraction = result(
        0.1, within=Range(0.001, 0.9, "held-out prompts measure the models, 0.1 is usual")
    )
    """Share of the groups of related prompts held out, the same in all three sets. Rows of a group have the
    same first user message, or the same field `group`
    """
    # Apart from `run.seed`: no champion was trained on a later candidate's held-out prompts (decision 18).
    split_seed: NonNegativeInt = result(0)
    """Determines, together with the group of a prompt, whether it is held out. The held-out prompts are the
    same for every `run.seed`
    """
    max_eval: PositiveInt = result(512)
    """Maximum number of held-out rows of each set"""
    deduplicate: bool = result(True)
    """Drop exact duplicates and count them"""
    max_bad_rows: Fraction = result(0.05)
    """A larger share of malformed rows stops the run; otherwise they are quarantined with line and reason"""
    min_rows: NonNegativeInt = result(2, within=Range(0, 10**8, "no set has more rows"))
    """Fewer usable rows in a set stop the run"""

    def sources(self) -> Iterator[tuple[SetName, int, Source]]:
        """Yield every source with its set and its index in it."""
        for name in SETS:
            sources: tuple[Source, ...] = getattr(self, name)
            for index, source in enumerate(sources):
                yield name, index, source


Measure = Literal["lengths", "sources", "vocabulary", "agreement"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
Limit = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
DEFAULT_WARNING = 0.1


class DriftConfig(Section):
    """The data compared with those of the champion. [Data](data.md#drift) describes the measures."""

    warn: dict[Measure, Limit | None] = execution({})
    """A measure above its limit is a warning; null: no limit. A measure that is left out has the limit 0.1
    """
    # No default: usual values differ between data sets (decision 48).
    stop: dict[Measure, Limit | None] = execution({})
    """A measure above its limit ends the run before the SFT model is trained; null, or left out: no limit"""

    def problems(self) -> Iterator[str]:
        for name in MEASURES:
            warn, stop = self.limits(name)
            if warn is not None and stop is not None and warn > stop:
                yield (
                    f"drift.warn.{name} must be at most drift.stop.{name} ({stop:g}); got {warn:g}; lower it,"
                    " or set it to null"
                )

    @property
    def can_stop(self) -> bool:
        """Whether any measure has a limit that ends the run."""
        return any(limit is not None for limit in self.stop.values())

    def limits(self, measure: Measure) -> tuple[float | None, float | None]:
        """Return the limits `warn` and `stop` of a measure."""
        return self.warn.get(measure, DEFAULT_WARNING), self.stop.get(measure)
