"""Engines take prompts while they sample others (`ppo.engine.dispatch=queue`).

    driver --open--> PromptQueue <--take-- engine 0
                                 <--take-- engine 1

Every engine has all prompts of a batch, in the same order, and the queue assigns them. An engine asks for as
many as it has room for. It gets at most an equal share of the batch at once, so that all engines sample the
same number of prompts if each has room for its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf_core.cluster.rpc import Actor, ParticipantSpec, rpc


class PromptQueue(Actor):
    """Gives each number of a batch to one engine."""

    def __init__(self, participant: ParticipantSpec) -> None:
        """Register the process."""
        super().__init__(participant)
        self._left: dict[int, Sequence[int]] = {}
        self._share: dict[int, int] = {}

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
