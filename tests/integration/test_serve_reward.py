"""`rlhf serve-reward` as people start it: a process with a tiny reward model.

- it says its url, answers a client of the pipeline with the scores of `models.scoring`, and ends on SIGTERM
  with code 0
- a folder that holds no reward model is one message and exit code 2
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.config.rewards import RemoteReward
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.models.score import ScoreStatistics, load_score_model
from rlhf_core.models.scoring import sequence_scores, single_process_batches
from rlhf_core.rewards.remote import RemoteService
from rlhf_core.types import RewardInput
from tests.support.tiny_llama import save_tiny_llama

COMMAND = [sys.executable, "-m", "rlhf_cli.main", "serve-reward", "--port", "0", "--device", "cpu"]


def test_it_serves_a_reward_model_until_it_is_stopped(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["Tell me about the small cat."], 300)
    model = load_score_model(
        save_tiny_llama(tmp_path / "causal", vocab_size=304), dtype="float32", attention="sdpa", device="cpu"
    ).eval()
    model.statistics = ScoreStatistics(mean=-0.5, std=0.25)
    folder = tmp_path / "reward" / "model"
    model.save(folder)
    tokenizer.save_pretrained(folder)
    log = (tmp_path / "log").open("w+")
    command = [*COMMAND, "--home", str(tmp_path / "home"), str(folder.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "/score" in line, (tmp_path / "log").read_text()
            source = RemoteReward(
                type="remote",
                urls=(line.split()[-1],),
                send_tokens=True,
                items_per_request=2,
            )
            samples = [
                RewardInput(str(i), "", "", (1, 2 + i), tuple(range(5, 9 + i)), True) for i in range(5)
            ]
            service = RemoteService(source)
            outcome = service(samples)
            service.close()
        finally:
            os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0
    pairs = [(sample.prompt_ids, sample.response_ids) for sample in samples]
    assert outcome.values == pytest.approx(
        sequence_scores(model, model.statistics, single_process_batches(model, pairs, 1000, 0)), abs=1e-5
    )


def test_a_folder_without_a_reward_model_is_one_message(tmp_path: Path) -> None:
    command = [*COMMAND, "--home", str(tmp_path / "home"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "config.json is missing" in done.stderr
    assert "Traceback" not in done.stderr
