"""Prompts, answers and artifacts of the tests of matches. Models say what is in their file `says`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import ModelError, WorkerDied
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.store import Store
from rlhf_core.testing.data import write_data_artifact
from rlhf_core.types import PromptExample
from tests.support.known_models import save_last_token_scorer

PROMPTS = [
    f"Tell me about a small {subject} {place}."
    for subject in ("fox", "cat", "dog", "bear")
    for place in ("in the garden", "on the roof")
]
GOOD, BAD = "It is kind and gentle. It has a warm voice!", "It is rotten and dull."
"""Their last tokens differ, by which reward models here tell them apart."""
TOKENIZER = train_tokenizer([*PROMPTS, GOOD, BAD], 400)


def prompts_of(*sources: str) -> list[PromptExample]:
    """Return the prompts, from each source in turn."""
    return [
        PromptExample(f"p{i}", text, (1, 2), source=sources[i % len(sources)])
        for i, text in enumerate(PROMPTS)
    ]


def policy(folder: Path, says: str) -> Path:
    folder.mkdir(parents=True)
    TOKENIZER.save_pretrained(folder)
    (folder / "says").write_text(says)
    return folder


FAILURES = {
    "OLD": ValueError("unknown architecture"),
    "BAD MODEL": ModelError("no eos_token_id"),
    "MEMORY": RuntimeError("CUDA out of memory"),
    "DISK": OSError(28, "No space left on device"),
    "DEAD": WorkerDied("the engine is gone"),
}
"""What models raise that say this."""
Tags = dict[str, str]


def reward_model(folder: Path, likes: str, cannot_score: str | None = None) -> Path:
    """Write an artifact with a reward model that gives a point to one answer, and can give NaN to another
    one. Return its folder.
    """
    last = TOKENIZER.encode(likes)[-1]
    overflowing = () if cannot_score is None else (TOKENIZER.encode(cannot_score)[-1],)
    save_last_token_scorer(folder / "model", {last: 1.0}, len(TOKENIZER), overflowing)
    return folder


def least(config: PipelineConfig, prompts: int, **changes: Any) -> PipelineConfig:
    """Return the configuration with this `register.min_prompts` and other sections."""
    tree = config.model_dump(mode="json", by_alias=True) | {"register": {"min_prompts": prompts}}
    return PipelineConfig.model_validate_json(json.dumps(tree | changes))


def data_of_run(config: PipelineConfig, folder: Path, key: str, seen: Any, **made: Any) -> Path:
    """Publish data and the artifact `sample` of a run, and return the folder of the latter.

    `seen` are arguments of `write_data_artifact`, `made` are sections of the configuration of the run.
    """
    store = ArtifactStore(Store(config.store_url), folder / "cache")
    tree = config.model_dump(mode="json", by_alias=True) | made
    write_data_artifact(folder / key, tokenizer=TOKENIZER, **seen)
    data = store.publish("data", key, folder / key, Provenance(config=tree))
    (folder / "out").mkdir()
    (folder / "out" / "best.jsonl").write_text("{}")
    provenance = Provenance({"data": data}, config=tree)
    return store.fetch(store.publish("sample", key, folder / "out", provenance))
