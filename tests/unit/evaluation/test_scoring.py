"""Scores of the evaluation, with tiny models and a scripted engine.

- the KL of a response is the sum over its tokens of log policy - log SFT model, at the temperature of the
  evaluation
- responses are sampled at that temperature, in batches, with seeds that depend only on the prompt, and the
  engine is always shut down
- the digest of rules covers their code and every setting that changes a value; changed code is refused
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import InputError
from rlhf_core.evaluation.generate import sample_responses
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.evaluation.scoring import ResponseScorer, judge_digests
from rlhf_core.testing.engines import Reply, Request, scripted_engines
from rlhf_core.types import PromptExample, RewardInput
from tests.support.tiny_llama import save_tiny_llama

CONFIG = PipelineConfig.model_validate(
    {
        "evaluate": {"temperature": 0.7},
        "ppo": {"temperature": 1.3, "max_new_tokens": 9, "engine": {"max_num_seqs": 2}},
    }
)


@torch.no_grad()
def test_kl_is_the_sum_of_log_ratios_at_the_evaluation_temperature(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    folders = [save_tiny_llama(tmp_path / name, seed) for seed, name in enumerate(("policy", "sft"))]
    pairs = [((5, 6, 7), (8, 9, 10, 11)), ((12,), (13,))]
    samples = [RewardInput(f"p{i}", "", "", *pair, True, {}) for i, pair in enumerate(pairs)]

    def logprob(lm: Any, prompt: tuple[int, ...], response: tuple[int, ...]) -> float:
        logprobs_LV = torch.log_softmax(lm(torch.tensor([[*prompt, *response]])).logits[0] / 0.7, dim=1)
        return sum(logprobs_LV[len(prompt) - 1 + t, token].item() for t, token in enumerate(response))

    policy, sft = map(AutoModelForCausalLM.from_pretrained, folders)
    wanted = [logprob(policy, *pair) - logprob(sft, *pair) for pair in pairs]
    found = ResponseScorer(CONFIG, 0, "cpu").policy_kl(PolicyFiles(folders[0]), folders[1], samples)
    assert found == pytest.approx(wanted, rel=1e-4)


def token_of_seed(request: Request) -> Reply:
    return Reply((request.seed,))


def sample(*names: str, done: list[int] | None = None) -> dict[str, int]:
    """Return the seed of each prompt's response."""
    prompts = [PromptExample(name, name, (1, 2)) for name in names]
    report = ([] if done is None else done).append
    rollouts = sample_responses(CONFIG, PolicyFiles(Path("model")), prompts, device="cpu", done=report)
    return {rollout.prompt_id: rollout.response_ids[0] for rollout in rollouts}


def test_responses_use_the_evaluation_temperature_and_the_seeds_of_prompts() -> None:
    done: list[int] = []
    with scripted_engines(token_of_seed) as engines:
        seeds = sample("a", "b", "c", done=done)
        assert sample("c", "a") == {name: seeds[name] for name in ("c", "a")}
    assert done == [2, 3] and len(set(seeds.values())) == 3
    for request in engines[0].requests:
        assert (request.sample_index, request.max_new_tokens) == (0, 9)
        assert (request.temperature, request.adapter) == (0.7, None)
    assert [engine.is_shut_down for engine in engines] == [True, True]


def test_engine_is_shut_down_after_an_error() -> None:
    def fail(_request: Request) -> Reply:
        raise RuntimeError("no device")

    with scripted_engines(fail) as engines, pytest.raises(RuntimeError, match="no device"):
        sample("a")
    assert engines[0].is_shut_down


def with_rule(tmp_path: Path, **fields: Any) -> PipelineConfig:
    file = tmp_path / "rule.py"
    file.write_text("def f(samples):\n    return [1.0 for _ in samples]\n")
    rule = {"type": "python", "name": "rule", "function": "rule:f", "file": str(file)} | fields
    return PipelineConfig.model_validate({"ppo": {"rewards": (rule,)}})


def test_digest_of_rules_covers_code_and_result_settings(tmp_path: Path) -> None:
    def digest(code: str, **fields: Any) -> str:
        config = with_rule(tmp_path, **fields)
        found = judge_digests(config, gold_known=False, reward_code={"rule": code}, inputs={})
        return found["rules"]

    assert digest("a") == digest("a", timeout=7.0, retries=1)
    assert len({digest("a"), digest("b"), digest("a", weight=2.0)}) == 3


def test_rules_with_changed_code_are_refused(tmp_path: Path) -> None:
    samples = [RewardInput("p", "", "", (1,), (2,), True, {})]
    scorer = ResponseScorer(with_rule(tmp_path), 0, "cpu")
    assert scorer.score("rules", None, samples) == [1.0]
    with pytest.raises(InputError, match="has changed since this run began"):
        scorer.score("rules", None, samples, {"rule": "0" * 64})
