"""What finished runs have recorded, by kind, for `rlhf inspect`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.ppo_sections import ClippedWeightLoss, SequenceLoss
from rlhf_core.errors import InputError
from rlhf_core.ops.finished_run import FinishedRun
from rlhf_core.ops.first_difference import Recording
from rlhf_core.ops.inspect.rollouts import ClipRange, Kind, RecordedRun
from rlhf_core.pipeline import StageName
from rlhf_core.ppo.watching.guards import raised_guards
from rlhf_core.record.annotations import annotations_of
from rlhf_core.record.reader import RECORD, parts_of

STAGE_OF_KIND: dict[Kind, StageName] = {
    "ppo": "ppo",
    "evaluation": "evaluate",
    "match": "register",
    "sample": "sample",
}


def recorded_runs(runs: Sequence[FinishedRun]) -> dict[Kind, list[RecordedRun]]:
    """Return the runs that have each kind.

    Raises InputError if a run has none, or if an artifact of its summary is not in the store any more.
    """
    found: dict[Kind, list[RecordedRun]] = {}
    for run in runs:
        kinds = [kind for kind in STAGE_OF_KIND if _has(run, kind)]
        if not kinds:
            raise InputError(f"{run.name} has no recorded rollouts (record.level was none); name another run")
        for kind in kinds:
            found.setdefault(kind, []).append(_recorded(run, kind))
    return found


def _has(run: FinishedRun, kind: Kind) -> bool:
    stage = STAGE_OF_KIND[kind]
    is_made = bool(run.stages.get(stage, {}).get("artifact"))
    return is_made and bool(parts_of(run.recorded(stage) / RECORD))


def _recorded(run: FinishedRun, kind: Kind) -> RecordedRun:
    stage = STAGE_OF_KIND[kind]
    folder, annotations = run.recorded(stage), annotations_of(*run.artifact(stage))
    if kind != "ppo":
        artifacts, ref = run.artifact("data")
        tokenizer = artifacts.fetch(ref, weights=False) / "tokenizer" / "tokenizer.json"
        return RecordedRun(run.name, folder, annotations, tokenizer=tokenizer)
    ppo = run.config("ppo").ppo
    evaluations = {}
    file = folder / "evaluations.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        row = json.loads(line)
        evaluations[int(row.pop("version"))] = row
    guards = raised_guards(ppo, Recording(folder, run.name).metrics, evaluations)
    return RecordedRun(run.name, folder, annotations, guards, clip_range(ppo))


def clip_range(ppo: PPOConfig) -> ClipRange | None:
    """Return the ratios that the policy's loss does not clip; None if it is a user's function."""
    match ppo.loss:
        case None:
            return ClipRange(ppo.clip_low, ppo.clip_high)
        case SequenceLoss() | ClippedWeightLoss() as loss:
            return ClipRange(loss.clip_low, loss.clip_high, isinstance(loss, SequenceLoss))
        case _:
            return None
