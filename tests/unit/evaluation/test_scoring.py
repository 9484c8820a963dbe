"""Scores of the evaluation, with tiny models and a scripted engine.

- the KL of a response is the sum over its tokens of log policy - log SFT model, at the temperature of the
  evaluation
- reward model and judge score in the precision of their training, and not in that of each other
- responses are sampled at that temperature, in batches, with seeds that depend only on the prompt, and the
  engine is always shut down
- the digest of rules covers their code and every setting that changes a value; changed code is refused
- exchanged prompts: no item is scored against a prompt equal to its own; every prompt is used as often as
  before; two calls agree
- where one prompt is that of more than half of the items there is no such exchange, and no number
- the exchanged accuracy of a reward model and the exchanged gold reward are those worked out by hand
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config import PipelineConfig
from rlhf_core.data.synthetic import _RAW_STD, gold_reward
from rlhf_core.errors import InputError
from rlhf_core.evaluation.generate import sample_responses
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.evaluation.scoring import (
    ResponseScorer,
    exchange,
    exchange_pairs,
    exchanged_gold,
    judge_digests,
)
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.models.score import load_score_model
from rlhf_core.models.scoring import sequence_scores, single_process_batches
from rlhf_core.pipeline import StageName
from rlhf_core.testing.engines import Reply, Request, scripted_engines
from rlhf_core.types import PairExample, PromptExample, RewardInput
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


def test_judge_and_reward_model_score_in_the_precision_of_their_training(tmp_path: Path) -> None:
    sft = save_tiny_llama(tmp_path / "sft", 0)
    folder, pairs = tmp_path / "judge", [((5, 6, 7), (8, 9, 10, 11)), ((12,), (13,))]
    torch.manual_seed(0)
    load_score_model(sft, dtype="float32", attention="sdpa", device="cpu").save(folder)
    reward = {"deepspeed": {"dtype": "bfloat16"}, "judge": {"deepspeed": {"dtype": "float32"}}}
    scorer = ResponseScorer(PipelineConfig.model_validate({"reward": reward}), 0, "cpu")
    samples = [RewardInput(f"p{i}", "", "", *pair, True, {}) for i, pair in enumerate(pairs)]
    dtypes: dict[StageName, str] = {"judge": "float32", "reward": "bfloat16"}
    for stage, dtype in dtypes.items():
        model = load_score_model(folder, dtype=dtype, attention="sdpa", device="cpu").eval()
        wanted = sequence_scores(model, model.statistics, single_process_batches(model, pairs, 64, 0))
        assert scorer.reward_model(stage, folder, samples) == wanted


def token_of_seed(request: Request) -> Reply:
    return Reply((request.seed % 2**31,))


def sample(*names: str, done: list[int] | None = None) -> dict[str, int]:
    """Return the token id of each prompt's response: its seed modulo 2**31."""
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


@given(st.lists(st.sampled_from("abcdefgh"), max_size=40))
def test_every_item_gets_another_prompt_than_its_own_or_there_is_no_exchange(prompts: list[str]) -> None:
    partner = exchange(prompts)
    if len(prompts) < 2 or 2 * Counter(prompts).most_common(1)[0][1] > len(prompts):
        assert partner is None
        return
    assert partner is not None and sorted(partner) == list(range(len(prompts)))
    assert all(prompts[i] != prompts[j] for i, j in enumerate(partner))
    assert exchange(prompts) == partner


def test_pairs_keep_their_responses_and_take_another_prompt() -> None:
    pairs = [
        PairExample(f"id {i}", f"prompt {i}", (i,), (10 + i,), (20 + i,), f"source {i}", 0.5)
        for i in range(5)
    ]
    exchanged = exchange_pairs(pairs)
    assert exchanged is not None
    for before, after in zip(pairs, exchanged, strict=True):
        assert (after.chosen_ids, after.rejected_ids, after.source) == (
            before.chosen_ids,
            before.rejected_ids,
            before.source,
        )
        assert after.prompt != before.prompt
        assert (after.prompt_id, after.prompt_ids) == (f"id {after.prompt[-1]}", (int(after.prompt[-1]),))
    assert exchange_pairs(pairs[:1]) is None


def test_the_gold_reward_falls_with_exchanged_prompts_for_the_model_that_reads_them_only() -> None:
    prompts = ["Tell me about a small fox in the garden.", "Describe a tall bear on the roof."]
    read = ["The small fox plays in the garden.", "The tall bear plays on the roof."]
    unread = ["It is kind and gentle."] * 2

    def samples(responses: list[str]) -> list[RewardInput]:
        return [RewardInput(p, p, r, (), (), True) for p, r in zip(prompts, responses, strict=True)]

    found = exchanged_gold({"sft": samples(unread), "ppo": samples(read)}, Intervals(PipelineConfig()))
    assert found is not None
    swapped = [gold_reward(p, r) for p, r in zip(prompts, reversed(read), strict=True)]
    assert found["ppo"]["mean"] == pytest.approx(sum(swapped) / 2)
    own = [gold_reward(p, r) for p, r in zip(prompts, read, strict=True)]
    # Without another animal, place and adjective there is nothing to lose; with them 0.9 + 0.7 + 0.3 + 0.4.
    assert sum(own) / 2 - found["ppo"]["mean"] == pytest.approx(2.3 / _RAW_STD)
    assert found["sft"]["mean"] == pytest.approx(gold_reward(prompts[0], unread[0]))
    assert exchanged_gold({"ppo": samples(read)[:1]}, Intervals(PipelineConfig())) is None
