"""The rollouts of the step in hand.

- what is read is what was written, to the last bit, with rewards where they were known
- another step, no file, and any damaged byte: nothing is read, and damage is said
"""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from rlhf_core.ppo.journal import RolloutJournal
from rlhf_core.ppo.rollouts import RolloutBatch
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.types import PromptExample, Rollout

PROMPTS = [
    PromptExample(f"p{i // 2}", f"prompt {i // 2}", (1, 2 + i // 2), {"answer": str(i)}) for i in range(4)
]
"""Each comes twice, with another answer."""


def batch(rewards: RewardBatch | None = None) -> RolloutBatch:
    noise = random.Random(0)
    rollouts = [
        Rollout(p.prompt_id, i, p.input_ids, (5, 6), (-noise.random(), -1e-17 * noise.random()), i == 0, 4)
        for p in PROMPTS
        for i in range(2)
    ]
    return RolloutBatch(rollouts, [p for p in PROMPTS for _ in range(2)], rewards, 1, 0.25)


@pytest.mark.parametrize("rewards", [None, RewardBatch([0.1, float("nan")], {"length": [0.1, 0.3]})])
def test_what_is_read_is_what_was_written(tmp_path: Path, rewards: RewardBatch | None) -> None:
    journal, written = RolloutJournal(tmp_path / "new", PROMPTS), batch(rewards)
    journal.write(3, batch())
    journal.write(5, written)
    read = RolloutJournal(tmp_path / "new", PROMPTS).read(5)
    assert read is not None
    assert (read.rollouts, read.prompts, read.replaced) == (written.rollouts, written.prompts, 1)
    assert read.scores_before == 0.25
    assert read.kept and not written.kept
    assert repr(read.rewards) == repr(rewards)
    assert journal.read(3) is None and journal.read(6) is None


def test_no_file_is_no_batch(tmp_path: Path) -> None:
    assert RolloutJournal(tmp_path, PROMPTS).read(1) is None


def test_every_damaged_byte_and_every_cut_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = RolloutJournal(tmp_path, PROMPTS)
    journal.write(1, batch())
    file = tmp_path / "rollouts.json"
    whole = file.read_bytes()
    damaged = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    damaged += [whole[:i] for i in range(0, len(whole), 7)]
    with caplog.at_level(logging.ERROR):
        for content in damaged:
            file.write_bytes(content)
            assert journal.read(1) is None
    assert len(caplog.records) == len(damaged)
    assert "is damaged; step 1 is sampled again" in caplog.text
