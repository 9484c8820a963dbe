"""Rewards that read responses: rules, Python functions, services and language models, in other processes.

    controller --lengths, prompts, model scores, references--> `RewardActor`: decode, `RewardComposer`
    engines -----------------chunks (Ray objects)-------------------^                      |
    controller <-----------scores of each source, warnings, or the error-------------------+

The composer of sources that have a state (connections, processes, kept replies) has one owner, an actor on
the driver's node, which scores whole batches as `RewardComposer` in one process would. Rules look at one
response at a time. If there is nothing else, each node of the stage has an actor, and each actor scores an
equal part of the batch. A batch that fails for several reasons may then be reported with another one.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rlhf_core.cluster.rpc import Actor, ParticipantSpec, Pending, as_argument, rpc
from rlhf_core.config.redact import LOG_FORMAT, ScrubbingFormatter
from rlhf_core.config.rewards import AnyReward, ExternalReward, ModelReward
from rlhf_core.errors import InfrastructureError, RLHFError, classified
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.sampling.rollouts import RewardInputs
from rlhf_core.ppo.training.batch import Indices, Places, RolloutColumns
from rlhf_core.rewards.compose import RewardBatch, RewardComposer, reward_input, weighted_sum
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.system.machine import machine
from rlhf_core.system.relayed_logs import relay
from rlhf_core.types import PromptExample, RewardInput

_CHUNKS = 64
"""Chunks that one call brings. More would fill the object store of the actor's node."""
_DECODING_THREADS = 8
"""Largest number of threads that decode. More would not help: a tenth of the work on a response holds the
lock of Python.
"""
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class RewardSettings:
    """How an actor makes its composer. See `RewardComposer` for the fields."""

    sources: tuple[AnyReward, ...]
    decode: Callable[[Sequence[int]], str]
    """Converts token ids of a response to text."""
    digests: Mapping[str, str] = field(default_factory=dict)
    score_clip: float | None = None
    replies: Path | None = None
    threads: int = 0
    """Limit of the threads that decode; 0: the cores of the actor's host."""


@dataclass(frozen=True)
class ResponseRows:
    """Some responses of a batch."""

    batch: int
    """`RolloutBatch.number`."""
    rows: Indices
    """(n,) position of each response in the part of the batch that this actor scores."""
    places: Places
    """(n,) in the chunks that come with it."""
    finished: NDArray[np.bool_]
    prompts: list[PromptExample]


@dataclass(frozen=True)
class Scored:
    """Result of an actor for its part of a batch."""

    rewards: RewardBatch | None
    """The scores; None after an error."""
    error: RLHFError | None
    """Its note is the traceback, because pickling loses causes."""
    records: list[logging.LogRecord]
    """Records of the log."""


# -- in the actor --


class RewardActor(Actor):
    """Decodes responses and scores them."""

    def __init__(self, participant: ParticipantSpec) -> None:
        """Register the process."""
        super().__init__(participant)
        self._batch: int | None = None
        self._inputs: dict[int, RewardInput] = {}

    @rpc("start")
    def open(self, settings: RewardSettings, process: str | None) -> None:
        """Create the sources.

        Args:
            settings: Settings of the composer.
            process: File of `shared_process_settings`, which this process takes over; None: it does not.

        Raises:
            ConfigError: A source cannot be used.
        """
        # A function that is loaded, or a service that is asked, has a time limit of its own.
        heartbeat("open the rewards", math.inf)
        if process is not None:
            _take_over(Path(process))
        self._decode = settings.decode
        self._threads = settings.threads
        self._composer = RewardComposer(
            settings.sources, settings.digests, score_clip=settings.score_clip, replies=settings.replies
        )

    @rpc()
    def read(self, part: ResponseRows, *chunks: RolloutColumns) -> None:
        """Decode responses. `score` uses them."""
        if part.batch != self._batch:
            self._batch, self._inputs = part.batch, {}
        columns = zip(part.rows.tolist(), part.places, part.finished.tolist(), part.prompts, strict=True)

        def decoded(column: tuple[int, tuple[int, int], bool, PromptExample]) -> tuple[int, RewardInput]:
            row, (number, place), finished, prompt = column
            response_ids = chunks[number].response(place).tolist()
            return row, reward_input(prompt, response_ids, finished, self._decode)

        with ThreadPoolExecutor(min(_DECODING_THREADS, self._threads or machine().cores())) as threads:
            self._inputs.update(threads.map(decoded, columns))

    @rpc()
    def score(self, batch: int, count: int, model_scores: Sequence[float] | None) -> Scored:
        """Return the scores of the responses that were read, in the order of their rows.

        Args:
            batch: `RolloutBatch.number`.
            count: Number of these responses.
            model_scores: (count,) or None; see `RewardComposer.score`.

        Raises:
            InfrastructureError: Other responses were read, because a call of `read` failed.
        """
        heartbeat("score", math.inf)
        read = self._inputs if batch == self._batch else {}
        self._batch, self._inputs = None, {}
        if len(read) != count:
            raise InfrastructureError(f"{len(read)} of {count} responses of batch {batch} were read")
        inputs = [read[row] for row in range(count)]
        with _records() as records:
            try:
                rewards = self._composer.score(inputs, model_scores)
                return Scored(rewards, None, list(records.queue))
            except Exception as error:
                found = classified(error, f"{self.participant.name}, score")
                found.add_note("".join(traceback.format_exception(error)).rstrip())
                return Scored(None, found, list(records.queue))

    @rpc()
    def close(self) -> None:
        """End processes and connections of the sources."""
        self._composer.close()


@contextmanager
def _records() -> Iterator[Queue[logging.LogRecord]]:
    """Yield what the reward sources log, in a form that can be pickled.

    It also goes to stderr, which Ray shows at once: a call with many retries takes long, and its actor may
    die. The controller writes it there again only after an error.
    """
    logger = logging.getLogger("rlhf_core.rewards")
    records: Queue[logging.LogRecord] = Queue()
    recorder = logging.handlers.QueueHandler(records)
    # An actor has no other handler, and Python's handler of last resort is not used besides the recorder.
    shown = logging.StreamHandler()
    shown.setFormatter(ScrubbingFormatter(LOG_FORMAT))
    handlers = [recorder, shown]
    propagate, level = logger.propagate, logger.level
    for handler in handlers:
        logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)


# -- what the process of a source inherits --


@contextmanager
def shared_process_settings(folder: Path | None = None) -> Iterator[str]:
    """Yield a file with the environment, the search path and the working folder of this process.

    Only this user can read it. It has the tokens of services, which must not go through Ray. The process that
    takes the settings over removes it. It is in `folder`, by default in that of temporary files.
    """
    descriptor, name = tempfile.mkstemp(prefix="rlhf-rewards-", dir=folder)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({"environment": dict(os.environ), "path": sys.path, "folder": os.getcwd()}, file)
        yield name
    finally:
        Path(name).unlink(missing_ok=True)


def _take_over(file: Path) -> None:
    """Give this process, and those that it will start, the settings of the process that wrote the file.

    It is removed at once: if this or the other process is killed, nothing else removes it.
    """
    text = file.read_text()
    file.unlink()
    settings = json.loads(text)
    own = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    os.environ.clear()
    os.environ.update(settings["environment"] | own)
    sys.path[:] = settings["path"]
    os.chdir(settings["folder"])


# -- in the controller --


class RewardActors:
    """Scores batches as `RewardComposer` does, without their tokens. Starts the actors; `close` it.

    Args:
        fleet: Started; it has the rollouts.
        settings: Settings of the composers.
        scratch: Folder of the attempt, for `shared_process_settings`.

    Raises:
        ConfigError: A source cannot be used.
    """

    def __init__(self, fleet: Fleet, settings: RewardSettings, scratch: Path | None = None) -> None:
        self._fleet = fleet
        self._settings = settings
        if any(isinstance(source, ExternalReward) for source in settings.sources):
            self._actors = [fleet.start_helper(RewardActor, "rewards 0")]
            with shared_process_settings(scratch) as process:
                self._open(process)
        else:
            self._actors = [
                fleet.start_helper(RewardActor, f"rewards {number}", node)
                for number, node in enumerate(fleet.nodes)
            ]
            self._open(None)

    def _open(self, process: str | None) -> None:
        calls = [actor.call(RewardActor.open, self._settings, process) for actor in self._actors]
        self._fleet.wait(calls, "the reward sources")

    def score(self, batch: RewardInputs, model_scores: Sequence[float] | None) -> RewardBatch:
        """See `RewardComposer.score`. Raises WorkerDied if an actor has died."""
        reading: list[Pending[None]] = []
        scoring: list[Pending[Scored]] = []
        for actor, rows in zip(
            self._actors, np.array_split(np.arange(len(batch)), len(self._actors)), strict=True
        ):
            for part, chunks in _parts(batch, rows):
                arguments = [as_argument(chunk) for chunk in chunks]
                reading.append(actor.call(RewardActor.read, part, *arguments))
            own = None if model_scores is None else [model_scores[row] for row in rows.tolist()]
            scoring.append(actor.call(RewardActor.score, batch.batch.number, len(rows), own))
        self._fleet.wait(reading, "the responses to be decoded")
        results = self._fleet.wait(scoring, "the rewards")
        # After an error, Ray may end before it has shown the last lines of its actors.
        shown = all(result.error is None for result in results)
        for result in results:
            relay(result.records, shown=shown)
        for result in results:
            if result.error is not None:
                raise result.error
        return self._joined([result.rewards for result in results if result.rewards is not None], len(batch))

    def _joined(self, parts: Sequence[RewardBatch], count: int) -> RewardBatch:
        if len(parts) == 1:
            return parts[0]
        by_source = {
            name: [value for part in parts for value in part.by_source[name]] for name in parts[0].by_source
        }
        return RewardBatch(self.total(by_source, count), by_source)

    def total(self, by_source: Mapping[str, Sequence[float]], count: int) -> list[float]:
        """See `RewardComposer.total`."""
        return weighted_sum(self._settings.sources, by_source, count, self._settings.score_clip)

    def close(self, *, wait: bool = True) -> None:
        """End what the sources have started. The processes of the actors end with the fleet.

        Args:
            wait: Whether to wait until it has ended, for at most 10 s.
        """
        # An actor that has died, or that still scores, ends with the fleet. Errors of Ray's calls have no
        # common class, and would hide the error of the stage.
        with suppress(Exception):
            closing = [actor.call(RewardActor.close) for actor in self._actors]
            if wait:
                self._fleet.fetch(closing, _CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None = None, *_rest: object) -> None:
        # After an error, an actor may still score.
        self.close(wait=error is None)


def _parts(
    batch: RewardInputs, rows: Indices
) -> Iterator[tuple[ResponseRows, list[Pending[RolloutColumns]]]]:
    """Yield the responses `rows` of a batch, a few chunks at a time, and these chunks."""
    rollouts = batch.batch
    objects = rollouts.places.objects[rows]
    used = np.unique(objects)
    for start in range(0, len(used), _CHUNKS):
        chunks = used[start : start + _CHUNKS]
        chosen = np.flatnonzero(np.isin(objects, chunks))
        indices = rows[chosen]
        places = Places(np.searchsorted(chunks, objects[chosen]), rollouts.places.rows[indices])
        prompts = [rollouts.prompts[index] for index in indices.tolist()]
        yield (
            ResponseRows(rollouts.number, chosen, places, rollouts.finished_B[indices], prompts),
            [rollouts.chunks[chunk] for chunk in chunks.tolist()],
        )


def open_rewards(
    fleet: Fleet, settings: RewardSettings, scratch: Path | None = None
) -> RewardActors | RewardComposer:
    """Return what scores the batches of PPO: actors, or the composer of this process if no source reads
    responses. For the arguments, see `RewardActors`.
    """
    if all(isinstance(source, ModelReward) for source in settings.sources):
        return RewardComposer(settings.sources, settings.digests, score_clip=settings.score_clip)
    return RewardActors(fleet, settings, scratch)
