"""Section `data`: where texts, pairs and prompts come from, and how they become tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section, UserPath

Format = Literal["auto", "text", "messages", "completion", "preference", "prompt"]


class Source(Section):
    """One place to read rows from."""

    path: UserPath = Field(
        min_length=1,
        description="`synthetic`, a local file or folder, `s3://bucket/key`, or a Hugging Face dataset id",
    )
    split: str = Field(
        "train",
        description="Split of a hub dataset; for local rows with a `split` field, only used if `only_split`",
    )
    only_split: bool = Field(False, description="Keep only the rows whose `split` field equals `split`")
    revision: str | None = Field(
        None, description="Commit of a hub dataset; pin it, or reuse cannot notice an upstream change"
    )
    format: Format = Field(
        "auto",
        description=(
            "`text`, `messages`, `completion` (prompt+completion), `preference` (prompt+chosen+rejected),"
            " `prompt`, or by the fields present"
        ),
    )
    limit: PositiveInt | None = Field(None, description="Read at most so many rows")
    rename: dict[str, str] = Field(
        default_factory=dict, description="Source field -> our field, for example {question: prompt}"
    )


class SyntheticConfig(Section):
    """The demo task: a small generated language with a known (gold) reward."""

    sft_examples: PositiveInt = Field(4000, description="Demonstrations")
    pairs: PositiveInt = Field(4000, description="Preference pairs labelled by simulated annotators")
    prompts: PositiveInt = Field(1200, description="Prompts for PPO and evaluation, before the split")
    label_temperature: NonNegativeFloat = Field(
        0.25, description="Annotator noise: P(chosen) = sigmoid(gold difference / temperature); 0 never errs"
    )


class DataConfig(Section):
    """From sources to token files."""

    sft: tuple[Source, ...] = Field(
        (Source(path="synthetic"),),
        min_length=1,
        description="Demonstrations: text, messages or prompt+completion",
    )
    preference: tuple[Source, ...] = Field(
        (Source(path="synthetic"),),
        description="Pairs for the reward model; may be empty if PPO uses rule rewards only",
    )
    prompts: tuple[Source, ...] = Field(
        (Source(path="synthetic"),),
        min_length=1,
        description="Prompts for PPO and evaluation; rows of any format with a prompt",
    )
    synthetic: SyntheticConfig = Field(
        default_factory=SyntheticConfig, description="The demo task, where a source is `synthetic`"
    )
    template: Literal["chat", "plain"] = Field(
        "chat",
        description=(
            "`chat` applies the tokenizer's chat template, once; `plain` joins prompt and response as"
            " they are"
        ),
    )
    chat_template: UserPath | None = Field(
        None, description="A Jinja file that replaces the tokenizer's chat template"
    )
    max_prompt_tokens: PositiveInt = Field(64, description="Longer prompts are dropped and counted")
    max_response_tokens: PositiveInt = Field(
        64, description="Responses of pairs and demonstrations longer than this are dropped and counted"
    )
    max_text_tokens: PositiveInt = Field(
        512, description="`text` and `messages` rows are cut to this many tokens"
    )
    eval_fraction: Fraction = Field(
        0.1, description="Share of the distinct prompts held out, the same in all three sets"
    )
    split_seed: NonNegativeInt = Field(
        0,
        description=(
            "Determines, together with a prompt's text, whether it is held out. The held-out prompts are the"
            " same for every `run.seed`"
        ),
    )
    max_eval: PositiveInt = Field(512, description="At most so many held-out rows of each set")
    deduplicate: bool = Field(True, description="Drop exact duplicates, counted")
    max_bad_rows: Fraction = Field(
        0.05,
        description=(
            "A larger share of malformed rows stops the run; fewer are quarantined with line and reason"
        ),
    )
    min_rows: NonNegativeInt = Field(2, description="Fewer usable rows in a set stop the run")
