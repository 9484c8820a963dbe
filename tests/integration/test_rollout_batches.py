"""A rollout batch of any size on one engine on the CPU, through the real vLLM.

- a batch of more prompt tokens than one scheduler step takes, and of more tokens than the KV cache holds, so
  that vLLM preempts requests and computes them again, is answered: with the same bits the second time
- a request alone gets the tokens that it gets in the batch, preempted or not
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.config.engine import EngineConfig
from rlhf_core.engines.vllm import CPU_TOKENS_PER_STEP, Engine
from rlhf_core.types import PromptExample, Rollout
from tests.support.tiny_llama import save_tiny_llama


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
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
    engine = Engine(model, EngineConfig(kv_cache_gib=1.0), device="cpu", max_model_len=160, seed=0)
    yield engine
    engine.shutdown()


def answers(engine: Engine, prompts: list[PromptExample], seeds: list[int]) -> list[Rollout]:
    return engine.generate(prompts, n=1, max_new_tokens=14, temperature=1.0, seeds=seeds, policy_version=0)


def test_a_large_batch_is_bit_identical_when_repeated(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counted(request: object, *args: object, **options: object) -> None:
        preempted.append(request)
        preempt(request, *args, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    chance = random.Random(0)
    prompts = [
        PromptExample(f"p{i}", "", tuple(chance.randrange(3, 101) for _ in range(117 + i % 7)))
        for i in range(44)
    ]
    seeds = list(range(44))
    first = answers(engine, prompts, seeds)
    assert sum(len(prompt.input_ids) for prompt in prompts) > CPU_TOKENS_PER_STEP
    assert preempted
    assert answers(engine, prompts, seeds) == first
    for place in (0, 41, 43):
        assert (
            answers(engine, prompts[place : place + 1], [place])[0].response_ids == first[place].response_ids
        )
