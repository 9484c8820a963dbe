"""The scripted engine.

- every public method and attribute of the real engine works on it
- an engine that sleeps does not sample
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from rlhf_core.engines.vllm import Engine
from rlhf_core.testing.engines import Reply, ScriptedEngine
from rlhf_core.types import PromptExample, Rollout

PROMPTS = [PromptExample("a", "", (1, 2)), PromptExample("b", "", (1, 3))]


def generate(engine: ScriptedEngine, adapter: int | None = None) -> list[Rollout]:
    return engine.generate(
        PROMPTS, n=2, max_new_tokens=3, temperature=1.0, seeds=[5, 6], policy_version=7, adapter=adapter
    )


def test_every_public_method_of_the_engine_is_scripted() -> None:
    public = {name: method for name, method in vars(Engine).items() if callable(method) and name[0] != "_"}
    assert len(public) == 9
    for name, method in public.items():
        scripted = vars(ScriptedEngine)[name]
        assert list(inspect.signature(scripted).parameters) == list(inspect.signature(method).parameters)


def test_every_public_method_of_the_engine_works() -> None:
    engine = ScriptedEngine(lambda request: Reply((*request.prompt.input_ids, 9)))
    engine.load_adapter(1, Path("adapter"))
    expected = generate(engine, adapter=1)
    assert engine.steps == 3 and [rollout.sample_index for rollout in expected] == [0, 1, 0, 1]

    assert engine.choose([(4, 5), (6, 7)], choices=[4, 6]) == [4, 6]
    assert engine.steps == 4
    engine.forget_prefixes()
    assert engine.prefix_resets == 1
    engine.shutdown()
    assert engine.is_shut_down


def test_an_engine_that_sleeps_does_not_sample() -> None:
    engine = ScriptedEngine(lambda request: Reply((9,)))
    engine.sleep()
    engine.wake("weights")
    with pytest.raises(RuntimeError, match="wake kv_cache first"):
        generate(engine)
    with pytest.raises(RuntimeError, match="wake kv_cache first"):
        engine.choose([(1,)], choices=[1])
    engine.wake("kv_cache")
    assert len(generate(engine)) == 4
