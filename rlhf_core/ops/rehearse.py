"""`rlhf rehearse`: a run as a whole on this machine's CPU, before GPUs are booked.

configuration -> plan, Derivation -> checks: store, registry, rows, rewards
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
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import TEXT, SetName
from rlhf_core.config.evaluate import LanguageModelConfig
from rlhf_core.config.keys import tracking_uri
from rlhf_core.config.load import load_config, overrides_of
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.rewards import ExternalReward, ModelReward
from rlhf_core.data.messages import Message
from rlhf_core.data.prepare import Prepared, read_and_encode
from rlhf_core.errors import ConfigError, CorruptArtifact, InputError, RLHFError
from rlhf_core.models.folder import ModelFolder
from rlhf_core.ops.check_reward import score_card
from rlhf_core.ops.data_table import ROWS as PLANNED_ROWS
from rlhf_core.ops.finished_run import find_run, newest_run
from rlhf_core.ops.plan.plan import Plan, make_plan
from rlhf_core.ops.rehearse_config import Change, Derivation
from rlhf_core.preflight import check
from rlhf_core.rewards.chat_service import ModelReply, ask_service
from rlhf_core.rewards.check import functions_of_ppo
from rlhf_core.rewards.questions import FIELD, Pair, letter_of, questions_of, rubric_text
from rlhf_core.run.references import resolve
from rlhf_core.run.state import read_state
from rlhf_core.storage.store import Store, open_store
from rlhf_core.system.home import HOME_OF_RUNS, Home
from rlhf_core.tracking.registry import LOCAL_STORE
from rlhf_core.tracking.tracker import open_tracking, public_uri

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
        # GPUs imply CUDA, as in `make_plan`. The rehearsal itself sets `run.device` to the CPU later.
        overrides = [*overrides, "run.device=cuda"]
    given = resolve(load_config(path, overrides)).config
    say("small model and few rows")
    derived = Derivation(given, place, model)
    found = Rehearsal(derived.changes, exercised=derived.rows)
    file = place / "rehearsal.yaml"
    tree = derived.config.model_dump(mode="json", by_alias=True)
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    try:
        # RLHF_HOME must not lead the checks to the user's home.
        config = load_config(file, overrides_of({"run.home": derived.config.run.home}))
    except ConfigError as error:
        raise InputError(f"the configuration of the rehearsal is not valid: {error.message}") from error
    plan = _planned(found, path, overrides, gpus, model)
    say("store, registry, rows and rewards")
    try:
        if _check(found, config, given, place) and run:
            say(f"rlhf run {file}, killed once; log {place / 'run.log'}")
            _run(found, config, place, [*run, str(file)], seconds)
    finally:
        if given.store.url is not None:
            Store(given.store.url, given.store.endpoint).delete_prefix(derived.prefix)
    if plan is not None:
        found.warnings = plan.warnings
        found.plan = dict(_compared(plan, found))
    found.seconds = time.monotonic() - started
    # The user knows their own files, not those of the rehearsal.
    for own, users in derived.copies.items():
        found.problems = [problem.replace(own, users) for problem in found.problems]
    # Of the children, the kernel counts those that were waited for, and theirs.
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
    _collect(found, "store: objects that are created once", check_store(config), config.store_url)
    _collect(found, "registry: a version and an alias", check_registry(config), uri)
    try:
        check(config)
        prepared = read_prepared(config, place / "read")
    except RLHFError as error:
        found.problems += error.message.splitlines()
        return False
    counts = ", ".join(f"{name} {count.read} read" for name, count in prepared.counts.items() if count.read)
    _collect(found, "rows, template, special tokens", check_rows(config, prepared), counts)
    own = ", ".join(each.function for each in functions_of_ppo(config).values())
    _collect(found, "functions of users with random numbers", check_functions(config), own)
    # The reward model is not trained yet; the run scores with it.
    scored = ", ".join(each.used_name for each in config.ppo.rewards if not isinstance(each, ModelReward))
    _collect(found, "rewards on answers of the rows", check_rewards(config, prepared), scored)
    judge = given.evaluate.language_model
    if judge is not None:
        _collect(found, "judge: a verdict on one pair", check_judge(judge), judge.name)
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
    # With a trace, the failpoint acts once in all processes together. Otherwise each retry would be killed.
    killed = {"RLHF_FAIL": _KILL, "RLHF_FAIL_TRACE": str(trace)} if config.ppo.enabled else {}
    log = place / "run.log"
    # With these variables, the run would write to the user's home and be shown in their server of Prefect.
    own = {name: value for name, value in os.environ.items() if name not in (HOME_OF_RUNS, "PREFECT_API_URL")}
    # An engine with a large vocabulary compiles an operation, which takes longer than its responses.
    own["TORCHDYNAMO_DISABLE"] = "1"
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
    # The failpoint creates this file just before it acts. The exit status does not tell a run that was killed
    # and continued from one that never wrote a checkpoint.
    if (trace / _KILL).exists():
        found.exercised["kill and resume"] = "SIGKILL of PPO after its first checkpoint, and its continuation"
    elif config.ppo.enabled:
        found.problems.append("ppo.checkpoint_every: no checkpoint was written; lower it")
    _read(found, config)


def _failure(config: PipelineConfig, log: Path, status: int) -> str:
    """Return the error of a run that failed."""
    states = [state for file in Home.of(config.run.home).run_states() if (state := read_state(file))]
    # The home of a rehearsal has one run.
    if states and states[0].get("error"):
        stage = (states[0].get("making") or {}).get("stage", "run")
        return f"stage {stage}: {states[0]['error']}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    # The beginnings of messages in `rlhf_cli.main`.
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
        # `pop`, because it is shown beside the plan, and not a second time in the list of what was exercised.
        seen = found.exercised.pop(f"stage {work.stage}", "not reached")
        yield work.stage, (f"{work.rows:,} {work.what}, {work.steps:,} steps", seen)
    if plan.unread is not None:
        yield "rows", (f"not read: {plan.unread}", "")


# -- checks besides the run: cheap, and before anything is trained --


_TOO_LONG = 0.2
"""Share of the rows from which a limit takes too much. The longest rows are among them."""
_UNSCORED = 0.1
"""Share of masked responses from which minibatches become too small."""
_PROBED = 1500
"""Characters of a long answer."""
_CONDITIONAL = "use a store with conditional puts (If-None-Match), or a folder"
_PAIR = Pair("What is 2 + 3?", "2 + 3 is 5.", "I do not know.")
_SCORED = 64
"""Prompts whose answers each reward scores."""


def check_store(config: PipelineConfig) -> Iterator[str]:
    """Yield what the store does not do: creating an object only once, and giving it back."""
    store, key = open_store(config), f"rehearsal-{uuid.uuid4().hex}"
    try:
        first, second = store.put_if_absent(key, b"first"), store.put_if_absent(key, b"second")
        content = store.read_bytes(key)
        store.delete([key])
    except RLHFError as error:
        yield f"store.url: {config.store_url} must create an object; got: {error.message}; {_CONDITIONAL}"
        return
    if not first or second or content != b"first":
        yield (
            f"store.url: {config.store_url} must refuse to create an object that exists, because of two"
            f" processes only one may commit; got a second one that replaced the first; {_CONDITIONAL}"
        )


def check_registry(config: PipelineConfig) -> Iterator[str]:
    """Yield why the registry takes no version of a model."""
    name = config.registered_model
    mlflow = open_tracking(config).mlflow
    try:
        mlflow.prepare()
        mlflow.ensure_model(name, "Versions of rehearsals (`rlhf rehearse`); it can be deleted.")
        # A server refuses a local path without a scheme.
        source = f"{LOCAL_STORE}{config.run.home}"
        version = mlflow.create_version(name, source=source, run_id=None, tags={}, description="A probe.")
        mlflow.set_alias(name, "probe", version.version)
        mlflow.delete_alias(name, "probe")
    except Exception as error:  # the client raises those of four libraries
        yield (
            f"tracking.uri: the registry at {mlflow.uri} must take a version of {name}; got"
            f" {type(error).__name__}: {str(error)[:200]}; give this user the right to register models, or"
            " name another server"
        )


def read_prepared(config: PipelineConfig, place: Path) -> Prepared:
    """Read and encode the rows of a rehearsal as the stage `data` does. Raises its errors."""
    contents = {f"data.{name}[{index}]": None for name, index, _ in config.data.sources()}
    place.mkdir(parents=True, exist_ok=True)
    return read_and_encode(config, place, lambda done, total: None, contents)


def _examples(prepared: Prepared, name: SetName) -> list[Any]:
    """Return the encoded rows of a set, training and held out."""
    return [item.example for split in prepared.splits[name].values() for item in split]


def check_rows(config: PipelineConfig, prepared: Prepared) -> Iterator[str]:
    """Yield what is wrong with the rendered rows."""
    yield from _special_tokens(config, prepared)
    if config.data.template == "chat":
        yield from _template(prepared)
    yield from _lengths(config, prepared)


def _special_tokens(config: PipelineConfig, prepared: Prepared) -> Iterator[str]:
    """Check that sequences have one BOS, and that the model ends with the EOS of its tokenizer."""
    tokenizer = prepared.encoder.tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows = (*_examples(prepared, "prompts"), *_examples(prepared, "sft"))
    doubled = sum(each.input_ids.count(bos) > 1 for each in rows)
    # GPT-2 and others have one token for both, which then begins and ends each sequence.
    if bos not in (None, eos) and doubled:
        field = "data.chat_template" if config.data.chat_template else "model.path (its chat template)"
        yield (
            f"{field}: a sequence must have {tokenizer.bos_token} once; got it more often in {doubled} of"
            f" {len(rows)} rows; write it once in the template, or remove it from the texts"
        )
    if config.model.path is None or config.sft.enabled:
        return
    own = ModelFolder(config.model.path).text_config.get("eos_token_id")
    ends = own if isinstance(own, list) else [own]
    if own is not None and eos not in ends:
        yield (
            f"model.path: the model ends with {tokenizer.convert_ids_to_tokens(ends)} (eos_token_id of"
            f" config.json), but its tokenizer has {tokenizer.eos_token}, at which the engines stop; name"
            " the same token as eos_token in tokenizer_config.json, or train it with sft.enabled=true"
        )


def _template(prepared: Prepared) -> Iterator[str]:
    """Check with a long answer that the template loses no text, and that masks begin where prompts end."""
    encoder = prepared.encoder
    text = " ".join(each.prompt for each in _examples(prepared, "prompts"))[:_PROBED] or "It is noon."
    # As far as the tokenizer has these characters.
    ids = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    text = encoder.tokenizer.decode(ids, skip_special_tokens=True).strip()
    ask, answer = Message("user", text), Message("assistant", text)
    try:
        prompt, response = encoder.response([ask], answer)
        whole = encoder.conversations([ask, answer])[0]
    except ValueError as error:
        yield f"data.chat_template: it must render a long answer; got: {error}; correct it"
        return
    for what, ids in {"the user's message": prompt, "the assistant's answer": response}.items():
        if _letters(text) not in _letters(encoder.tokenizer.decode(list(ids))):
            yield (
                f"data.chat_template: it must render the whole text; got a part of {what}, which has"
                f" {len(text)} characters; remove what cuts or changes it from the template"
            )
    start = whole.mask.index(1) if 1 in whole.mask else len(whole.mask)
    if whole.ids[:start] != prompt:
        yield (
            f"data.chat_template: the prompt must end where what is learned begins; got a prompt of"
            f" {len(prompt)} tokens, and the first learned token at {start}; put {{% generation %}} right"
            " after what add_generation_prompt writes"
        )


def _letters(text: str) -> str:
    # The normaliser of a tokenizer may change case and blanks. No template is at fault for that.
    return "".join(text.casefold().split())


def _lengths(config: PipelineConfig, prepared: Prepared) -> Iterator[str]:
    """Check that the limits take few rows."""
    table = prepared.lengths.table(config.given_limits, prepared.limits)
    for row in table:
        if row["longer"] and row["longer"] >= _TOO_LONG * row["rows"]:
            fate = "cut" if row["field"] == TEXT else "left out"
            why = prepared.lengths.why(row["field"], [row["set"]], config.given_limits, prepared.limits)
            yield (
                f"{row['field']}: with the template, {row['longer']} of {row['rows']} rows of"
                f" data.{row['set']} are longer than {row['tokens']} tokens and {fate}; {why}"
            )


def check_functions(config: PipelineConfig) -> Iterator[str]:
    """Yield what is wrong with the user's loss and advantages, which get random numbers."""
    for name in functions_of_ppo(config):
        try:
            if name == "ppo.loss":
                _compute_loss(config.ppo)
            else:
                _compute_advantages(config.ppo)
        except Exception as error:  # code of a user can raise any
            said = f"{type(error).__name__}: {str(error)[:200]}"
            yield f"{name}: it must compute with random numbers; got {said}; correct it"


def _compute_loss(ppo: PPOConfig) -> None:
    import torch

    from rlhf_core.algo.losses import LossInputs
    from rlhf_core.ppo.training.loss_step import loss_of

    # The same numbers in every rehearsal, so that a message about them comes again.
    torch.manual_seed(0)
    logprobs_BT = (-torch.rand(4, 8)).requires_grad_()
    old_BT, ones_BT = logprobs_BT.detach() + 0.01, torch.ones(4, 8)
    inputs = LossInputs(
        logprobs_BT, old_BT, old_BT, torch.randn(4, 8), ones_BT, ones_BT.bool(), ppo.loss_sum, 32.0
    )
    loss, _ = loss_of(ppo)(inputs)
    loss.backward()
    gradient_BT = logprobs_BT.grad
    if not loss.isfinite() or (gradient_BT is not None and not gradient_BT.isfinite().all()):
        raise ValueError(f"loss {loss.item():g} and gradient {gradient_BT} must be finite")


def _compute_advantages(ppo: PPOConfig) -> None:
    import torch

    from rlhf_core.algo.advantages import AdvantageInputs
    from rlhf_core.ppo.training.experience import own_advantages_of

    compute = own_advantages_of(ppo)
    assert compute is not None
    number_B = torch.arange(2 * ppo.samples_per_prompt)
    group_B = number_B // ppo.samples_per_prompt
    compute(AdvantageInputs(torch.randn(len(number_B)), group_B, number_B + 1, number_B % 2 == 0))


def check_rewards(config: PipelineConfig, prepared: Prepared) -> Iterator[str]:
    """Yield the sources of rewards that fail on answers of the rows, or give all of them the same value."""
    if not config.ppo.enabled:
        return
    sources = {each.used_name: (f"ppo.rewards.{n}", each) for n, each in enumerate(config.ppo.rewards)}
    try:
        card = score_card(config, prepared, _SCORED, checks=("constant", "cut"))
    except RLHFError as error:
        yield f"ppo.rewards: {error.message}"
        return
    constant = {found.source for found in card.findings if found.check == "constant"}
    for found in card.findings:
        field, source = sources[found.source]
        is_external, is_constant = isinstance(source, ExternalReward), found.check == "constant"
        # A format that no answer of the rows has is sound beside another reward.
        adds_nothing_yet = is_constant and not is_external and len(constant) < len(sources)
        may_be_masked = not is_constant and getattr(source, "on_error", None) == "mask"
        few = may_be_masked and card.unscored[found.source] <= _UNSCORED
        if found.check == "cut" or adds_nothing_yet or few:
            continue
        yield (
            f"{field} ({found.source}): it must score answers of the rows, and tell them apart; got"
            f" {found.check}: {found.evidence}; correct it, see rlhf check-reward"
        )


def check_judge(settings: LanguageModelConfig) -> Iterator[str]:
    """Ask the language model of the evaluation about one pair, if it is at an address."""
    if settings.url is None:
        return
    replies: list[ModelReply] = []
    questions = questions_of(rubric_text(settings.rubric), _PAIR)
    try:
        ask_service(FIELD, settings, questions, lambda question, reply: replies.append(reply))
    except RLHFError as error:
        yield f"{FIELD}.url: the judge must answer; got: {error.message}; start it, or correct the address"
        return
    if all(reply.is_cut or letter_of(reply.text) is None for reply in replies):
        yield (
            f"{FIELD}.model: it must end its reply with A, B or C; got {replies[0].text[-60:]!r}; raise"
            f" {FIELD}.max_tokens, or correct its rubric"
        )
