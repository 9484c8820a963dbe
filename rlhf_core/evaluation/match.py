"""The policy against the present champion: both answer the same held-out prompts, and the evaluation's judge decides.

Numbers recorded by two evaluations compare only where both had the same measure; a match needs no such luck. The reward
model, where it is the judge, is the candidate's own: a true reward or rules say more, and come first.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.data.dataset import load_prompts
from rlhf_core.errors import CorruptArtifact, InputError
from rlhf_core.evaluation import generate, scoring
from rlhf_core.evaluation.judge import Answer, Comparison, ScoreJudge, compare
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.store import Store
from rlhf_core.types import Services

log = logging.getLogger(__name__)


def play(config: PipelineConfig, services: Services, champion: Mapping[str, str]) -> Comparison | None:
    """The candidate of `services.inputs` against the version with the tags `champion`, paired by prompt.

    None, with the reason in the log, where the champion's weights are not in this store, or read other tokens.
    """
    try:
        folder = _weights(config, champion)
    except (InputError, CorruptArtifact) as error:
        log.warning("the champion cannot be played against (%s): recorded evaluations decide", error.message)
        return None
    candidate = services.inputs["ppo"] / "policy"
    if folder is None or _tokenizer(folder) != _tokenizer(candidate):
        why = "its weights are not in this store" if folder is None else "it has another tokenizer"
        log.warning("the champion cannot be played against (%s): recorded evaluations decide", why)
        return None
    return _play(config, services, {"ppo": candidate, "champion": folder})


def _weights(config: PipelineConfig, champion: Mapping[str, str]) -> Path | None:
    settings = config.store
    store = Store(config.store_url, settings.endpoint, settings.retry_seconds)
    artifacts = ArtifactStore(store, Path(config.run.home).resolve() / "cache")
    ref = artifacts.find("ppo", champion["rlhf.ppo.key"]) if "rlhf.ppo.key" in champion else None
    if ref is None or ref.digest != champion.get("rlhf.ppo.digest"):
        return None
    return artifacts.fetch(ref) / "policy"


def _tokenizer(folder: Path) -> str:
    """Digest of what turns text into tokens."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def _play(config: PipelineConfig, services: Services, models: Mapping[str, Path]) -> Comparison:
    from transformers import AutoTokenizer

    from rlhf_core.training.launch import resolve_device

    device = resolve_device(config.run.device)
    tokenizer = AutoTokenizer.from_pretrained(services.inputs["data"] / "tokenizer", trust_remote_code=False)
    prompts = list(load_prompts(services.inputs["data"], "eval"))[: config.evaluate.prompts]
    responses = generate.responses_of(config, models, tokenizer, prompts, device=device, progress=services.progress)
    judge = scoring.choose_measure(config, gold_known=scoring.has_gold(prompts))
    both = [*responses["ppo"], *responses["champion"]]
    reward = services.inputs["reward"] / "model" if "reward" in services.inputs else None
    scores = scoring.score(judge, config, reward, both, pad_id=tokenizer.pad_token_id or 0, device=device)
    ours, theirs = (
        [Answer(sample, {judge: value}) for sample, value in zip(responses[name], values, strict=True)]
        for name, values in (("ppo", scores[: len(prompts)]), ("champion", scores[len(prompts) :]))
    )
    whole = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if not any(map(_masked, pair))]
    settings = Intervals(config).settings("match")
    return compare(ScoreJudge(judge), [ours[i] for i in whole], [theirs[i] for i in whole], **settings)


def _masked(answer: Answer) -> bool:
    return any(math.isnan(value) for value in answer.scores.values())
