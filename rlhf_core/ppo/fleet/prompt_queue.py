"""Engines take prompts while they sample others (`ppo.engine.dispatch=queue`).

    driver --open--> PromptQueue <--take-- engine 0
                                 <--take-- engine 1

Every engine has all prompts of a batch, in the same order, and the queue assigns them. An engine asks for as
many as it has room for. It gets at most an equal share of the batch at once, so that all engines sample the
same number of prompts if each has room for its share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.cluster.rpc import Actor, ParticipantSpec, rpc


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
