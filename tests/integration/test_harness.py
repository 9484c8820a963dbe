"""The stage `benchmark` with lm-evaluation-harness, a small model, and tasks of one's own; no network.

- metrics are those that transformers gives without the harness, with their standard errors
- the questions with wrong answers are a regression set
- the same stage gives the same bytes
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.data.prompt_sets import read_sets
from rlhf_core.data.tokenizer import load_tokenizer, train_tokenizer
from tests.support.tiny_llama import save_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / ".venv-benchmark"
QUESTIONS = [f"Is {number} an even number?" for number in range(6)]
NEW_TOKENS = 5
RIGHT = (0, 2, 3)
"""Questions whose true answer is that of the model."""

pytestmark = pytest.mark.skipif(not HARNESS.is_dir(), reason="make .venv-benchmark")

TASK = """
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl}}
test_split: test
doc_to_text: "{{question}}"
"""
ANSWERS = """
task: answers
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<never>"], max_gen_toks: %d, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOICES = """
task: choices
output_type: multiple_choice
doc_to_target: 0
doc_to_choice: ["yes", "no"]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
STAGE = """
import json, sys
from pathlib import Path
from rlhf_core.config import PipelineConfig
from rlhf_core.stages.benchmark import benchmark_digests, run
from rlhf_core.testing import stage_context

folder, inputs, tree = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
config = PipelineConfig.model_validate_json(tree)
before = benchmark_digests(config)
context = stage_context(folder, inputs={name: Path(path) for name, path in inputs.items()}, sources=before)
result = run(config, context)
assert benchmark_digests(config) == before
print(json.dumps([result.metrics, context.metrics.last]))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("benchmark")
    tokenizer = train_tokenizer(QUESTIONS, 300)
    tokenizer.save_pretrained(folder / "data/tokenizer")
    # Large weights, so that its answers differ from question to question.
    save_tiny_llama(
        folder / "ppo/policy", vocab_size=len(tokenizer), eos_token_id=None, initializer_range=0.5
    )
    return {name: str(folder / name) for name in ("data", "ppo")}


@cache
def model_of(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(f"{folder}/policy").eval()


def answer_of(inputs: dict[str, str], question: str) -> str:
    """The model's most likely answer, one token after the other."""
    import torch

    model, tokenizer = model_of(inputs["ppo"]), load_tokenizer(f"{inputs['data']}/tokenizer")
    tokens = tokenizer(question)["input_ids"]
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
    return str(tokenizer.decode(tokens[-NEW_TOKENS:]))


def log_likelihood(inputs: dict[str, str], question: str, answer: str) -> float:
    import torch

    model, tokenizer = model_of(inputs["ppo"]), load_tokenizer(f"{inputs['data']}/tokenizer")
    start, whole = (tokenizer(text)["input_ids"] for text in (question, question + answer))
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(logprobs[at - 1, whole[at]]) for at in range(len(start), len(whole)))


@pytest.fixture(scope="module")
def tasks(inputs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "answers.yaml").write_text(TASK + ANSWERS % NEW_TOKENS)
    (folder / "choices.yaml").write_text(TASK + CHOICES)
    (folder / "both.yaml").write_text("group: both\ntask: [answers, choices]\n")
    rows = [
        {"question": text, "answer": answer_of(inputs, text) if number in RIGHT else "another answer"}
        for number, text in enumerate(QUESTIONS)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run_stage(folder: Path, inputs: dict[str, str], settings: dict[str, Any]) -> list[dict[str, float]]:
    tree = json.dumps({"run": {"device": "cpu"}, "benchmark": {"batch_size": 4, **settings}})
    environment = {**os.environ, "PYTHONPATH": f"{HARNESS}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", STAGE, str(folder), json.dumps(inputs), tree],
        env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def standard_error(share: float, count: int) -> float:
    """Of the mean of zeros and ones, with the denominator n - 1."""
    return math.sqrt(share * (1 - share) / (count - 1))


def test_the_metrics_are_those_of_transformers_and_the_same_twice(
    inputs: dict[str, str], tasks: Path, tmp_path: Path
) -> None:
    settings = {"tasks": ["answers", "choices"], "folder": str(tasks), "apply_chat_template": False}
    metrics, logged = run_stage(tmp_path / "one", inputs, settings)
    likely = [
        log_likelihood(inputs, text, " yes") > log_likelihood(inputs, text, " no") for text in QUESTIONS
    ]
    assert 0 < sum(likely) < len(likely), "the choices differ"
    expected = {"answers/exact_match": len(RIGHT) / len(QUESTIONS), "choices/acc": sum(likely) / len(likely)}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value)
        assert metrics[f"{name}_stderr"] == pytest.approx(standard_error(value, len(QUESTIONS)))
        assert logged[f"benchmark/{name}"] == metrics[name]
    assert set(metrics) == {each + end for each in expected for end in ("", "_stderr")}

    # As a group, which has no metric of its own.
    assert run_stage(tmp_path / "two", inputs, settings | {"tasks": ["both"]}) == [metrics, logged]
    first, second = tmp_path / "one/output", tmp_path / "two/output"
    assert sorted(file.name for file in first.iterdir()) == ["benchmark.json", "failed.jsonl"]
    for file in first.iterdir():
        assert (second / file.name).read_bytes() == file.read_bytes()

    failed = first / "failed.jsonl"
    rows = [json.loads(line) for line in failed.read_text().splitlines()]
    wrong = [text for number, text in enumerate(QUESTIONS) if number not in RIGHT]
    assert [row["prompt"] for row in rows] == wrong
    assert {row["answer"] for row in rows} == {"another answer"}
    item = {"name": "failed", "path": str(failed), "reward": {"type": "answer"}}
    config = PipelineConfig.model_validate_json(json.dumps({"evaluate": {"regression": [item]}}))
    sets = read_sets(config, Path(inputs["data"]))
    assert [prompt.prompt for prompt in sets["failed"]] == wrong
