"""Rewards that read responses are computed in other processes.

- the same scores as by a composer in one process: with one or several actors, with scores of a reward model,
  with normalization, and with groups that are replaced
- the controller receives no tokens for it
- only sources without a state are divided over several actors
- the same errors and warnings
- what the sources log is on stderr at once, without secrets, and again by the controller only after an
  error; an unexpected error brings the log and its causes
- several threads decode the responses of a batch, at most as many as the stage has
- a batch of which a part was not read is not scored
- the process of a source gets the environment of the stage, from a file that only its user can read, and
  that it removes
- after an error, the end does not wait for an actor that still scores
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from typing_extensions import override

from rlhf_core.cluster.rpc import Actor, Pending, RemoteActor
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError, DataError, InfrastructureError, RewardError
from rlhf_core.ppo.sampling.reward_actor import (
    ResponseRows,
    RewardActors,
    RewardSettings,
    open_rewards,
    shared_process_settings,
)
from rlhf_core.ppo.sampling.rollouts import Collector
from rlhf_core.ppo.training.batch import ModelScores, Places, RolloutBatch, RolloutColumns, columns_of
from rlhf_core.rewards.compose import RewardBatch, RewardComposer
from rlhf_core.system.relayed_logs import is_from_this_process
from rlhf_core.testing.engines import Reply, Request, ScriptedEngine
from rlhf_core.testing.fleet import (
    NEVER,
    ScriptedEngineActor,
    ScriptedFleet,
    ScriptedRank,
    ScriptedRewards,
    scripted_actor,
)
from rlhf_core.testing.machine import ScriptedMachine, on_machine
from rlhf_core.types import PromptExample, RewardInput, Rollout

A = TypeVar("A", bound=Actor)
R = TypeVar("R")

PROMPTS = [PromptExample(f"p{i}", f"prompt {i}", (i, i + 1), {"answer": str(i % 3)}) for i in range(1, 13)]
RULES: list[dict[str, Any]] = [
    {"type": "answer", "weight": 2.0, "normalize": "batch"},
    {"type": "token_share", "below": 6},
    {"type": "length", "target": 2, "tolerance": 3, "weight": 0.5},
]
FUNCTION = """
import math, os

def score(samples):
    for sample in samples:
        if sample.prompt_id == os.environ.get("BAD_PROMPT"):
            raise ValueError("no score")
    return [len(sample.response) + math.fsum(sample.response_ids) / len(samples) for sample in samples]
"""


class Mean(ScriptedRank):
    @override
    def scores(self, _role: Any, share: Any, *chunks: Any) -> ModelScores:
        _, responses = self.received(share, chunks).tokens()
        return ModelScores([float(tokens.mean()) for tokens in responses])


class Fleet(ScriptedFleet):
    """Counts the chunks that the controller receives. The first actors of rewards are those of `first`."""

    received = 0
    first: Sequence[ScriptedRewards] = ()

    @override
    def start_helper(self, kind: type[A], name: str, node: str | None = None) -> RemoteActor[A]:
        if len(self.rewards) >= len(self.first):
            return super().start_helper(kind, name, node)
        self.rewards.append(self.first[len(self.rewards)])
        return scripted_actor(self.rewards[-1])

    @override
    def wait(self, pending: Sequence[Pending[R]], what: str) -> list[R]:
        results = super().wait(pending, what)
        self.received += sum(isinstance(result, RolloutColumns) for result in results)
        return results


def configuration(rewards: Sequence[dict[str, Any]], **ppo: Any) -> PipelineConfig:
    settings = {"prompts_per_step": 6, "samples_per_prompt": 2, "minibatches": 1, "staleness": 0}
    return config_from_tree({"ppo": {**settings, "rewards": list(rewards), **ppo}}, "test")


def decode(ids: Sequence[int]) -> str:
    return " ".join(str(token) for token in ids)


def scored(
    config: PipelineConfig,
    *,
    nodes: int | None,
    model: bool = False,
    first: Sequence[ScriptedRewards] = (),
) -> tuple[RewardBatch, RolloutBatch, Fleet]:
    """Return the rewards of a step. `nodes` is None for a composer in this process."""

    def respond(request: Request) -> Reply:
        first = request.prompt.input_ids[0]
        sample = request.sample_index if first % 3 else 0  # all samples of each third prompt are equal
        return Reply((first, sample, 1)[: 2 + sample])

    engines = [ScriptedEngineActor(ScriptedEngine(respond)) for _ in range(2)]
    fleet = Fleet(config, ranks={"reward": [Mean(), Mean()]} if model else None, engines=engines)
    fleet.first = first
    fleet.node_ids = [f"node {number}" for number in range(nodes or 1)]
    fleet.sync(0)
    ppo = config.ppo
    with (
        RewardComposer(ppo.rewards, score_clip=ppo.score_clip)
        if nodes is None
        else open_rewards(fleet, RewardSettings(ppo.rewards, decode, score_clip=ppo.score_clip)) as composer
    ):
        collector = Collector(ppo, fleet, PROMPTS, decode, composer, 0)
        batch = collector.collect(1, 0)
        rewards = batch.rewards or collector.rewards(batch)
    return rewards, batch, fleet


@pytest.mark.parametrize("nodes", [1, 3, 40])
@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize("filtering", [None, {"max_rounds": 2}])
def test_the_scores_are_those_of_one_process(nodes: int, model: bool, filtering: Any) -> None:
    rewards = [*RULES, {"type": "model", "weight": 0.1}] if model else RULES
    options = {"algorithm": "grpo", "dynamic_filtering": filtering} if filtering else {}
    config = configuration(rewards, score_clip=4.0 if model else None, **options)
    expected, _, alone = scored(config, nodes=None, model=model)
    found, batch, fleet = scored(config, nodes=nodes, model=model)
    assert found == expected and list(found.by_source) == list(expected.by_source)
    assert len(set(found.total)) > 3 and bool(filtering) == bool(batch.replaced)
    assert alone.received > 0 and fleet.received == 0
    assert len(fleet.rewards) == nodes


def test_no_actor_is_started_if_no_source_reads_responses() -> None:
    _, _, fleet = scored(configuration([{"type": "model"}]), nodes=2, model=True)
    assert fleet.rewards == [] and fleet.received == 0


@pytest.fixture
def function(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "my_rewards.py"
    file.write_text(FUNCTION)
    return {"type": "python", "function": "m:score", "file": str(file), "retries": 1}


def test_a_function_gets_whole_batches_in_one_process(function: dict[str, Any]) -> None:
    config = configuration([*RULES, function])
    expected, _, _ = scored(config, nodes=None)
    found, _, fleet = scored(config, nodes=3)
    assert found == expected
    assert len(fleet.rewards) == 1 and fleet.received == 0


@pytest.mark.parametrize("on_error", ["abort", "mask"])
def test_failures_have_the_same_errors_and_warnings(
    function: dict[str, Any], on_error: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BAD_PROMPT", "p3")
    config = configuration([{**function, "on_error": on_error}], prompts_per_step=12)
    seen = []
    for nodes in (None, 1):
        caplog.clear()
        message = ""
        try:
            rewards, _, _ = scored(config, nodes=nodes)
            message = repr(rewards)
        except RewardError as error:
            message = error.message
        seen.append((message, [(r.name, r.levelno, r.getMessage()) for r in caplog.records]))
    assert seen[0] == seen[1]
    assert any("try 1 of 2 failed" in text for _, _, text in seen[1][1])
    # After an error, Ray may end before it shows them.
    assert {is_from_this_process(record) for record in caplog.records} == {on_error == "abort"}
    assert ("on_error=mask would leave" in seen[1][0]) == (on_error == "abort")
    assert not logging.getLogger("rlhf_core.rewards").handlers


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_rule_that_cannot_score_a_response_names_its_prompt(nodes: int) -> None:
    config = configuration([{"type": "gold"}], prompts_per_step=12)
    with pytest.raises(DataError) as alone:
        scored(config, nodes=None)
    with pytest.raises(DataError) as found:
        scored(config, nodes=nodes)
    assert found.value.message == alone.value.message


def test_a_source_that_cannot_be_used_is_an_error_at_the_start(function: dict[str, Any]) -> None:
    config = configuration([{**function, "function": "m:missing"}])
    with pytest.raises(ConfigError, match="function must be loadable"):
        RewardActors(Fleet(config), RewardSettings(config.ppo.rewards, decode))


class Broken(RewardComposer):
    """Cannot write its replies."""

    @override
    def score(self, batch: Any, model_scores: Any) -> RewardBatch:
        logging.getLogger("rlhf_core.rewards.remote").info("try 1 of 2 failed: api_key=12345678")
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise OSError("No space left on device") from error


class WithBroken(ScriptedRewards):
    @override
    def open(self, settings: RewardSettings, process: str | None) -> None:
        self._composer = Broken(settings.sources)


def test_an_unexpected_error_brings_log_and_causes(capfd: pytest.CaptureFixture[str]) -> None:
    actor = WithBroken()
    actor.open(RewardSettings((), decode), None)
    result = pickle.loads(pickle.dumps(actor.score(1, 0, None)))
    assert [record.getMessage() for record in result.records] == ["try 1 of 2 failed: api_key=12345678"]
    assert type(result.error) is InfrastructureError
    assert "scripted rewards, score: OSError: No space left on device" in result.error.message
    assert "KeyError: 'the cause'" in "".join(result.error.__notes__)
    shown = capfd.readouterr().err
    assert "INFO rlhf_core.rewards.remote: try 1 of 2 failed" in shown and "12345678" not in shown


@pytest.mark.parametrize("batch", [7, 8])
def test_a_batch_that_was_not_read_as_a_whole_is_not_scored(batch: int) -> None:
    actor = ScriptedRewards()
    sources = configuration([{"type": "token_share", "below": 6}]).ppo.rewards
    actor.open(RewardSettings(sources, decode), None)
    rollouts = [Rollout(p.prompt_id, 0, p.input_ids, (3, 7), (0.0, 0.0), True, 0) for p in PROMPTS[:2]]
    rows, places = np.arange(2), Places(np.zeros(2, np.int64), np.arange(2))
    part = ResponseRows(7, rows, places, np.ones(2, np.bool_), PROMPTS[:2])
    actor.read(part, columns_of(rollouts, 1))
    read = 2 if batch == 7 else 0
    with pytest.raises(InfrastructureError, match=f"{read} of 3 responses of batch {batch} were read"):
        actor.score(batch, 3, None)
    # Nothing is left of it.
    assert actor.score(7, 0, None).rewards == RewardBatch([], {"token_share": []})
    actor.read(part, columns_of(rollouts, 1))
    assert actor.score(7, 2, None).rewards == RewardBatch([0.5, 0.5], {"token_share": [0.5, 0.5]})


def decoded_by(decode: Callable[[Sequence[int]], str], threads: int) -> list[RewardInput]:
    """Return what an actor on a host with two cores makes of a response to each prompt."""
    actor = ScriptedRewards()
    sources = configuration(RULES[1:]).ppo.rewards
    actor.open(RewardSettings(sources, decode, threads=threads), None)
    rollouts = [
        Rollout(p.prompt_id, 0, p.input_ids, (i, 7), (0.0, 0.0), True, 0) for i, p in enumerate(PROMPTS)
    ]
    rows, places = np.arange(12), Places(np.zeros(12, np.int64), np.arange(12))
    with on_machine(ScriptedMachine(cores=2)):
        actor.read(ResponseRows(7, rows, places, np.ones(12, np.bool_), PROMPTS), columns_of(rollouts, 1))
    return [actor._inputs[row] for row in range(12)]


def test_responses_are_decoded_at_the_same_time() -> None:
    both = threading.Barrier(2)

    def decode_together(ids: Sequence[int]) -> str:
        both.wait(30)  # raises if one response is decoded after the other
        return decode(ids)

    found = decoded_by(decode_together, threads=0)
    assert [each.response for each in found] == [f"{row} 7" for row in range(12)]
    assert [each.prompt_id for each in found] == [prompt.prompt_id for prompt in PROMPTS]


def test_the_threads_of_the_stage_limit_those_that_decode() -> None:
    running: list[int] = []
    most = []

    def decode_slowly(ids: Sequence[int]) -> str:
        running.append(1)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()
        return decode(ids)

    decoded_by(decode_slowly, threads=1)
    assert len(most) == 12 and max(most) == 1


def test_the_settings_of_a_process_are_in_a_file_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_REWARD_TOKEN", "secret")
    with shared_process_settings() as name:
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o600
        settings = json.loads(Path(name).read_text())
    assert not Path(name).exists()
    assert settings["environment"]["RLHF_REWARD_TOKEN"] == "secret"
    assert settings["path"] == sys.path and settings["folder"] == os.getcwd()


def test_the_actor_removes_the_file_of_settings(tmp_path: Path) -> None:
    with shared_process_settings(tmp_path) as name:
        assert list(tmp_path.iterdir()) == [Path(name)]
        ScriptedRewards().open(RewardSettings((), decode), name)
        assert list(tmp_path.iterdir()) == []


class Busy(ScriptedRewards):
    @override
    def close(self) -> Any:
        return NEVER


class Unreachable(ScriptedRewards):
    @override
    def close(self) -> None:
        raise RuntimeError("Ray has ended")


@pytest.mark.parametrize("actor", [Busy, Unreachable])
def test_the_end_does_not_hide_or_delay_an_error(actor: type[ScriptedRewards]) -> None:
    config = configuration(RULES)
    fleet = Fleet(config)
    fleet.first = [actor()]
    settings = RewardSettings(config.ppo.rewards, decode)
    with pytest.raises(RewardError, match="of the stage"), RewardActors(fleet, settings):
        raise RewardError("of the stage")
    assert fleet.client.seconds == 0.0
