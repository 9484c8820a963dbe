"""The script of docs/verdicts.md.

- its questions are those that a reward with `compare: pairs` asks, and with its rubric those of a judge
- each question has the letter of the chosen answer, and `type: answer` takes it
- both orders of a pair, and the pair itself, have one group
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf_core.config.rewards import LanguageModelReward
from rlhf_core.rewards.answers import is_right
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.rewards.questions import Pair, questions_of, rubric_text
from rlhf_core.types import RewardInput
from tests.support.chat_server import ChatServer, answers_of, prefer_first

PAGE = Path(__file__).parents[3] / "docs" / "verdicts.md"
ROW = {"prompt": "Name a bird.", "chosen": "A robin.", "rejected": "Bird."}


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_script_asks_what_the_reward_and_the_judge_ask(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Short is better.\n")
    (tmp_path / "pairs.jsonl").write_text(json.dumps(ROW))
    [script] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=300, check=True)
    verdicts = rows_of(tmp_path / "verdicts.jsonl")
    for row in verdicts:
        assert answers_of(row["prompt"])["AB".index(row["completion"])] == ROW["chosen"]
        assert is_right(row["completion"], row["answer"]) and not is_right("C", row["answer"])
    [pair] = rows_of(tmp_path / "grouped.jsonl")
    assert pair.items() >= ROW.items() and {row["group"] for row in verdicts} == {pair["group"]}
    questions = [row["prompt"] for row in verdicts]
    judged = rubric_text(str(tmp_path / "judge-rubric.txt"))
    assert list(questions_of(judged, Pair(*ROW.values()))) == questions
    samples = [
        RewardInput("p", ROW["prompt"], ROW[name], (1,), (2,), True) for name in ("chosen", "rejected")
    ]
    with ChatServer(prefer_first) as server:
        source = LanguageModelReward(
            url=server.url, model="m", compare="pairs", rubric=str(rubric), max_tokens=64
        )
        with RewardComposer((source,)) as composer:
            composer.score(samples, None)
        assert sorted(server.questions) == sorted(questions)
