"""The tutorials of the documentation, command by command, with a tiny model and files of the named formats.

Commands whose comment begins with "the whole run" are left out: the trial before them is the same, but short.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_core.data.tokenizer import train_tokenizer
from tests.support.tiny_llama import save_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = [f"Tom has {a} apples and buys {b}. How many has he?" for a in range(2, 10) for b in range(2, 10)]


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each `rlhf` command of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            command, _, comment = line.partition("#")
            if command.startswith(".venv/bin/rlhf") and not comment.strip().startswith("the whole run"):
                yield command.split()[1:]


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


@pytest.mark.parametrize("page", ["grpo.md", "dpo.md"])
def test_the_commands_of_a_tutorial_end_in_a_registered_policy(page: str, folder: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PREFECT_"))
    }
    for words in commands(page):
        done = subprocess.run(
            [sys.executable, "-m", "rlhf_cli.main", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"rlhf {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    [summary] = folder.glob(".rlhf/runs/*/summary.json")
    assert json.loads(summary.read_text(encoding="utf-8"))["stages"]["register"]["metrics"]["version"] == 1
