"""Engines take prompts while they sample others (`ppo.engine.dispatch=queue`).

    driver --open--> PromptQueue <--take-- engine 0
                                 <--take-- engine 1

Every engine has all prompts of a batch, in the same order, and the queue assigns them. An engine asks for as
many as it has room for. It gets at most an equal share of the batch at once, so that all engines sample the
same number of prompts if each has room for its share.

With `ppo.weight_sync.keep_requests`, the requests of an engine stay alive during weight syncs:

    sample_kept(step k + 1)  decode, take prompts, ... until all of k + 1 is finished, and return it
    sample_kept(step k + 2)  decode, take prompts, ... until the queue says pause. Return what is finished of
                             k + 2. The other requests stay in the engine
    weight sync
    sample_kept(step k + 2)  decode, ... and return the rest, of which new weights have sampled a part

An engine with room takes prompts of the oldest step that has any. So it samples step k + 2 while the last
responses of step k + 1 are not finished.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Unpack

from rlhf_core.cluster.rpc import Actor, ParticipantSpec, rpc
from rlhf_core.engines.vllm import Engine, SamplingOptions
from rlhf_core.types import PromptExample, Rollout


@dataclass(frozen=True)
class Given:
    """What an engine gets with `ppo.weight_sync.keep_requests`."""

    paused: bool
    """Whether the engine has to stop for a weight sync."""
    numbers: Sequence[tuple[int, int]]
    """Batch and number in the batch of each prompt that it may sample."""
    left: Collection[int]
    """Batches that have more prompts."""


class PromptQueue(Actor):
    """Gives each number of a batch to one engine."""

    def __init__(self, participant: ParticipantSpec) -> None:
        """Register the process."""
        super().__init__(participant)
        self._left: dict[int, Sequence[int]] = {}
        self._share: dict[int, int] = {}
        self._given: dict[int, list[tuple[int, int]]] = {}
        """What `give` has returned, by engine."""
        self._paused = False

    @rpc()
    def open(self, batch: int, prompts: int, engines: int) -> None:
        """Begin a batch."""
        self._left[batch] = range(prompts)
        self._share[batch] = math.ceil(prompts / engines)

    @rpc()
    def take(self, batch: int, most: int) -> Sequence[int]:
        """Return the next numbers of a batch, at most `most`; none if all are taken."""
        left = self._left[batch]
        count = min(most, self._share[batch])
        self._left[batch] = left[count:]
        return left[:count]

    # -- several batches, whose requests are kept during weight syncs --

    @rpc()
    def give(self, engine: int, most: int) -> Given:
        """Return the next numbers of all batches, the oldest batch first, at most `most`; none during a
        pause.
        """
        numbers: list[tuple[int, int]] = []
        open_batches = [] if self._paused else sorted(self._left)
        for batch in open_batches:
            left = self._left[batch]
            count = min(most - len(numbers), self._share[batch])
            self._left[batch] = left[count:]
            numbers += [(batch, number) for number in left[:count]]
        self._given.setdefault(engine, []).extend(numbers)
        return Given(self._paused, numbers, [batch for batch, left in self._left.items() if left])

    @rpc()
    def pause(self, paused: bool) -> None:
        """Stop the engines at their next `give`, or let them go on."""
        self._paused = paused

    @rpc()
    def give_back(self, engine: int, done: Mapping[int, Collection[int]]) -> None:
        """Give again what a lost engine got. `done` has the numbers of each batch that are sampled."""
        for batch, number in self._given.pop(engine, ()):
            if batch in self._left and number not in done[batch]:
                self._left[batch] = sorted([*self._left[batch], number])

    @rpc()
    def close(self, batch: int) -> None:
        """Forget a batch, all of which is sampled."""
        del self._left[batch], self._share[batch]
        for engine, given in self._given.items():
            self._given[engine] = [(other, number) for other, number in given if other != batch]


ASK_SECONDS = 0.05
"""Time between questions to the queue. An engine pauses at most this long, and one decoding step, after the
queue was paused.
"""


@dataclass
class OpenBatch:
    """Prompts of a step that an engine may sample."""

    prompts: Sequence[PromptExample]
    seeds: Sequence[int]
    running: set[int] = field(default_factory=set)
    """Numbers of prompts that this engine has taken and not finished."""
    finished: dict[int, list[Rollout]] = field(default_factory=dict)
    """Responses that were not returned yet, by number of the prompt."""


class KeptRequests:
    """Samples the batches that are open.

    Args:
        engine: Samples the responses.
        most: Sequences that the engine decodes at once.
        ask_seconds: Time between questions to the queue.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        most: int,
        ask_seconds: float = ASK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._most = most
        self._ask_seconds = ask_seconds
        self._clock = clock
        self._open: dict[int, OpenBatch] = {}
        self._requests: dict[str, tuple[int, int]] = {}
        """Batch and number of each request."""

    def open(self, batch: int, prompts: Sequence[PromptExample], seeds: Sequence[int], oldest: int) -> None:
        """Hold the prompts of a batch. Batches before `oldest` are forgotten."""
        self._open = {number: other for number, other in self._open.items() if number >= oldest}
        self._open[batch] = OpenBatch(prompts, seeds)

    def sample(
        self, batch: int, give: Callable[[int], Given], **options: Unpack[SamplingOptions]
    ) -> dict[int, list[Rollout]]:
        """Sample until all prompts of a batch are taken and those of this engine are finished, or until a
        pause. Return the responses by number of the prompt that were not returned before.

        Args:
            batch: Number of the batch.
            give: `give(most)` asks the queue for at most `most` prompts.
            options: See `SamplingOptions`.
        """
        ask_at, left = -math.inf, True
        while True:
            alive = self._engine.kept
            # One prompt at a time if its samples alone are more than the engine decodes at once.
            room = max(self._most // options["n"] - alive, 0 if alive else 1)
            if (left and room) or self._clock() >= ask_at:
                given = give(room)
                ask_at, left = self._clock() + self._ask_seconds, bool(given.left)
                if given.paused:
                    break
                self._begin(given.numbers, options)
            if not self._open[batch].running and batch not in given.left:
                break
            self._collect()
        finished, self._open[batch].finished = self._open[batch].finished, {}
        return finished

    def _begin(self, numbers: Sequence[tuple[int, int]], options: SamplingOptions) -> None:
        if not numbers:
            return
        taken = [(self._open[batch], number) for batch, number in numbers]
        names = self._engine.begin(
            [(batch.prompts[number], batch.seeds[number]) for batch, number in taken], **options
        )
        for name, place, (batch, number) in zip(names, numbers, taken, strict=True):
            self._requests[name] = place
            batch.running.add(number)

    def _collect(self) -> None:
        """Make a step, and store what is finished."""
        for name, rollouts in self._engine.advance().items():
            batch, number = self._requests.pop(name)
            self._open[batch].running.remove(number)
            self._open[batch].finished[number] = rollouts
