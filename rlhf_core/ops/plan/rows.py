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
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig, RewardConfig, SFTConfig, TrainingSection
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


def describe_batches(config: PipelineConfig) -> list[tuple[str, str]]:
    """Return (stage, description) for every training stage of the run."""
    descriptions = []
    for stage, section in config.training_sections.items():
        batch = largest_pass(config, stage)
        text = _batches(config, section, batch)
        if section is config.reward and config.reward.members > 1:
            text += f"; {config.reward.members} models one after the other"
        descriptions.append((str(stage), text))
    if config.ppo.enabled:
        descriptions.append((PPO, _ppo(config)))
    return descriptions


def _batches(config: PipelineConfig, section: TrainingSection, batch: ForwardPass) -> str:
    """Return the batch size of a stage that trains one model, the share of each rank, and the steps."""
    size, ranks = section.batch_size, section.deepspeed.ranks
    longest = f"{batch.longest} tokens an"
    examples: int | None = None
    if isinstance(section, SFTConfig):
        name: SetName = "sft"
        one, what, each = "sequence", "demonstrations", 1
    else:
        name = "preference"
        one, what, each = "pair", "pairs", 2
        longest = f"2 x {longest}"
    sources = getattr(config.data, name)
    if sources and all(source.path == "synthetic" for source in sources):
        examples = config.data.synthetic.rows(name)
    return (
        f"{_plural(size, one)} of at most {longest} optimizer step, {_share(size, ranks)};"
        f" {_passes(batch, each * math.ceil(size / ranks))};"
        f" {_steps(config, examples, size, section.epochs, what)};"
        f" {_training(section.deepspeed, section.lora)}"
    )


def _ppo(config: PipelineConfig) -> str:
    """Return the batch sizes of PPO, the share of each rank, and the devices."""
    ppo = config.ppo
    total, engines, ranks = ppo.rollout_batch_size, ppo.engine.count, ppo.policy_deepspeed.ranks
    trained = "policy and critic" if ppo.uses_critic else "the policy"
    lines = [
        (
            f"{ppo.steps} steps of {ppo.prompts_per_step} prompts x"
            f" {_plural(ppo.samples_per_prompt, 'sample')} = {total} responses of at most"
            f" {config.limits.new} tokens, {math.ceil(total / engines)} for each of"
            f" {_plural(engines, 'engine')}; {ppo.steps * total} responses in all"
        ),
        (
            f"each step: {_plural(ppo.epochs, 'epoch')} x {_plural(ppo.minibatches, 'minibatch')} of"
            f" {ppo.minibatch_size} responses = {_plural(ppo.epochs * ppo.minibatches, 'optimizer step')} of"
            f" {trained}, {ppo.policy_optimizer_steps} of the policy in all"
        ),
        (
            f"policy: {_share(ppo.minibatch_size, ranks)};"
            f" {_passes(largest_pass_of_ppo(config), math.ceil(ppo.minibatch_size / ranks))};"
            f" {_training(ppo.policy_deepspeed, ppo.lora)}"
        ),
    ]
    if ppo.uses_critic:
        lines.append(
            f"critic: {_share(ppo.minibatch_size, ppo.critic_deepspeed.ranks)};"
            f" {_training(ppo.critic_deepspeed, ppo.lora)}"
        )
    if ppo.difficulty is not None:
        chosen = ppo.difficulty
        lines.append(
            f"prompts with {chosen.field} from {chosen.min:g} to {chosen.max:g}"
            f" ({chosen.order.replace('_', ' ')}); the number of steps stays, so each is drawn more often"
        )
    for source in ppo.rewards:
        if isinstance(source, LanguageModelReward):
            asked = ppo.most_questions(source)
            lines.append(
                f"reward {source.used_name}: at most {_plural(asked, 'question')} to {source.model} a step,"
                f" with replies of at most {source.max_tokens} tokens; {ppo.steps * asked} questions in all"
            )
    lines.append(f"devices: {plan(ppo).describe()}")
    return "\n".join(lines)


def _share(count: int, ranks: int) -> str:
    if ranks == 1:
        return "on one rank"
    return f"{math.ceil(count / ranks)} on each of {ranks} ranks"


def _passes(batch: ForwardPass, sequences: int) -> str:
    """Describe the micro-batches of one rank in one optimizer step, which has `sequences`."""
    count = math.ceil(sequences / max(1, batch.tokens // batch.longest))
    return f"at most {_plural(count, 'micro-batch')} of {batch.tokens} tokens"


def _steps(config: PipelineConfig, examples: int | None, batch: int, epochs: int, what: str) -> str:
    if examples is None:
        return (
            f"{math.ceil(1000 / batch) * epochs} optimizer steps for every 1000 {what}"
            f" ({_plural(epochs, 'epoch')})"
        )
    per_epoch = math.ceil(round(examples * (1 - config.data.eval_fraction)) / batch)
    return f"about {_plural(per_epoch, 'optimizer step')} an epoch, {per_epoch * epochs} in all"


def _training(deepspeed: DeepSpeedConfig, lora: LoraConfig | None) -> str:
    offloaded = {"optimizer": "optimizer state", "all": "optimizer state and parameters"}
    parts = [f"ZeRO-{deepspeed.zero_stage}", deepspeed.dtype]
    if deepspeed.hpz > 1:
        parts.append(f"a second copy over {deepspeed.hpz} ranks (hpZ)")
    if deepspeed.gradient_checkpointing:
        parts.append("gradient checkpointing")
    if deepspeed.offload != "none":
        parts.append(f"{offloaded[deepspeed.offload]} in host memory")
    parts.append("all parameters" if lora is None else f"LoRA of rank {lora.r}")
    return ", ".join(parts)


def _plural(count: int, word: str) -> str:
    if count != 1:
        word += "es" if word.endswith("batch") else "s"
    return f"{count} {word}"
