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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import tracking_uri
from rlhf_core.config.load import load_config
from rlhf_core.config.rewards import ModelReward
from rlhf_core.errors import ConfigError, CorruptArtifact, InputError, RLHFError
from rlhf_core.ops.data_table import ROWS as PLANNED_ROWS
from rlhf_core.ops.finished_run import find_run, newest_run
from rlhf_core.ops.plan.plan import Plan, make_plan
from rlhf_core.ops.rehearse import checks
from rlhf_core.ops.rehearse.derive import Change, Derivation
from rlhf_core.preflight import check
from rlhf_core.rewards.check import functions_of_ppo
from rlhf_core.run.references import resolve
from rlhf_core.run.state import read_state
from rlhf_core.storage.store import Store
from rlhf_core.system.home import HOME_OF_RUNS, Home
from rlhf_core.tracking.tracker import public_uri

_KILL = "ppo.after_checkpoint:1:kill"
"""When the run is killed, as `rlhf_core.system.failpoints` reads it."""
_FIRST_STEP = (
    "objective/scores",
    "objective/scores_std",
    "objective/kl",
    "rollout/length",
    "rollout/eos_rate",
    "rollout/logprob_gap_mean",
    "value/explained_variance",
    "policy/grad_norm",
)
Say = Callable[[str], None]


@dataclass
class Rehearsal:
    """What a rehearsal has found."""

    changes: list[Change]
    problems: list[str] = field(default_factory=list)
    """What would fail: field, rule, value, fix. Empty: nothing was found."""
    exercised: dict[str, str] = field(default_factory=dict)
    """What was seen working, and how."""
    first_step: dict[str, float] = field(default_factory=dict)
    """Metrics of the first step of PPO."""
    plan: dict[str, tuple[str, str]] = field(default_factory=dict)
    """What the plan says of the run, and what was seen here."""
    warnings: tuple[str, ...] = ()
    """Those of the plan."""
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
    if gpus is not None:
        overrides = [*overrides, "run.device=cuda"]
    given = resolve(load_config(path, overrides)).config
    say("small model and few rows")
    derived = Derivation(given, place, model)
    found = Rehearsal(derived.changes, exercised=derived.rows)
    file = place / "rehearsal.yaml"
    tree = derived.config.model_dump(mode="json", by_alias=True)
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    try:
        config = load_config(file)
    except ConfigError as error:
        raise InputError(f"the configuration of the rehearsal is not valid: {error.message}") from error
    plan = _planned(found, path, overrides, gpus, model)
    say("store, registry, rows and rewards")
    if _check(found, config, given, place) and run:
        say(f"rlhf run {file}, killed once; log {place / 'run.log'}")
        _run(found, config, place, [*run, str(file)], seconds)
    if plan is not None:
        found.warnings = plan.warnings
        found.plan = dict(_compared(plan, found))
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
    if gpus is None and load_config(path, overrides).run.device == "cuda":
        found.plan["memory"] = "not planned: give --gpus", "not measured"
        return None
    shape = None if model is None else str(model / "config.json")
    try:
        plan = make_plan(path, overrides, gpus, shape, rows=PLANNED_ROWS)
    except RLHFError as error:
        found.problems += error.message.splitlines()
        return None
    found.problems += [problem.text for problem in plan.verdict.problems]
    return plan


def _check(found: Rehearsal, config: PipelineConfig, given: PipelineConfig, place: Path) -> bool:
    """Make the checks before the run, and return whether the rows can be used."""
    Home.of(config.run.home).make()
    uri = public_uri(tracking_uri(config))
    _collect(found, "store: objects that are created once", checks.check_store(config), config.store_url)
    _collect(found, "registry: a version and an alias", checks.check_registry(config), uri)
    try:
        check(config)
        prepared = checks.read(config, place / "read")
    except RLHFError as error:
        found.problems += error.message.splitlines()
        return False
    counts = ", ".join(f"{name} {count.read} read" for name, count in prepared.counts.items() if count.read)
    _collect(found, "rows, template, special tokens", checks.check_rows(config, prepared), counts)
    own = ", ".join(each.function for each in functions_of_ppo(config).values())
    _collect(found, "functions of users with random numbers", checks.check_functions(config), own)
    # The reward model is not trained yet; the run scores with it.
    scored = ", ".join(each.used_name for each in config.ppo.rewards if not isinstance(each, ModelReward))
    _collect(found, "rewards on answers of the rows", checks.check_rewards(config, prepared), scored)
    judge = given.evaluate.language_model
    if judge is not None:
        _collect(found, "judge: a verdict on one pair", checks.check_judge(judge), judge.name)
    return True


def _collect(found: Rehearsal, what: str, problems: Iterator[str], detail: str) -> None:
    before = len(found.problems)
    found.problems += problems
    if len(found.problems) == before and detail:
        found.exercised[what] = detail


def _run(found: Rehearsal, config: PipelineConfig, place: Path, command: list[str], seconds: float) -> None:
    """Run the configuration, with PPO killed after its first checkpoint, and read its artifacts."""
    trace = place / "trace"
    trace.mkdir()
    killed = {"RLHF_FAIL": _KILL, "RLHF_FAIL_TRACE": str(trace)} if config.ppo.enabled else {}
    log = place / "run.log"
    own = {name: value for name, value in os.environ.items() if name not in (HOME_OF_RUNS, "PREFECT_API_URL")}
    with (
        log.open("ab") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**own, **killed}
        ) as process,
    ):
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            found.problems.append(f"run: it did not end within {seconds:.0f} s; see {log}")
            return
        finally:
            process.terminate()  # a run ends its stages in order
    if status != 0:
        found.problems.append(_failure(config, log, status))
        return
    if (trace / _KILL).exists():
        found.exercised["kill and resume"] = "SIGKILL of PPO after its first checkpoint, and its continuation"
    elif config.ppo.enabled:
        found.problems.append("ppo.checkpoint_every: no checkpoint was written; lower it")
    _read(found, config)


def _failure(config: PipelineConfig, log: Path, status: int) -> str:
    """Return the error of a run that failed."""
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
    if "ppo" not in run.stages:
        return
    ppo, policy = config.ppo, config.ppo.policy_deepspeed
    adapter = "" if ppo.lora is None else f", adapters {'sent alone' if ppo.syncs_adapter else 'merged'}"
    found.exercised["placement"] = (
        f"{policy.ranks} ranks with ZeRO-{policy.zero_stage} in {policy.dtype}, {ppo.engine.count} engines,"
        f" colocate {ppo.colocate}{adapter}, {ppo.rollout_batch_size} responses in {ppo.minibatches}"
        " minibatches"
    )
    artifacts, ref = run.artifact("ppo")
    lines = (artifacts.fetch(ref) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    if len(lines) != ppo.steps:
        raise CorruptArtifact(f"{ref.uri} has {len(lines)} steps; {ppo.steps} were expected")
    first = json.loads(lines[0])
    shown = [*_FIRST_STEP, *(name for name in first if name.startswith("rewards/"))]
    found.first_step = {name: first[name] for name in shown if first.get(name) is not None}
    for name, value in first.items():
        if isinstance(value, float) and not math.isfinite(value):
            found.problems.append(f"ppo: {name} must be finite in the first step; got {value}")


def _compared(plan: Plan, found: Rehearsal) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield what the plan says of the run, and what was seen here."""
    fits = "fits" if plan.verdict.fits else "does not fit"
    step = "" if plan.time is None else f"; {sum(plan.time.phases.values()):.1f} s for a step of PPO"
    yield "memory, time", (f"{fits} {plan.hardware}{step}", "not measured")
    for work in plan.work:
        seen = found.exercised.pop(f"stage {work.stage}", "not reached")
        yield work.stage, (f"{work.rows:,} {work.what}, {work.steps:,} steps", seen)
    if plan.unread is not None:
        yield "rows", (f"not read: {plan.unread}", "")
