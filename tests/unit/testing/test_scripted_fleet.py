"""The scripted fleet.

- scripted engines sample the rollouts of a step with the version of the last sync, from fixed shares or a
  queue, with the same responses
- a lost engine does not change the rollouts: the next sync restarts it
- ranks get the responses of the batch, and their results are in its order
- the error of a rank is raised without a restart
- a call that never ends is an error after the start timeout, which no test waits for
- a method that was not overridden is the real one, with the given models
- a wrong number of results is an error, as in Ray
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from rlhf_core.cluster.rpc import Actor
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import InfrastructureError, WorkerStuck
from rlhf_core.ppo.fleet.worker import ModelWorker
from rlhf_core.ppo.sampling.rollouts import Collector, read_responses
from rlhf_core.ppo.training.batch import ModelScores, RolloutBatch, RolloutColumns
from rlhf_core.testing.engines import Reply, Request, ScriptedEngine
from rlhf_core.testing.trainer import ScriptedTrainer
from rlhf_core.types import PromptExample
from tests.support.scripted_actors import NEVER, local_actor
from tests.support.scripted_fleet import ScriptedEngineActor, ScriptedFleet, ScriptedRank

PROMPTS = [PromptExample(f"p{i}", f"question {i}", (1, i)) for i in range(8)]


def respond(request: Request) -> Reply:
    return Reply((request.prompt.input_ids[1], request.sample_index))


class Mean(ScriptedRank):
    """The score of a response is the mean of its tokens."""

    @override
    def scores(self, role: Any, share: Any, *chunks: RolloutColumns) -> ModelScores:
        return ModelScores([float(tokens.mean()) for tokens in self.received(share, chunks).tokens()[1]])


def sampled(
    ranks: Sequence[ModelWorker] = (), lost: int | None = None, **engine: Any
) -> tuple[ScriptedFleet, RolloutBatch]:
    """Return a fleet of three engines, and the rollouts of step 1 from version 4."""
    ppo = {"samples_per_prompt": 2, "prompts_per_step": 6, "minibatches": 1, "engine": engine}
    config = config_from_tree({"ppo": {"algorithm": "grpo", **ppo}}, "test")
    engines = [ScriptedEngineActor(ScriptedEngine(respond)) for _ in range(3)]
    fleet = ScriptedFleet(config, ranks={"reward": ranks} if ranks else {}, engines=engines)
    no_rewards: Any = None
    with fleet:
        fleet.sync(4)
        if lost is not None:
            fleet.engines.lost = {lost}
        return fleet, Collector(config.ppo, fleet, PROMPTS, str, no_rewards, 0).collect(1, 4)


def responses(fleet: ScriptedFleet, batch: RolloutBatch) -> list[Any]:
    return read_responses(fleet, batch, range(len(batch)))


@pytest.mark.parametrize("changed", [{}, {"lost": 1}])
def test_engines_sample_the_rollouts_of_a_step(changed: dict[str, Any]) -> None:
    fleet, batch = sampled(**changed)
    assert len(batch) == 12 and batch.version == 4
    expected = [(prompt.input_ids, (prompt.input_ids[1], i % 2)) for i, prompt in enumerate(batch.prompts)]
    assert responses(fleet, batch) == expected
    assert fleet.synced == ([4, 4] if "lost" in changed else [4])
    assert fleet.engines.serving == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_score_the_responses_of_a_batch(count: int) -> None:
    fleet, batch = sampled([Mean() for _ in range(count)])
    expected = [sum(tokens) / 2 for _, tokens in responses(fleet, batch)]
    assert fleet.scores(batch).gather().values == expected


def test_the_error_of_a_rank_is_raised() -> None:
    class Broken(ScriptedRank):
        @override
        def scores(self, *_given: Any) -> ModelScores:
            raise InfrastructureError("broken")

    fleet, batch = sampled([Broken()])
    with pytest.raises(InfrastructureError, match="broken"):
        fleet.scores(batch).gather()


def test_a_call_that_never_ends_is_an_error_after_the_timeout() -> None:
    class Silent(ScriptedRank):
        @override
        def scores(self, *_given: Any) -> ModelScores:
            silent: ModelScores = NEVER
            return silent

    fleet, batch = sampled([Silent()])
    with pytest.raises(WorkerStuck, match=r"while waiting for reward\.scores"):
        fleet.scores(batch).gather()
    limit = fleet.client.start_seconds
    assert limit < fleet.client.objects.seconds < limit + 2


def test_other_methods_of_a_rank_are_the_real_ones(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(torch.nn.Linear(2, 1))
    fleet = ScriptedFleet(ranks={"policy": [ScriptedRank({"policy": trainer})]})
    policy = fleet.groups["policy"]
    fleet.wait(policy.call(ModelWorker.save_checkpoint, "policy", str(tmp_path)), "the checkpoint")
    assert [file.name for file in tmp_path.iterdir()] == ["scripted_trainer.json"]
    assert fleet.wait(policy.call(ModelWorker.checkpoint_bytes, "policy"), "the size") == [
        trainer.checkpoint_bytes
    ]
    assert fleet.usage()[0].counters["seconds/save_checkpoint"] > 0


def test_a_wrong_number_of_results_is_an_error() -> None:
    actor = local_actor(ScriptedRank())
    with pytest.raises(TypeError):
        actor.call_parts(2, Actor.usage)  # type: ignore[arg-type]  # wrong on purpose

    class Rank(ScriptedRank):
        @override
        def logprobs(self, *_given: Any) -> Any:
            return (None,)

    with pytest.raises(ValueError, match="1 results instead of 2"):
        local_actor(Rank()).call_parts(2, ModelWorker.logprobs, "policy", False, 1)
