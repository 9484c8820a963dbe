"""Time of a PPO step with 1, 2, 4 and 8 engines and ranks of stated speeds, next to the ideal, and with
several values of `ppo.staleness`: `python -m tests.benchmarks.growth`.

The controller, its fleet, routes and plans are the real ones. Engines and ranks are scripted, and the clock
is virtual: a call starts when its actor is free and its arguments exist, and takes the stated time. A wait
moves the clock. The batch grows with the devices: an engine samples as many responses in every row.

engine      a decoding step costs a constant, and a part for each sequence that is being decoded
rank        scores and trains a number of tokens per second; the ranks of a group meet in the all-reduce of
            each optimizer step
sync        once per step, or with `ppo.staleness=n` in every n-th step, when engines and ranks are free

The ideal has equal lengths, equal devices, and no time for communication: the sum of sampling, scoring and
training, or with `ppo.staleness` the longer one of sampling and of the others. Not counted are the
controller's own time (`driver_scale.py`), prompts, rewards and transfers of rollouts.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from rlhf_core.cluster.rpc import Pending, RemoteActor
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.placement import PPOSettings, plan
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.ppo import controller as controller_module
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.fleet.fleet import Fleet, WorkerGroup
from rlhf_core.ppo.training.batch import ModelScores, RolloutHeader, SentShare
from rlhf_core.ppo.training.experience import ResponseSums
from rlhf_core.ppo.training.loss_step import OptimizerStep
from rlhf_core.ppo.training.rank_rows import Exchange, ExperienceInputs
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.types import PromptExample
from tests.support.scripted_fleet import ScriptedRank
from tests.support.small_ppo import local_context

SIZES = (1, 2, 4, 8)
STALENESS = (1, 2, 4, 8)
PROMPT, LONGEST, SAMPLES = 128, 1024, 8
RESPONSES = 256
"""Of each engine."""
STEPS = 6
"""Measured steps. One before them, and with staleness one after them, are not counted."""
MORE_STEPS = 48
"""The same for the comparison of staleness. `max(STALENESS)` steps before them are not counted, so that the
measured ones are the same for all and end with a sync.
"""


@dataclass(frozen=True)
class Speeds:
    """Speeds of one device, about those of a GPU with a model of 7B. Seconds, and tokens per second."""

    decode_step: float = 0.020
    decode_sequence: float = 0.00008
    """Duration of a decoding step, for each sequence."""
    scoring: float = 30_000.0
    training: float = 9_000.0
    all_reduce: float = 0.15
    """Duration for all gradients between very many ranks; between n ranks (n - 1) / n of it."""
    sync: float = 0.6


@dataclass(frozen=True)
class Scenario:
    """How long responses are, and how fast devices are."""

    name: str
    lognormal: bool = False
    slowest: float = 1.0
    """Speed of the first engine and of the first rank of each group."""
    longest: int = LONGEST
    """Limit of lognormal lengths."""
    stalls: float = 0.0
    """Probability that an engine takes twice the time for its share of a batch, and a rank for its training
    on a batch. Independent of each other.
    """


SCENARIOS = (
    Scenario("equal lengths"),
    Scenario("lognormal lengths", lognormal=True),
    Scenario("the same, one device of each group slow", lognormal=True, slowest=0.8),
)
VARYING = (
    Scenario("lognormal lengths", lognormal=True),
    Scenario("the same, one device of each group slow", lognormal=True, slowest=0.8),
    Scenario("lognormal lengths, stalls", lognormal=True, stalls=0.1),
    Scenario("lognormal lengths up to 4096", lognormal=True, longest=4096),
    Scenario("the same, stalls", lognormal=True, longest=4096, stalls=0.1),
)
"""Of the comparison of staleness."""


def lengths_of(seed: int, count: int, longest: int = LONGEST) -> np.ndarray[Any, Any]:
    """Return lognormal lengths with a median of 300 tokens, at most `longest`."""
    drawn = np.random.default_rng(seed & 0xFFFFFFFF).lognormal(np.log(300), 0.7, count)
    return np.clip(drawn, 1, longest).astype(np.int32)


def stall(scenario: Scenario, seed: int) -> float:
    """Return the factor of the time of one device and batch."""
    drawn = np.random.default_rng((seed & 0xFFFFFFFF, 1)).random()
    return 2.0 if drawn < scenario.stalls else 1.0


EQUAL = int(lengths_of(0, 100_000).mean())
"""The mean of the lognormal lengths."""


# -- virtual time --


@dataclass
class Clock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, pending: Sequence[Pending[Any]], _what: str = "") -> list[Any]:
        """Wait for scripted calls, as `Fleet.wait` does."""
        for call in pending:
            self.now = max(self.now, call.reference.when())
        return [call.reference.value for call in pending]


@dataclass(frozen=True)
class Result:
    """What a call returns, and when."""

    value: Any
    when: Callable[[], float]


@dataclass
class Meeting:
    """A call of all ranks of a group, who wait for each other after each optimizer step."""

    all_reduce: float
    starts: list[float] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    """Duration of each step, by rank."""

    def end(self) -> float:
        """Return when the last step ends."""
        steps: list[float] = [max(ranks) + self.all_reduce for ranks in zip(*self.seconds, strict=True)]
        return max(self.starts) + sum(steps)


class Handle:
    """An actor handle of Ray for a scripted device, whose methods return a value and their seconds."""

    def __init__(self, clock: Clock, device: Any) -> None:
        self._clock, self._device = clock, device
        self._free: Callable[[], float] = lambda: 0.0

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, parts: int = 0, **kwargs: Any) -> Any:
            values = [each.value if isinstance(each, Result) else each for each in args]
            arriving = [each.when() for each in args if isinstance(each, Result)]
            start = max([self._clock.now, self._free(), *arriving])
            value, seconds = getattr(self._device, name)(*values, **kwargs)
            if isinstance(seconds, Meeting):
                seconds.starts.append(start)
                self._free = seconds.end
            else:
                self._free = lambda: start + seconds
            free = self._free
            return [Result(each, free) for each in value] if parts else Result(value, free)

        def options(*, num_returns: int) -> Any:
            return SimpleNamespace(remote=lambda *args, **kwargs: remote(*args, parts=num_returns, **kwargs))

        return SimpleNamespace(remote=remote, options=options)


def decode_seconds(lengths: Sequence[int], room: int, speeds: Speeds) -> float:
    """Return how long an engine decodes these responses, at most `room` at a time, in this order."""
    waiting, running = list(reversed(lengths)), list[int]()
    step, seconds = 0, 0.0
    while waiting or running:
        while waiting and len(running) < room:
            heapq.heappush(running, step + waiting.pop())
        steps = running[0] - step
        seconds += steps * (speeds.decode_step + speeds.decode_sequence * len(running))
        step += steps
        while running and running[0] == step:
            heapq.heappop(running)
    return seconds


# -- scripted devices --


class Engine:
    def __init__(self, scenario: Scenario, speeds: Speeds, speed: float, room: int) -> None:
        self._scenario, self._speeds, self._speed, self._room = scenario, speeds, speed, room
        self.version = 0

    def sample(
        self, chunks: Sequence[Sequence[PromptExample]], *, n: int, seeds: Sequence[int], **_options: Any
    ) -> tuple[list[Any], float]:
        longest = self._scenario.longest
        if self._scenario.lognormal:
            lengths = [lengths_of(seed, n, longest) for seed in seeds]
        else:
            lengths = [np.full(n, EQUAL) for _ in seeds]
        parts, start = [], 0
        for chunk in chunks:
            parts.append(np.concatenate(lengths[start : start + len(chunk)]) + PROMPT)
            start += len(chunk)
        all_ = np.concatenate(lengths).astype(np.int32)
        header = RolloutHeader(all_, all_ < longest, np.full(len(all_), self.version))
        seconds = decode_seconds(all_.tolist(), self._room, self._speeds) / self._speed
        return [header, *parts], seconds * stall(self._scenario, seeds[0])


class Rank(ScriptedRank):
    """One rank of the roles of its group. Chunks are the numbers of tokens of their rows."""

    def __init__(
        self, scenario: Scenario, speeds: Speeds, speed: float, meeting: Callable[[str], Meeting], number: int
    ) -> None:
        super().__init__()
        self._scenario, self._speeds, self._speed, self._meeting = scenario, speeds, speed, meeting
        self._calls = 1000 * number
        """Seed of the next training."""

    def _score(self, share: SentShare | int, chunks: Sequence[Any]) -> float:
        batch = self.received(share, chunks)
        lengths: Any = batch.chunks
        tokens = sum(int(lengths[number][row]) for number, row in batch.share.places)
        return tokens / self._speeds.scoring / self._speed

    @override
    def logprobs(self, _role: str, _entropy: bool, share: SentShare | int, *chunks: Any) -> Any:
        return [None, None], self._score(share, chunks)

    @override
    def values(self, share: SentShare | int, *chunks: Any) -> Any:
        return [None, None], self._score(share, chunks)

    @override
    def scores(self, _role: str, share: SentShare | int, *chunks: Any) -> Any:
        seconds = self._score(share, chunks)
        assert self._batch is not None
        scores = np.random.default_rng(0).normal(size=len(self._batch.share.places)).tolist()
        return ModelScores(scores), seconds

    @override
    def make_experience(self, inputs: ExperienceInputs, *_objects: Any) -> Any:
        sums = dict.fromkeys(ResponseSums.__dataclass_fields__, np.ones(len(inputs.scores)))
        # Engines with other weights would end the step, and loops would be logged.
        sums |= dict.fromkeys(("gap", "repeating"), np.zeros(len(inputs.scores)))
        return [ResponseSums(**sums), None], 0.0

    def _train(self, name: str, exchange: Exchange, steps: Sequence[OptimizerStep]) -> Any:
        tokens = (exchange.prompt_lengths + exchange.lengths)[exchange.order]
        meeting = self._meeting(name)
        self._calls += 1
        factor = stall(self._scenario, self._calls)
        seconds = [
            factor
            * float(sum(tokens[indices].sum() for indices in step.micro_batches if indices))
            / self._speeds.training
            / self._speed
            for step in steps
        ]
        meeting.seconds.append(seconds)
        return {"loss": 1.0, "clipped": 0.0, "approx_kl": 0.0, "grad_norm": 1.0}, meeting

    @override
    def update_policy(
        self, exchange: Exchange, steps: Sequence[OptimizerStep], *_args: Any, **_kw: Any
    ) -> Any:
        return self._train("policy", exchange, steps)

    @override
    def update_critic(
        self, _inputs: Any, exchange: Exchange, steps: Sequence[OptimizerStep], *_args: Any
    ) -> Any:
        return self._train("critic", exchange, steps)


class Meetings:
    """The meetings of one group."""

    def __init__(self, ranks: int, all_reduce: float) -> None:
        self._ranks, self._all_reduce = ranks, all_reduce * (ranks - 1) / ranks
        self._open: dict[str, list[Meeting]] = {}

    def join(self, name: str) -> Meeting:
        """Return the meeting that a rank takes part in: the last one, or a new one if all are in that."""
        meetings = self._open.setdefault(name, [])
        if not meetings or len(meetings[-1].seconds) == self._ranks:
            meetings.append(Meeting(self._all_reduce))
        return meetings[-1]


class Engines:
    """The part of `EnginePool` that a step uses."""

    def __init__(self, clock: Clock, actors: Sequence[RemoteActor[Any]]) -> None:
        self.serving = list(range(len(actors)))
        self._clock, self._actors = clock, actors

    def actor(self, index: int) -> RemoteActor[Any]:
        return self._actors[index]

    def collect(self, pending: Mapping[int, Pending[Any]], _what: str) -> dict[int, Any]:
        return dict(zip(pending, self._clock.wait(list(pending.values())), strict=True))


# -- one row of the table --


def configuration(size: int, staleness: int, longest: int, measured: range) -> PipelineConfig:
    deepspeed = {"ranks": size, "zero_stage": 1}
    return config_from_tree(
        {
            "model": {"tiny": {"max_positions": 8192}},
            "run": {"device": "cpu"},
            "data": {"max_prompt_tokens": PROMPT},
            "ppo": {
                "steps": measured.stop + staleness,
                "staleness": staleness,
                "colocate": "pairs",
                "prompts_per_step": size * RESPONSES // SAMPLES,
                "samples_per_prompt": SAMPLES,
                "max_new_tokens": longest,
                "micro_batch_tokens": 16_384,
                "minibatches": 4,
                "critic_warmup_steps": 0,
                "guards": {"blind_critic": "off"},  # the values are not modelled
                "policy_deepspeed": deepspeed,
                "critic_deepspeed": deepspeed,
                "engine": {"count": size, "max_num_seqs": RESPONSES},
                # The responses to compare are not modelled.
                "weight_sync": {"canary": False},
                "rewards": [{"type": "model"}],
            },
        },
        "growth",
    )


def step_seconds(
    size: int,
    staleness: int,
    scenario: Scenario,
    speeds: Speeds = Speeds(),
    measured: range = range(1, 1 + STEPS),
) -> float:
    """Return the mean duration of a step.

    Args:
        size: Engines, ranks of policy and reference, and ranks of critic and reward model.
        staleness: `ppo.staleness`.
        scenario: Lengths and devices.
        speeds: Speeds of each device.
        measured: Numbers of the steps, from 0.
    """
    config = configuration(size, staleness, scenario.longest, measured)
    prompts = [PromptExample(f"p{i}", "", (1,) * PROMPT) for i in range(config.ppo.prompts_per_step)]
    clock = Clock()
    placement = plan(config.ppo)
    fleet: Any = Fleet(PPOSettings.of(config), "cpu", {}, 0)
    factors = [scenario.slowest] + [1.0] * (size - 1)
    for group in placement.groups:
        meetings = Meetings(group.ranks, speeds.all_reduce)
        first = 100 * len(fleet.groups)
        ranks = [
            Rank(scenario, speeds, factor, meetings.join, first + number)
            for number, factor in enumerate(factors)
        ]
        workers = tuple(RemoteActor[Any](Handle(clock, rank)) for rank in ranks)
        fleet.groups.update(dict.fromkeys(group.roles, WorkerGroup(group, workers)))
    engines = [Engine(scenario, speeds, factor, config.ppo.engine.max_num_seqs) for factor in factors]
    fleet.engines = Engines(clock, [RemoteActor(Handle(clock, engine)) for engine in engines])
    fleet.wait = clock.wait
    fleet.usage_by_group = lambda: None

    def sync(version: int) -> SyncReport:
        clock.now += speeds.sync
        for engine in engines:
            engine.version = version
        return SyncReport(version, 1, 1, speeds.sync)

    fleet.sync = sync
    with (
        tempfile.TemporaryDirectory() as folder,
        RewardComposer(config.ppo.rewards) as composer,
        mock.patch.object(controller_module, "time", clock),
    ):
        controller: Any = PPOController(fleet, prompts, str, composer, local_context(Path(folder)))
        controller._log_samples = lambda *_args: None  # reads responses
        durations: list[float] = [controller.iterate()["timing/step"] for _ in range(measured.stop)]
    return statistics.mean(durations[measured.start :])


def ideal_seconds(staleness: int, speeds: Speeds = Speeds()) -> float:
    """Return the duration of a step with equal lengths, equal devices and no communication."""
    tokens = RESPONSES * (PROMPT + EQUAL)
    rollout = decode_seconds([EQUAL] * RESPONSES, RESPONSES, speeds)
    # Two models on each rank score, and one of them trains.
    rest = 2 * tokens / speeds.scoring + tokens / speeds.training
    return max(rollout, rest) if staleness else rollout + rest


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    table = Table(title="Seconds of a PPO step, scripted devices")
    for column in ("", "engines, ranks", "staleness 0", "ideal / time", "staleness 1", "ideal / time"):
        table.add_column(column, justify="right" if column else "left")
    for scenario in SCENARIOS:
        for size in SIZES:
            cells = []
            for staleness in (0, 1):
                seconds = step_seconds(size, staleness, scenario)
                cells += [f"{seconds:.1f}", f"{ideal_seconds(staleness) / seconds:.2f}"]
            table.add_row(scenario.name if size == SIZES[0] else "", str(size), *cells)
        table.add_section()
    table.caption = f"ideal: {ideal_seconds(0):.1f} s, with staleness 1 {ideal_seconds(1):.1f} s"
    Console(width=120).print(table)
    compare_staleness()


def compare_staleness() -> None:
    """Print the durations of a step with several values of `ppo.staleness`."""
    table = Table(title="Seconds of a PPO step by ppo.staleness, and those with 1 divided by them")
    for column in ("", "engines, ranks", *[f"staleness {staleness}" for staleness in STALENESS]):
        table.add_column(column, justify="right" if column else "left")
    first = max(STALENESS)
    measured = range(first, first + MORE_STEPS)
    for scenario in VARYING:
        for size in SIZES:
            times = [step_seconds(size, n, scenario, measured=measured) for n in STALENESS]
            cells = [f"{seconds:.1f} ({times[0] / seconds:.2f})" for seconds in times]
            table.add_row(scenario.name if size == SIZES[0] else "", str(size), *cells)
        table.add_section()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
