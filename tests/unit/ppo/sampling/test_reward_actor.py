"""Rewards that read responses.

- rules in actors give the same scores as a composer in one process: with one or several actors, with scores
  of a reward model, with normalization, and with groups that are replaced; the controller receives no tokens
- sources with a state are asked by the controller, with whole batches; actors decode these if there are
  several nodes
- the same errors
- several threads decode the responses of a batch, at most as many as the stage has
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typing_extensions import override

from rlhf_core.cluster.rpc import Pending
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError, DataError, RewardError
from rlhf_core.ppo.sampling.reward_actor import RewardSettings, open_rewards
from rlhf_core.ppo.sampling.rollouts import Collector, Composer, decoded
from rlhf_core.ppo.training.batch import ModelScores, RolloutBatch, RolloutColumns
from rlhf_core.rewards.compose import RewardBatch, RewardComposer
from rlhf_core.testing.engines import Reply, Request, ScriptedEngine
from rlhf_core.types import PromptExample
from tests.support.scripted_fleet import ScriptedEngineActor, ScriptedFleet, ScriptedRank
from tests.support.scripted_machine import ScriptedMachine, on_machine

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
    """Counts the chunks that the controller receives."""

    received = 0

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
    config: PipelineConfig, *, nodes: int | None, model: bool = False
) -> tuple[RewardBatch, RolloutBatch, Fleet]:
    """Return the rewards of a step. `nodes` is None for a composer in this process."""

    def respond(request: Request) -> Reply:
        first = request.prompt.input_ids[0]
        sample = request.sample_index if first % 3 else 0  # all samples of each third prompt are equal
        return Reply((first, sample, 1)[: 2 + sample])

    engines = [ScriptedEngineActor(ScriptedEngine(respond)) for _ in range(2)]
    fleet = Fleet(config, ranks={"reward": [Mean(), Mean()]} if model else None, engines=engines)
    fleet.node_ids = [f"node {number}" for number in range(nodes or 1)]
    fleet.sync(0)
    ppo = config.ppo
    with ExitStack() as opened:
        composer: Composer
        if nodes is None:
            composer = opened.enter_context(RewardComposer(ppo.rewards, score_clip=ppo.score_clip))
        else:
            settings = RewardSettings(ppo.rewards, decode, score_clip=ppo.score_clip)
            composer = opened.enter_context(open_rewards(settings))(fleet)
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


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_function_gets_whole_batches_in_the_controller(function: dict[str, Any], nodes: int) -> None:
    config = configuration([*RULES, function])
    expected, _, _ = scored(config, nodes=None)
    found, _, fleet = scored(config, nodes=nodes)
    assert found == expected
    assert len(fleet.rewards) == (0 if nodes == 1 else nodes), "which decode the texts"
    assert fleet.received > 0


@pytest.mark.parametrize("on_error", ["abort", "mask"])
def test_a_response_without_a_value_ends_the_step_or_is_masked(
    function: dict[str, Any], on_error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAD_PROMPT", "p3")
    config = configuration([{**function, "on_error": on_error}], prompts_per_step=12)
    if on_error == "abort":
        with pytest.raises(RewardError, match="on_error=mask would leave"):
            scored(config, nodes=1)
    else:
        rewards, _, _ = scored(config, nodes=1)
        assert sum(math.isnan(value) for value in rewards.total) == 2, "of both responses to the prompt"


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
        scored(config, nodes=1)


def decoded_by(decode: Callable[[Sequence[int]], str], threads: int) -> list[str]:
    """Return what a host with two cores makes of a response to each prompt."""
    with on_machine(ScriptedMachine(cores=2)):
        return decoded([(row, 7) for row in range(12)], decode, threads)


def test_responses_are_decoded_at_the_same_time() -> None:
    both = threading.Barrier(2)

    def decode_together(ids: Sequence[int]) -> str:
        both.wait(30)  # raises if one response is decoded after the other
        return decode(ids)

    assert decoded_by(decode_together, threads=0) == [f"{row} 7" for row in range(12)]


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
