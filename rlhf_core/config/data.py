"""Section `data`: where texts, pairs and prompts come from, and how they become tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rlhf_core.config.base import (
    COEFFICIENT,
    TOKENS,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
    Section,
    UserPath,
    content,
    result,
)

_EXAMPLES = Range(1, 2_000_000, "examples are held in memory, about 2 KiB each")

SetName = Literal["sft", "preference", "prompts"]
SETS: tuple[SetName, ...] = ("sft", "preference", "prompts")
"""The sets of rows that the sources of `data` are read into."""
Format = Literal["auto", "text", "messages", "completion", "preference", "prompt"]


class Source(Section):
    """One file, folder, bucket or dataset of rows."""

    path: UserPath = content(
        ...,
        "`synthetic`, a local file or folder, `s3://bucket/key`, a Hugging Face dataset id, or a"
        " [reference](rounds.md#references) to a file of an earlier run",
        min_length=1,
    )
    split: str = result(
        "train",
        "Split of a hub dataset, or of a folder whose files are named by splits (`train-*.parquet`); for rows"
        " with a `split` field, only used if `only_split`",
    )
    only_split: bool = result(False, "Keep only the rows whose `split` field equals `split`")
    revision: str | None = content(
        None,
        "Commit of a hub dataset. Without it, a change of the dataset is not noticed when stages are reused",
    )
    format: Format = result(
        "auto",
        "`text`, `messages`, `completion` (prompt+completion), `preference` (prompt+chosen+rejected),"
        " `prompt`; `auto`: by the fields that are present",
    )
    limit: PositiveInt | None = result(None, "Read at most this number of rows")
    rename: dict[str, str] = result(
        {}, "New names of fields, for example {question: prompt}, {reward_model.ground_truth: answer}"
    )
    ignore: tuple[str, ...] = result(
        (),
        "Fields of rows and of messages that no text or mask is made of, such as `tools`, `weight`. Without"
        " this, those that change what a row means are refused. Rewards can still read those of rows",
        later=True,
    )
    labelled_by: Literal["reward", "judge_model", "language_model"] | None = result(
        None,
        "For rows of a stage `sample`: its `sample.judge`, see [rounds](rounds.md). Such pairs do not train"
        " the second reward model (`reward.judge`). With `judge_model` and `language_model` the results say"
        " that the policy was trained with this judge",
        later=True,
    )


class SyntheticConfig(Section):
    """The demo task: a small generated language with a known (gold) reward."""

    sft_examples: PositiveInt = result(4000, "Demonstrations", within=_EXAMPLES)
    pairs: PositiveInt = result(4000, "Preference pairs labelled by simulated annotators", within=_EXAMPLES)
    prompts: PositiveInt = result(
        1200,
        "Prompts for PPO and evaluation, before the split",
        within=Range(1, 1440, "the task has 1,440 different prompts"),
    )
    label_temperature: NonNegativeFloat = result(
        0.25,
        "Annotator noise: P(chosen) = sigmoid(gold difference / temperature); 0: no errors",
        within=COEFFICIENT,
    )


class DataConfig(Section):
    """Data sources and their conversion to token files."""

    sft: tuple[Source, ...] = result(
        (Source(path="synthetic"),),
        "Demonstrations: text, messages or prompt+completion",
        min_length=1,
    )
    preference: tuple[Source, ...] = result(
        (Source(path="synthetic"),),
        "Pairs for the reward model and DPO; may be empty if PPO uses rule rewards only",
    )
    prompts: tuple[Source, ...] = result(
        (Source(path="synthetic"),),
        "Prompts for PPO and evaluation; rows of any format with a prompt",
        min_length=1,
    )
    synthetic: SyntheticConfig = result(SyntheticConfig(), "The demo task, used if a source is `synthetic`")
    template: Literal["chat", "plain"] = result(
        "chat",
        "`chat` applies the tokenizer's chat template, once; `plain` joins prompt and response without a"
        " template",
    )
    chat_template: UserPath | None = content(None, "A Jinja file that replaces the tokenizer's chat template")
    max_prompt_tokens: PositiveInt = result(64, "Longer prompts are dropped and counted", within=TOKENS)
    max_response_tokens: PositiveInt = result(
        64,
        "Responses of pairs and demonstrations longer than this are dropped and counted",
        within=TOKENS,
    )
    max_text_tokens: PositiveInt = result(
        512,
        "`text` and `messages` rows are cut to this many tokens",
        within=TOKENS,
    )
    eval_fraction: Fraction = result(
        0.1,
        "Share of the distinct prompts held out, the same in all three sets",
        within=Range(0, 0.9, "the remaining prompts are used for training"),
    )
    split_seed: NonNegativeInt = result(
        0,
        "Determines, together with a prompt's text, whether it is held out. The held-out prompts are the"
        " same for every `run.seed`",
    )
    max_eval: PositiveInt = result(512, "Maximum number of held-out rows of each set")
    deduplicate: bool = result(True, "Drop exact duplicates and count them")
    max_bad_rows: Fraction = result(
        0.05,
        "A larger share of malformed rows stops the run; otherwise they are quarantined with line and reason",
    )
    min_rows: NonNegativeInt = result(
        2,
        "Fewer usable rows in a set stop the run",
        within=Range(0, 10**8, "rows are held in memory"),
    )

    def sources(self) -> Iterator[tuple[SetName, int, Source]]:
        """Yield every source with its set and its index in it."""
        for name in SETS:
            sources: tuple[Source, ...] = getattr(self, name)
            for index, source in enumerate(sources):
                yield name, index, source
