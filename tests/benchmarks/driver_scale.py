"""Time and memory of the PPO controller for one step, by the number of ranks: `python -m
tests.benchmarks.driver_scale`.

The controller, its fleet, routes, headers and plans are the real ones. Ranks and engines are scripted: they
answer at once with headers, sums and references of the right sizes, in the same process, so their time is
counted. Arguments are pickled as Ray does. The time of Ray's own calls is measured with one real actor, per
call and per object reference, and added for the number of calls and references of the step.

*delay* is the sum of both: the controller works while ranks and engines wait for it.

*while waiting* is the CPU time of a real wait for calls of all ranks of a group, while the monitor asks the
agents of all hosts (one real actor answers for all of them), for the whole step. It delays nothing. The first
row shows what Ray's threads and the monitor need without other hosts.

`--rules` adds three rules, whose actors (one for each host) are scripted as well. `--case RANKS RESPONSES
TOKENS` measures one case. Each case runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from rlhf_core.cluster.agent import Host
from rlhf_core.cluster.nodes import ClusterNodes
from rlhf_core.cluster.rpc import ActorClient, Pending, RemoteActor
from rlhf_core.cluster.stored_output import StoredOutput
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.config.placement import PPOSettings, plan
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.fleet.fleet import Fleet, WorkerGroup
from rlhf_core.ppo.sampling.reward_actor import ResponseRows, RewardSettings, open_rewards
from rlhf_core.ppo.training.batch import ModelScores, RolloutHeader, SentShare
from rlhf_core.ppo.training.experience import ResponseSums
from rlhf_core.ppo.training.loss_step import OptimizerStep
from rlhf_core.ppo.training.rank_rows import ExperienceInputs
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.storage.store import Store
from rlhf_core.system.heartbeat import Monitor, Participant, register
from rlhf_core.system.processes import ProcessId
from rlhf_core.types import PromptExample
from tests.support.scripted_fleet import ScriptedRank
from tests.support.small_ppo import local_context

CASES = ((1, 512, 512), (8, 4096, 2048), (64, 16_384, 8192), (1000, 100_000, 8192))
STEP_SECONDS = 600.0
PROMPT, SAMPLES = 128, 8
RULES = (
    {"type": "keywords", "words": ["thanks"], "weight": 0.1},
    {"type": "repetition", "weight": 0.1},
    {"type": "well_formed", "weight": 0.1},
)
PROCESSES_PER_HOST = 8
START_SECONDS, WAIT_SECONDS = 5.0, 20.0
"""The first seconds of a wait, in which all hosts are asked at once, and those that are measured."""


class Meter:
    """Counts the calls of actors."""

    def __init__(self) -> None:
        self.calls = 0
        self.references = 0
        self.pickled_bytes = 0


class _Reference:
    """Stands for a reference to an object of a rank or an engine."""

    @override
    def __reduce__(self) -> Any:
        return (_Reference, ())


class _Method:
    def __init__(self, meter: Meter, run: Any, parts: int = 0) -> None:
        self._meter, self._run, self._parts = meter, run, parts

    def options(self, *, num_returns: int) -> _Method:
        return _Method(self._meter, self._run, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        from ray import cloudpickle

        meter = self._meter
        sent = [argument for argument in args if not isinstance(argument, _Reference)]
        meter.calls += 1
        meter.references += len(args) - len(sent) + max(0, self._parts - 1)
        meter.pickled_bytes += len(cloudpickle.dumps((sent, kwargs), protocol=5))
        return self._run(*args, **kwargs)


class _Handle:
    def __init__(self, meter: Meter, actor: Any) -> None:
        self._meter, self._actor = meter, actor

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._meter, getattr(self._actor, name))


class _Rank(ScriptedRank):
    """One rank of every role of its group."""

    @override
    def logprobs(self, _role: str, _with_entropy: bool, share: SentShare | int, *chunks: Any) -> Any:
        self.received(share, chunks)
        return None, _Reference()

    @override
    def values(self, share: SentShare | int, *chunks: Any) -> Any:
        self.received(share, chunks)
        return None, _Reference()

    @override
    def scores(self, _role: str, share: SentShare | int, *chunks: Any) -> ModelScores:
        batch = self.received(share, chunks)
        return ModelScores(np.random.default_rng(0).normal(size=len(batch.share.places)).tolist())

    @override
    def make_experience(self, inputs: ExperienceInputs, *_objects: Any) -> Any:
        sums = dict.fromkeys(ResponseSums.__dataclass_fields__, np.ones(len(inputs.scores)))
        sums["gap"] = np.zeros(len(inputs.scores))  # engines with other weights would end the step
        return ResponseSums(**sums), _Reference()

    @override
    def update_policy(self, exchange: Any, steps: list[OptimizerStep], *_args: Any, **_kw: Any) -> Any:
        return {"loss": 1.0, "clipped": 0.0, "approx_kl": 0.0, "grad_norm": float(len(steps))}

    @override
    def update_critic(self, _inputs: Any, _exchange: Any, steps: list[OptimizerStep], *_args: Any) -> Any:
        return {"loss": 1.0, "clipped": 0.0, "grad_norm": float(len(steps))}


class _Engine:
    def __init__(self, tokens: int, index: int) -> None:
        self._tokens, self._noise = tokens, np.random.default_rng(index)
        self.version = 0

    def sample(self, chunks: Sequence[Sequence[PromptExample]], *, n: int, **_options: Any) -> list[Any]:
        count = sum(len(chunk) for chunk in chunks) * n
        # A quarter of the responses reaches the limit.
        lengths = np.minimum(self._noise.integers(1, self._tokens * 4 // 3, count), self._tokens)
        header = RolloutHeader(lengths.astype(np.int32), lengths < self._tokens, np.full(count, self.version))
        return [header, *(_Reference() for _ in chunks)]


class _Engines:
    def __init__(self, actors: list[RemoteActor[Any]]) -> None:
        self.serving = list(range(len(actors)))
        self._actors = actors

    def actor(self, index: int) -> RemoteActor[Any]:
        return self._actors[index]

    def collect(self, pending: Mapping[int, Pending[Any]], _what: str) -> dict[int, Any]:
        return {index: call.reference for index, call in pending.items()}


class _Rewards:
    """Scores with rules."""

    def open(self, settings: RewardSettings) -> None:
        self._sources = [source.used_name for source in settings.sources]

    def score(self, part: ResponseRows, *_chunks: Any) -> RewardBatch:
        values = np.random.default_rng(0).normal(size=len(part.prompts)).tolist()
        return RewardBatch(values, {name: list(values) for name in self._sources})


def configuration(ranks: int, responses: int, tokens: int, *, rules: bool) -> PipelineConfig:
    deepspeed = {"ranks": ranks, "zero_stage": 3}
    return config_from_tree(
        {
            "model": {"tiny": {"max_positions": 1 << 15}},
            "run": {"device": "cpu"},
            "data": {"max_prompt_tokens": PROMPT},
            "ppo": {
                "prompts_per_step": responses // SAMPLES,
                "samples_per_prompt": SAMPLES,
                "max_new_tokens": tokens,
                "micro_batch_tokens": 16_384,
                "minibatches": 4,
                "samples_every": 100,
                "policy_deepspeed": deepspeed,
                "critic_deepspeed": deepspeed,
                "engine": {"count": max(1, ranks // 8)},
                "rewards": [{"type": "model"}, *(RULES if rules else ())],
            },
        },
        "driver_scale",
    )


def measure(ranks: int, responses: int, tokens: int, *, rules: bool) -> dict[str, float]:
    """Return the numbers of one step with scripted ranks and engines."""
    config = configuration(ranks, responses, tokens, rules=rules)
    prompts = [PromptExample(f"p{i}", "", (i % 1000,) * PROMPT) for i in range(responses // SAMPLES)]
    meter = Meter()
    placement = plan(config.ppo)
    fleet: Any = Fleet(PPOSettings.of(config), "cpu", {}, 0)
    for group in placement.groups:
        workers: Any = tuple(RemoteActor(_Handle(meter, _Rank())) for _ in range(group.ranks))
        fleet.groups.update(dict.fromkeys(group.roles, WorkerGroup(group, workers)))
    engines = [_Engine(tokens, index) for index in range(config.ppo.engine.count)]
    fleet.engines = _Engines([RemoteActor(_Handle(meter, engine)) for engine in engines])
    fleet.wait = lambda pending, _what: [call.reference for call in pending]
    fleet.usage_by_group = lambda: None
    hosts = [f"host {number}" for number in range(math.ceil(placement.processes / PROCESSES_PER_HOST))]
    fleet._placement = SimpleNamespace(node_of_bundle=hosts)
    fleet.start_helper = lambda *_args: RemoteActor(_Handle(meter, _Rewards()))

    def sync(version: int) -> SyncReport:
        for engine in engines:
            engine.version = version
        return SyncReport(version, 1, 1, 1.0)

    fleet.sync = sync
    settings = RewardSettings(config.ppo.rewards, str)
    with tempfile.TemporaryDirectory() as folder, open_rewards(settings) as composer_of:
        composer = composer_of(fleet)
        controller: Any = PPOController(fleet, prompts, str, composer, local_context(Path(folder)))
        controller._log_samples = lambda *_args: None  # reads 16 responses
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        controller.iterate()  # imports, and the first use of everything
        first = meter.calls, meter.references, meter.pickled_bytes
        cpu, wall = time.process_time(), time.monotonic()
        controller.iterate()
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    return {
        "ranks": ranks,
        "responses": responses,
        "tokens": tokens,
        "cpu_seconds": cpu,
        "seconds": wall,
        "calls": meter.calls - first[0],
        "references": meter.references - first[1],
        "pickled_mb": (meter.pickled_bytes - first[2]) / 1e6,
        "memory_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def ray_costs() -> tuple[float, float]:
    """Return the CPU seconds of one call of a real actor, and of one reference among its arguments."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=256 << 20)

    class Actor:
        def make(self, count: int) -> list[Any]:
            return [np.zeros(50_000, np.float32) for _ in range(count)]

        def use(self, *_objects: Any) -> None:
            return None

    try:
        actor = ray.remote(Actor).remote()
        references = actor.make.options(num_returns=128).remote(128)
        ray.get(actor.use.remote(*references), timeout=300)
        seconds = []
        for count in (0, 128):
            cpu = time.process_time()
            ray.get([actor.use.remote(*references[:count]) for _ in range(200)], timeout=60)
            seconds.append((time.process_time() - cpu) / 200)
    finally:
        ray.shutdown()
    return seconds[0], (seconds[1] - seconds[0]) / 128


class _Agent:
    """Answers for the agents of all hosts."""

    def report(self) -> list[Participant]:
        return [
            Participant(f"rank {number}", ProcessId(number, 0.0), "host", 1, 1e6, "step")
            for number in range(PROCESSES_PER_HOST)
        ]


class _Busy:
    def work(self, seconds: float) -> None:
        time.sleep(seconds)


def waiting_cost(ranks: int, processes: int) -> float:
    """Return the CPU seconds of the controller in a second in which it waits for a call of all ranks.

    Args:
        ranks: Ranks of the group.
        processes: Ranks of all groups, and engines.
    """
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=256 << 20)
    used: list[float] = []
    try:
        with tempfile.TemporaryDirectory() as folder, Monitor(Path(folder) / "monitor") as monitor:
            agent: Any = ray.remote(_Agent).options(num_cpus=0).remote()
            busy = ray.remote(_Busy).remote()
            ray.get([agent.report.remote(), busy.work.remote(0.0)], timeout=300)
            output = StoredOutput(Path(folder, "out"), Store(Path(folder, "store")), "artifacts/ppo/k/000001")
            nodes = ClusterNodes(PipelineConfig(), Path(folder), [], output, monitor)
            hosts = math.ceil(processes / PROCESSES_PER_HOST) - 1
            nodes._hosts = [
                Host(str(number), RemoteActor(agent), f"host-{number}") for number in range(hosts)
            ]
            monitor.include(nodes)
            register(monitor.folder, "controller", math.inf)
            calls: list[Pending[None]] = [Pending(busy.work.remote(2 * START_SECONDS + WAIT_SECONDS))]
            calls += [Pending(busy.work.remote(0.0)) for _ in range(ranks - 1)]
            timers = [
                threading.Timer(seconds, lambda: used.append(time.process_time()))
                for seconds in (START_SECONDS, START_SECONDS + WAIT_SECONDS)
            ]
            for timer in timers:
                timer.start()
            ActorClient(monitor, TimeoutsConfig()).wait(calls, "a call of all ranks")
            for timer in timers:
                timer.join()
            monitor.include(None)
    finally:
        ray.shutdown()
    return (used[1] - used[0]) / WAIT_SECONDS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("--case", type=int, nargs=3, metavar=("RANKS", "RESPONSES", "TOKENS"))
    args = parser.parse_args(arguments)
    if args.case:
        found = measure(*args.case, rules=args.rules)
        processes = plan(configuration(*args.case, rules=args.rules).ppo).processes
        print(json.dumps(found | {"waiting": waiting_cost(args.case[0], processes), "processes": processes}))
        return
    per_call, per_reference = ray_costs()
    table = Table(title="The controller in one PPO step, four models")
    for column in (
        "ranks per group", "responses", "response tokens", "controller s", "Ray calls s", "delay s",
        "% of 600 s", "while waiting s", "% of 600 s with it", "memory MB", "pickled MB",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for case in CASES:
        command = [sys.executable, "-m", "tests.benchmarks.driver_scale", "--case", *map(str, case)]
        command += ["--rules"] if args.rules else []
        found = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200).stdout
        )
        own = found["cpu_seconds"]
        calls = found["calls"] * per_call + found["references"] * per_reference
        waiting = found["waiting"] * STEP_SECONDS
        delay = own + calls
        total = found["responses"] * found["tokens"]
        table.add_row(
            f"{case[0]}", f"{case[1]}", f"{total / 1e6:.1f} M", f"{own:.2f}", f"{calls:.2f}",
            f"{delay:.2f}", f"{100 * delay / STEP_SECONDS:.2f}", f"{waiting:.2f}",
            f"{100 * (delay + waiting) / STEP_SECONDS:.2f}", f"{found['memory_mb']:.0f}",
            f"{found['pickled_mb']:.0f}",
        )  # fmt: skip
    table.caption = (
        f"CPU seconds; Ray: {per_call * 1e6:.0f} us a call, {per_reference * 1e6:.1f} us a reference"
    )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
