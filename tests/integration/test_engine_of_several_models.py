"""One engine for several models, with the real vLLM.

- it samples the tokens that an engine started for each model samples, to the same bits of their
  log-probabilities, with tied embeddings and without (slow set)
- the same for small models of other architectures (slow set)
- for models that scale or cap their logits, its log-probabilities are those of the trainer (slow set)
- a tensor that is not loaded ends the sampling
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_core.config.load import config_from_tree
from rlhf_core.engines.sync.wire import are_interchangeable
from rlhf_core.errors import WeightSyncError
from rlhf_core.evaluation.generate import SamplingSettings, _Request, _sample_here
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.policy import load_policy
from rlhf_core.types import PromptExample, Rollout
from tests.benchmarks.architectures import tiny_config
from tests.support.tiny_llama import save_tiny_llama

Result = TypeVar("Result")

CONFIG = config_from_tree(
    {
        "run": {"device": "cpu", "threads": 1},
        "data": {"max_prompt_tokens": 16},
        "ppo": {"max_new_tokens": 8, "engine": {"max_num_seqs": 4, "prefix_caching": True}},
    },
    "test",
)
PROMPTS = [PromptExample(f"p{i}", "", tuple(range(3, 5 + i))) for i in range(9)]


def in_child(work: Callable[..., Result], *arguments: Any) -> Result:
    """vLLM looks at all modules, and fails at Flask's, which other tests import."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result(timeout=200)


def by_one_and_each(folders: list[Path]) -> list[list[list[list[Rollout]]]]:
    """What an engine for all models samples, and then one for each. Importing vLLM takes longest."""
    return in_child(sampled_in_turn, [folders, *([folder] for folder in folders)])


def sampled_in_turn(groups: list[list[Path]]) -> list[list[list[list[Rollout]]]]:
    return [sampled_here(*folders) for folders in groups]


def sampled_here(*folders: Path) -> list[list[list[Rollout]]]:
    files = [PolicyFiles(folder) for folder in folders]
    request = _Request(CONFIG, files, [PROMPTS[:6], PROMPTS[6:]], SamplingSettings(1.0), "cpu")
    return _sample_here(request, lambda count: None)


def error_here(*folders: Path) -> str:
    """Errors of this class cannot be sent to another process."""
    with pytest.raises(WeightSyncError) as error:
        sampled_here(*folders)
    return str(error.value)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_engine_samples_what_an_engine_for_each_model_samples(tmp_path: Path, tied: bool) -> None:
    folders = [
        save_tiny_llama(tmp_path / f"m{seed}", seed, eos_token_id=2, tie_word_embeddings=tied)
        for seed in range(2)
    ]
    (one, two), *alone = by_one_and_each(folders)
    assert alone == [[one], [two]]
    assert one != two


def save(folder: Path, model_type: str, seed: int, **fields: object) -> Path:
    """Save a small model with random weights and heads of the size that vLLM needs."""
    config = tiny_config(model_type)
    for name, size in {"hidden_size": 128, "n_embd": 128, "head_dim": 32}.items():
        if hasattr(config, name):
            setattr(config, name, size)
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    ["qwen2", "qwen3", "gemma2", "gpt2", "opt", "mixtral", "phi3", "olmo2", "gpt_neox", "stablelm"],
)
def test_other_architectures_use_the_weights_that_replace_the_first(tmp_path: Path, model_type: str) -> None:
    folders = [save(tmp_path / f"m{seed}", model_type, seed) for seed in range(2)]
    assert are_interchangeable(*folders)
    (one, two), *alone = by_one_and_each(folders)
    assert alone == [[one], [two]]
    assert one != two


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("gemma2", "final_logit_softcapping", 0.5),
        ("granite", "logits_scaling", 0.5),
        ("cohere", "logit_scale", 2.0),
    ],
)
def test_engine_and_trainer_scale_and_cap_logits_alike(
    tmp_path: Path, model_type: str, field: str, value: float
) -> None:
    folder = save(tmp_path / "model", model_type, 0, **{field: value}, initializer_range=0.1)
    policy = load_policy(folder, dtype="float32", attention="eager", device="cpu")
    assert getattr(policy.lm.config, field) == value
    (shares,) = in_child(sampled_here, folder)
    assert [len(share) for share in shares] == [6, 3]
    for rollout in (rollout for share in shares for rollout in share):
        batch = collate([TokenSequence.of(rollout.prompt_ids, rollout.response_ids)], pad_id=0, pack=True)
        assert list(rollout.rollout_logprobs) == pytest.approx(policy(batch).logprobs_N.tolist(), abs=1e-4)


def test_a_tensor_that_is_not_loaded_ends_the_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [save_tiny_llama(tmp_path / f"m{seed}", seed, eos_token_id=2) for seed in range(2)]
    monkeypatch.setenv("RLHF_FAIL", "weight_sync.load:5:drop")
    assert "1 of 21 tensors differ" in in_child(error_here, *folders)
