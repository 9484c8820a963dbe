"""A local language model as judge, with the real vLLM.

- a small model is trained to prefer the kind answer, and the first one if both are kind: it agrees with the
  held-out pairs, its order bias is found, and makes no wins
- a model with random weights is refused
- the same for a reward that compares, behind an OpenAI-compatible address: its order bias cancels
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.data.dataset import write
from rlhf_core.data.messages import Message
from rlhf_core.data.templates import Encoder
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.errors import GateFailed, RewardError
from rlhf_core.evaluation.language_model import LanguageModelJudge
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.rewards.language_model import REASONS
from rlhf_core.rewards.questions import LETTERS, Pair, questions_of
from rlhf_core.stages.agreement import check_language_model_rewards
from rlhf_core.stages.gates import check_gate
from rlhf_core.system.files import write_json
from rlhf_core.testing import RecordingMetrics, stage_context
from rlhf_core.types import PairExample, RewardInput
from tests.support.chat_server import ChatServer
from tests.support.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.slow

ANIMALS = ("fox", "cat", "dog", "bear", "owl", "hen")
KIND, CRUEL = "It is kind.", "It is cruel."
RUBRIC = "Kind is better."
AGREEMENT = "reward_agreement/language_model"


def text(animal: str, end: str) -> str:
    return f"A {animal}. {end}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    answers = [text(animal, end) for animal in ANIMALS for end in (KIND, CRUEL)]
    questions = [
        question for answer in answers for question in questions_of(RUBRIC, Pair("Hi", answer, KIND))
    ]
    return train_tokenizer([*questions, *LETTERS], 512)


def judge_of(folder: Path, tokenizer: Any, seed: int = 0) -> Path:
    """Save a model with random weights and its tokenizer."""
    save_tiny_llama(
        folder,
        seed=seed,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(folder)
    return folder


def train(folder: Path, tokenizer: Any, steps: int = 120, rubric: str = RUBRIC) -> None:
    """Teach the model to name the kind answer, and the first of two kind ones."""
    encoder = Encoder(tokenizer, "chat", "judge")
    letters = [tokenizer(letter, add_special_tokens=False)["input_ids"][-1] for letter in LETTERS]
    examples = []
    for a in ANIMALS:
        for b in ANIMALS:
            pairs = ((KIND, CRUEL, "A"), (CRUEL, KIND, "B"), (KIND, KIND, "A"))
            for first, second, letter in pairs:
                question, _ = questions_of(rubric, Pair("Tell me", text(a, first), text(b, second)))
                ids = encoder.prompt([Message("user", question)])
                examples.append((ids, letters[LETTERS.index(letter)]))
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is so small that more are slower
    model = LlamaForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(0)
    for _ in range(steps):
        batch = draw.sample(examples, 16)
        longest = max(len(ids) for ids, _ in batch)
        tokens = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids, _ in batch])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch])
        logits = model(input_ids=tokens, attention_mask=mask, logits_to_keep=1).logits[:, -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([letter for _, letter in batch]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


@pytest.fixture
def judge(tmp_path: Path, tokenizer: Any) -> Callable[[Path], tuple[PipelineConfig, LanguageModelJudge]]:
    """Makes the judge of a folder, with 24 held-out pairs whose chosen answers are kind."""
    (tmp_path / "rubric.txt").write_text(RUBRIC)
    data = tmp_path / "data"
    tokenizer.save_pretrained(data / "tokenizer")

    def ids(answer: str) -> tuple[int, ...]:
        return tuple(tokenizer(answer, add_special_tokens=False)["input_ids"])

    pairs = [
        PairExample(f"p{i}", "Tell me", (1,), ids(text(a, KIND)), ids(text(b, CRUEL)), "a")
        for i, (a, b) in enumerate((a, b) for a in ANIMALS for b in ANIMALS[:4])
    ]
    write(data, "pairs", "eval", pairs)
    write_json(data / "data_card.json", {"sources": []})

    def make(folder: Path) -> tuple[PipelineConfig, LanguageModelJudge]:
        settings = {"path": str(folder), "rubric": str(tmp_path / "rubric.txt")}
        tree = {
            "run": {"device": "cpu", "threads": 1, "home": str(tmp_path / "home")},
            "ppo": {"engine": {"max_num_seqs": 16}},
            "evaluate": {"language_model": settings, "bootstrap": 200},
        }
        config = config_from_tree(tree, "test")
        return config, LanguageModelJudge(config, stage_context(tmp_path, inputs={"data": data}), "cpu")

    return make


def samples(answers: Sequence[str]) -> list[RewardInput]:
    return [RewardInput(f"p{i}", "Tell me", answer, (1,), (2,), True, {}) for i, answer in enumerate(answers)]


def test_a_trained_judge_agrees_and_its_order_bias_makes_no_wins(
    tmp_path: Path, tokenizer: Any, judge: Any
) -> None:
    folder = judge_of(tmp_path / "judge", tokenizer)
    train(folder, tokenizer)
    config, model = judge(folder)
    metrics = model.measure_agreement()
    check_gate(config, "evaluate", metrics)
    assert metrics["language_model/agreement/mean"] > 0.9
    ours = samples([text(a, KIND) for a in ANIMALS] * 2)
    theirs = samples([text(a, KIND) for a in reversed(ANIMALS)] + [text(a, CRUEL) for a in ANIMALS])
    comparison = model.compare(ours, theirs, Intervals(config))
    # Both kind: the first answer is preferred in both orders, which is a tie.
    assert comparison.preferences[:6] == (0.5,) * 6
    assert sum(comparison.preferences[6:]) >= 5
    assert model.to_json()["inconsistent"] >= 0.5


def test_a_model_with_random_weights_is_refused(tmp_path: Path, tokenizer: Any, judge: Any) -> None:
    config, model = judge(judge_of(tmp_path / "judge", tokenizer))
    metrics = model.measure_agreement()
    with pytest.raises(GateFailed, match=r"the language model judge agrees with 0\.\d+ .* held-out pairs"):
        check_gate(config, "evaluate", metrics)
    assert len(list((tmp_path / "home" / "judge").glob("*/*.json"))) == metrics["language_model/requests"]


def writer(folder: Path, tokenizer: Any) -> Callable[[str], str]:
    """Return the function that answers a question with the most likely token of the model."""
    model, encoder = LlamaForCausalLM.from_pretrained(folder), Encoder(tokenizer, "chat", "judge")

    def write_token(question: str) -> str:
        ids = torch.tensor([encoder.prompt([Message("user", question)])])
        with torch.no_grad():
            return str(tokenizer.decode(model(input_ids=ids, logits_to_keep=1).logits[0, -1].argmax()))

    return write_token


def test_the_order_bias_of_a_reward_that_compares_is_found_and_cancels(
    tmp_path: Path, tokenizer: Any, judge: Any
) -> None:
    folder = judge_of(tmp_path / "judge", tokenizer)
    judge(folder)  # writes the held-out pairs
    train(folder, tokenizer, steps=160, rubric=RUBRIC + REASONS)
    context = stage_context(tmp_path, inputs={"data": tmp_path / "data"}, metrics=RecordingMetrics())
    with ChatServer(writer(folder, tokenizer)) as server:
        reward: dict[str, Any] = {"type": "language_model", "url": server.url, "model": "tiny"}
        reward |= {"compare": "pairs", "max_tokens": 64, "concurrency": 1}
        reward |= {"rubric": str(tmp_path / "rubric.txt")}
        tree: dict[str, Any] = {
            "run": {"device": "cpu", "home": str(tmp_path / "home")},
            "ppo": {"algorithm": "grpo", "samples_per_prompt": 4, "rewards": [reward]},
            "evaluate": {"bootstrap": 200},
        }
        config = config_from_tree(tree, "test")
        assert check_language_model_rewards(config, context, "ppo")[f"{AGREEMENT}/mean"] > 0.9
        kind = samples([text(animal, KIND) for animal in ANIMALS[:3]])
        cruel = samples([text("fox", CRUEL)])
        with RewardComposer(config.ppo.rewards) as composer:
            mixed = composer.score([replace(each, prompt_id="p") for each in kind + cruel], None)
            equal = composer.score([replace(each, prompt_id="p") for each in kind], None)
        assert mixed.total[3] == 0.0 and min(mixed.total[:3]) > 0.5
        assert equal.total == [0.5] * 3 and equal.metrics()["language_model/order_bias"] == 1.0
        server.respond = writer(judge_of(tmp_path / "random", tokenizer, seed=1), tokenizer)
        ppo = {**tree["ppo"], "rewards": [{**reward, "model": "other", "on_error": "mask"}]}
        with pytest.raises((GateFailed, RewardError), match=r"min_agreement|held-out pairs have no grade"):
            check_language_model_rewards(config_from_tree({**tree, "ppo": ppo}, "test"), context, "ppo")
