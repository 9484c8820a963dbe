"""The table of architectures (`docs/architectures.md`) is what its command finds: a sample of it, made again.

Rules: architectures whose decoder layers keep the borders of packed sequences are packed, as policy and
as score model; those with `sdpa` or `eager` attention that loses them, or with a state besides attention, are
padded; what is no decoder is refused with a reason.
"""

from __future__ import annotations

import pytest

from tests.benchmarks.architectures import engine, pipeline_use, tried

SAMPLE = {
    "llama": ["packed"] * 4,
    "mixtral": ["packed"] * 4,
    "nemotron": ["padded", "packed"] * 2,
    "stablelm": ["padded", "packed"] * 2,
    "gpt_oss": ["refused", "padded"] * 2,
    "lfm2": ["padded", "padded", "refused", "refused"],
    "gpt2": ["refused"] * 4,
}


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_sample_of_architectures_agrees_with_the_table(model_type: str) -> None:
    _name, outcomes = tried(model_type)
    assert [text if text in ("packed", "padded") else "refused" for text in outcomes] == SAMPLE[model_type]


@pytest.mark.parametrize(
    ("outcomes", "name", "model_type", "expected"),
    [
        (["packed"] * 4, "LlamaForCausalLM", "llama", "all"),
        (["refused: a", "packed"] * 2, "Gemma2ForCausalLM", "gemma2", "all"),
        (["packed", "x", "x", "packed"], "LlamaForCausalLM", "llama", "no reward model, no critic"),
        (["packed", "packed", "x", "x"], "GraniteForCausalLM", "granite", "no reward model, no critic"),
        (["packed"] * 4, "HeliumForCausalLM", "helium", "all, engine not tested"),
        (["x"] * 4, "GPT2LMHeadModel", "gpt2", "nothing"),
        (["packed"] * 4, "RwkvForCausalLM", "rwkv", "SFT"),
    ],
)
def test_the_stages_that_can_use_an_architecture(
    outcomes: list[str], name: str, model_type: str, expected: str
) -> None:
    assert pipeline_use(outcomes, engine(name, model_type)) == expected
