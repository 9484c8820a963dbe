"""The rollouts of the step in hand, written before anything trains on them.

A checkpoint holds the weights that the next step samples with. An attempt that is killed in that step, or
before the checkpoint after it, leaves the rollouts here; the attempt that continues from the checkpoint uses
them instead of sampling again, which on GPUs would not even give the same tokens. Only that one step can be
of use, so only it is kept.

Consumes and produces `RolloutBatch`es. One JSON file, replaced as a whole, with a checksum of its content.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_core.ppo.rollouts import RolloutBatch
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.system.files import write_atomic
from rlhf_core.types import PromptExample, Rollout

log = logging.getLogger(__name__)


class RolloutJournal:
    """In `folder`, which outlives an attempt. `prompts`: all there are, in the same order every time."""

    def __init__(self, folder: Path, prompts: Sequence[PromptExample]) -> None:
        self._file = folder / "rollouts.json"
        self._prompts = prompts
        self._position = {id(prompt): i for i, prompt in enumerate(prompts)}

    def write(self, step: int, batch: RolloutBatch) -> None:
        """Keep the batch of `step`, in place of any other."""
        content = json.dumps(
            {
                "step": step,
                "rollouts": [asdict(rollout) for rollout in batch.rollouts],
                "prompts": [self._position[id(prompt)] for prompt in batch.prompts],
                "rewards": None if batch.rewards is None else asdict(batch.rewards),
                "replaced": batch.replaced,
                "scores_before": batch.scores_before,
            }
        )
        write_atomic(self._file, f"{hashlib.sha256(content.encode()).hexdigest()}\n{content}")

    def read(self, step: int) -> RolloutBatch | None:
        """The batch of `step`; None if another was kept, or none, or it is damaged, which is said."""
        try:
            checksum, content = self._file.read_bytes().split(b"\n", 1)
        except FileNotFoundError:
            return None
        except ValueError:
            checksum, content = b"", b""
        if hashlib.sha256(content).hexdigest().encode() != checksum:
            log.error("%s is damaged; step %d is sampled again", self._file, step)
            return None
        kept = json.loads(content)
        if kept["step"] != step:
            return None
        rollouts = [_rollout(fields) for fields in kept["rollouts"]]
        rewards = None if kept["rewards"] is None else RewardBatch(**kept["rewards"])
        prompts = [self._prompts[i] for i in kept["prompts"]]
        return RolloutBatch(rollouts, prompts, rewards, kept["replaced"], kept["scores_before"], kept=True)


def _rollout(fields: dict[str, Any]) -> Rollout:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return Rollout(**values)
