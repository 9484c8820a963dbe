"""The match of a candidate against the champion; its models are scripted here, store and tokenizer are real.

- both answer the evaluation's prompts, and the judge of the evaluation decides each
- it is not played where the champion's weights are not in this store, are others by now, or read other tokens
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.data.tokenizer import train_tokenizer
from rlhf_core.evaluation import match
from rlhf_core.storage.artifacts import ArtifactStore
from rlhf_core.storage.store import Store
from rlhf_core.types import ArtifactRef, PromptExample, Rollout, Services
from tests.small_ppo import services as nowhere

PROMPTS = [
    f"Tell me about a small {subject} {place}."
    for subject in ("fox", "cat", "dog", "hen")
    for place in ("in the garden", "on the roof")
]
GOOD, BAD = "It is kind and gentle. It has a warm voice.", "It is rotten and dull."
TOKENIZER = train_tokenizer([*PROMPTS, GOOD, BAD], 400)


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    tree = {"run": {"device": "cpu", "home": str(tmp_path)}, "evaluate": {"prompts": 8, "bootstrap": 200}}
    return PipelineConfig.model_validate_json(json.dumps(tree))


def policy(folder: Path, says: str) -> Path:
    folder.mkdir(parents=True)
    TOKENIZER.save_pretrained(folder)
    (folder / "says").write_text(says)
    return folder


@pytest.fixture
def services(tmp_path: Path) -> Services:
    """Of a candidate that says good things."""
    policy(tmp_path / "ppo" / "policy", GOOD)
    TOKENIZER.save_pretrained(tmp_path / "data" / "tokenizer")
    base = nowhere(tmp_path)
    return Services({name: tmp_path / name for name in ("ppo", "data")}, tmp_path, tmp_path, base.checkpoints,
                    base.metrics, base.progress)  # fmt: skip


@pytest.fixture
def champion(config: PipelineConfig, tmp_path: Path) -> Callable[[str], tuple[Path, ArtifactRef]]:
    """Publishes one that says something."""

    def publish(says: str) -> tuple[Path, ArtifactRef]:
        policy(tmp_path / "out" / "policy", says)
        store = ArtifactStore(Store(config.store_url), tmp_path / "cache")
        ref = store.publish("ppo", "c" * 16, tmp_path / "out", parents={}, metrics={}, config={})
        return store.fetch(ref) / "policy", ref

    return publish


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def respond(
        config: Any, model: Path, prompts: Sequence[PromptExample], *, device: str, done: Callable[[int], None]
    ) -> list[Rollout]:
        ids = tuple(TOKENIZER.encode((model / "says").read_text(), add_special_tokens=False))
        return [Rollout(p.prompt_id, 0, p.input_ids, ids, (0.0,) * len(ids), True, 0) for p in prompts]

    examples = [PromptExample(f"p{i}", text, (1, 2)) for i, text in enumerate(PROMPTS)]
    monkeypatch.setattr(match, "load_prompts", lambda folder, split: examples)
    monkeypatch.setattr("rlhf_core.evaluation.generate.sample_responses", respond)


def tags(ref: ArtifactRef) -> dict[str, str]:
    return {"rlhf.ppo.key": ref.key, "rlhf.ppo.digest": ref.digest}


@pytest.mark.parametrize(("says", "rate"), [(BAD, 1.0), (GOOD, 0.5)])
def test_the_judge_of_the_evaluation_decides_prompt_by_prompt(
    says: str, rate: float, config: PipelineConfig, services: Services, champion: Any
) -> None:
    played = match.play(config, services, tags(champion(says)[1]))
    assert played is not None
    assert (played.win_rate.mean, len(played.preferences)) == (rate, len(PROMPTS))


@pytest.mark.parametrize("judge", ["rules", "reward_model"])
def test_rules_and_the_candidates_reward_model_can_judge(
    judge: str, config: PipelineConfig, services: Services, champion: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = config.model_dump(mode="json", by_alias=True)
    tree["ppo"]["rewards"] = [{"type": "model"}, {"type": "keywords", "words": ["rotten"]}]
    tree["evaluate"]["judge"] = judge
    asked = []

    def score(_config: Any, folder: Path, samples: Sequence[Any], **_rest: Any) -> list[float]:
        asked.append(folder)
        return [float("nan") if sample.prompt_id == "p0" else float("rotten" in sample.response) for sample in samples]

    monkeypatch.setattr("rlhf_core.evaluation.scoring.score_reward_model", score)
    inputs = {**services.inputs, "reward": Path("/its/reward")}
    with_reward = Services(inputs, services.out, services.work, services.checkpoints, services.metrics, services.progress)  # fmt: skip
    played = match.play(PipelineConfig.model_validate_json(json.dumps(tree)), with_reward, tags(champion(BAD)[1]))
    assert played is not None
    assert played.win_rate.mean == 0.0
    if judge == "reward_model":
        assert asked == [Path("/its/reward/model")]
        assert len(played.preferences) == len(PROMPTS) - 1, "a masked score is no defeat"


def test_it_is_not_played_without_the_champions_weights(
    config: PipelineConfig, services: Services, champion: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    _, ref = champion(BAD)
    for other in ({}, {**tags(ref), "rlhf.ppo.key": "e" * 16}, {**tags(ref), "rlhf.ppo.digest": "f" * 64}):
        assert match.play(config, services, other) is None
        assert "its weights are not in this store): recorded evaluations decide" in caplog.text
        caplog.clear()


def test_it_is_not_played_against_other_tokens_or_damaged_weights(
    config: PipelineConfig, services: Services, champion: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    folder, ref = champion(BAD)
    own = tmp_path / "ppo" / "policy" / "tokenizer.json"
    whole = own.read_text()
    own.write_text(whole + " ")
    assert match.play(config, services, tags(ref)) is None
    assert "another tokenizer" in caplog.text
    own.write_text(whole)
    (folder / "says").write_text("rot")
    assert match.play(config, services, tags(ref)) is None
    assert "the champion cannot be played against (" in caplog.text
