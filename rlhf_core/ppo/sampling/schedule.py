"""When the rollouts of each step are sampled: one interface, `Rollouts`, two schedules, and the rollouts in a
checkpoint (`StoredRollouts`).

    SynchronousRollouts  the engines wait for the weights of the step before   `ppo.staleness=0`
    RolloutsAhead        they sample while models score and train              `ppo.staleness`

Only the first one gives the same bits in each run. Each schedule opens with its own contract.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from typing_extensions import override

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import CorruptArtifact
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.sampling.rollouts import Collector, Sampling
from rlhf_core.ppo.training.batch import Places, RolloutBatch, RolloutColumns
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.types import PromptExample

log = logging.getLogger(__name__)


class StoredRollouts:
    """The rollouts of one step in a checkpoint.

        rollouts/chunk-00000.safetensors ...  tokens and log-probabilities as columns
        rollouts/batch-0.safetensors          lengths, places, prompts and seeds of the responses
        rollouts/batch-1.safetensors ...      the same for those that filtering has replaced
        rollouts/batch.json                   the step, and the rewards if known

    With `ppo.staleness` the next steps are already sampled when a checkpoint is written, with weights that it
    does not contain. The store verifies the files with those of the checkpoint.

    Args:
        folder: Folder of a checkpoint, or one below it.
        prompts: All prompts, in the same order in each attempt.
        fleet: Holds the chunks.
    """

    def __init__(self, folder: Path, prompts: Sequence[PromptExample], fleet: Fleet) -> None:
        self._folder = folder / "rollouts"
        self._prompts = prompts
        self._fleet = fleet

    def write(self, step: int, batch: RolloutBatch) -> None:
        """Store the batch of `step`. One chunk is in memory at a time."""
        self._folder.mkdir(parents=True)
        for number, pending in enumerate(batch.chunks):
            (columns,) = self._fleet.wait([pending], "rollouts")
            self._save(f"chunk-{number:05d}", vars(columns))
        parts = [batch, *batch.filtered]
        for number, part in enumerate(parts):
            rows = {
                "objects": part.places.objects,
                "rows": part.places.rows,
                "lengths": part.lengths_B,
                "finished": part.finished_B,
                "prompts": part.numbers_B,
                "seeds": part.seeds_B,
            }
            self._save(f"batch-{number}", rows)
        content = {
            "step": step,
            "chunks": len(batch.chunks),
            "rewards": [None if part.rewards is None else asdict(part.rewards) for part in parts],
            "replaced": batch.replaced,
            "scores_before": batch.scores_before,
            "version": batch.version,
        }
        # Last: `read` takes a folder without it for one without rollouts.
        (self._folder / "batch.json").write_text(json.dumps(content), encoding="utf-8")

    def _save(self, name: str, arrays: Mapping[str, Any]) -> None:
        # safetensors reads the memory of an array without its strides. `samples` becomes an array of one
        # element.
        whole = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        save_file(whole, self._folder / f"{name}.safetensors")

    def _load(self, name: str) -> dict[str, Any]:
        arrays: dict[str, Any] = load_file(self._folder / f"{name}.safetensors")
        return arrays

    def read(self, step: int) -> RolloutBatch | None:
        """Return the batch of `step`, or None if the checkpoint has none."""
        file = self._folder / "batch.json"
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if content.get("step") != step:
            return None
        chunks = []
        for number in range(content["chunks"]):
            arrays = self._load(f"chunk-{number:05d}")
            columns = RolloutColumns(**{**arrays, "samples": int(arrays["samples"][0])})
            # Into the object store, so that ranks get a restored chunk in the same way as a sampled one.
            chunks.append(self._fleet.put(columns))
        batches = []
        for number, rewards in enumerate(content["rewards"]):
            rows = self._load(f"batch-{number}")
            # Each once: a prompt is made anew when it is asked for.
            prompts = {i: self._prompts[i] for i in set(rows["prompts"].tolist())}
            batch = RolloutBatch(
                chunks,
                Places(rows["objects"], rows["rows"]),
                rows["lengths"],
                rows["finished"],
                [prompts[i] for i in rows["prompts"].tolist()],
                None if rewards is None else RewardBatch(**rewards),
                version=content["version"],
                seeds_B=rows["seeds"],
                numbers_B=rows["prompts"],
            )
            batches.append(batch)
        whole, *filtered = batches
        return replace(
            whole,
            filtered=filtered,
            replaced=content["replaced"],
            scores_before=content["scores_before"],
        )


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
    """Samples each step when it begins, with the weights of the step before."""

    @override
    def take(self, step: int) -> RolloutBatch:
        self._fleet.turns.sample()
        batch = self._collector.collect(step, step - 1)
        self._fleet.turns.train()
        return batch


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
        # One step beyond the next sync: its batch is sampled before the sync, so that no engine waits for it.
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
        # Only values of existing keys are replaced, which a dict allows during an iteration.
        for step, batch in self._batches.items():
            if isinstance(batch, Sampling):
                self._batches[step] = self._collector.finish(batch)

    # -- checkpoints --

    @override
    def save(self, folder: Path, completed: int) -> None:
        """Store all batches, which were waited for, in the checkpoint of step `completed`."""
        for step, batch in zip(self._batches, self.finished, strict=True):
            self._stored(folder, step - completed).write(step, batch)

    @override
    def restore(self, folder: Path, completed: int) -> None:
        """Read the batches of the checkpoint of step `completed`.

        Raises CorruptArtifact if a batch is missing.
        """
        every = self._ppo.sync_every
        # As in `start`: a checkpoint at a sync has one batch, one between two syncs those up to the batch
        # after the next.
        next_sync = math.ceil(completed / every) * every
        for step in range(completed + 1, min(next_sync + 1, self._ppo.steps) + 1):
            batch = self._stored(folder, step - completed).read(step)
            if batch is None:
                raise CorruptArtifact(
                    f"the checkpoint {folder} has no readable rollouts of step {step}, which"
                    f" ppo.staleness={self._ppo.staleness} needs; remove this checkpoint to continue from an"
                    " earlier one"
                )
            self._batches[step] = batch

    def _stored(self, folder: Path, number: int) -> StoredRollouts:
        """Return the place of the batch of the next step (`number` 1) or of a later one in a checkpoint."""
        folder = folder if number == 1 else folder / f"ahead-{number}"
        return StoredRollouts(folder, self._prompts, self._fleet)


def rollouts_of(
    ppo: PPOConfig, fleet: Fleet, prompts: Sequence[PromptExample], collector: Collector
) -> Rollouts:
    """Return the configured schedule. For the arguments, see `Rollouts`."""
    kind = RolloutsAhead if ppo.staleness else SynchronousRollouts
    return kind(ppo, fleet, prompts, collector)
