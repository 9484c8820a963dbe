"""Rewards that read responses, in an actor of a real Ray.

- rules and a Python function return what they return in one process, and the function has the environment,
  the search path and the working folder of the stage
- warnings of the actor are logged by the stage
- a dead actor is named by the next call, and the process of the function has ended with it
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.placement import PPOSettings
from rlhf_core.errors import WorkerDied
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.sampling.reward_actor import RewardActors, RewardSettings
from rlhf_core.ppo.sampling.rollouts import RewardInputs
from rlhf_core.ppo.training.batch import Places, RolloutBatch, columns_of
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.types import PromptExample, Rollout

FUNCTION = """
import json, os, sys
from pathlib import Path

calls = []

def score(samples):
    calls.append(len(samples))
    if calls == [len(samples)]:
        raise ValueError("the first call fails")
    names = ("OMP_NUM_THREADS", "SECRET_OF_THE_TEST")
    found = {"folder": os.getcwd(), "pid": os.getpid(), **{name: os.environ.get(name) for name in names}}
    Path(os.environ["FILE_OF_THE_TEST"]).write_text(json.dumps(found))
    return [sum(sample.response_ids) / 7 + len(samples) for sample in samples]
"""


class OnlyRewards(Fleet):
    """Starts Ray, and no ranks and engines."""

    @override
    def _start_actors(self) -> None:
        return None


def test_sources_have_the_process_settings_of_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, seen = tmp_path / "my_rewards.py", tmp_path / "seen.json"
    file.write_text(FUNCTION)
    function = {"type": "python", "function": "m:score", "file": str(file), "timeout": 60, "retries": 1}
    rules = [{"type": "token_share", "below": 5, "normalize": "batch"}, {"type": "repetition"}]
    tree = {"run": {"device": "cpu"}, "ppo": {"rewards": [*rules, function]}}
    config = config_from_tree(tree, "test")
    monkeypatch.setenv("FILE_OF_THE_TEST", str(seen))
    prompts = [PromptExample(f"p{i}", f"prompt {i}", (1, i)) for i in range(6)]
    rollouts = [
        Rollout(prompt.prompt_id, 0, prompt.input_ids, tuple(range(2, 4 + i)), (0.0,) * (2 + i), True, 0)
        for i, prompt in enumerate(prompts)
    ]
    with OnlyRewards(PPOSettings.of(config), "cpu", {}, 0) as fleet:
        # After the start of Ray, whose processes therefore do not inherit them.
        monkeypatch.setenv("SECRET_OF_THE_TEST", "secret")
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        monkeypatch.chdir(tmp_path)
        chunks = [fleet.put(columns_of(rollouts[:4], 1)), fleet.put(columns_of(rollouts[4:], 1))]
        places = Places(np.array([0, 0, 0, 0, 1, 1]), np.array([0, 1, 2, 3, 0, 1]))
        lengths = np.array([len(rollout.response_ids) for rollout in rollouts], np.int32)
        batch = RolloutBatch(chunks, places, lengths, np.ones(6, np.bool_), prompts)
        inputs = RewardInputs(fleet, batch, str)
        with RewardComposer(config.ppo.rewards) as composer:
            expected = composer.score(inputs, None)
        own = json.loads(seen.read_text())
        seen.unlink()
        caplog.clear()
        with RewardActors(fleet, RewardSettings(config.ppo.rewards, str)) as rewards:
            assert rewards.score(inputs, None) == expected
            found = json.loads(seen.read_text())
            assert found["pid"] != own["pid"]
            assert {**found, "pid": 0} == {**own, "pid": 0}
            assert found["SECRET_OF_THE_TEST"] == "secret" and found["folder"] == str(tmp_path)
            warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert any("reward python: try 1 of 2 failed" in text for text in warnings)
            _kill(rewards)
            with pytest.raises(WorkerDied, match="died"):  # Ray may not know its name yet
                rewards.score(inputs, None)
            deadline = time.monotonic() + 30
            while Path(f"/proc/{found['pid']}").exists():
                assert time.monotonic() < deadline
                time.sleep(0.1)


def _kill(rewards: RewardActors) -> None:
    import ray

    [actor] = rewards._actors
    pid = ray.get(actor.handle.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
    os.kill(pid, signal.SIGKILL)
