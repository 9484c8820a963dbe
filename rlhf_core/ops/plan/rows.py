"""What each stage makes of the rows: how many it uses, in how many steps, and the estimated time.

Rows are counted in the files. The share of them that is used is that of the first rows (`ops.data_table`).
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import base_of
from rlhf_core.config.data import PROMPT, RESPONSE, TEXT, SetName, Source
from rlhf_core.config.training import RewardConfig, SFTConfig
from rlhf_core.data.files import list_files, read_file, suffix_of
from rlhf_core.data.sources import address_of
from rlhf_core.ops.data_table import DataTable
from rlhf_core.pipeline import StageName
from rlhf_core.planning.loads import PPO, largest_pass

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
    """Estimated time of all steps, if every sequence has the maximum length."""
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
        every = steps * seconds[stage]
        shorter = min(1.0, _median(table, name) / largest_pass(config, stage).longest)
        work.append(StageWork(stage, what, rows, steps, every, every * shorter))
    if config.ppo.enabled:
        prompts, steps = _training_rows(config, table, "prompts"), config.ppo.steps
        every = steps * seconds[PPO]
        # The policy is taken to answer as long as the rows.
        responses = [row["p50"] for row in _lengths(table) if row["field"] == RESPONSE]
        sampled = min([config.limits.new, *responses])
        shorter = min(1.0, (_median(table, "prompts") + sampled) / config.max_sequence_tokens)
        work.append(StageWork(PPO, "prompts", prompts, steps, every, every * shorter))
    return work


def _median(table: DataTable, name: SetName) -> int:
    """Return the tokens of a row of a set: of its prompt and response, or of its text if that is longer."""
    medians: dict[str, int] = {row["field"]: row["p50"] for row in _lengths(table) if row["set"] == name}
    return max(medians.get(TEXT, 0), medians.get(PROMPT, 0) + medians.get(RESPONSE, 0))


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
        rows = sum(rows_of_file(file) for file in list_files(address, source.split))
    return rows if source.limit is None else min(rows, source.limit)


def rows_of_file(file: Path) -> int:
    """Return about the number of rows of a file. A CSV row with line breaks counts several times."""
    suffix = suffix_of(file.name)
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        return int(pq.read_metadata(file).num_rows)
    if suffix == ".json":
        with file.open("rb") as stream:
            return sum(1 for _ in read_file(str(file), stream))
    if suffix == ".jsonl.gz":
        with gzip.open(file) as unpacked:
            return sum(not line.isspace() for line in unpacked)
    with file.open("rb") as stream:
        lines = sum(not line.isspace() for line in islice(stream, _COUNTED_LINES))
        # The lines that were not read are taken to be as long as these.
        lines = round(lines * file.stat().st_size / max(1, stream.tell()))
    return lines - (suffix == ".csv")
