"""The rollouts of the current step in local files, for an attempt that is interrupted during this step.

    rollouts/chunk-00000.safetensors ...  tokens and log-probabilities as columns
    rollouts/batch.safetensors            lengths, places and prompts of the responses
    rollouts/manifest.json                sha256 of itself and these files, and the rewards if they are known

The next attempt continues from the checkpoint with the weights that sampled the rollouts, and uses them
instead of sampling again, which on GPUs would not give the same tokens. Only the step after a checkpoint can
be repeated in this way, so the folder has one step. It is renamed when it is complete.

With `ppo.staleness` the folder is part of each checkpoint: the next step is already sampled, with weights
that no longer exist.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.training.batch import Places, RolloutBatch, RolloutColumns
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.types import PromptExample

log = logging.getLogger(__name__)


class RolloutCache:
    """Reads and writes the rollouts of one step.

    Args:
        folder: Local folder that outlives an attempt.
        prompts: All prompts, in the same order in each attempt.
        fleet: Holds the chunks.
    """

    def __init__(self, folder: Path, prompts: Sequence[PromptExample], fleet: Fleet) -> None:
        self._folder = folder / "rollouts"
        self._prompts = prompts
        # By identity: prompts with the same text have the same `prompt_id`, but may differ in `meta`.
        self._index = {id(prompt): i for i, prompt in enumerate(prompts)}
        self._fleet = fleet

    def write(self, step: int, batch: RolloutBatch) -> None:
        """Store the batch of `step` and remove the batch of any other step.

        One chunk is in memory at a time.
        """
        part = self._folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        digests = {}
        for number, pending in enumerate(batch.chunks):
            (columns,) = self._fleet.wait([pending], "rollouts")
            arrays = {field.name: getattr(columns, field.name) for field in fields(RolloutColumns)}
            name = f"chunk-{number:05d}.safetensors"
            digests[name] = _save(part / name, arrays)
        arrays = {
            "objects": batch.places.objects,
            "rows": batch.places.rows,
            "lengths": batch.lengths_B,
            "finished": batch.finished_B,
            "prompts": np.array([self._index[id(prompt)] for prompt in batch.prompts], np.int64),
        }
        digests["batch.safetensors"] = _save(part / "batch.safetensors", arrays)
        content = json.dumps(
            {
                "step": step,
                "files": digests,
                "rewards": None if batch.rewards is None else asdict(batch.rewards),
                "replaced": batch.replaced,
                "scores_before": batch.scores_before,
                "version": batch.version,
            }
        )
        checksum = hashlib.sha256(content.encode()).hexdigest()
        (part / "manifest.json").write_text(f"{checksum}\n{content}", encoding="utf-8")
        # A folder with files cannot be replaced. A kill between these two lines loses the cache, and the step
        # is sampled again.
        shutil.rmtree(self._folder, ignore_errors=True)
        part.replace(self._folder)

    def read(self, step: int) -> RolloutBatch | None:
        """Return the batch of `step`, or None if it is missing, damaged, or of another step."""
        if not self._folder.exists():
            return None
        manifest = self._manifest()
        if manifest is None:
            log.error("%s is damaged; step %d is sampled again", self._folder, step)
            return None
        if manifest["step"] != step:
            return None
        loaded: list[dict[str, Any]] = []
        for name, digest in manifest["files"].items():
            arrays = _load(self._folder / name, digest)
            if arrays is None:
                log.error("%s is damaged; step %d is sampled again", self._folder / name, step)
                return None
            loaded.append(arrays)
        # JSON keeps the order of `write`: the batch is last.
        *chunks, rows = loaded
        return RolloutBatch(
            [self._fleet.put(_columns(chunk)) for chunk in chunks],
            Places(rows["objects"], rows["rows"]),
            rows["lengths"],
            rows["finished"],
            [self._prompts[i] for i in rows["prompts"].tolist()],
            None if manifest["rewards"] is None else RewardBatch(**manifest["rewards"]),
            manifest["replaced"],
            manifest["scores_before"],
            from_cache=True,
            version=manifest["version"],
        )

    def _manifest(self) -> dict[str, Any] | None:
        try:
            checksum, content = (self._folder / "manifest.json").read_bytes().split(b"\n", 1)
        except (FileNotFoundError, ValueError):
            return None
        if hashlib.sha256(content).hexdigest().encode() != checksum:
            return None
        manifest: dict[str, Any] = json.loads(content)
        return manifest


def _columns(arrays: Mapping[str, Any]) -> RolloutColumns:
    return RolloutColumns(**{**arrays, "samples": int(arrays["samples"][0])})


def _save(file: Path, arrays: Mapping[str, Any]) -> str:
    """Write arrays to a file and return its sha256."""
    # safetensors reads the memory of an array without its strides. `samples` becomes an array of one element.
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    file.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _load(file: Path, digest: str) -> dict[str, Any] | None:
    """Return the arrays of a file, or None if it is missing or has another sha256."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    if hashlib.sha256(content).hexdigest() != digest:
        return None
    arrays: dict[str, Any] = load(content)
    return arrays
