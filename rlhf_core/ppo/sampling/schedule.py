"""When the rollouts of each step are sampled: one interface, `Rollouts`, two schedules, and the files of
rollouts that outlive an attempt (`RolloutCache`).

    SynchronousRollouts  the engines wait for the weights of the step before   `ppo.staleness=0`
    RolloutsAhead        they sample while models score and train              `ppo.staleness`

Only the first one gives the same bits in each run. Each schedule opens with its own contract.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save
from typing_extensions import override

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import CorruptArtifact
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.sampling.rollouts import Collector, Sampling
from rlhf_core.ppo.training.batch import Places, RolloutBatch, RolloutColumns
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.types import PromptExample

log = logging.getLogger(__name__)


class RolloutCache:
    """The rollouts of one step in local files, for an attempt that is interrupted during this step.

        rollouts/chunk-00000.safetensors ...  tokens and log-probabilities as columns
        rollouts/batch.safetensors            lengths, places and prompts of the responses
        rollouts/manifest.json                sha256 of itself and these files, and the rewards if known

    The next attempt continues from the checkpoint with the weights that sampled the rollouts, and uses them
    instead of sampling again, which on GPUs would not give the same tokens. Only the step after a checkpoint
    can be repeated in this way, so the folder has one step. It is renamed when it is complete.

    With `ppo.staleness` the folder is part of each checkpoint: the next step is already sampled, with weights
    that no longer exist.

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


class Rollouts:
    """Returns the rollouts of each step. A schedule that samples ahead adds to the other methods.

    Args:
        ppo: Section `ppo`.
        fleet: Holds the chunks.
        prompts: All prompts, in the same order in each attempt.
        collector: Samples the batches.
    """

    def __init__(
        self, ppo: PPOConfig, fleet: Fleet, prompts: Sequence[PromptExample], collector: Collector
    ) -> None:
        self._ppo = ppo
        self._fleet = fleet
        self._prompts = prompts
        self._collector = collector

    def take(self, step: int) -> RolloutBatch:
        """Wait for the batch of `step` and return it. The policy has version `step` - 1."""
        raise NotImplementedError

    @property
    def is_unfinished(self) -> bool:
        """Whether the engines sample for a later step."""
        return False

    @property
    def finished(self) -> list[RolloutBatch]:
        """The batches of later steps that were waited for, in the order of their steps."""
        return []

    def start(self, completed: int) -> None:
        """Let the engines sample for later steps while step `completed` + 1 is scored and trained."""

    def finish(self) -> None:
        """Wait until no engine samples, before a sync, an evaluation or a checkpoint."""

    def save(self, folder: Path, completed: int) -> None:
        """Store in the checkpoint of step `completed` what an attempt that continues from it needs."""

    def restore(self, folder: Path, completed: int) -> None:
        """Continue from the checkpoint of step `completed`."""


class SynchronousRollouts(Rollouts):
    """Samples each step when it begins, with the weights of the step before.

    The step after a checkpoint is also written to files: an attempt that is interrupted in it uses them
    instead of sampling again (`RolloutCache`). In other steps, an attempt that continues from the checkpoint
    has other weights.
    """

    def __init__(
        self,
        ppo: PPOConfig,
        fleet: Fleet,
        prompts: Sequence[PromptExample],
        collector: Collector,
        cache: RolloutCache,
    ) -> None:
        super().__init__(ppo, fleet, prompts, collector)
        self._cache = cache
        self.checkpointed = 0
        """Step of the last checkpoint."""

    @override
    def take(self, step: int) -> RolloutBatch:
        self._fleet.turns.sample()
        batch = self._read_or_collect(step)
        self._fleet.turns.train()
        return batch

    def _read_or_collect(self, step: int) -> RolloutBatch:
        follows_checkpoint = self.checkpointed == step - 1
        if follows_checkpoint:
            cached = self._cache.read(step)
            if cached is not None:
                log.info("step %d: using the %d rollouts that an earlier attempt sampled", step, len(cached))
                return cached
        batch = self._collector.collect(step, step - 1)
        if follows_checkpoint:
            self._cache.write(step, batch)
        return batch

    @override
    def save(self, folder: Path, completed: int) -> None:
        self.checkpointed = completed

    @override
    def restore(self, folder: Path, completed: int) -> None:
        self.checkpointed = completed


class RolloutsAhead(Rollouts):
    """Rollouts that the engines sample while models score and train (`ppo.staleness`).

    With n = `ppo.staleness`, the engines get new weights after every n-th step. Between two syncs they sample
    n batches, one directly after the other. k is a multiple of n:

        ranks    step k + 1 | step k + 2 | ... | step k + n            | sync of version k + n
        engines  batch k + 2 | batch k + 3 | ... | batch k + n + 1     |
                 all of them from version k

    The sync waits for both. Batch s > 1 is trained on by step s, so it is from version n * ((s - 2) // n) and
    1 to n versions behind. Within the n steps neither waits for the other, except a step for its own batch,
    and an engine that has finished its share of a batch begins with the next one.

    Consumes batches of `Collector`. Produces the batch of each step from the second on. Waits for the engines
    where a batch is needed: for its step, and all of them for a sync and a checkpoint, which contains them.
    """

    def __init__(
        self, ppo: PPOConfig, fleet: Fleet, prompts: Sequence[PromptExample], collector: Collector
    ) -> None:
        super().__init__(ppo, fleet, prompts, collector)
        self._batches: dict[int, Sampling | RolloutBatch] = {}
        """Samplings or finished batches by step, ascending."""

    @property
    @override
    def is_unfinished(self) -> bool:
        """Whether a batch was not waited for."""
        return any(isinstance(batch, Sampling) for batch in self._batches.values())

    @property
    @override
    def finished(self) -> list[RolloutBatch]:
        """The batches that were waited for, in the order of their steps."""
        return [batch for batch in self._batches.values() if isinstance(batch, RolloutBatch)]

    @override
    def start(self, completed: int) -> None:
        """After a sync of version `completed`, let the engines sample all batches up to the next sync."""
        if completed % self._ppo.sync_every:
            return
        last = min(completed + self._ppo.sync_every + 1, self._ppo.steps)
        for step in range(completed + 2, last + 1):
            self._batches[step] = self._collector.start(step, completed, ahead=True)

    @override
    def take(self, step: int) -> RolloutBatch:
        """Wait for the batch of `step` and remove it. If it was not sampled ahead, sample it now."""
        batch = self._batches.pop(step, None)
        if batch is None:
            return self._collector.collect(step, step - 1)
        return self._collector.finish(batch) if isinstance(batch, Sampling) else batch

    @override
    def finish(self) -> None:
        """Wait for all batches."""
        for step, batch in self._batches.items():
            if isinstance(batch, Sampling):
                self._batches[step] = self._collector.finish(batch)

    # -- checkpoints --

    @override
    def save(self, folder: Path, completed: int) -> None:
        """Store all batches, which were waited for, in the checkpoint of step `completed`."""
        for step, batch in zip(self._batches, self.finished, strict=True):
            self._cache(folder, step - completed).write(step, batch)

    @override
    def restore(self, folder: Path, completed: int) -> None:
        """Read the batches of the checkpoint of step `completed`.

        Raises:
            CorruptArtifact: A batch is missing or damaged.
        """
        every = self._ppo.sync_every
        next_sync = math.ceil(completed / every) * every
        for step in range(completed + 1, min(next_sync + 1, self._ppo.steps) + 1):
            batch = self._cache(folder, step - completed).read(step)
            if batch is None:
                raise CorruptArtifact(
                    f"the checkpoint {folder} has no readable rollouts of step {step}, which"
                    f" ppo.staleness={self._ppo.staleness} needs; remove this checkpoint to continue from an"
                    " earlier one"
                )
            self._batches[step] = batch

    def _cache(self, folder: Path, number: int) -> RolloutCache:
        """Return the place of the batch of the next step (`number` 1) or of a later one in a checkpoint."""
        folder = folder if number == 1 else folder / f"ahead-{number}"
        return RolloutCache(folder, self._prompts, self._fleet)


def rollouts_of(
    ppo: PPOConfig,
    fleet: Fleet,
    prompts: Sequence[PromptExample],
    collector: Collector,
    cache: RolloutCache,
) -> Rollouts:
    """Return the configured schedule.

    Args:
        ppo: Section `ppo`.
        fleet: Holds the chunks.
        prompts: All prompts, in the same order in each attempt.
        collector: Samples the batches.
        cache: Files that outlive an attempt.
    """
    if ppo.staleness == 0:
        return SynchronousRollouts(ppo, fleet, prompts, collector, cache)
    return RolloutsAhead(ppo, fleet, prompts, collector)
