"""The match of an earlier registration, which is used again with `register.votes`.

Votes of people are about the answers of one match. On GPUs, the same seeds can give other answers: then the
votes fit no later match, and each of them is another test, which spends its own level.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import CorruptArtifact
from rlhf_core.evaluation.scoring import MODEL_STAGES
from rlhf_core.pipeline import STAGES
from rlhf_core.storage.artifacts import ArtifactStore, open_artifacts
from rlhf_core.tracking.champions import POLICY
from rlhf_core.tracking.gate import Match
from rlhf_core.types import StageContext

log = logging.getLogger(__name__)

SAMPLES = "match_samples.jsonl"
"""Pairs of answers of the match, for people."""


def match_name(config: PipelineConfig, context: StageContext, champion: Mapping[str, str]) -> str:
    """Return the name of the file with the match of the candidate in `context` against a champion.

    It contains a digest of what decides the match: the inputs of the stage, among them the candidate's
    judge, the champion, and its judge if that is a trained model which the store has now.
    """
    inputs = context.lineage.inputs if context.lineage else {}
    identity = {
        "version": STAGES["register"].version,
        "inputs": {stage: ref.digest for stage, ref in inputs.items()},
        "sources": {name: it for name, it in context.sources.items() if not name.startswith("register.")},
        "champion": [champion.get(POLICY), champion.get("eval.judge")],
        "judges_of_champion": _judges(open_artifacts(config), champion),
    }
    return f"match-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]}.json"


def _judges(artifacts: ArtifactStore, champion: Mapping[str, str]) -> dict[str, str | None]:
    """Return the digests of trained models that can be the champion's judge; None for a missing one."""
    own = champion.get("eval.judge")
    stages = [stage for judge, stage in MODEL_STAGES.items() if own in (judge, None)]
    found = {stage: artifacts.find_registered(stage, champion) for stage in stages}
    return {stage: None if ref is None else ref.digest for stage, ref in found.items()}


def keep_match(output: Path, name: str, match: Match) -> None:
    """Write the match, without its votes, to the output of the stage. Its samples are there already."""
    for other in output.glob("match-*.json"):  # against a champion that was replaced during the match
        other.unlink()
    content = match.record() | {"votes": None, "outcomes": match.outcomes}
    (output / name).write_text(json.dumps(content) + "\n", encoding="utf-8")


def load_match(config: PipelineConfig, name: str, output: Path) -> Match | None:
    """Return the match with this name that an earlier registration kept, and copy its samples to `output`;
    None if there is none.
    """
    artifacts = open_artifacts(config)
    ref = artifacts.find_file("register", name)
    if ref is None:
        return None
    try:
        folder = artifacts.fetch(ref)
    except CorruptArtifact as error:
        log.warning("the match is run again: %s", error.message)
        return None
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    shutil.copyfile(folder / SAMPLES, output / SAMPLES)
    log.info("the match against the champion is that of the artifact register/%s", ref.key)
    match = Match(**content)
    return replace(match, outcomes=tuple(match.outcomes))
