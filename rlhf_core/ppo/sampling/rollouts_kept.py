"""Rollouts whose requests stay alive during weight syncs (`ppo.weight_sync.keep_requests`).

n = `ppo.staleness`, here 1:

    ranks    wait for batch k + 1 | score and train step k + 1 | sync of version k + 1 | wait for batch k + 2
    engines  the last responses of k + 1, then those of k + 2  | pause                 | the last of k + 2

After the sync of version k, the batches up to k + n + 1 are open. The engines take prompts of the oldest
batch that has any (`rlhf_core.ppo.fleet.kept_requests`). Before the next sync they pause. Their requests stay
and continue with the new weights. The first token of batch s is from version s - n - 1 or a later one, so a
batch is at most n versions behind in its oldest token.

What is sampled by which version depends on timing. A checkpoint has no rollouts: an attempt that continues
samples the next step from the weights of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_core.cluster.rpc import Pending, RemoteActor
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo.fleet.engine_actor import EngineActor
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.fleet.prompt_queue import PromptQueue
from rlhf_core.ppo.sampling.rollouts import Collector, Sampling
from rlhf_core.ppo.sampling.rollouts_ahead import RolloutsAhead
from rlhf_core.ppo.training.batch import RolloutBatch
from rlhf_core.system.overriding import override
from rlhf_core.types import PromptExample

_QUEUE = "the queue of prompts"


class RolloutsKept(RolloutsAhead):
    """The batches of the next steps. Arguments as for `RolloutsAhead`."""

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
    def start(self, completed: int) -> None:
        """Do nothing: `take` has let the engines sample the next steps."""

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

    @override
    def save(self, folder: Path, completed: int) -> None:
        """Do nothing: a checkpoint has no rollouts."""

    @override
    def restore(self, folder: Path, completed: int) -> None:
        """Do nothing."""

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
