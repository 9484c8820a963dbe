"""Runs whose stage `sample` has answers, and files of votes about them, without a pipeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.evaluation.review import AnswersToPrompt, BlindPair, page_digest, write_answers
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store


def made_run(
    home: Path, name: str, prompts: Sequence[AnswersToPrompt], key: str = "c" * 16, **fields: Any
) -> dict[str, Any]:
    """Make a finished run and return its summary, which has `fields`."""
    config = PipelineConfig.model_validate({"run": {"home": str(home), "name": "small"}, "sample": {}})
    store = ArtifactStore(Store(config.store_url), home / "cache")
    folder = home / f"sample-{key}"
    folder.mkdir(parents=True)
    write_answers(folder, prompts)
    made = Provenance(config=config.model_dump(mode="json", by_alias=True))
    artifact = store.publish("sample", key, folder, made).uri
    summary = {"run": name, "stages": {"sample": {"artifact": artifact, "key": key}}, **fields}
    file = home / "runs" / name / "summary.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(summary))
    return summary


def save_votes(
    file: Path, pairs: Sequence[BlindPair], choices: Sequence[str | None], saved: int = 1700000000000
) -> Path:
    """Write the file that the page of `pairs` saves, and return its path."""
    content = {"format": "rlhf-review-1", "page": page_digest(pairs), "saved": saved, "votes": choices}
    file.write_text(json.dumps(content))
    return file
