"""A rollout batch of any size on one engine on the CPU, through the real vLLM.

- a batch of more prompt tokens than one scheduler step takes, and of more tokens than the KV cache holds, so
  that vLLM preempts requests and computes them again, is answered: with the same bits the second time
- log-probabilities are those that vLLM's own code returns
- a request alone gets the tokens that it gets in the batch, preempted or not
- with prefix caching the samples of a prompt share its keys and values, until the weights change
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.ppo_sections import EngineConfig
from rlhf_core.engines.vllm import CPU_TOKENS_PER_STEP, Engine
from rlhf_core.types import PromptExample, Rollout
from tests.support.tiny_llama import save_tiny_llama


@pytest.fixture(params=[EngineConfig(kv_cache_gib=1.0)])
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """A token takes 2 x 3 layers x 32 heads x 256 x 4 bytes: a KV cache of 1 GiB has 42 blocks of 128
    tokens.
    """
    # vLLM looks for `__dict__` in every value of every module. A proxy of Flask, which the S3 server of other
    # tests has loaded, raises at that.
    for name, module in list(sys.modules.items()):
        if any(type(value).__name__ == "LocalProxy" for value in vars(module).values()):
            monkeypatch.delitem(sys.modules, name)
    model = save_tiny_llama(
        tmp_path / "model",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=32,
        head_dim=256,
        max_position_embeddings=160,
        eos_token_id=None,
        dtype="float32",
    )
    engine = Engine(model, request.param, device="cpu", max_model_len=160, seed=0)
    yield engine
    engine.shutdown()


def answers(engine: Engine, prompts: list[PromptExample], seeds: list[int]) -> list[Rollout]:
    return engine.generate(prompts, n=1, max_new_tokens=14, temperature=1.0, seeds=seeds, policy_version=0)


@pytest.fixture
def results_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Any]]:
    """Return a list to which each call of a method adds its result.

    Engines run without the statistics of vLLM, which count preemptions and cached tokens.
    """

    def record(owner: Any, name: str) -> list[Any]:
        method, results = getattr(owner, name), []

        def recorded(*args: Any, **options: Any) -> Any:
            results.append(method(*args, **options))
            return results[-1]

        monkeypatch.setattr(owner, name, recorded)
        return results

    return record


def test_a_large_batch_is_bit_identical_when_repeated(
    engine: Engine, results_of: Callable[[Any, str], list[Any]]
) -> None:
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempted = results_of(scheduler, "_preempt_request")
    chance = random.Random(0)
    prompts = [
        PromptExample(f"p{i}", "", tuple(chance.randrange(3, 101) for _ in range(117 + i % 7)))
        for i in range(48)
    ]
    seeds = list(range(48))
    first = answers(engine, prompts, seeds)
    assert sum(len(prompt.input_ids) for prompt in prompts) > CPU_TOKENS_PER_STEP
    assert preempted
    assert answers(engine, prompts, seeds) == first
    for place in (0, 35, 47):
        assert (
            answers(engine, prompts[place : place + 1], [place])[0].response_ids == first[place].response_ids
        )
    # What `take_logprobs` has replaced.
    ours = vars(scheduler).pop("update_from_output")
    assert answers(engine, prompts, seeds) == first
    scheduler.update_from_output = ours


@pytest.mark.parametrize("engine", [EngineConfig(prefix_caching=True)], indirect=True)
def test_samples_share_the_keys_of_their_prompt_until_the_weights_change(
    engine: Engine, results_of: Callable[[Any, str], list[Any]]
) -> None:
    cache = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    looked_up = results_of(cache, "get_computed_blocks")
    prompt = PromptExample("p", "", tuple(random.Random(0).randrange(3, 101) for _ in range(140)))

    def found() -> list[int]:
        """Tokens of each request that were in the cache."""
        return [answer[1] for answer in looked_up]

    def sample() -> list[Rollout]:
        looked_up.clear()
        return engine.generate([prompt], n=3, max_new_tokens=14, temperature=1.0, seeds=[0], policy_version=0)

    first = sample()
    assert found() == [0, 128, 128], "blocks of 128 tokens"
    assert [row.response_ids for row in sample()] == [row.response_ids for row in first]
    assert found() == [128, 128, 128]

    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.mul_(2)

    engine.llm.apply_model(change)
    stale = sample()
    engine.forget_prefixes()
    fresh = sample()
    assert found() == [0, 128, 128]
    assert fresh != stale
    assert [row.response_ids for row in sample()] == [row.response_ids for row in fresh]
