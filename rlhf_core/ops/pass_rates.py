"""Pass rates of the prompts of a run, as rows for `data.prompts`.

record of `sample` or `ppo`, prompts of `data`  ->  {"prompt": ..., "pass_rate": 0.25, "sampled": 8, ...}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_core.data.dataset import load_prompts
from rlhf_core.data.messages import Message
from rlhf_core.data.prompt_sets import load_encoder
from rlhf_core.errors import InputError
from rlhf_core.ops.finished_run import FinishedRun
from rlhf_core.record.reader import read_rollouts
from rlhf_core.system.files import write_jsonl


@dataclass(frozen=True)
class WrittenRates:
    """What `write_pass_rates` has written."""

    rated: int
    """Prompts with a pass rate."""
    unrated: int
    """Prompts without one: held-out ones, and those that were not sampled."""
    left_out: int
    """Prompts of several messages, whose rows cannot be written."""
    useful: int
    """Rated prompts with a pass rate above 0 and below 1."""


def write_pass_rates(
    run: FinishedRun, stage: Literal["ppo", "sample"], column: str, at_least: float, output: Path
) -> WrittenRates:
    """Write all prompts of a run as rows, with the share of responses that pass where it is known.

    Args:
        run: The run.
        stage: The stage whose recorded responses count.
        column: Column of the record with the value of a response, such as `score` or `reward/answer`.
        at_least: A response with this value or a higher one passes.
        output: JSONL file, which is replaced.

    Raises:
        InputError: The run has no such stage, record or column.
    """
    passed: dict[str, list[bool]] = {}
    rows = read_rollouts(run.recorded(stage), ["prompt_id", column])
    for row in rows.to_pylist():
        value = row[column]
        # A response without a value says nothing; NaN is none either.
        if value is not None and value == value:
            passed.setdefault(row["prompt_id"], []).append(value >= at_least)
    if not passed:
        raise InputError(f"no response that {stage} recorded has a value in {column}; name another --column")
    data = run.data()
    encoder = load_encoder(run.config(stage), data)
    written = []
    left_out = 0
    # Held-out prompts as well, so that the same ones are held out of the new rows.
    every = {each.prompt_id: each for each in (*load_prompts(data, "train"), *load_prompts(data, "eval"))}
    for prompt in every.values():
        # A conversation and a system message are in `prompt` as joined text. Written as one message they
        # would be another prompt, for which the pass rate does not hold.
        if encoder.prompt([Message("user", prompt.prompt)]) != prompt.input_ids:
            left_out += 1
            continue
        # `prompt` last: a field of the source row with this name would replace it.
        fields = {**prompt.meta, "prompt": prompt.prompt}
        if results := passed.get(prompt.prompt_id):
            fields |= {"pass_rate": sum(results) / len(results), "sampled": len(results)}
        written.append(fields)
    write_jsonl(output, written)
    rates = [row["pass_rate"] for row in written if "pass_rate" in row]
    useful = sum(0 < rate < 1 for rate in rates)
    return WrittenRates(len(rates), len(written) - len(rates), left_out, useful)
