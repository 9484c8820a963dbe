"""Match of the policy against the current champion.

Both answer the same prompts, which neither was trained on, and the judge of the evaluation compares the
answers. Recorded evaluations are comparable only if both used the same measure; a match does not have this
restriction. If the judge is a reward model, it is the one that the candidate was trained with. The champion's
reward model therefore judges the same answers as well.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import load_prompts
from rlhf_core.data.decoding import load_decoder
from rlhf_core.errors import CorruptArtifact, InputError
from rlhf_core.evaluation import generate, scoring
from rlhf_core.evaluation.judge import Answer, Comparison, ScoreJudge, compare
from rlhf_core.evaluation.policy_files import PolicyFiles, made_with, policy_files
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.rewards.compose import code_digests
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.store import open_store
from rlhf_core.system.home import Home
from rlhf_core.types import ArtifactRef, PromptExample, RewardInput, StageContext, StageName

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class _NotPlayed(Exception):
    """Its message says why."""


@dataclass(frozen=True)
class Played:
    """Result of a match from the candidate's point of view."""

    judge: str
    """The measure that decided."""
    home: Comparison
    """Comparison by the judge of the candidate's evaluation."""
    away: Comparison | None
    """Comparison by the champion's reward model, if `home` used the candidate's. None if it is not in this
    store.
    """


@dataclass(frozen=True)
class _Champion:
    policy: PolicyFiles
    tokenizer: str
    seen: frozenset[str]
    """Ids of the prompts that it was trained on."""
    template: str
    """`data.template` of its run."""
    reward: Path | None
    """The champion's reward model, if a reward model is the judge. None if it is not in this store."""


def play(config: PipelineConfig, context: StageContext, champion: Mapping[str, str]) -> Played | None:
    """The candidate of `context.inputs` against the version with the tags `champion`, paired by prompt.

    None, with the reason in the log, where the champion is not in this store, reads other tokens, cannot be
    served as the candidate can, or where no prompt is left that both can be asked.
    """
    try:
        prompts = list(load_prompts(context.inputs["data"], "eval"))[: config.evaluate.prompts]
        judge = scoring.choose_measure(config, gold_known=scoring.has_gold(prompts))
        other = _find(config, champion, judge)
        tokenizer = _tokenizer(context.inputs["ppo"] / "policy")
        if (other.tokenizer, other.template) != (tokenizer, config.data.template):
            raise _NotPlayed("it has another tokenizer or template")
        prompts = [prompt for prompt in prompts if prompt.prompt_id not in other.seen]
        if not prompts:
            raise _NotPlayed("it was trained on all held-out prompts")
        return _play(config, context, prompts, other, judge)
    except _NotPlayed as reason:
        log.warning("no match against the champion: %s; recorded evaluations decide", reason)
        return None


def _find(config: PipelineConfig, tags: Mapping[str, str], judge: str) -> _Champion:
    artifacts = ArtifactStore(open_store(config), Home.of(config.run.home).cache)
    try:
        policy, data = (_artifact(artifacts, stage, tags) for stage in ("ppo", "data"))
        made = artifacts.config(policy)
        train = load_prompts(artifacts.fetch(data), "train")
        folder = artifacts.fetch(policy)
        sft = partial(_fetched, artifacts, "sft", tags)
        files = policy_files(made_with(made["ppo"]), folder, sft)
        seen = frozenset(prompt.prompt_id for prompt in train)
        reward = _reward_model(artifacts, tags) if judge == "reward_model" else None
        return _Champion(files, _tokenizer(folder / "policy"), seen, str(made["data"]["template"]), reward)
    except (CorruptArtifact, InputError) as error:  # a store that fails is tried again, and decides nothing
        raise _NotPlayed(error.message) from error


def _reward_model(artifacts: ArtifactStore, tags: Mapping[str, str]) -> Path | None:
    try:
        return _fetched(artifacts, "reward", tags) / "model"
    except _NotPlayed as reason:
        log.warning("the champion's reward model will not judge: %s", reason)
        return None


def _fetched(artifacts: ArtifactStore, stage: StageName, tags: Mapping[str, str]) -> Path:
    return artifacts.fetch(_artifact(artifacts, stage, tags))


def _artifact(artifacts: ArtifactStore, stage: StageName, tags: Mapping[str, str]) -> ArtifactRef:
    """The one that the version was made from or with."""
    key = tags.get(f"rlhf.{stage}.key")
    ref = artifacts.find(stage, key) if key is not None else None
    if ref is None or ref.digest != tags.get(f"rlhf.{stage}.digest"):
        raise _NotPlayed(f"its {stage} artifact is not in this store")
    return ref


def _tokenizer(folder: Path) -> str:
    """Digest of what turns text into tokens."""
    found = hashlib.sha256()
    for file in (folder / name for name in _TOKENIZER_FILES):
        found.update(file.read_bytes() if file.exists() else b"")
        found.update(b"\x1f")
    return found.hexdigest()


def _play(
    config: PipelineConfig,
    context: StageContext,
    prompts: list[PromptExample],
    champion: _Champion,
    judge: str,
) -> Played:
    from rlhf_core.engines.ranks import resolve_device

    device = resolve_device(config.run.device)
    decoder = load_decoder(context.inputs["data"])

    def respond(name: str, files: PolicyFiles) -> list[RewardInput]:
        return generate.responses_of(
            config, {name: files}, decoder.response, prompts, device=device, progress=context.progress
        )[name]

    ours = respond("ppo", policy_files(config.ppo, context.inputs["ppo"], lambda: context.inputs["sft"]))
    try:
        theirs = respond("champion", champion.policy)
    except (
        Exception
    ) as error:  # it may be larger, older, of another kind: the candidate was just served the same way
        raise _NotPlayed(f"it cannot be served here ({type(error).__name__}: {error})") from error

    code = code_digests(config.ppo.rewards, context.sources)

    def judged(reward: Path | None) -> Comparison:
        scores = scoring.score(
            judge, config, reward, [*ours, *theirs], pad_id=decoder.pad, device=device, reward_code=code
        )
        pairs = [
            (Answer(a, {judge: x}), Answer(b, {judge: y}))
            for a, b, x, y in zip(ours, theirs, scores[: len(ours)], scores[len(ours) :], strict=True)
            if not math.isnan(x + y)
        ]
        if not pairs:
            raise _NotPlayed("no response could be scored")
        settings = Intervals(config).settings("match")
        return compare(ScoreJudge(judge), [a for a, _ in pairs], [b for _, b in pairs], **settings)

    home = judged(context.inputs["reward"] / "model" if "reward" in context.inputs else None)
    away = judged(champion.reward) if judge == "reward_model" and champion.reward is not None else None
    return Played(judge, home, away)
