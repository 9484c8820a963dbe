"""Votes of people between two rounds (`sample.judge: people`).

    round k ends -> page of the stage `sample` -> votes -> `rlhf review` -> preference rows -> round k + 1

Nothing waits: the command ends after round k, and goes on when it is started again and finds the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import RLHFError, VotesNeeded
from rlhf_core.ops.review.record import Review, open_review, votes_command
from rlhf_core.system.files import write_jsonl


def rows_of_votes(config: PipelineConfig, number: int, summary: Mapping[str, Any]) -> Path:
    """Write the labels of people about the samples of a finished round (`Review.labels`) and return the file:
    {folder of the run}/review/labels-<digest of the rows>.jsonl.

    Args:
        config: The configuration of the rounds.
        number: Number of the round.
        summary: Summary of the round.

    Raises:
        VotesNeeded: There are no rows. The page is written, and the message has its address and the command
            that records votes.
        InputError: The round has no pair of answers that people could compare.
        CorruptArtifact: The answers are damaged.
    """
    review = _review(config, summary)
    rows = review.labels()
    if not rows:
        page, shown = review.write_page(None)
        command = votes_command(review.name, config.run.home, "sample", config.store.endpoint)
        raise VotesNeeded(
            f"round {number} is finished, and round {number + 1} needs votes of people on {shown} pairs: open"
            f" {page} in a browser, vote and save the votes, run `{command}`, and start the"
            " rounds again in the same way"
        )
    file = review.folder / f"labels-{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:8]}.jsonl"
    write_jsonl(file, rows)
    return file


def number_of_rows(config: PipelineConfig, summary: Mapping[str, Any]) -> int | None:
    """Return the number of rows that the votes on the samples of a finished round give; None if there are no
    rows, or if it cannot be found out.
    """
    try:
        return len(_review(config, summary).labels()) or None
    except RLHFError:
        return None


def _review(config: PipelineConfig, summary: Mapping[str, Any]) -> Review:
    return open_review(summary["run"], config.run.home, "sample", config.store.endpoint)
