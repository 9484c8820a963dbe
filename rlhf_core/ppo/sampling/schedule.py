"""When the rollouts of each step are sampled: one interface, `Rollouts`, and three schedules.

    SynchronousRollouts  the engines wait for the weights of the step before   `ppo.staleness=0`
    RolloutsAhead        they sample while models score and train              `ppo.staleness`
    RolloutsKept         the same; requests stay alive during weight syncs     `ppo.weight_sync.keep_requests`

Only the first one gives the same bits in each run. Each schedule opens with its own contract.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from rlhf_core.cluster.rpc import Pending, RemoteActor
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import CorruptArtifact
from rlhf_core.ppo.fleet.engine_actor import EngineActor
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.fleet.prompt_queue import PromptQueue
from rlhf_core.ppo.sampling.rollout_cache import RolloutCache
from rlhf_core.ppo.sampling.rollouts import Collector, Sampling
from rlhf_core.ppo.training.batch import RolloutBatch
from rlhf_core.types import PromptExample

log = logging.getLogger(__name__)

_QUEUE = "the queue of prompts"


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
    instead of sampling again (`rollout_cache`). In other steps, an attempt that continues from the checkpoint
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


class RolloutsKept(Rollouts):
    """Rollouts whose requests stay alive during weight syncs (`ppo.weight_sync.keep_requests`).

    n = `ppo.staleness`, here 1:

        ranks    wait for batch k + 1 | score, train step k + 1   | sync of version k + 1 | wait for k + 2
        engines  the last responses of k + 1, then those of k + 2 | pause                 | the last of k + 2

    After the sync of version k, the batches up to k + n + 1 are open. The engines take prompts of the oldest
    batch that has any (`rlhf_core.ppo.fleet.prompt_queue`). Before the next sync they pause. Their requests
    stay and continue with the new weights. The first token of batch s is from version s - n - 1 or a later
    one, so a batch is at most n versions behind in its oldest token.

    What is sampled by which version depends on timing. A checkpoint has no rollouts: an attempt that
    continues samples the next step from the weights of the checkpoint.
    """

    def __init__(
        self, ppo: PPOConfig, fleet: Fleet, prompts: Sequence[PromptExample], collector: Collector
    ) -> None:
        super().__init__(ppo, fleet, prompts, collector)
        self._open: dict[int, Sampling] = {}
        """Samplings by step, ascending."""
        self._queue: RemoteActor[PromptQueue] | None = None
        self._engines: dict[int, RemoteActor[EngineActor]] = {}
        """Engines that have requests, by index."""
        self._sent: dict[int, set[int]] = {}
        """Steps whose prompts an engine has."""

    @property
    @override
    def is_unfinished(self) -> bool:
        """Whether the engines sample."""
        return any(sampling.calls for sampling in self._open.values())

    @override
    def take(self, step: int) -> RolloutBatch:
        """Let the engines sample, wait for the batch of `step`, and return it. They continue with later ones.

        Engines and policy have version `step` - 1.

        Raises:
            WeightSyncError: An engine sampled a token from a version that `ppo.staleness` does not allow.
        """
        version = step - 1
        if self._queue is None:
            self._queue = self._fleet.start_queue()
        engines = len(self._fleet.engines.serving)
        for each in range(step, min(version + 1 + self._ppo.staleness, self._ppo.steps) + 1):
            if each not in self._open:
                self._open[each] = sampling = self._collector.prepare(each, version)
                self._wait(self._queue.call(PromptQueue.open, each, len(sampling.prompts), engines))
        self._resume(self._queue)
        sampling = self._open[step]
        while True:
            self._receive(sampling)
            if len(sampling.done) == len(sampling.prompts):
                break
            serving = self._fleet.engines.serving
            assert len(serving) < len(self._engines), "engines that are not lost return all responses"
            # The others get what the lost engine had.
            self.finish()
            self._fleet.sync(version)
            self._resume(self._queue)
        del self._open[step]
        self._wait(self._queue.call(PromptQueue.close, step))
        return self._collector.batch_of(sampling, range(sampling.version, version + 1))

    @override
    def finish(self) -> None:
        """Let the engines pause, and wait for them. Their requests stay."""
        if not self.is_unfinished:
            return
        assert self._queue is not None, "the engines sample"
        self._wait(self._queue.call(PromptQueue.pause, True))
        for sampling in self._open.values():
            self._receive(sampling)

    def _resume(self, queue: RemoteActor[PromptQueue]) -> None:
        """Let the engines sample all open batches."""
        pool = self._fleet.engines
        serving = {index: pool.actor(index) for index in pool.serving}
        for index, actor in list(self._engines.items()):
            # An engine that was restarted is another actor.
            if serving.get(index) != actor:
                done = {step: self._numbers(sampling) for step, sampling in self._open.items()}
                self._wait(queue.call(PromptQueue.give_back, index, done))
                del self._sent[index]
        self._engines = serving
        self._wait(queue.call(PromptQueue.pause, False))
        for index, engine in serving.items():
            sent = self._sent.setdefault(index, set())
            for step, sampling in self._open.items():
                if step not in sent:
                    sent.add(step)
                    prompts = [sampling.prompts[i] for i in sampling.order]
                    seeds = [sampling.seeds[i] for i in sampling.order]
                    engine.call(EngineActor.open_batch, step, prompts, seeds, min(self._open))
            # One call after the other: each ends when its batch is finished.
            for step, sampling in self._open.items():
                parts = self._collector.parts(len(sampling.prompts), len(serving))
                sampling.calls[index], sampling.tokens[index] = engine.call_parts(
                    1 + parts, EngineActor.sample_kept, queue, step, parts, **self._collector.options
                )

    def _receive(self, sampling: Sampling) -> None:
        """Wait for the calls of the engines that are not lost."""
        serving = self._fleet.engines.serving
        sampling.calls = {index: call for index, call in sampling.calls.items() if index in serving}
        self._collector.receive(sampling)
        sampling.calls.clear()

    @staticmethod
    def _numbers(sampling: Sampling) -> set[int]:
        """Return the numbers in the queue of the prompts that are sampled."""
        done = sampling.done
        return {number for number, i in enumerate(sampling.order) if i in done}

    def _wait(self, call: Pending[None]) -> None:
        self._fleet.wait([call], _QUEUE)


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
    if ppo.weight_sync.keep_requests:
        return RolloutsKept(ppo, fleet, prompts, collector)
    return RolloutsAhead(ppo, fleet, prompts, collector)
