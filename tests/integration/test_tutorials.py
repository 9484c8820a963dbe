"""The tutorials of the documentation, command by command, with a tiny model and files of the named formats.

Commands whose comment begins with "the whole run" are left out: the trial before them is the same, but short.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlhf_core.data.tokenizer import train_tokenizer
from tests.support.tiny_llama import save_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = [f"Tom has {a} apples and buys {b}. How many has he?" for a in range(2, 10) for b in range(2, 10)]


def commands(page: str) -> Iterator[tuple[list[str], int]]:
    """Yield the words of each `rlhf` command of a page, and its exit code: 2 if its comment is "refused".

    Commands about a `RUN` that the reader names are left out.
    """
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            command, *rest = shlex.split(line, comments=False)
            words, comment = rest, ""
            if "#" in rest:
                at = rest.index("#")
                words, comment = rest[:at], " ".join(rest[at + 1 :])
            if command == ".venv/bin/rlhf" and not comment.startswith("the whole run") and "RUN" not in words:
                yield words, 2 if comment.startswith("refused") else 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the model and the files that the tutorials name."""
    model = tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct"
    save_tiny_llama(model, vocab_size=320, max_position_embeddings=128, bos_token_id=1, eos_token_id=2)
    train_tokenizer(QUESTIONS, 320).save_pretrained(model)
    answers = [str(sum(map(int, re.findall(r"\d+", question)))) for question in QUESTIONS]
    rows = {
        "questions.jsonl": [
            {"question": question, "answer": f"Together.\n#### {answer}"}
            for question, answer in zip(QUESTIONS, answers, strict=True)
        ],
        "pairs.jsonl": [
            {"prompt": question, "chosen": f"He has {answer}.", "rejected": "apples apples apples"}
            for question, answer in zip(QUESTIONS, answers, strict=True)
        ],
    }
    for name, lines in rows.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return tmp_path


def rlhf(folder: Path, words: Sequence[str], code: int = 0) -> str:
    """Run a command in `folder` and return what it printed. It must end with the exit code `code`."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PREFECT_"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_cli.main", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, f"rlhf {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def registered_version(folder: Path) -> int:
    [summary] = folder.glob(".rlhf/runs/*/summary.json")
    version: int = json.loads(summary.read_text(encoding="utf-8"))["stages"]["register"]["metrics"]["version"]
    return version


def test_the_first_own_run_ends_in_an_evaluated_policy(folder: Path) -> None:
    for words, code in commands("first-run.md"):
        rlhf(folder, words, code)
    summaries = [json.loads(file.read_text()) for file in folder.glob(".rlhf/runs/*/summary.json")]
    assert any("ppo" in summary["evaluate"]["policies"] for summary in summaries if "evaluate" in summary)


def test_dpo_ends_in_a_registered_policy(folder: Path) -> None:
    for words, code in commands("dpo.md"):
        rlhf(folder, words, code)
    assert registered_version(folder) == 1


def test_grpo_ends_in_a_policy_that_is_retrained_and_taken_back(folder: Path) -> None:
    for words, code in commands("grpo.md"):
        rlhf(folder, words, code)
    assert registered_version(folder) == 1
    # A person, because two steps are no evidence for the test of a champion.
    rlhf(folder, ["promote", "grpo-policy", "1", "--reason", "the first one"])
    try:
        for words, code in commands("weekly.md"):
            named = [
                word.replace("my.yaml", "grpo.yaml").replace("my-policy", "grpo-policy") for word in words
            ]
            rlhf(folder, named, code)
    finally:
        rlhf(folder, ["down"])
    assert "no champion" in rlhf(folder, ["champions", "grpo-policy"])
