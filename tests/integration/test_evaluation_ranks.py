"""Evaluation over several ranks and engines, with the real Ray, DeepSpeed and vLLM.

- two ranks, with a copy of the model each or with its ZeRO-3 shards, compute the log-probabilities and scores
  of one process, to 1e-5
- two engines sample the tokens of one engine
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.cluster.ranks import ray_session
from rlhf_core.config.load import config_from_tree
from rlhf_core.evaluation.generate import responses_of
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.evaluation.scoring import ResponseScorer
from rlhf_core.models.score import load_score_model
from rlhf_core.system.heartbeat import Monitor
from rlhf_core.testing import RecordingProgress, stage_context
from rlhf_core.types import PromptExample, RewardInput
from tests.support.tiny_llama import save_tiny_llama

PAIRS = [(tuple(range(3, 5 + i)), tuple(range(40, 41 + (3 * i) % 7))) for i in range(9)]


def config_of(zero_stage: int, **evaluate: int) -> Any:
    sizes = {"ranks": 2, "zero_stage": zero_stage}
    tree = {
        "run": {"device": "cpu", "threads": 1},
        "data": {"max_prompt_tokens": 16},
        "reward": {"deepspeed": sizes},
        "ppo": {
            "policy_deepspeed": sizes,
            "critic_deepspeed": sizes,
            "micro_batch_tokens": 32,
            "max_new_tokens": 8,
            "engine": {"max_num_seqs": 4},
        },
        "evaluate": evaluate,
    }
    return config_from_tree(tree, "test")


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        Monitor(tmp_path_factory.mktemp("monitor")) as monitor,
        ray_session(2, "cpu", None, monitor),
    ):
        yield


@pytest.mark.usefixtures("ray")
def test_two_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    files = PolicyFiles(save_tiny_llama(tmp_path / "policy"))
    one, two = config_of(3), config_of(3, ranks=2)
    wanted = ResponseScorer(one, 0, "cpu").logprobs(files, PAIRS, 0.7)
    found = ResponseScorer(two, 0, "cpu").logprobs(files, PAIRS, 0.7)
    assert [len(row) for row in found] == [len(response) for _, response in PAIRS]
    torch.testing.assert_close(torch.cat(found), torch.cat(wanted), rtol=1e-5, atol=1e-5)

    load_score_model(files.model, dtype="float32", attention="sdpa", device="cpu").save(tmp_path / "reward")
    samples = [RewardInput("p", "", "", *pair, True, {}) for pair in PAIRS]
    scores = [
        ResponseScorer(config, 0, "cpu").reward_model("reward", tmp_path / "reward", samples)
        for config in (config_of(0), config_of(0, ranks=2))
    ]
    assert scores[1] == pytest.approx(scores[0], rel=1e-5, abs=1e-5) and len(set(scores[0])) > 1


@pytest.mark.slow  # three starts of vLLM
@pytest.mark.usefixtures("ray")
def test_two_engines_sample_the_tokens_of_one(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "policy", eos_token_id=2, dtype="float32")
    prompts = [PromptExample(f"p{i}", "", prompt) for i, (prompt, _) in enumerate(PAIRS)]
    context = stage_context(tmp_path)

    def sampled(**evaluate: int) -> list[RewardInput]:
        return responses_of(
            config_of(0, **evaluate), {"sft": PolicyFiles(model)}, str, prompts, device="cpu", context=context
        )["sft"]

    assert sampled(engines=2) == sampled()
    assert isinstance(context.progress, RecordingProgress)
    assert ("evaluate", 9, 9, "responses") in context.progress.reports
