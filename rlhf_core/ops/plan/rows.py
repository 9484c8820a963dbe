"""What each stage makes of the rows: how many it uses, in which batches and steps, and the estimated time.

Rows are counted in the files. The share of them that is used is that of the first rows (`ops.data_table`).
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import base_of
from rlhf_core.config.data import PROMPT, RESPONSE, TEXT, SetName, Source
from rlhf_core.config.placement import plan
from rlhf_core.config.rewards import LanguageModelReward
from rlhf_core.config.training import RewardConfig, SFTConfig
from rlhf_core.data.files import list_files, read_file, suffix_of
from rlhf_core.data.sources import address_of
from rlhf_core.ops.data_table import DataTable
from rlhf_core.pipeline import StageName
from rlhf_core.planning.loads import PPO, largest_pass, largest_pass_of_ppo
from rlhf_core.planning.memory import ForwardPass

_COUNTED_LINES = 1_000_000
"""Lines of a file that are counted, in a second or two."""


@dataclass(frozen=True)
class StageWork:
    """The rows and steps of one stage."""

    stage: StageName
    what: str
    """What its rows are, such as `pairs`."""
    rows: int
    steps: int
    seconds: float
    """Estimated time of all steps, if every sequence has the maximum length of its set."""
    at_median: float
    """The same, if every row has the median length of the first ones."""


def why_unread(config: PipelineConfig) -> str | None:
    """Return why the rows are not read by a plan, which makes no request, or None if they are."""
    for name, index, source in config.data.sources():
        if address_of(source).kind not in ("local", "synthetic"):
            return f"data.{name}.{index}.path ({source.path}) is not on this machine"
    base = base_of(config, "sft")
    if base is None or not base.is_hub:
        return None
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(base.path, "tokenizer.json", revision=base.revision), str):
        return None
    return f"the tokenizer of {base.path} is not in the cache of the hub"


def stage_work(
    config: PipelineConfig, table: DataTable, seconds: Mapping[StageName, float]
) -> list[StageWork]:
    """Return the work of each stage that trains. `seconds` are those of one of its steps."""
    work = []
    pairs, judge = _training_rows(config, table, "preference"), config.reward.judge
    share = 0.0 if judge is None else judge.fraction
    for stage, section in config.training_sections.items():
        if isinstance(section, SFTConfig):
            name: SetName = "sft"
            what, rows = "demonstrations", _training_rows(config, table, name)
        else:
            name = "preference"
            what, rows = "pairs", round(pairs * (share if stage == "judge" else 1 - share))
        steps = section.epochs * math.ceil(rows / section.batch_size)
        if isinstance(section, RewardConfig):
            steps *= section.members
        # The longest pass has room for texts, also if the set has none.
        a_token = steps * seconds[stage] / largest_pass(config, stage).longest
        full = a_token * _length(table, name, "tokens")
        median = a_token * _length(table, name, "p50")
        # The median is of rows before they are cut or left out, and can be above the limit.
        work.append(StageWork(stage, what, rows, steps, full, min(full, median)))
    if config.ppo.enabled:
        prompts, steps = _training_rows(config, table, "prompts"), config.ppo.steps
        every = steps * seconds[PPO]
        # The policy is taken to answer as long as the rows.
        responses = [row["p50"] for row in _lengths(table) if row["field"] == RESPONSE]
        sampled = min([config.limits.new, *responses])
        shorter = min(1.0, (_length(table, "prompts", "p50") + sampled) / config.max_sequence_tokens)
        work.append(StageWork(PPO, "prompts", prompts, steps, every, every * shorter))
    return work


def _length(table: DataTable, name: SetName, of: Literal["p50", "tokens"]) -> int:
    """Return the tokens of a row of a set with the median or the largest lengths: of its prompt and response,
    or of its text if that is longer.
    """
    lengths: dict[str, int] = {row["field"]: row[of] for row in _lengths(table) if row["set"] == name}
    return max(lengths.get(TEXT, 0), lengths.get(PROMPT, 0) + lengths.get(RESPONSE, 0))


def _lengths(table: DataTable) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.card["limits"]["rows"]
    return rows


def _training_rows(config: PipelineConfig, table: DataTable, name: SetName) -> int:
    """Return about how many rows of a set are for training."""
    counts = table.card["counts"][name]
    if not counts["read"]:
        return 0
    sources = getattr(config.data, name)
    rows = [count_rows(config, name, source) for source in sources]
    # Fewer than the table could read: the others are of another split, and all that count were read.
    if counts["read"] < sum(min(table.rows, each) for each in rows) or sum(rows) <= counts["read"]:
        return int(counts["train"])
    # Without weights, which apply to all rows of a source and not to those that were read.
    weighted = [row["rows"] for row in table.card["weights"] if row["field"].startswith(f"data.{name}[")]
    used: float = sum(each * source.weight for each, source in zip(rows, sources, strict=True))
    share: float = (sum(weighted) or counts["train"]) / counts["read"]
    return round(share * used)


def count_rows(config: PipelineConfig, name: SetName, source: Source) -> int:
    """Return the number of rows of a local or generated source."""
    address = address_of(source)
    if address.kind == "synthetic":
        rows = config.data.synthetic.rows(name)
    else:
        rows = sum(map(rows_of_file, list_files(address, source.split)))
    return rows if source.limit is None else min(rows, source.limit)


def rows_of_file(file: Path) -> int:
    """Return about the number of rows of a file. A CSV row with line breaks counts several times."""
    suffix = suffix_of(file.name)
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        # From the footer: the rows can be gigabytes.
        return int(pq.read_metadata(file).num_rows)
    if suffix == ".json":
        with file.open("rb") as stream:
            return sum(1 for _ in read_file(str(file), stream))
    if suffix == ".jsonl.gz":
        # To the end: the share of a compressed file that was read does not say how many lines follow.
        with gzip.open(file) as unpacked:
            return sum(not line.isspace() for line in unpacked)
    with file.open("rb") as stream:
        # Binary: a file that is opened as text refuses `tell` while it is iterated over.
        lines = sum(not line.isspace() for line in islice(stream, _COUNTED_LINES))
        # The lines that were not read are taken to be as long as these.
        lines = round(lines * file.stat().st_size / max(1, stream.tell()))
    return lines - (suffix == ".csv")


@dataclass(frozen=True)
class Batch:
    """The batch of an optimizer step of one model."""

    model: str
    """The stage, and in PPO what is trained."""
    rows: int
    of_rank: int
    tokens: int
    """Tokens of the longest row; a pair is two sequences."""
    micro_batches: int
    """Micro-batches of a rank, at most."""
    micro_batch_tokens: int


def batches(config: PipelineConfig) -> list[Batch]:
    """Return the batch of each model that the run trains."""
    found = []
    for stage, section in config.training_sections.items():
        sequences = 1 if isinstance(section, SFTConfig) else 2
        ranks, largest = section.deepspeed.ranks, largest_pass(config, stage)
        found.append(_batch(stage, section.batch_size, ranks, largest, sequences))
    ppo = config.ppo
    if ppo.enabled:
        ranks, largest = ppo.policy_deepspeed.ranks, largest_pass_of_ppo(config)
        found.append(_batch(f"{PPO} policy", ppo.minibatch_size, ranks, largest, 1))
        if ppo.uses_critic:
            ranks = ppo.critic_deepspeed.ranks
            found.append(_batch(f"{PPO} critic", ppo.minibatch_size, ranks, largest, 1))
    return found


def _batch(model: str, rows: int, ranks: int, largest: ForwardPass, sequences: int) -> Batch:
    of_rank = math.ceil(rows / ranks)
    passes = math.ceil(sequences * of_rank / max(1, largest.tokens // largest.longest))
    return Batch(model, rows, of_rank, sequences * largest.longest, passes, largest.tokens)


def describe_ppo(config: PipelineConfig) -> list[str]:
    """Return what a step of PPO samples, on which devices, and what it asks language models."""
    ppo = config.ppo
    total, engines = ppo.rollout_batch_size, ppo.engine.count
    lines = [
        f"{PPO}: each of {ppo.steps} steps samples {ppo.prompts_per_step} prompts x"
        f" {ppo.samples_per_prompt} = {total} responses, {math.ceil(total / engines)} for each engine, and"
        f" makes {ppo.epochs * ppo.minibatches} optimizer steps",
        f"{PPO}: devices: {plan(ppo).describe()}",
    ]
    for source in ppo.rewards:
        if isinstance(source, LanguageModelReward):
            asked = ppo.most_questions(source)
            lines.append(
                f"{PPO}: reward {source.used_name}: at most {asked} questions to {source.model} a step, with"
                f" replies of at most {source.max_tokens} tokens; {ppo.steps * asked} questions in all"
            )
    return lines
