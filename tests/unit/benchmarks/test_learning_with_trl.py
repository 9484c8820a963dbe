"""The comparison of learning with TRL, with scripted trainers.

- both systems have the same prompts, rule, batch and number of steps
- prompts whose text has other tokens are left out
- it ends with its table and file

TRL is replaced, so that its own options are not checked.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.config.load import config_from_tree
from rlhf_core.config.rewards import KeywordsReward
from rlhf_core.rewards.rules import keywords
from rlhf_core.types import PromptExample, RewardInput
from tests.benchmarks import learning_with_trl
from tests.support.tiny_llama import save_tiny_llama
from tests.support.word_tokenizer import word_tokenizer

WORDS = [f"w{number}" for number in range(14)]
TEXTS = [
    " ".join(["happy", "fun", *WORDS, "more"]),
    " ".join([*WORDS, "more", "happy", "fun"]),
    "happy fun",  # fewer tokens than a prompt
    " ".join(["unknown", *WORDS, "fun", "happy"]),  # the tokenizer does not know its first word
]


class GRPOTrainer:
    """Stands for TRL's: it scores one response for each that a step has."""

    def __init__(self, *, reward_funcs: Any, args: Any, train_dataset: Any, **_rest: Any) -> None:
        assert len(train_dataset["prompt"]) == 2
        self._reward, self._args = reward_funcs, args

    def train(self) -> None:
        args = self._args
        assert args.per_device_train_batch_size * args.steps_per_generation == 64
        for step in range(args.max_steps // args.steps_per_generation):
            self._reward(completions=["happy " * step] * 64, prompts=None)


class PPOTrainer:
    """Stands for TRL's: the responses of step k have k words that count."""

    def __init__(self, *, args: Any, reward_model: Any, train_dataset: Any, **_rest: Any) -> None:
        self._args, self._rewards, self._ids = args, reward_model, train_dataset["input_ids"]

    def train(self) -> None:
        args, happy = self._args, self._ids[0][0]
        for step in range(args.total_episodes // args.per_device_train_batch_size):
            # Words of the prompt do not count.
            row = [*self._ids[0], *([happy] * step), 0]
            [hidden] = self._rewards.backbone(torch.tensor([row] * 64)).hidden_states
            assert self._rewards.score(hidden).shape == (64, len(row), 1)


@pytest.fixture
def learning_trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The program of TRL's runs, with a scripted TRL, which is not in this environment."""
    name = "tests.benchmarks.learning_trl"
    modules = {key: ModuleType(key) for key in ("trl", "trl.experimental", "trl.experimental.ppo")}
    vars(modules["trl"]).update(GRPOConfig=SimpleNamespace, GRPOTrainer=GRPOTrainer)
    vars(modules["trl.experimental.ppo"]).update(PPOConfig=SimpleNamespace, PPOTrainer=PPOTrainer)
    for key, module in modules.items():
        monkeypatch.setitem(sys.modules, key, module)
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save_tiny_llama(tmp_path / "model", vocab_size=64)
    word_tokenizer(TEXTS[:3]).save_pretrained(folder)
    return folder


def test_trl_counts_the_words_that_the_rule_counts(learning_trl: Any) -> None:
    budget = learning_with_trl.BUDGET
    rule = KeywordsReward(words=tuple(budget["words"]), cap=budget["cap"])
    responses = ["", "Happy, happy! unhappy", "fun " * 20, "they_love LOVE joy's", "glad\nsmiled"]
    samples = [RewardInput("p", "", response, (), (), True, {}) for response in responses]
    expected = [keywords(rule, sample) for sample in samples]
    assert learning_trl.count_words(budget, responses) == expected == [0.0, 2.0, 8.0, 2.0, 2.0]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_both_systems_have_the_same_budget(algorithm: str) -> None:
    tree = learning_with_trl.tree_of(Path("model"), algorithm, 0, 12)
    ppo = config_from_tree(tree, "test").ppo
    budget = learning_with_trl.BUDGET
    assert (ppo.rollout_batch_size, ppo.minibatches) == (budget["responses"], budget["minibatches"])
    assert ppo.samples_per_prompt == learning_with_trl.ALGORITHMS[algorithm]["samples"]
    assert (ppo.steps, ppo.max_new_tokens) == (12, budget["new_tokens"])
    assert ppo.policy.learning_rate == ppo.critic.learning_rate == budget["learning_rate"]
    assert (ppo.policy.betas, ppo.policy.warmup_ratio) == (budget["betas"], 0.0)


def test_the_comparison_trains_both_systems_and_ends_with_its_table(
    model: Path,
    learning_trl: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained: list[tuple[str, int, int]] = []

    def train(
        _model: Path, prompts: Sequence[PromptExample], algorithm: str, seed: int, steps: int
    ) -> dict[str, Any]:
        assert [prompt.prompt_id for prompt in prompts] == ["p0", "p1"]
        trained.append((algorithm, seed, steps))
        return {"score": [0.25 + seed] * steps}

    def run(command: Sequence[Any], **_options: Any) -> SimpleNamespace:
        assert command[:2] == [Path("trl-env/bin/python"), Path(learning_trl.__file__)]
        learning_trl.main([str(command[2])])
        return SimpleNamespace(stdout=capsys.readouterr().out)

    monkeypatch.setattr(learning_with_trl, "train", train)
    monkeypatch.setattr(learning_with_trl, "subprocess", SimpleNamespace(run=run, PIPE=None))
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    out = tmp_path / "new" / "learning.json"
    options = ["--model", str(model), "--texts", str(texts), "--steps", "3", "--out", str(out)]
    learning_with_trl.main([*options, "--trl", "trl-env/bin/python"])
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == f"json: {out}"
    assert "│ TRL ppo, seed 1 │ 0.00 │ 2.00 │" in " ".join(shown.split())
    assert trained == [("grpo", 0, 3), ("grpo", 1, 3), ("ppo", 0, 3), ("ppo", 1, 3)]
    runs = json.loads(out.read_text())
    assert runs["grpo, seed 1"]["score"] == [1.25] * 3
    assert runs["TRL grpo, seed 0"]["score"] == runs["TRL ppo, seed 0"]["score"] == [0.0, 1.0, 2.0]
    learning_with_trl.main([*options, "--algorithms", "ppo", "--seeds", "1"])
    assert list(json.loads(out.read_text())) == ["ppo, seed 0"], "without TRL"
