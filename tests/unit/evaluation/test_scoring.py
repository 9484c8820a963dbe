"""What evaluation asks of models: tiny ones that score, and an engine that is scripted.

- the KL of a response is the sum over its tokens of log policy - log SFT model, at the temperature of the
  evaluation
- responses are sampled at that temperature too, in batches, with seeds that depend on the prompt alone, and
  the engine ends, whatever happens
- rules are another judge when their code or a setting that changes a value differs, and are not asked with
  other code
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
from rlhf_core.evaluation.scoring import judge_digests, policy_kl, score
from rlhf_core.types import PromptExample, RewardInput
from tests.support.tiny_llama import save_tiny_llama

CONFIG = PipelineConfig.model_validate(
    {
        "evaluate": {"temperature": 0.7},
        "ppo": {"temperature": 1.3, "max_new_tokens": 9, "engine": {"max_num_seqs": 2}},
    }
)


@torch.no_grad()
def test_the_kl_is_the_sum_over_a_response_of_the_log_ratio_at_the_evaluations_temperature(
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
    found = policy_kl(CONFIG, PolicyFiles(folders[0]), folders[1], samples, pad_id=0, device="cpu")
    assert found == pytest.approx(wanted, rel=1e-4)


class Scripted:
    """An engine whose responses tell what was asked."""

    broken = False
    asked: list[dict[str, Any]]
    ended = 0

    def __init__(self, model: Path, engine: Any, **options: Any) -> None:
        pass

    def generate(self, prompts: list[PromptExample], *, seeds: list[int], **options: Any) -> list[Any]:
        if self.broken:
            raise RuntimeError("no device")
        Scripted.asked.append(options)
        return [(prompt.prompt_id, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def shutdown(self) -> None:
        Scripted.ended += 1


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setattr("rlhf_core.engines.vllm.Engine", Scripted)
    Scripted.asked, Scripted.ended, Scripted.broken = [], 0, False
    return Scripted


def sample(*names: str, done: list[int] | None = None) -> list[Any]:
    prompts = [PromptExample(name, name, (1, 2)) for name in names]
    report = ([] if done is None else done).append
    return sample_responses(CONFIG, PolicyFiles(Path("model")), prompts, device="cpu", done=report)


def test_responses_are_sampled_at_the_evaluations_temperature_with_the_seeds_of_their_prompts(
    scripted: type[Scripted],
) -> None:
    done: list[int] = []
    found = dict(sample("a", "b", "c", done=done))
    wanted = {"n": 1, "max_new_tokens": 9, "temperature": 0.7, "policy_version": 0, "adapter": None}
    assert scripted.asked == [wanted, wanted] and done == [2, 3]
    assert len(set(found.values())) == 3
    assert dict(sample("c", "a")) == {name: found[name] for name in ("c", "a")}
    assert scripted.ended == 2


def test_an_engine_that_fails_is_ended(scripted: type[Scripted]) -> None:
    scripted.broken = True
    with pytest.raises(RuntimeError, match="no device"):
        sample("a")
    assert scripted.ended == 1


def with_rule(tmp_path: Path, **fields: Any) -> PipelineConfig:
    file = tmp_path / "rule.py"
    file.write_text("def f(samples):\n    return [1.0 for _ in samples]\n")
    rule = {"type": "python", "name": "rule", "function": "rule:f", "file": str(file)} | fields
    return PipelineConfig.model_validate({"ppo": {"rewards": (rule,)}})


def test_the_digest_of_rules_covers_their_code_and_what_changes_a_value(tmp_path: Path) -> None:
    def digest(code: str, **fields: Any) -> str:
        return judge_digests(with_rule(tmp_path, **fields), gold_known=False, reward_code={"rule": code})[
            "rules"
        ]

    assert digest("a") == digest("a", timeout=7.0, retries=1)
    assert len({digest("a"), digest("b"), digest("a", weight=2.0)}) == 3


def test_rules_whose_code_has_changed_judge_nothing(tmp_path: Path) -> None:
    samples = [RewardInput("p", "", "", (1,), (2,), True, {})]
    settings: dict[str, Any] = {"pad_id": 0, "device": "cpu"}
    assert score("rules", with_rule(tmp_path), None, samples, **settings) == [1.0]
    with pytest.raises(InputError, match="has changed since this run began"):
        score("rules", with_rule(tmp_path), None, samples, reward_code={"rule": "0" * 64}, **settings)
