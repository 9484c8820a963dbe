"""Rewards of PPO that read responses.

Rules look at one response at a time and have no state. If there is nothing else, each node of the stage has
an actor, which decodes and scores an equal part of the batch, so that no token reaches the controller:

    controller --lengths, prompts, model scores, references--> `RewardActor` on each node: decode, rules
    engines -----------------chunks (Ray objects)-------------------^                  |
    controller <-----------scores of each source, or the error-------------------------+

Functions, services and language models have a state (processes, connections, kept replies) and the tokens of
the stage's environment, which do not go through Ray. Their `RewardComposer` is in the controller, which then
fetches the responses. It would wait for another process of its host in the same way. If there are other
hosts, the actors decode the responses, and the controller gets the texts from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Concatenate, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhf_core.cluster.rpc import Actor, Pending, RemoteActor, as_argument, rpc
from rlhf_core.config.rewards import AnyReward, ExternalReward, ModelReward
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.sampling.rollouts import Composer, RewardInputs, decoded
from rlhf_core.ppo.training.batch import Indices, Places, RolloutColumns
from rlhf_core.rewards.compose import RewardBatch, RewardComposer, reward_input, weighted_sum
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.types import Numbers, PromptExample

_T = TypeVar("_T")

_CHUNKS = 64
"""Chunks that one call brings. More would fill the object store of the actor's node."""


@dataclass(frozen=True)
class RewardSettings:
    """How the composer is made. See `RewardComposer` for the fields."""

    sources: tuple[AnyReward, ...]
    decode: Callable[[Sequence[int]], str]
    """Converts token ids of a response to text."""
    digests: Mapping[str, str] = field(default_factory=dict)
    score_clip: float | None = None
    replies: Path | None = None
    threads: int = 0
    """Limit of the threads that decode; 0: the cores of the actor's host."""

    def new_composer(self) -> RewardComposer:
        """Start the sources, and return their composer, which the caller closes."""
        return RewardComposer(self.sources, self.digests, score_clip=self.score_clip, replies=self.replies)


@dataclass(frozen=True)
class ResponseRows:
    """Some responses of a batch."""

    places: Places
    """(n,) in the chunks that come with it."""
    finished: NDArray[np.bool_]
    prompts: list[PromptExample]
    model_scores: list[float] | None
    """(n,) or None; see `RewardComposer.score`."""

    def responses(self, chunks: Sequence[RolloutColumns]) -> list[Numbers[int]]:
        """Return the token ids of each response."""
        return [Numbers(chunks[number].response(row)) for number, row in self.places]


class RewardActor(Actor):
    """Decodes responses and scores them with rules."""

    @rpc("start")
    def open(self, settings: RewardSettings) -> None:
        """Take the settings."""
        self._settings = settings
        self._composer = settings.new_composer()

    @rpc()
    def score(self, part: ResponseRows, *chunks: RolloutColumns) -> RewardBatch:
        """Return the scores of some responses. Only the values of each source are final: a source may be
        normalized over the whole batch.
        """
        heartbeat("score", math.inf)  # each rule has a time limit of its own
        responses = part.responses(chunks)
        texts = decoded(responses, self._settings.decode, self._settings.threads)
        inputs = list(map(reward_input, part.prompts, responses, part.finished.tolist(), texts))
        return self._composer.score(inputs, part.model_scores)

    @rpc()
    def texts(self, part: ResponseRows, *chunks: RolloutColumns) -> list[str]:
        """Return the texts of some responses."""
        heartbeat("decode", math.inf)
        return decoded(part.responses(chunks), self._settings.decode, self._settings.threads)


class RewardActors:
    """Scores batches with rules as `RewardComposer` does, without their tokens. Starts the actors, which end
    with the fleet.

    Args:
        fleet: Started; it has the rollouts.
        settings: Settings of the composers.
    """

    def __init__(self, fleet: Fleet, settings: RewardSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._actors: list[RemoteActor[RewardActor]] = [
            fleet.start_helper(RewardActor, f"rewards {number}", node)
            for number, node in enumerate(fleet.nodes)
        ]
        opening = [actor.call(RewardActor.open, settings) for actor in self._actors]
        fleet.wait(opening, "the reward sources")

    def score(self, batch: RewardInputs, model_scores: Sequence[float] | None) -> RewardBatch:
        """See `RewardComposer.score`. Raises WorkerDied if an actor has died."""
        by_source: dict[str, list[float]] = {}
        for source in self._settings.sources:
            # NaN, so that a row without a value would be masked and not count as 0.
            by_source[source.used_name] = [math.nan] * len(batch)
        for rows, result in self._results(batch, model_scores, RewardActor.score):
            for name, values in result.by_source.items():
                for row, value in zip(rows, values, strict=True):
                    by_source[name][row] = value
        return RewardBatch(self.total(by_source, len(batch)), by_source)

    def texts(self, batch: RewardInputs) -> list[str]:
        """Return the text of each response. Raises WorkerDied if an actor has died."""
        texts = [""] * len(batch)
        for rows, found in self._results(batch, None, RewardActor.texts):
            for row, text in zip(rows, found, strict=True):
                texts[row] = text
        return texts

    def _results(
        self,
        batch: RewardInputs,
        model_scores: Sequence[float] | None,
        method: Callable[Concatenate[RewardActor, ResponseRows, ...], _T],
    ) -> Iterator[tuple[list[int], _T]]:
        """Yield some responses, and what a method of an actor returns for them."""
        calls: list[Pending[_T]] = []
        rows_of_calls: list[list[int]] = []
        of_actors = np.array_split(np.arange(len(batch)), len(self._actors))
        for actor, rows_of_actor in zip(self._actors, of_actors, strict=True):
            for rows, part, chunks in _parts(batch, rows_of_actor, model_scores):
                calls.append(actor.call(method, part, *map(as_argument, chunks)))
                rows_of_calls.append(rows)
        yield from zip(rows_of_calls, self._fleet.wait(calls, "the rewards"), strict=True)

    def total(self, by_source: Mapping[str, Sequence[float]], count: int) -> list[float]:
        """See `RewardComposer.total`."""
        return weighted_sum(self._settings.sources, by_source, count, self._settings.score_clip)


class DecodedElsewhere:
    """Scores batches with a composer of this process, whose texts are decoded on all nodes.

    Args:
        actors: Decode.
        composer: Asks functions, services and language models.
    """

    def __init__(self, actors: RewardActors, composer: RewardComposer) -> None:
        self._actors, self.composer = actors, composer
        self.total = composer.total

    def score(self, batch: RewardInputs, model_scores: Sequence[float] | None) -> RewardBatch:
        """See `RewardComposer.score`. Raises WorkerDied if an actor has died."""
        batch.texts = self._actors.texts(batch)
        return self.composer.score(batch, model_scores)


def _parts(
    batch: RewardInputs, rows: Indices, model_scores: Sequence[float] | None
) -> Iterator[tuple[list[int], ResponseRows, list[Pending[RolloutColumns]]]]:
    """Yield some of the responses `rows` of a batch, what an actor gets of them, and their chunks."""
    rollouts = batch.batch
    objects = rollouts.places.objects[rows]
    used = np.unique(objects)
    for start in range(0, len(used), _CHUNKS):
        chunks = used[start : start + _CHUNKS]
        chosen = np.flatnonzero(np.isin(objects, chunks))
        indices = rows[chosen]
        numbers: list[int] = indices.tolist()
        part = ResponseRows(
            Places(np.searchsorted(chunks, objects[chosen]), rollouts.places.rows[indices]),
            rollouts.finished_B[indices],
            [rollouts.prompts[number] for number in numbers],
            None if model_scores is None else [model_scores[number] for number in numbers],
        )
        yield numbers, part, [rollouts.chunks[chunk] for chunk in chunks.tolist()]


@contextmanager
def open_rewards(settings: RewardSettings) -> Iterator[Callable[[Fleet], Composer]]:
    """Yield a function that returns what scores the batches of PPO, for a fleet that has started. Processes
    and connections of this host end with this context.

    Raises ConfigError if a source cannot be used, before a fleet is needed.
    """
    reads_responses = any(not isinstance(source, ModelReward) for source in settings.sources)
    if reads_responses and not any(isinstance(source, ExternalReward) for source in settings.sources):
        yield lambda fleet: RewardActors(fleet, settings)
        return
    with settings.new_composer() as composer:

        def of_fleet(fleet: Fleet) -> Composer:
            if not reads_responses or len(fleet.nodes) < 2:
                return composer
            # Without sources: those have a state and secrets of this process, and the actors only decode.
            return DecodedElsewhere(RewardActors(fleet, replace(settings, sources=())), composer)

        yield of_fleet
