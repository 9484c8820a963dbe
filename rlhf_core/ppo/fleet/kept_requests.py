"""Requests of an engine that stay alive during weight syncs (`ppo.weight_sync.keep_requests`).

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Unpack

from rlhf_core.engines.vllm import Engine, SamplingOptions
from rlhf_core.ppo.fleet.prompt_queue import Given
from rlhf_core.types import PromptExample, Rollout

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
