"""A round of sampling on the real stack, as `rlhf run` runs it. The store is a bucket.

- with DPO and without PPO, the earlier stages are reused, and evaluation and registry have the policy of DPO
- samples of the policy are the data of a second round, by their references
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.data.dataset import load_prompts
from tests.integration.test_pipeline import Golden, run_tiny


@pytest.fixture
def begun(s3_server: Any, tmp_path: Path) -> Iterator[Golden]:
    """A run that has ended with the reward model."""
    with tempfile.TemporaryDirectory(prefix="r-") as temporary:
        yield Golden(tmp_path, f"{s3_server.url}/round", Path(temporary), "--until", "reward", environment={})


def test_samples_of_the_policy_are_the_data_of_a_second_round(begun: Golden) -> None:
    """The first round with DPO and without PPO, and the data of the second one. The store is a bucket."""
    from mlflow import MlflowClient

    settings = (
        f"store.url={begun.url}",
        "sample={policy: dpo, answers: 3, prompts: 40}",
        "ppo.enabled=false",
        "dpo.enabled=true",
        "register.policy=dpo",
    )
    first, _, _ = run_tiny(begun.home, *settings)
    made = [name for name, stage in first["stages"].items() if not stage["reused"]]
    assert made == ["dpo", "sample", "evaluate", "register"] and "ppo" not in first["stages"]
    evaluation = first["evaluate"]
    assert {"sft", "dpo", "difference"} == set(evaluation["gold_reward"])
    assert 0 <= evaluation["policies"]["dpo"]["win_rate"]["mean"] <= 1
    assert "ppo" not in json.dumps(evaluation)
    page = (begun.fetch("evaluate", first) / "report.html").read_text()
    assert "Gold reward, DPO" in page and "Gold reward, PPO" not in page
    assert first["registration"]["policy"] == "dpo" and len(first["weights_sha256"]) == 64
    samples, counts = begun.fetch("sample", first), first["sample"]
    best, pairs = (
        [json.loads(line) for line in (samples / name).read_text().splitlines()]
        for name in ("best.jsonl", "pairs.jsonl")
    )
    assert counts == {"policy": "dpo", "rl_algorithm": "PPO", "best": len(best), "pairs": len(pairs)}
    assert 0 < len(pairs) <= len(best) <= 40
    training = {prompt.prompt for prompt in load_prompts(begun.fetch("data"), "train")}
    assert {row["prompt"] for row in best} <= training
    metrics = first["stages"]["sample"]["metrics"]
    assert metrics["gold_mean"] < metrics["gold_best"] or metrics["score_mean"] < metrics["score_best"]

    artifact = f"artifact://sample/{first['stages']['sample']['key']}"
    added = (f"data.sft.1.path={artifact}/best.jsonl", f"data.preference.1.path={artifact}/pairs.jsonl")
    second, _, _ = run_tiny(begun.home, *settings, *added, "--until", "data")
    assert second["pipeline_key"] != first["pipeline_key"]
    rows = {
        name: second["stages"]["data"]["metrics"][name] - first["stages"]["data"]["metrics"][name]
        for name in ("data/sft_read", "data/pairs_read", "data/sft_eval", "data/pairs_eval")
    }
    assert rows == {
        "data/sft_read": len(best), "data/pairs_read": len(pairs), "data/sft_eval": 0, "data/pairs_eval": 0
    }  # fmt: skip
    client = MlflowClient(f"sqlite:///{begun.home}/mlflow.db")
    tags = client.get_run(second["mlflow_run_id"]).data.tags
    assert tags["rlhf.reference.data.sft.1.path"].startswith(f"{artifact}/best.jsonl = artifact sample/")
