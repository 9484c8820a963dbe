"""How busy the processes of PPO are in each step.

    counters of ranks and engines (`cluster.rpc`) --+
    timings of the controller ----------------------+--> metrics of the step --> MLflow (docs/tuning.md)
    lengths and micro-batches of the rollouts ------+

The counters are read after a weight sync, when no process works: at the end of each step, or with
`ppo.staleness=n` of every n-th. The first steps of an attempt have no metrics: they are the base of the next
ones, and are slower than the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean

from rlhf_core.cluster.rpc import Usage
from rlhf_core.config.placement import TRAINED, Group, PPOSettings
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.ppo.fleet.fleet import ENGINES, Fleet
from rlhf_core.ppo.training.batch import RolloutBatch

Metrics = dict[str, float]
Counters = Mapping[str, float]

# Names of methods with `rpc`, by which `cluster.rpc` counts seconds. A method with another name would count
# as idle time.
_SAMPLING = ("sample",)
_SCORING = ("logprobs", "values", "scores", "make_experience")
_TRAINING = ("update_policy", "update_critic")
_SYNC = ("send_weights", "start_weight_update", "update_weights", "finish_weight_update", "acknowledge")
_MOVING = ("sleep", "wake", "offload_states", "reload_states")
"""Calls that are made one after the other with `ppo.engine.sleep_level`."""
_WORK = (*_SAMPLING, *_SCORING, *_TRAINING, *_SYNC, *_MOVING)
"""Calls of one step. Checkpoints are saved between steps."""


@dataclass
class StepsSinceSync:
    """The steps from one weight sync to the next: one, or several with `ppo.staleness` of more than 1."""

    timings: Metrics = field(default_factory=dict)
    """Sum of each `timing/<phase>`, and `timing/step`."""
    batches: list[RolloutBatch] = field(default_factory=list)
    """Batches that were scored and trained on."""
    engines_waited: bool = False
    """Whether an evaluation or a checkpoint between two syncs let the engines finish all batches, so that
    they are idle until the next sync.
    """

    def add(self, batch: RolloutBatch, timings: Mapping[str, float]) -> None:
        """Add a step."""
        self.batches.append(batch)
        for name, seconds in timings.items():
            if name.startswith("timing/"):
                self.timings[name] = self.timings.get(name, 0.0) + seconds


class Utilisation:
    """Measures each step.

    Args:
        settings: Settings of the stage.
        fleet: The processes.
    """

    def __init__(self, settings: PPOSettings, fleet: Fleet) -> None:
        self._epochs = settings.ppo.epochs
        self._shares = settings.ppo.minibatches * settings.ppo.policy_deepspeed.ranks
        """Parts of a batch: those of all policy ranks in all minibatches."""
        self._overlapped = settings.ppo.staleness > 0
        self._fleet = fleet
        self._last: dict[str, list[Usage]] | None = None

    def begin(self) -> None:
        """Begin the next step now: what the engines sampled for an evaluation is not part of a step."""
        if self._last is not None:
            self._last = self._fleet.usage_by_group()

    def measure(self, steps: StepsSinceSync, sampled: Sequence[RolloutBatch]) -> Metrics:
        """Return the metrics of the steps that end now; {} if the counters are not known.

        Args:
            steps: All since the last call.
            sampled: The batches that were sampled in them, and not read from files.
        """
        seconds = steps.timings["timing/step"]
        usage = self._fleet.usage_by_group()
        before, self._last = self._last, usage
        if usage is None or before is None:
            return {}
        if len(usage[ENGINES]) != len(before[ENGINES]):
            return {}  # an engine was given up, and those after it have other positions now
        work = {name: _differences(before[name], usage[name]) for name in usage}
        groups = [workers.group for workers in self._fleet.distinct_groups]
        measured: Metrics = {}
        moving = moving_seconds(work)
        if moving:
            measured["moving/share"] = moving / seconds
        return {
            **measured,
            **idle_shares(work, groups, seconds),
            **token_rates(work, groups, steps.batches, sampled, self._epochs),
            **engine_metrics(work[ENGINES]),
            **gpu_metrics(work, usage, groups),
            "utilisation/padding": 0.0 if self._fleet.packs else padding_share(steps.batches),
            "utilisation/data_wait": data_wait(work, steps.timings, overlapped=self._overlapped) / seconds,
            "utilisation/tokens_per_minibatch": _tokens(steps.batches) / len(steps.batches) / self._shares,
        }


# -- from counters to metrics --


def sync_metrics(report: SyncReport) -> Metrics:
    """Return the size, time and rate of a weight sync."""
    return {
        "sync/bytes": float(report.bytes),
        "sync/seconds": report.seconds,
        "sync/gb_per_s": report.bytes / report.seconds / 1e9,
    }


def idle_shares(work: Mapping[str, Sequence[Counters]], groups: Sequence[Group], seconds: float) -> Metrics:
    """Return `utilisation/idle/<role>` and `utilisation/idle/engines`: the share of a step in which its
    processes have no call.

    Args:
        work: Counters of the step, of each process by group.
        groups: All groups of ranks. Roles that share ranks have the same value.
        seconds: Duration of the step.
    """
    metrics = {f"utilisation/idle/{ENGINES}": _idle(work[ENGINES], seconds)}
    for group in groups:
        metrics |= dict.fromkeys(
            [f"utilisation/idle/{role}" for role in group.roles], _idle(work[group.name], seconds)
        )
    return metrics


def _idle(processes: Sequence[Counters], seconds: float) -> float:
    busy = fmean(seconds_of(process, _WORK) for process in processes)
    # Calls are timed in their own processes, so their sum can exceed the step by a little.
    return max(0.0, 1 - busy / seconds)


def token_rates(
    work: Mapping[str, Sequence[Counters]],
    groups: Sequence[Group],
    batches: Sequence[RolloutBatch],
    sampled: Sequence[RolloutBatch],
    epochs: int,
) -> Metrics:
    """Return `utilisation/tokens_per_s/<role>` while the role computes: of the engines in sampling, of policy
    and critic in training, of reference and reward model in scoring. Only the engines' leaves out the
    prompts.

    Args:
        work: Counters of the step, of each process by group.
        groups: All groups of ranks.
        batches: That were scored and trained on.
        sampled: The batches that were sampled in the meantime.
        epochs: Passes over each batch.
    """
    tokens = _tokens(batches)
    metrics: Metrics = {}
    if sampled:
        responses = sum(int(batch.lengths_B.sum()) for batch in sampled)
        metrics |= _rate(ENGINES, responses, work[ENGINES], *_SAMPLING)
    for group in groups:
        ranks = work[group.name]
        for role in group.roles:
            if role in TRAINED:
                metrics |= _rate(role, tokens * epochs, ranks, f"update_{role}")
            elif role == "reward":
                metrics |= _rate(role, tokens, ranks, "scores")
            else:
                # The policy's log-probabilities are the same call.
                passes = 2 if "policy" in group.roles else 1
                metrics |= _rate(role, tokens * passes, ranks, "logprobs")
    return metrics


def _tokens(batches: Sequence[RolloutBatch]) -> int:
    return sum(int(batch.prompt_lengths_B.sum() + batch.lengths_B.sum()) for batch in batches)


def _rate(role: str, tokens: int, processes: Sequence[Counters], *methods: str) -> Metrics:
    # By the slowest process: the others wait for it in the collectives, or for the end of the phase.
    longest = max(seconds_of(process, methods) for process in processes)
    return {f"utilisation/tokens_per_s/{role}": tokens / longest} if longest > 0 else {}


def engine_metrics(engines: Sequence[Counters]) -> Metrics:
    """Return `rollout/token_latency` (seconds of a decoding step, the time between two tokens of a response)
    and `rollout/engine_balance` (mean sampling time of the engines divided by the longest).
    """
    seconds = [seconds_of(engine, _SAMPLING) for engine in engines]
    steps = sum(engine.get("decode_steps", 0.0) for engine in engines)
    if not steps:
        return {}
    return {
        "rollout/token_latency": sum(seconds) / steps,
        "rollout/decode_steps": max(engine.get("decode_steps", 0.0) for engine in engines),
        "rollout/engine_balance": fmean(seconds) / max(seconds),
    }


def gpu_metrics(
    work: Mapping[str, Sequence[Counters]], usage: Mapping[str, Sequence[Usage]], groups: Sequence[Group]
) -> Metrics:
    """Return `gpu/utilisation/<phase>`, the share of a phase in which the GPUs of its processes run kernels,
    and `gpu/memory/<role>`, the largest share of a GPU's memory in use. {} where there are no figures.

    Args:
        work: Counters of the step, of each process by group (`cluster.rpc.GpuSampler`).
        usage: Usage of each process by group, at the end of the step.
        groups: All groups of ranks.
    """
    processes = list(chain.from_iterable(work.values()))
    metrics: Metrics = {}
    for phase, methods in {"rollout": _SAMPLING, "scoring": _SCORING, "training": _TRAINING}.items():
        samples = _sum(processes, "gpu_samples", methods)
        if samples:
            metrics[f"gpu/utilisation/{phase}"] = _sum(processes, "gpu_busy", methods) / samples
    roles = {ENGINES: (ENGINES,), **{group.name: group.roles for group in groups}}
    for name, processes_of_group in usage.items():
        known = [each.gpu_memory for each in processes_of_group if each.gpu_memory is not None]
        if known:
            metrics |= {f"gpu/memory/{role}": max(known) for role in roles[name]}
    return metrics


def _sum(processes: Sequence[Counters], name: str, methods: Sequence[str]) -> float:
    return sum(process.get(f"{name}/{method}", 0.0) for process in processes for method in methods)


def padding_share(batches: Sequence[RolloutBatch]) -> float:
    """Return the share of padding in the micro-batches of scoring, if their rows are padded."""
    needed = computed = 0
    for batch in batches:
        lengths_B = (batch.prompt_lengths_B + batch.lengths_B).tolist()
        needed += sum(lengths_B) * len(batch.routes)
        for shares in batch.routes.values():
            for share in shares:
                indices = share.indices.tolist()
                for micro_batch in share.micro_batches:
                    longest = max((lengths_B[indices[i]] for i in micro_batch), default=0)
                    computed += longest * len(micro_batch)
    return 1 - needed / computed if computed else 0.0


def data_wait(
    work: Mapping[str, Sequence[Counters]], timings: Mapping[str, float], *, overlapped: bool
) -> float:
    """Return the seconds of a step in which no process has a call: the controller plans, rewards are
    computed, and data is transferred. They are part of a phase, as the moving of memory is.

    Args:
        work: Counters of the step, of each process by group.
        timings: `timing/<phase>` of the step.
        overlapped: Whether the engines sample during scoring and training, so that `timing/rollout` is only
            the rest of it.
    """
    processes = list(chain.from_iterable(work.values()))
    phases = {"scoring": _SCORING, "training": _TRAINING, "sync": _SYNC}
    if not overlapped:
        phases["rollout"] = _SAMPLING
    waited = 0.0
    for phase, methods in phases.items():
        longest = max(seconds_of(process, methods) for process in processes)
        waited += max(0.0, timings.get(f"timing/{phase}", 0.0) - longest)
    return max(0.0, waited - moving_seconds(work))


def moving_seconds(work: Mapping[str, Sequence[Counters]]) -> float:
    """Return the seconds in which memory moves between devices and host (`ppo.fleet.engine_pool`).

    Args:
        work: Counters of the step, of each process by group.
    """
    processes = list(chain.from_iterable(work.values()))
    seconds = 0.0
    for method in _MOVING:
        # All processes move at the same time, and the slowest one ends the phase.
        seconds += max(seconds_of(process, (method,)) for process in processes)
    return seconds


def seconds_of(process: Counters, methods: Sequence[str]) -> float:
    """Return the time that a process spent in these methods."""
    return sum(process.get(f"seconds/{method}", 0.0) for method in methods)


def _differences(before: Sequence[Usage], after: Sequence[Usage]) -> list[Counters]:
    """Return what the counters of each process have grown by."""
    differences: list[Counters] = []
    for old, new in zip(before, after, strict=True):
        grown = {name: value - old.counters.get(name, 0.0) for name, value in new.counters.items()}
        # A process that was replaced counts from 0 again.
        replaced = min(grown.values(), default=0.0) < 0
        differences.append(new.counters if replaced else grown)
    return differences
