"""The rollouts of an interrupted step.

- the cache returns exactly the batch that was written, without pickle; another step or a damaged file gives
  nothing
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from rlhf_core.cluster.rpc import Pending
from rlhf_core.ppo.sampling.schedule import RolloutCache
from rlhf_core.ppo.training.batch import Places, RolloutBatch, columns_of, header_of
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.testing.fleet import ScriptedFleet
from rlhf_core.types import PromptExample, Rollout
from tests.support.scripted_rollouts import rollouts

REPEATED = [
    PromptExample(f"p{i // 2}", f"prompt {i // 2}", (1, 2 + i // 2), {"answer": str(i)}) for i in range(4)
]
"""Each prompt occurs twice, with different answers."""


def cached_batch(rewards: RewardBatch | None = None) -> RolloutBatch:
    noise = random.Random(0)
    sampled = [
        Rollout(p.prompt_id, i, p.input_ids, (5, 6), (-noise.random(), -1e-17 * noise.random()), i == 0, 4)
        for p in REPEATED
        for i in range(2)
    ]
    header = header_of(sampled)
    return RolloutBatch(
        [Pending(columns_of(sampled[:6], 2)), Pending(columns_of(sampled[6:], 2))],
        Places(np.array([0] * 6 + [1] * 2), np.array([4, 5, 2, 3, 0, 1, 0, 1])),
        header.lengths,
        header.finished,
        [p for p in REPEATED for _ in range(2)],
        rewards,
        1,
        0.25,
        version=4,
    )


def cache_in(folder: Path) -> RolloutCache:
    return RolloutCache(folder, REPEATED, ScriptedFleet())


@pytest.mark.parametrize(
    "rewards",
    [None, RewardBatch([0.1, float("nan")], {"length": [0.1, 0.3]}, {"length": {"requests": 2.0}})],
)
def test_the_cache_returns_what_was_written(tmp_path: Path, rewards: RewardBatch | None) -> None:
    cache, written = cache_in(tmp_path / "new"), cached_batch(rewards)
    cache.write(3, cached_batch())
    cache.write(5, written)
    read = cache_in(tmp_path / "new").read(5)
    assert read is not None
    assert (rollouts(read), read.prompts, read.replaced) == (rollouts(written), written.prompts, 1)
    assert (read.scores_before, read.version) == (0.25, 4)
    assert read.from_cache and not written.from_cache
    assert repr(read.rewards) == repr(rewards)
    assert cache.read(3) is None and cache.read(6) is None
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["rollouts"]


def test_without_files_the_cache_is_empty(tmp_path: Path) -> None:
    assert cache_in(tmp_path).read(1) is None


@pytest.mark.parametrize("name", ["manifest.json", "chunk-00001.safetensors", "batch.safetensors"])
def test_the_cache_detects_every_damaged_byte(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    cache = cache_in(tmp_path)
    cache.write(1, cached_batch())
    file = tmp_path / "rollouts" / name
    whole = file.read_bytes()
    damaged = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(0, len(whole), 23)]
    damaged += [whole[:i] for i in range(0, len(whole), 97)]
    with caplog.at_level(logging.ERROR):
        for content in damaged:
            file.write_bytes(content)
            assert cache.read(1) is None
        file.unlink()
        assert cache.read(1) is None
    assert len(caplog.records) == len(damaged) + 1
    assert "is damaged; step 1 is sampled again" in caplog.text


def test_nothing_in_the_cache_is_unpickled(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    cache.write(1, cached_batch())
    folder = tmp_path / "rollouts"
    (folder / "batch.safetensors").write_bytes(pickle.dumps({"objects": np.arange(3)}))
    checksum, content = (folder / "manifest.json").read_text().split("\n", 1)
    manifest = json.loads(content)
    manifest["files"]["batch.safetensors"] = hashlib.sha256(
        (folder / "batch.safetensors").read_bytes()
    ).hexdigest()
    content = json.dumps(manifest)
    checksum = hashlib.sha256(content.encode()).hexdigest()
    (folder / "manifest.json").write_text(f"{checksum}\n{content}")
    with pytest.raises(SafetensorError):
        cache.read(1)
