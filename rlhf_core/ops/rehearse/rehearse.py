"""`rlhf rehearse`: a run as a whole on this machine's CPU, before GPUs are booked.

configuration -> plan, Derivation -> store, registry, rows, rewards (`checks`)
                                  -> rlhf run: PPO is killed after its first checkpoint, and retried
                                  -> artifacts and record -> Rehearsal
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import tracking_uri
from rlhf_core.config.load import load_config
from rlhf_core.errors import ConfigError, CorruptArtifact, InputError, RLHFError
from rlhf_core.ops.data_table import ROWS as PLANNED_ROWS
from rlhf_core.ops.finished_run import FinishedRun, find_run, newest_run
from rlhf_core.ops.plan.plan import Plan, make_plan
from rlhf_core.ops.rehearse import checks
from rlhf_core.ops.rehearse.derive import Change, Derivation
from rlhf_core.preflight import check
from rlhf_core.record.reader import read_rollouts
from rlhf_core.rewards.check import functions_of_ppo
from rlhf_core.run.references import resolve
from rlhf_core.run.state import read_state
from rlhf_core.storage.store import Store
from rlhf_core.system.home import HOME_OF_RUNS, Home
from rlhf_core.tracking.tracker import public_uri

_KILL = "ppo.after_checkpoint:1:kill"
"""When the run is killed, as `rlhf_core.system.failpoints` reads it."""
_STARVED = 0.5
"""Share of a step's responses that may be left out of the update."""
_FIRST_STEP = (
    "objective/scores",
    "objective/scores_std",
    "objective/kl",
    "policy/entropy",
    "rollout/length",
    "rollout/eos_rate",
    "rollout/logprob_gap_mean",
    "value/explained_variance",
    "loss/policy",
    "loss/value",
    "policy/grad_norm",
)
Say = Callable[[str], None]
ROWS = "rows, template, special tokens"
"""Name of the check of rows in `Rehearsal.exercised`."""


@dataclass
class Rehearsal:
    """What a rehearsal has found."""

    changes: list[Change]
    rows: Mapping[str, str]
    """Rows that were read, by the field of their source."""
    problems: list[str] = field(default_factory=list)
    """What would fail: field, rule, value, fix. Empty: nothing was found."""
    exercised: dict[str, str] = field(default_factory=dict)
    first_step: dict[str, float] = field(default_factory=dict)
    """Metrics of the first step of PPO."""
    plan: list[tuple[str, str, str]] = field(default_factory=list)
    """What is compared, what the plan says, and what was seen."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of this process and those that it has started."""


def rehearse(
    path: str,
    overrides: Sequence[str],
    place: Path,
    run: Sequence[str],
    *,
    model: Path | None = None,
    gpus: str | None = None,
    seconds: float = 3600.0,
    say: Say = lambda text: None,
) -> Rehearsal:
    """Rehearse a configuration.

    Args:
        path: YAML file of the configuration.
        overrides: Fields to override.
        place: Folder for everything that the rehearsal writes.
        run: Command that runs a configuration, whose file is added to it; empty: only the checks before it.
        model: Folder with `config.json` and tokenizer of a model that is not on this machine.
        gpus: GPUs of the run, as for `rlhf plan`.
        seconds: Limit of the run.
        say: Is called with what is done next.

    Raises:
        InputError: The configuration is wrong, or a model or source is not on this machine.
    """
    started = time.monotonic()
    given = load_config(path, overrides)
    if gpus is not None and given.run.device == "auto":
        overrides = [*overrides, "run.device=cuda"]
        given = load_config(path, overrides)
    given = resolve(given).config
    say("small model and few rows")
    derived = Derivation(given, place, model)
    found = Rehearsal(derived.changes, derived.rows)
    file = place / "rehearsal.yaml"
    tree = derived.config.model_dump(mode="json", by_alias=True)
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    try:
        config = load_config(file)
    except ConfigError as error:
        raise InputError(f"the configuration of the rehearsal is not valid: {error.message}") from error
    plan = _planned(found, path, overrides, gpus, model)
    say("store, registry, rows and rewards")
    limits = _check(found, config, given, place)
    if limits is not None and run:
        say(f"rlhf run {file}, killed once; log {place / 'run.log'}")
        _run(found, config, place, [*run, str(file)], seconds)
    if plan is not None:
        found.plan += _compared(plan, config, limits, found)
    if given.store.url is not None:
        Store(given.store.url, given.store.endpoint).delete_prefix("rehearsal")
    found.seconds = time.monotonic() - started
    # The user knows their own files, not those of the rehearsal.
    for own, users in derived.copies.items():
        found.problems = [problem.replace(own, users) for problem in found.problems]
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found.cpu_seconds = sum(each.ru_utime + each.ru_stime for each in used)
    return found


def _planned(
    found: Rehearsal, path: str, overrides: Sequence[str], gpus: str | None, model: Path | None
) -> Plan | None:
    """Return the plan of the run, or None; what it refuses is a problem."""
    given = load_config(path, overrides)
    if given.run.device == "cuda" and gpus is None:
        found.plan.append(("fits", "not planned: give --gpus", ""))
        return None
    shape = None if model is None else str(model / "config.json")
    try:
        plan = make_plan(path, overrides, gpus, shape, rows=PLANNED_ROWS)
    except RLHFError as error:
        found.problems += error.message.splitlines()
        return None
    found.problems += [f"{problem.text}" for problem in plan.verdict.problems]
    return plan


def _check(
    found: Rehearsal, config: PipelineConfig, given: PipelineConfig, place: Path
) -> dict[str, int] | None:
    """Make the checks before the run, and return the limits of lengths; None if the rows cannot be used."""
    Home.of(config.run.home).make()
    uri = public_uri(tracking_uri(config))
    _collect(found, "store: objects that are created once", checks.check_store(config), config.store_url)
    _collect(found, "registry: a version and an alias", checks.check_registry(config), uri)
    try:
        check(config)
        prepared = checks.read(config, place / "read")
    except RLHFError as error:
        found.problems += error.message.splitlines()
        return None
    counts = ", ".join(
        f"{name} {count.read} read, {sum(map(len, prepared.splits[name].values()))} used"
        for name, count in prepared.counts.items()
        if count.read
    )
    _collect(found, ROWS, checks.check_rows(config, prepared), counts)
    functions = [each.function for each in functions_of_ppo(config).values()]
    if functions:
        problems = checks.check_functions(config)
        _collect(found, "functions of users with random numbers", problems, ", ".join(functions))
    sources = ", ".join(source.used_name for source in config.ppo.rewards) or "none"
    _collect(found, "rewards on answers of the rows", checks.check_rewards(config, prepared), sources)
    judge = given.evaluate.language_model
    if judge is not None:
        _collect(found, "judge: a verdict on one pair", checks.check_judge(judge, prepared), judge.name)
    return dict(prepared.limits._asdict())


def _collect(found: Rehearsal, what: str, problems: Iterator[str], detail: str) -> None:
    problems_found = list(problems)
    found.problems += problems_found
    if not problems_found:
        found.exercised[what] = detail


def _run(found: Rehearsal, config: PipelineConfig, place: Path, command: list[str], seconds: float) -> None:
    """Run the configuration, with PPO killed after its first checkpoint, and read its artifacts."""
    trace = place / "trace"
    trace.mkdir()
    killed = {"RLHF_FAIL": _KILL, "RLHF_FAIL_TRACE": str(trace)} if config.ppo.enabled else {}
    status = _call(command, place / "run.log", killed, seconds)
    if status != 0:
        found.problems.append(_failure(config, place / "run.log", status, seconds))
        return
    if (trace / _KILL).exists():
        found.exercised["kill and resume"] = "SIGKILL of PPO after its first checkpoint, and its continuation"
    elif config.ppo.enabled:
        found.problems.append("ppo.checkpoint_every: no checkpoint was written; lower it")
    _read(found, config)


def _call(command: list[str], log: Path, environment: Mapping[str, str], seconds: float) -> int | None:
    """Run a command with its output in a log, and return its exit code; None if it did not end in time."""
    without = {name: value for name, value in os.environ.items() if not name.startswith(("RLHF_FAIL",))}
    without.pop(HOME_OF_RUNS, None)
    without.pop("PREFECT_API_URL", None)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**without, **environment}
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # ends its stages in order
            process.wait()
            return None
        except BaseException:
            process.terminate()
            process.wait()
            raise


def _failure(config: PipelineConfig, log: Path, status: int | None, seconds: float) -> str:
    """Return the error of a run that failed."""
    if status is None:
        return f"run: it did not end within {seconds:.0f} s; see {log}"
    states = [state for file in Home.of(config.run.home).run_states() if (state := read_state(file))]
    if states and states[0].get("error"):
        stage = (states[0].get("making") or {}).get("stage", "run")
        return f"stage {stage}: {states[0]['error']}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith(("error:", "failed:"))]
    return errors[-1] if errors else f"run: it ended with {status}; see {log}"


def _read(found: Rehearsal, config: PipelineConfig) -> None:
    """Read what a finished run has made."""
    home = config.run.home
    run = find_run(newest_run(home), home, config.store.endpoint)
    for stage, entry in run.stages.items():
        found.exercised[f"stage {stage}"] = f"{entry.get('made_in_seconds') or entry['seconds']:.0f} s"
    registered = run.summary.get("registration", {})
    if "version" in registered:
        found.exercised["registered"] = f"{registered['model']} version {registered['version']}"
    if "ppo" in run.stages:
        found.exercised["placement"] = _placement(config)
        _read_ppo(found, run, config)


def _read_ppo(found: Rehearsal, run: FinishedRun, config: PipelineConfig) -> None:
    """Read the first step, and check that no step was starved."""
    artifacts, ref = run.artifact("ppo")
    folder = artifacts.fetch(ref, record=True)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    if len(steps) != config.ppo.steps:
        raise CorruptArtifact(f"{ref.uri} has {len(steps)} steps; {config.ppo.steps} were expected")
    found.first_step = {name: steps[0][name] for name in _FIRST_STEP if name in steps[0]}
    found.first_step |= {name: value for name, value in steps[0].items() if name.startswith("rewards/")}
    for name, value in steps[0].items():
        if isinstance(value, float) and not math.isfinite(value):
            found.problems.append(f"ppo: {name} must be finite in the first step; got {value}")
    record = read_rollouts(folder, ["step", "excluded", "total"])
    for step in sorted(set(record["step"].to_pylist())):
        why = [
            each
            for each, number in zip(record["excluded"].to_pylist(), record["step"].to_pylist(), strict=True)
            if number == step
        ]
        out = [each for each in why if each is not None]
        # A random model seldom gets different scores for the samples of a prompt.
        if "filtered" not in out and len(out) > _STARVED * len(why):
            found.problems.append(
                f"ppo.minibatches: a minibatch must keep most of its responses; {len(out)} of {len(why)} of"
                f" step {step} were left out ({out[0]}); correct the rewards, or raise ppo.prompts_per_step"
            )


def _placement(config: PipelineConfig) -> str:
    ppo = config.ppo
    policy = ppo.policy_deepspeed
    parts = [
        f"{policy.ranks} ranks with ZeRO-{policy.zero_stage} in {policy.dtype}",
        f"{ppo.engine.count} engines in {ppo.engine.dtype}",
        f"colocate {ppo.colocate}",
    ]
    if ppo.lora is not None:
        parts.append(f"adapters of rank {ppo.lora.r}, {'sent alone' if ppo.syncs_adapter else 'merged'}")
    parts.append(f"{ppo.rollout_batch_size} responses in {ppo.minibatches} minibatches")
    return ", ".join(parts)


def _compared(
    plan: Plan, config: PipelineConfig, limits: Mapping[str, int] | None, found: Rehearsal
) -> Iterator[tuple[str, str, str]]:
    """Yield what the plan says beside what was seen."""
    planned = ", ".join(f"{name} {value}" for name, value in plan.config.limits._asdict().items())
    seen = "not reached" if limits is None else ", ".join(f"{name} {value}" for name, value in limits.items())
    yield "tokens", planned, f"{seen} (with shorter sampled responses)"
    for work in plan.work:
        done = found.exercised.get(f"stage {work.stage}", "not reached")
        yield f"{work.stage}", f"{work.rows:,} {work.what}, {work.steps:,} steps", done
    if plan.unread is not None:
        yield "rows", f"not read: {plan.unread}", found.exercised.get(ROWS, "not usable")
    fits = "fits" if plan.verdict.fits else "does not fit"
    yield "memory", f"{fits} {plan.hardware}", f"not comparable: a small model on {config.run.device}"
    if plan.time is not None:
        step = f"{sum(plan.time.phases.values()):.1f} s"
        yield "a step of PPO", step, "not comparable"
    for warning in plan.warnings:
        yield "warning", warning, ""
