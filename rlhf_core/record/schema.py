"""The columns of the record. A row is one response to one prompt.

`kind`, `step` and `index` identify a row of a stage. Whoever adds something to rollouts later writes a table
of its own with these three columns.

Axes: `P` tokens of the prompt, `T` tokens of the response.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from rlhf_core.config.pipeline import RecordLevel

LEVELS: tuple[RecordLevel, ...] = ("none", "rewards", "logprobs", "all")
"""Ascending."""
REWARD = "reward/"
"""Begins the name of the column with the raw values of a reward source."""
WEIGHTED = "weighted/"
"""Begins the name of the column with the part of a reward source in `total`."""
PREFERENCE = "preference/"
"""Begins the name of the column with the verdicts against the answers of a model."""

TOKENS = pa.list_(pa.field("element", pa.int32()))
NUMBERS = pa.list_(pa.field("element", pa.float32()))
"""The name of the elements is that in a Parquet file."""


class Column(NamedTuple):
    """A column of the record."""

    name: str
    type: pa.DataType
    level: RecordLevel
    """The smallest level that has it."""
    meaning: str
    """With shape and unit; a cell of the table in docs/record.md."""


COLUMNS = (
    Column("kind", pa.string(), "rewards", "what sampled it: `ppo`, `evaluation`, `match` or `sample`"),
    Column("step", pa.int32(), "rewards", "step of PPO, from 1; 0 for other kinds"),
    Column("index", pa.int32(), "rewards", "number of the response in its step, from 0"),
    Column("group", pa.int32(), "rewards", "number of the prompt in its step, from 0"),
    Column("prompt_id", pa.string(), "rewards", "digest of the prompt's text, as in the data artifact"),
    Column("source", pa.string(), "rewards", "data source of the prompt"),
    Column("prompt_ids", TOKENS, "rewards", "(P,) tokens of the prompt, with its template"),
    Column("response_ids", TOKENS, "rewards", "(T,) tokens of the response, with EOS if it ended so"),
    Column("finished", pa.bool_(), "rewards", "whether EOS ended it; otherwise the length limit cut it"),
    Column("policy_version", pa.int32(), "rewards", "number of steps after which the policy sampled it"),
    Column(
        "weights",
        pa.string(),
        "rewards",
        "digest of the weights that sampled it, as the engines acknowledged them; null with `ppo.staleness`",
    ),
    Column(
        "seed",
        pa.int64(),
        "rewards",
        "seed of the request, of which vLLM uses the lower 31 bits; vLLM adds the number of the sample in its"
        " group",
    ),
    Column(
        "total",
        pa.float32(),
        "rewards",
        "weighted sum of the rewards, before penalties; NaN if a source has no value",
    ),
    Column("score", pa.float32(), "rewards", "`total` minus the penalties for length and a missing EOS"),
    Column("kl", pa.float32(), "rewards", "KL to the reference before the update, in nats: sum of k1"),
    Column(
        "excluded",
        pa.string(),
        "rewards",
        "why nothing was learned from it: `filtered` (equal scores in its group, which was replaced),"
        " `unscored`, `skipped` (the whole step); null if it was trained on",
    ),
    Column(
        "ensemble_std",
        pa.float64(),
        "rewards",
        "standard deviation of the scores of an ensemble over its members; null without one",
    ),
    Column("rollout_logprobs", NUMBERS, "logprobs", "(T,) log-probabilities by the engine, in nats"),
    Column("old_logprobs", NUMBERS, "logprobs", "(T,) by the policy before the update"),
    Column("ref_logprobs", NUMBERS, "logprobs", "(T,) by the reference"),
    Column("values", NUMBERS, "logprobs", "(T,) by the critic before the update; null without one"),
    Column("new_logprobs", NUMBERS, "all", "(T,) by the policy after the update"),
    Column(
        "advantages", NUMBERS, "all", "(T,) that the policy was trained on, whitened if the algorithm does"
    ),
    Column("returns", NUMBERS, "all", "(T,) that the critic was trained on; null without one"),
)
"""Of PPO, without those of reward sources."""

REWARD_COLUMNS = (
    Column(f"{REWARD}<source>", pa.float64(), "rewards", "raw value of a reward source; NaN if it failed"),
    Column(f"{WEIGHTED}<source>", pa.float32(), "rewards", "part of `total`: clipped, normalised, weighted"),
)
"""One of each for every source of `ppo.rewards`."""

ANSWER_COLUMNS = (
    Column("model", pa.string(), "rewards", "the stage that trained what answered, or `champion`"),
    Column(
        "prompt_set",
        pa.string(),
        "rewards",
        "`held-out`, `chosen answers` (prompts of held-out pairs that are not among these), the name of a"
        " regression set, or `training`",
    ),
    Column(
        f"{PREFERENCE}<model>",
        pa.float64(),
        "rewards",
        "verdict of the judge against the answer of this model: 1 won, 0.5 tie, 0 lost; null if they were not"
        " compared",
    ),
)
"""Further ones of the other kinds."""


def includes(level: RecordLevel, other: RecordLevel) -> bool:
    """Return whether `level` has the columns of `other`."""
    return LEVELS.index(level) >= LEVELS.index(other)


def schema_of(level: RecordLevel, sources: Iterable[str]) -> pa.Schema:
    """Return the columns of a level, with those of these reward sources."""
    fields = [pa.field(column.name, column.type) for column in COLUMNS if includes(level, column.level)]
    for source in sources:
        fields += [pa.field(each.name.replace("<source>", source), each.type) for each in REWARD_COLUMNS]
    return pa.schema(fields)
