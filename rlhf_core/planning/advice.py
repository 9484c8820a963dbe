"""Search for the cheapest changes of a configuration that make it fit its devices."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import chain, count

from rlhf_core.config import PipelineConfig
from rlhf_core.config.consistency import learning_rates
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.pipeline import TrainingStage, section_of
from rlhf_core.config.training import DeepSpeedConfig, adapter_rate
from rlhf_core.errors import InputError
from rlhf_core.planning.fit import FitVerdict, Problem
from rlhf_core.planning.loads import JUDGE, largest_pass

_MAX_TRIALS = 1500
"""Maximum number of configurations tried for one problem, which takes about two seconds."""

Changes = dict[str, str]
"""Value of each changed field, in the form of an override."""
Candidate = tuple[PipelineConfig, FitVerdict]
"""A configuration, and whether it fits."""


def changed_fields(config: PipelineConfig, fields: Changes) -> Changes:
    """Return the fields whose value differs from that of the configuration."""
    tree = config.model_dump(mode="json", by_alias=True)
    changes = {}
    for name, value in fields.items():
        now: object = tree
        for part in name.split("."):
            now = now[part] if isinstance(now, dict) else None
        same = str(now).lower() == value.lower()
        # The search writes numbers with two decimals, 0.30 for 0.3.
        if isinstance(now, float):
            same = now == float(value)
        if not same:
            changes[name] = value
    return changes


def with_changes(config: PipelineConfig, changes: Changes) -> PipelineConfig:
    """Return the configuration with these fields changed. Raises ConfigError."""
    tree = config.model_dump(mode="json", by_alias=True)
    return config_from_tree(tree, "plan", as_overrides(changes))


def as_overrides(changes: Changes) -> tuple[str, ...]:
    """Return the changes as they are pasted on a command line."""
    return tuple(f"{field}={value}" for field, value in changes.items())


def advise(
    config: PipelineConfig, compare: Callable[[PipelineConfig], FitVerdict], split: Changes | None = None
) -> tuple[str, ...] | None:
    """Return overrides with which the configuration fits, or None if none of those tried is enough.

    They are the cheapest changes, or those of `split` where no cheap ones are found. Every override that is
    not needed is left out.
    """

    def changed(changes: Changes) -> Candidate | None:
        try:
            candidate = with_changes(config, changes)
        except InputError:
            return None
        return candidate, compare(candidate)

    changes = _cheapest(config, compare(config), changed) or split
    result = changed(changes) if changes else None
    if changes is None or result is None or not result[1].fits:
        return None
    for field in list(changes):
        fewer = {name: value for name, value in changes.items() if name != field}
        result = changed(fewer)
        if result is not None and result[1].fits:
            changes = fewer
    return as_overrides(changes | _adapter_rates(config, changes))


def _cheapest(
    config: PipelineConfig,
    verdict: FitVerdict,
    changed: Callable[[Changes], Candidate | None],
) -> Changes | None:
    """Return cheap changes with which the configuration fits, or None if none are found.

    The problems are solved one after the other, each by the cheapest changes (`_moves`) that solve it and add
    no other problem.
    """
    changes: Changes = {}
    now: Candidate = (config, verdict)
    while now[1].problems:
        found = _solve(changes, now, changed)
        if found is None:
            return None
        changes, now = found
    return changes


def _adapter_rates(config: PipelineConfig, changes: Changes) -> Changes:
    """Return the learning rates of the adapters among the changes, for those of all parameters."""
    sections = tuple(name.removesuffix("lora") for name in changes if name.endswith(".lora"))
    rates = {}
    for field, rate, _, adapters in learning_rates(config):
        if not adapters and field.startswith(sections):
            rates[field] = f"{adapter_rate(rate):g}"
    return rates


def _solve(
    start: Changes,
    now: Candidate,
    changed: Callable[[Changes], Candidate | None],
) -> tuple[Changes, Candidate] | None:
    """Return the cheapest changes that solve the first problem of `now` without a new one.

    A uniform-cost search. None if no solution is found within `_MAX_TRIALS`.
    """
    problem, old_problems = now[1].problems[0], {p.key for p in now[1].problems}
    order = count()
    frontier = [(0.0, next(order), start, now)]
    seen = {frozenset(start.items())}
    while frontier and len(seen) < _MAX_TRIALS:
        cost, _, changes, (config, verdict) = heapq.heappop(frontier)
        unsolved = [p for p in verdict.problems if p.key == problem.key or p.key not in old_problems]
        if not unsolved:
            return changes, (config, verdict)
        for field, value, price in chain.from_iterable(_moves(config, p) for p in unsolved):
            further = {**changes, field: value}
            key = frozenset(further.items())
            if key in seen:
                continue
            seen.add(key)
            result = changed(further)
            if result is not None:
                # The number breaks ties, because configurations cannot be compared.
                heapq.heappush(frontier, (cost + price, next(order), further, result))
    return None


def _moves(config: PipelineConfig, problem: Problem) -> Iterator[tuple[str, str, float]]:
    """Return (field, next value, price) of changes that may solve a problem.

    Changes that cost some time are cheap. Moving work to other devices costs more, and changing the training
    most.
    """
    if problem.stage in config.training_sections:
        return _moves_of_training(config, problem.stage, problem.what)
    if problem.stage == "ppo":
        return _moves_of_ppo(config, problem)
    return _moves_of_evaluation(config, problem)


def _moves_of_training(
    config: PipelineConfig, stage: TrainingStage, what: str
) -> Iterator[tuple[str, str, float]]:
    section, name = config.training_sections[stage], section_of(stage)
    if what == "devices":
        yield f"{name}.deepspeed.ranks", str(max(1, section.deepspeed.ranks // 2)), 1.0
        return
    yield from _smaller_passes(name, section.micro_batch_tokens, largest_pass(config, stage).longest)
    yield from _trainer(f"{name}.deepspeed", section.deepspeed)
    if section.lora is None:
        yield f"{name}.lora", "{r: 16, alpha: 32}", 6.0


def _moves_of_evaluation(config: PipelineConfig, problem: Problem) -> Iterator[tuple[str, str, float]]:
    ranks, engines = config.evaluate.ranks, config.evaluate.engines
    if problem.what in ("devices", "memory"):
        yield "evaluate.ranks", str(max(1, ranks // 2)), 1.0
        yield "evaluate.engines", str(max(1, engines // 2)), 1.0
    elif problem.what in (JUDGE, "engine"):
        yield from _larger_engine(config)
    else:
        yield "evaluate.ranks", str(2 * ranks), 0.5
        if config.ppo.policy_deepspeed.zero_stage < 3:
            yield "ppo.policy_deepspeed.zero_stage", "3", 1.0


def _moves_of_ppo(config: PipelineConfig, problem: Problem) -> Iterator[tuple[str, str, float]]:
    ppo, engine = config.ppo, config.ppo.engine
    if problem.what in ("devices", "memory"):
        yield "ppo.engine.count", str(max(1, engine.count - 1)), 1.0
        yield from (("ppo.colocate", way, 2.0) for way in ("pairs", "all") if way != ppo.colocate)
        for name, ranks in (("policy", ppo.policy_deepspeed.ranks), ("critic", ppo.critic_deepspeed.ranks)):
            yield f"ppo.{name}_deepspeed.ranks", str(max(1, ranks // 2)), 1.5
    for level in range(engine.sleep_level):  # adapters need level 1, and offloaded states level 0
        yield "ppo.engine.sleep_level", str(level), 0.5
    # -0.1: an engine on the devices of ranks leaves them more memory. 0.05: one by itself needs more.
    if "engine" in problem.what:
        yield from _larger_engine(config, -0.1 if "+engine" in problem.what else 0.05)
    if problem.what in ("engine", "engine layout", "devices"):
        return
    yield from _smaller_passes("ppo", ppo.micro_batch_tokens, config.max_sequence_tokens)
    if "policy" in problem.what or "reference" in problem.what:
        yield from _trainer("ppo.policy_deepspeed", ppo.policy_deepspeed)
    if "critic" in problem.what or "reward" in problem.what:
        yield from _trainer("ppo.critic_deepspeed", ppo.critic_deepspeed)
    if ppo.lora is None:
        yield "ppo.lora", "{r: 16, alpha: 32}", 6.0


def _larger_engine(config: PipelineConfig, more: float = 0.05) -> Iterator[tuple[str, str, float]]:
    """Yield changes that give the model of an engine more room. `more` is added to the engine's share of the
    device.
    """
    engine = config.ppo.engine
    share = engine.gpu_memory_utilization + more
    if 0.1 < share <= 0.95:
        yield "ppo.engine.gpu_memory_utilization", f"{share:.2f}", 1.0
    if engine.dtype == "float32":
        yield "ppo.engine.dtype", "bfloat16", 2.0
    yield "ppo.engine.tensor_parallel", str(2 * engine.tensor_parallel), 3.0
    yield "ppo.engine.count", str(max(1, engine.count // 2)), 1.0


def _smaller_passes(section: str, budget: int, longest: int) -> Iterator[tuple[str, str, float]]:
    if budget // 2 >= longest:
        yield f"{section}.micro_batch_tokens", str(budget // 2), 1.0


def _trainer(field: str, deepspeed: DeepSpeedConfig) -> Iterator[tuple[str, str, float]]:
    if not deepspeed.gradient_checkpointing:
        yield f"{field}.gradient_checkpointing", "true", 1.0
    if deepspeed.zero_stage < 3:
        yield f"{field}.zero_stage", str(deepspeed.zero_stage + 1), 0.5
    step = 1 if field.startswith("ppo.") else deepspeed.ranks
    yield f"{field}.ranks", str(deepspeed.ranks + step), 1.0
    if deepspeed.dtype == "float32":
        yield f"{field}.dtype", "bfloat16", 1.0
    if deepspeed.offload == "none" and deepspeed.zero_stage > 0:
        yield f"{field}.offload", "optimizer", 4.0
    elif deepspeed.offload == "optimizer" and deepspeed.zero_stage == 3:
        yield f"{field}.offload", "all", 4.0
